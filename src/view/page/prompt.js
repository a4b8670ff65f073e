/* prompt.js - one prompt over all steps that had it, of one run or several: how its scores move, and what was answered. */

import { Chart, Group } from "./chart.js";
import { json, run as runOf, title } from "./data.js";
import { choice, color, h, num } from "./elements.js";
import { labelsOf } from "./compare.js";
import { dots, groupsOf } from "./samples.js";

/* The steps of a prompt, ascending: {step, samples, mean, tokens, ...}. */
function stepsOf(samples) {
  const by = new Map();
  for (const s of samples) {
    if (!by.has(s.step)) by.set(s.step, []);
    by.get(s.step).push(s);
  }
  return [...by].map(([step, list]) => ({ ...groupsOf(list)[0], step, samples: list }));
}

const one = text => text.replace(/\s+/g, " ").trim();

export async function promptPage({ run, path, query, go, main }) {
  const uid = +path[0] || 0,
    validation = query.get("v") === "1" ? 1 : 0,
    ids = query.getAll("with").filter(id => id !== run.id),
    { runs } = await json("runs");
  const stores = [run, ...await Promise.all(ids.filter(id => runs.some(r => r.id === id && !r.error)).map(id => runOf(id).open()))],
    label = labelsOf(stores),
    answers = await Promise.all(stores.map(r => json("prompt", { run: r.id, uid, validation }))),
    group = new Group({ open: x => { location.hash = groupOf(0, Math.round(x)); } });
  const groupOf = (k, step) => `#/${stores[k].id}/samples/${step}/${uid}${validation ? "?v=1" : ""}`;
  const address = (v, list) => `#/${run.id}/prompt/${uid}?${new URLSearchParams([...(v ? [["v", 1]] : []), ...list.map(id => ["with", id])])}`;
  const head = answers.find(a => a.samples.length);
  const other = h("select", { "aria-label": "Add a run", onchange: e => { if (e.target.value) location.hash = address(validation,
      [...ids, e.target.value]); } }, h("option", { value: "" }, "beside another run …"), runs.filter(r => !r.error && !stores.some(
    s => s.id === r.id)).map(r => h("option", { value: r.id }, `${title(r)} (${r.dir.split("/").at(-1)})`)));
  const tools = h("div", { class: "tools" }, h("a", { href: `#/${run.id}/samples/last${validation ? "?v=1" : ""}` }, "Samples"),
    h("span", { class: "quiet" }, "/"), h("b", {}, `prompt ${uid} over all steps`), choice("Part of the run", [
      [0, "Training"],
      [1, "Validation"]
    ], validation, v => { location.hash = address(v, ids); }), runs.length > 1 ? other : null);
  if (!head) {
    main.replaceChildren(tools, h("p", { class: "panel pad" },
      `No step has samples of prompt ${uid} in ${validation ? "validation" : "training"}.`));
    return {};
  }
  const charts = [
    ["Mean score", g => g.mean],
    ["Spread of the scores (std)", g => g.std],
    ["Mean tokens", g => g.tokens]
  ].map(([name, value]) => [new Chart({ title: name, group }), value]);
  const steps = answers.map(a => stepsOf(a.samples)),
    lo = Math.min(0, ...answers.flatMap(a => a.samples.map(s => s.score ?? 0))),
    hi = Math.max(lo + 1e-9, ...answers.flatMap(a => a.samples.map(s => s.score ?? 0)));
  const differs = answers.map(a => a.samples.length > 0 && a.prompt !== head.prompt);
  const rows = steps.flatMap((list, k) => list.map(g => ({ ...g, k }))).sort((a, b) => b.step - a.step || a.k - b.k);
  const shown = rows.slice(0, 400);
  main.replaceChildren(h("h1", { class: "sr" }, `${title(run.info)}: prompt ${uid}`), tools,
    stores.length > 1 ? h("div", { class: "legend" }, stores.map((r, k) => h("span", {}, h("i", { style: { background: color(k) } }),
      label[k], differs[k] ? h("span", { class: "warn" }, " another text: the data is not the same") : answers[k].samples.length ?
      "" : h("span", { class: "quiet" }, " no samples of it"), h("a", { href: address(validation, ids.filter(id => id !== r.id)),
        hidden: k === 0, "aria-label": `without ${label[k]}` }, " ×")))) : "",
    h("section", { class: "panel", "aria-label": "Prompt" }, h("header", {}, h("h2", {}, "Prompt"), h("span",
      { class: "quiet small" }, head.data_source ?? ""), head.ground_truth ? h("span", { class: "small" }, `ground truth ${head.ground_truth}`) :
      null), h("div", { class: "body" }, h("pre", { class: "prompt", tabindex: 0, "aria-label": "Prompt" }, head.prompt))),
    h("div", { class: "grid" }, charts.map(([c]) => c.element)),
    h("section", { class: "panel", "aria-label": "Steps" }, h("header", {}, h("h2", {}, "Steps"), h("span",
        { class: "quiet small num" }, `${num(answers.reduce((n, a) => n + a.steps, 0))} with this prompt${rows.length > shown.length ? `; the newest ${shown.length}` : ""}`)),
      h("div", { class: "scroll" }, h("table", { class: "steps" }, h("thead", {}, h("tr", {}, ["step", "scores", "mean", "tokens",
        "the first response"].map((t, i) => h("th", { scope: "col", class: i === 3 ? "wide" : null }, t)))), h("tbody", {}, shown.map(
        g => h("tr", {}, h("td", { class: "num" }, stores.length > 1 ? h("i", { class: "swatch", style: { background: color(g.k) },
            title: label[g.k] }) : null, h("a", { href: groupOf(g.k, g.step) }, num(g.step))), h("td", {}, dots(g.samples, lo, hi)),
          h("td", { class: "num" }, num(g.mean, 3)), h("td", { class: "num wide" }, num(Math.round(g.tokens))), h("td",
            { class: "mono" }, h("span", { class: "clip2" }, one(answers[g.k].excerpts[g.step] ?? ""))))))))));
  for (const [c, value] of charts) c.set(steps.map((list, k) => ({ name: label[k], color: k, x: list.map(g => g.step), raw: list.map(
    value) })).filter(l => l.x.length));
  return { destroy: () => group.destroy(), keys: [
      ["Enter", "on a plot: the samples of the step"]
    ] };
}
