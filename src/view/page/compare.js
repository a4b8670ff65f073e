/* compare.js - several runs in one plot: each, or the mean of those that differ in their seeds alone. */

import { Chart, Group } from "./chart.js";
import { json, matching, run as runOf, smooth, title } from "./data.js";
import { choice, color, h } from "./elements.js";
import { frontOf, line, showing, smoothControl, smoothing } from "./metrics.js";
import { bandOf, differing, flat, seedGroups } from "./stats.js";

/* Hours from the first step on: the sum of what the run says its steps took. */
function hours(run) {
  const at = new Map();
  let sum = 0;
  const [s, t, c] = ["timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"].map(n => run.series.get(n) ?? { step: [],
    value: [] });
  const more = new Map([...t.step.map((x, i) => [x, t.value[i]])]);
  c.step.forEach((x, i) => more.set(x, (more.get(x) ?? 0) + c.value[i]));
  s.step.forEach((x, i) => { sum += (s.value[i] || 0) + (more.get(x) || 0);
    at.set(x, sum / 3600); });
  return at;
}

/* A name for each of these runs: with the directory where two have the same. */
export const labelsOf = stores => stores.map(r => stores.filter(o => title(o.info) === title(r.info)).length > 1 ?
  `${title(r.info)} (${r.info.dir.split("/").at(-1)})` : title(r.info));

/* The configurations as maps of keys to texts. */
const configs = stores => Promise.all(stores.map(async r => new Map(flat((await json("config", { run: r.id })).config))));

/* The mean over a group's runs with its band, each run smoothed as a single one is. */
function groupLine(name, color, series) {
  const b = bandOf(series.map(s => ({ step: s.step, value: s.value.length > 2 * smoothing() ? smooth(s.value, smoothing()) : s
      .value })));
  return { name, color, x: b.step, raw: b.mean, band: series.length > 1 ? { lo: b.lo, hi: b.hi } : undefined };
}

export async function comparePage({ runs, query, go, main }) {
  const chosen = query.getAll("run").map(id => runs.find(r => r.id === id)).filter(r => r && !r.error);
  if (!chosen.length) {
    main.replaceChildren(h("p", { class: "panel pad" }, "No runs are chosen: ", h("a", { href: "#/?all" },
      "choose some in the list of runs"), "."));
    return {};
  }
  const stores = await Promise.all(chosen.map(r => runOf(r.id).open())),
    maps = await configs(stores),
    groups = seedGroups(maps),
    group = new Group(),
    grid = h("div", { class: "grid two" }),
    deviation = h("span", { class: "quiet small" }, "band: one standard deviation"),
    legend = h("div", { class: "legend" });
  showing(Math.max(...stores.map(r => r.info.step)));
  const names = [...new Set(stores.flatMap(r => r.info.names.map(n => n.name)))].sort();
  const label = labelsOf(stores),
    groupLabel = groups.map(g => g.length > 1 ? `${label[g[0]]}: mean of ${g.length} seeds` : label[g[0]]);
  let axis = query.get("x") === "time" ? "time" : "step",
    seeds = query.get("group") === "seeds",
    cards = [],
    turn = 0;
  const keep = () => go(
    `#/compare?${new URLSearchParams([...chosen.map(r => ["run", r.id]), ...(search.value ? [["q", search.value]] : []), ...(axis === "time" ? [["x", axis]] : []), ...(seeds ? [["group", "seeds"]] : [])])}`,
    true);
  const search = h("input", { type: "search",
    placeholder: "another metric …", "aria-label": "Metrics whose names have these words", value: query.get("q") ?? "",
    oninput: () => { keep();
      show(); } });
  const key = () => legend.replaceChildren(...(seeds ? groups.map((g, i) => h("span", {}, h("i", { style: { background: color(
      i) } }), groupLabel[i], ` `, g.map((k, n) => [n ? ", " : "", h("a", { href: `#/${stores[k].id}/overview` }, stores[k]
      .info.dir.split("/").at(-1))]))) : stores.map((r, i) => h("span", {}, h("i", { style: { background: color(i) } }), h("a",
      { href: `#/${r.id}/overview` }, label[i]), ` ${r.info.state}`))));
  const draw = () => {
    const times = axis === "time" && !seeds ? stores.map(hours) : null;
    for (const [c, n] of cards) {
      c.x = times ? "hours" : "step";
      if (seeds) {
        c.set(groups.map((g, i) => groupLine(groupLabel[i], i, g.map(k => stores[k].series.get(n)).filter(s => s?.step.length)))
          .filter(l => l.x.length));
        continue;
      }
      c.set(stores.map((r, i) => {
        const s = r.series.get(n);
        return line(label[i], i, s, times && s ? s.step.map(x => times[i].get(x) ?? null) : s?.step);
      }).map(l => times ? { ...l, ...dropGaps(l) } : l).filter(l => l.x.length || stores.length > 1));
    }
    key();
    deviation.hidden = !seeds;
  };
  const show = async () => {
    const mine = ++turn,
      list = search.value ? matching(names, search.value).slice(0, 24) : frontOf(names).flatMap(f => f.found.slice(0, f.all ?
        2 : 1));
    await Promise.all(stores.map(r => r.need([...list, "timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"])));
    if (mine !== turn) return;
    group.destroy();
    group.window = null;
    cards = list.map(n => [new Chart({ title: n, entry: stores.map(r => r.name(n)).find(Boolean), group, tall: true,
      log: /grad_norm/.test(n) }), n]);
    grid.replaceChildren(...cards.map(([c]) => c.element));
    draw();
  };
  const by = choice("Axis", [
    ["step", "by step"],
    ["time", "by time"]
  ], axis, v => { axis = v;
    group.zoom(null);
    keep();
    draw(); });
  const over = groups.length < stores.length ? choice("Lines", [
    [false, "each run"],
    [true, "mean over seeds"]
  ], seeds, v => { seeds = v;
    by.hidden = v;
    keep();
    draw(); }) : h("span", { class: "quiet small", title: "Runs whose configurations differ in seeds and directories alone are drawn as one line with a band." },
    "no two runs differ in their seeds alone");
  seeds &&= groups.length < stores.length;
  by.hidden = seeds;
  main.replaceChildren(h("h1", { class: "sr" }, "Comparison of runs"), h("div", { class: "tools" }, search, by, over,
    smoothControl(draw), h("a", { href: `#/${stores[0].id}/scatter?${new URLSearchParams(stores.slice(1).map(r => ["with", r.id]))}` },
      "two metrics"), deviation), legend, grid,
    differences(stores, maps, label));
  await show();
  return { destroy: () => group.destroy(), poll: async () => { await Promise.all(stores.filter(r => r.info.state === "running")
      .map(r => r.refresh()));
    draw(); } };
}

function dropGaps(l) {
  const keep = l.x.map((x, i) => x === null ? -1 : i).filter(i => i >= 0);
  return { x: keep.map(i => l.x[i]), raw: keep.map(i => l.raw[i]), smooth: l.smooth === l.raw ? undefined : keep.map(i => l.smooth[
      i]) };
}

/* Which keys of the configuration differ. */
function differences(stores, maps, label) {
  const keys = differing(maps),
    page = (r, i) => `#/${r.id}/config?${new URLSearchParams([["show", "differs"], ...stores.filter((_, k) => k !== i).map(o => ["with", o.id])])}`;
  return h("section", { class: "panel", "aria-label": "Differences of the configurations" }, h("header", {}, h("h2", {},
    "Keys that differ")), h("div", { class: "scroll" }, keys.length ? h("table", {}, h("thead", {}, h("tr", {}, h("th",
      { scope: "col" }, "key"), stores.map((r, i) => h("th", { scope: "col" }, h("a", { href: page(r, i) }, label[i]))))),
    h("tbody", {}, keys.map(k => h("tr", {}, h("th", { scope: "row", class: "mono" }, k), maps.map(m => h("td",
      { class: "mono" }, m.get(k) ?? "–")))))) : h("p", { class: "pad quiet" }, "The configurations are the same.")));
}
