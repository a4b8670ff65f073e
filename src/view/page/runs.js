/* runs.js - the list of runs: what came out of each, sorted and found by words and tags, of which several can be compared. */

import { json, title } from "./data.js";
import { ago, clock, h, num, span } from "./elements.js";
import { badge } from "./app.js";
import { tagList } from "./notes.js";
import { fitsWords, sorted } from "./stats.js";

/* Columns: [key, heading, value to sort by, what it is, class]. */
const COLUMNS = [
  ["name", "run", r => title(r).toLowerCase()],
  ["state", "state", r => r.state],
  ["step", "step", r => r.step],
  ["reward", "reward", r => r.reward?.value, "mean of the last 10 steps"],
  ["validation", "validation", r => r.validation?.value, "the last one"],
  ["lr", "lr", r => r.lr, "learning rate of the configuration", "wide"],
  ["duration", "time", r => r.seconds, "from its first start to its end, or until now", "wide"],
  ["started", "started", r => r.started, "", "wide"],
  ["written", "last write", r => r.modified, "", "wide"]
];
const result = v => h("td", { class: "num", title: v?.name }, num(v?.value, 3));

export async function runsPage({ runs, query, go, main }) {
  const chosen = new Set(query.getAll("run")),
    body = h("tbody"),
    head = h("tr"),
    count = h("span", { class: "quiet small", role: "status" }),
    compare = h("button", { type: "button", onclick: () => {
        location.hash = `#/compare?${new URLSearchParams([...chosen].map(id => ["run", id]))}`; } }, "Compare");
  let list = runs,
    by = COLUMNS.some(([k]) => k === query.get("sort")) ? query.get("sort") : "",
    down = query.get("down") === "1";
  const keep = () => go(
    `#/?${new URLSearchParams([["all", ""], ...(by ? [["sort", by]] : []), ...(down ? [["down", 1]] : []), ...(filter.value ? [["q", filter.value]] : []), ...[...chosen].map(id => ["run", id])])}`,
    true);
  const filter = h("input", { type: "search", class: "runs", placeholder: "name, directory, #tag, note", "aria-label": "Runs with these words",
    value: query.get("q") ?? "", oninput: () => { keep();
      draw(); } });
  const tell = () => {
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
  };
  const pick = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    keep();
    tell();
  };
  /* First the largest, newest or A; again: the other way round; again: as they were written. */
  const sortBy = key => {
    const first = key !== "name" && key !== "state";
    if (by !== key) { by = key;
      down = first; } else if (down === first) down = !first;
    else { by = "";
      down = false; }
    keep();
    draw();
    head.querySelector(`[data-key=${key}]`)?.focus();
  };
  const row = (r, now) => {
    if (r.error) return h("tr", {}, h("td"), h("td", { colspan: COLUMNS.length }, h("span", { class: "bad" }, r.error), h("div",
      { class: "quiet small" }, r.dir)));
    const note = r.notes?.at(-1);
    return h("tr", {}, h("td", {}, h("input", { type: "checkbox", checked: chosen.has(r.id),
        "aria-label": `Compare ${title(r)}`, onchange: e => pick(r.id, e.target.checked) })),
      h("td", {}, h("a", { href: `#/${r.id}/overview` }, title(r)), " ", tagList(r.tags), h("div", { class: "quiet small" }, h("bdi", {}, r.dir)),
        note ? h("div", { class: "small note", title: r.notes.map(n => n.text).join("\n") }, note.text) : null),
      h("td", {}, badge(r.state, r.exit)),
      h("td", { class: "num" }, num(Math.max(0, r.step)), r.total > 0 ? h("span", { class: "quiet" }, ` of ${num(r.total)}`) : ""),
      result(r.reward), result(r.validation), h("td", { class: "num wide" }, num(r.lr, 3)), h("td", { class: "num wide" }, span(
        r.seconds ?? NaN)), h("td", { class: "num quiet wide" }, clock(r.started)), h("td", { class: "num quiet wide" }, ago(r
        .modified, now)));
  };
  const draw = () => {
    const now = Date.now() / 1000,
      found = list.filter(r => fitsWords(filter.value, r.error ? r.dir :
        `${r.dir} ${title(r)} ${(r.tags ?? []).join(" ")} ${(r.notes ?? []).map(n => n.text).join(" ")}`, r.tags)),
      [, , value] = COLUMNS.find(([k]) => k === by) ?? [];
    head.replaceChildren(h("th", {}, h("span", { class: "sr" }, "compare")), ...COLUMNS.map(([key, name, , text, c]) => h("th",
      { scope: "col", class: c, "aria-sort": key !== by ? null : down ? "descending" : "ascending" }, h("button",
        { type: "button", class: "plain sort", "data-key": key, title: text, onclick: () => sortBy(key) }, name, h("span",
          { "aria-hidden": "true" }, key !== by ? "" : down ? " ↓" : " ↑")))));
    body.replaceChildren(...(value ? sorted(found, r => r.error ? null : value(r), by, down) : found).map(r => row(r, now)));
    count.textContent = found.length < list.length ? `${found.length} of ${list.length} runs` : `${list.length} runs`;
  };
  for (const id of chosen)
    if (!runs.some(r => r.id === id)) chosen.delete(id);
  main.replaceChildren(h("h1", {}, "Runs"), h("div", { class: "tools" }, filter, compare, count, h("span",
      { class: "quiet small" }, "tick two or more to compare them")),
    h("div", { class: "panel scroll" }, h("table", { class: "runs" }, h("thead", {}, head), body)));
  tell();
  draw();
  return {
    keys: [
      ["Space", "ticks the run whose box has the focus"],
      ["Enter", "on a heading: sorts by it, again: the other way round"]
    ],
    poll: async () => { list = (await json("runs")).runs;
      if (!body.contains(document.activeElement) && !head.contains(document.activeElement)) draw(); }
  };
}
