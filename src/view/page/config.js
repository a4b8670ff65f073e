/* config.js - the configuration of a run: all of it, what was set, what differs from other runs'. */

import { json, matching, run as runOf, title } from "./data.js";
import { choice, clock, h, panel, span } from "./elements.js";
import { labelsOf } from "./compare.js";
import { differing, flat, isSet } from "./stats.js";

const SHOWS = { all: "All", set: "Only what I set", differs: "Differs" };

/* Which of the other runs to compare with; choosing reloads the page by its address. */
function others(runs, run, chosen, change) {
  const rest = runs.filter(r => !r.error && r.id !== run.id);
  return h("select", { "aria-label": "Run to compare with", onchange: e => change(e.target.value) },
    h("option", { value: "" }, rest.length ? "another run …" : "there is no other run"),
    rest.map(r => h("option", { value: r.id, selected: chosen.includes(r.id) }, `${title(r)} (${r.dir.split("/").at(-1)})`)));
}

export async function configPage({ run, query, go, main }) {
  const ids = query.getAll("with").filter(id => id !== run.id),
    { config, set } = await json("config", { run: run.id }),
    rows = flat(config),
    i = run.info;
  let show = query.get("show") in SHOWS ? query.get("show") : "all",
    stores = [],
    maps = [];
  const body = h("div"),
    count = h("span", { class: "quiet small", role: "status" }),
    pick = h("span");
  const keep = () => go(
    `#/${run.id}/config?${new URLSearchParams([...(show === "all" ? [] : [["show", show]]), ...ids.map(id => ["with", id]), ...(search.value ? [["q", search.value]] : [])])}`,
    true);
  const search = h("input", { type: "search", placeholder: "key or value", "aria-label": "Keys and values with these words",
    value: query.get("q") ?? "", oninput: () => { keep();
      draw(); } });
  const found = () => {
    const words = new Set(matching(rows.map(([k, v]) => `${k} ${v}`), search.value));
    return rows.filter(([k, v]) => words.has(`${k} ${v}`) && (show !== "set" || isSet(set ?? [], k)));
  };
  const table = () => {
    const all = [new Map(rows), ...maps],
      keys = matching(differing(all), search.value),
      label = labelsOf([run, ...stores]);
    count.textContent = keys.length === 1 ? "1 key differs" : `${keys.length} keys differ`;
    return !stores.length ? h("p", { class: "quiet" }, "Choose a run to compare with.") : h("div", { class: "scroll" }, h("table",
      {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), label.map(l => h("th", { scope: "col" }, l)))),
      h("tbody", {}, keys.map(k => h("tr", {}, h("th", { scope: "row", class: "mono" }, k), all.map(m => h("td",
        { class: "mono" }, m.get(k) ?? "–")))))));
  };
  const draw = () => {
    pick.hidden = show !== "differs";
    if (show === "differs") return body.replaceChildren(table());
    const list = found();
    count.textContent = `${list.length} of ${rows.length} keys`;
    body.replaceChildren(show === "set" && !set ? h("p", { class: "quiet" },
        "This run.db does not say which keys were set: an earlier verlc wrote it. Another run of the same program shows by “Differs” what is not alike.") :
      h("dl", { class: "cfg" }, list.flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])));
    return undefined;
  };
  const load = async () => {
    const { runs } = await json("runs");
    stores = await Promise.all(ids.filter(id => runs.some(r => r.id === id && !r.error)).map(id => runOf(id).open()));
    maps = await Promise.all(stores.map(async r => new Map(flat((await json("config", { run: r.id })).config))));
    pick.replaceChildren(others(runs, run, ids, id => { ids.splice(0, ids.length, ...(id ? [id] : []));
      keep();
      load(); }));
    draw();
  };
  const copy = h("button", { type: "button", title: "as arguments of a command line, what is shown", onclick: async () => {
      await navigator.clipboard.writeText(found().map(([k, v]) => `${k}=${v}`).join("\n"));
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500); } }, "Copy");
  main.replaceChildren(h("h1", { class: "sr" }, "Configuration"), h("dl", { class: "kpis" }, [
      ["Started", clock(i.started)],
      ["Ended", i.ended ? clock(i.ended) : "–"],
      ["Time", i.started ? span((i.ended || i.now) - i.started) : "–"],
      ["Machine", i.status?.host || "–"],
      ["verlc", i.version || "–"],
      ["Directory", i.dir]
    ]
    .map(([k, v]) => h("div", { class: "kpi" }, h("dt", {}, k), h("dd", { title: v, class: v.length > 12 ? "long" : null },
      v)))), h("div", { class: "tools" }, choice("Keys", Object.entries(SHOWS), show, v => { show = v;
    keep();
    draw(); }), pick, search, copy, count), panel("Configuration", body));
  draw();
  await load();
  return {};
}
