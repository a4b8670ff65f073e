/* runs.js - the list of runs, of which several can be compared. */

import { json, title } from "./data.js";
import { ago, clock, h, num } from "./elements.js";
import { badge } from "./app.js";

export async function runsPage({ runs, main }) {
  const chosen = new Set(),
    body = h("tbody"),
    compare = h("button", {
      type: "button",
      disabled: true,
      onclick: () => {
        location.hash = `#/compare?${new URLSearchParams([...chosen].map(id => ["run", id]))}`;
      }
    }, "Compare");
  const filter = h("input", { type: "search", placeholder: "name or directory", "aria-label": "Runs with these words",
  oninput: () => draw() });
  const pick = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
  };
  let list = runs;
  const draw = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean),
      now = Date.now() / 1000;
    body.replaceChildren(...list.filter(r => words.every(w => `${r.dir} ${r.error ? "" : title(r)}`.toLowerCase().includes(w)))
      .map(r => h("tr", {},
        h("td", {}, r.error ? "" : h("input", { type: "checkbox", checked: chosen.has(r
          .id), "aria-label": `Compare ${title(r)}`, onchange: e => pick(r.id, e.target.checked) })),
        h("td", {}, r.error ? h("span", { class: "bad" }, r.error) : h("a", { href: `#/${r.id}/overview` }, title(r)), h(
          "div", { class: "quiet small" }, r.dir)),
        h("td", {}, badge(r.state, r.exit)),
        h("td", { class: "num" }, r.error ? "" : `${num(Math.max(0, r.step))}${r.total > 0 ? ` of ${num(r.total)}` : ""}`),
        h("td", { class: "num quiet wide" }, r.error ? "" : clock(r.started)), h("td", { class: "num quiet" }, ago(r
          .modified, now)))));
  };
  main.replaceChildren(h("h1", {}, "Runs"), h("div", { class: "tools" }, filter, compare, h("span", { class: "quiet small" },
      "tick two or more to compare them")),
    h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "sr" },
      "compare")), ["run", "state", "step", "started", "last write"].map(t => h("th", { scope: "col", class: t ===
        "started" ? "wide" : null }, t)))), body)));
  draw();
  return { poll: async () => { list = (await json("runs")).runs;
      draw(); } };
}