/* run_pages.js - pages of one run: search, rewards, time and memory. */

import { Chart, Group } from "./chart.js";
import { get, json, title } from "./data.js";
import { choice, gib, h, num, panel, problem, span } from "./elements.js";
import { heatmap, openStep, phaseChart } from "./metrics.js";
import { rangeInputs } from "./samples.js";
import { isOpen, isPhase } from "./stats.js";

const groupAddress = (run, s) => `#/${run.id}/samples/${s.step}/${s.uid}?${s.validation ? "v=1&" : ""}s=${s.sample}`;

/* Cards of single metrics; returns what draws them again. */
function cardsOf(run, names, group) {
  const cards = names.map((n, i) => [new Chart({ title: n, entry: run.name(n), group }), n, i]);
  const draw = () => { for (const [c, n, i] of cards) { const s = run.series.get(n);
      c.set(s ? [{ name: n, color: i, x: s.step, raw: s.value.map(v => Number.isFinite(v) ? v : null) }] : [], run.events); } };
  return { element: h("div", { class: "grid" }, cards.map(([c]) => c.element)), draw };
}

/* ---- search ---- */

export async function searchPage({ run, query, go, main }) {
  let where = ["prompt", "response"].includes(query.get("in")) ? query.get("in") : "both",
    stop = null;
  const words = h("input", { type: "search", class: "grow",
  placeholder: "a regular expression, as in \\boxed\\{\\d+\\}", "aria-label": "Search in prompts and responses", value: query
      .get("q") ?? "" });
  const match = h("input", { type: "checkbox", checked: query.get("case") === "1", onchange: () => look() });
  const range = rangeInputs(query, () => look());
  const hits = h("ul", { class: "hits" }),
    count = h("p", { class: "quiet small pad", role: "status" },
      "Searches every prompt and response of the run, the newest step first.");
  const row = m => h("li", {}, h("div", { class: "row small" }, h("a", { href: groupAddress(run, m) },
      `step ${num(m.step)} · prompt ${m.uid} · #${m.sample}`), h("span", { class: "quiet" }, m.validation ? "validation" : "",
      m.response ? " response" : " prompt"),
    h("span", { class: "quiet num" }, m.score === null ? "no score" : `score ${num(m.score, 3)}`)), h(
  "div", { class: "mono" }, m.before, h("mark", {}, m.match), m.after));
  const look = async () => {
    stop?.abort();
    const mine = stop = new AbortController(),
      q = words.value;
    go(`#/${run.id}/search?${new URLSearchParams([["q", q], ...(where === "both" ? [] : [["in", where]]), ...(match.checked ? [["case", 1]] : []), ...range.params()])}`,
      true);
    hits.replaceChildren();
    if (!q) { count.textContent = ""; return; }
    count.textContent = "Searching …";
    let found = 0,
      rest = "";
    const tell = p => { count.textContent =
        `${num(found)}${p.full ? " and more" : ""} sample${found === 1 ? "" : "s"} ${isOpen(range.value()) ? "" : " with such a score "}found in ${num(p.done)} of ${num(p.total)}${p.more ? " …" : p.full ? ": a longer pattern finds fewer" : ""}`; };
    try {
      const answer = await get("search", { run: run.id, q, in: where, case: +match.checked, ...Object.fromEntries(range.params()) }, mine.signal),
        reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done || mine.signal.aborted) break;
        const lines = (rest + value).split("\n"),
          fresh = [];
        rest = lines.pop();
        for (const line of lines) {
          const m = JSON.parse(line);
          if (m.error) throw new Error(m.error);
          if ("done" in m) tell(m);
          else { found++;
            fresh.push(row(m)); }
        }
        hits.append(...fresh);
      }
    } catch (e) { if (e.name !== "AbortError" && mine === stop) { count.textContent = "";
        hits.replaceChildren(problem(e)); } }
  };
  main.replaceChildren(h("h1", { class: "sr" }, "Search"), h("form", { class: "tools", role: "search", onsubmit: e => { e
          .preventDefault();
        look(); } }, words,
    choice("Where", [
      ["both", "Both"],
      ["prompt", "Prompts"],
      ["response", "Responses"]
    ], where, v => { where = v;
      look(); }), h("label", {}, match, "Match case"), range.element, h("button", {}, "Search")), h(
"section", { class: "panel", "aria-label": "Found" }, count, hits));
  if (words.value) look();
  else if (matchMedia("(pointer: fine)").matches) words.focus();
  return { destroy: () => stop?.abort() };
}

/* ---- rewards ---- */

export async function rewardsPage({ run, main }) {
  const group = new Group({ open: openStep(run) }),
    names = run.info.names.map(n => n.name).filter(n => /^reward\//.test(n) || ["critic/rewards/max", "critic/rewards/min",
      "train/zero_variance_groups"
    ].includes(n));
  const maps = [heatmap(run, group), heatmap(run, group, { name: "response_length",
    title: "Response lengths of a step's samples" })];
  const held = heatmap(run, new Group({ open: x => { location.hash =
      `#/${run.id}/samples/${Math.round(x)}?v=1`; } }), { title: "Rewards of validation", validation: 1 });
  const cards = cardsOf(run, names, group),
    errors = h("div", {}, h("p", { class: "quiet" }, "Looking …"));
  main.replaceChildren(h("h1", { class: "sr" }, `${title(run.info)}: rewards`), h("div", { class: "grid two" }, maps.map(m => m
      .chart.element), held.chart.element),
    panel("Samples without a score", errors), cards.element);
  await run.need(names);
  cards.draw();
  const look = async () => {
    for (const m of [...maps, held]) m.update();
    const e = await json("errors", { run: run.id }),
      kinds = Object.entries(e.by_status).sort((a, b) => b[1].count - a[1].count);
    errors.replaceChildren(...(e.all === 0 ? [h("p", {}, h("span", { class: "good" }, "None."), h("span", { class: "quiet" },
        " Every sample of training has a score."))] :
      [h("p", {}, h("b", { class: "bad num" }, num(e.all)),
          ` samples in ${num(e.steps)} steps have no score. They are never scored 0.${e.looked < e.steps ? ` Below: the last ${e.looked} of these steps.` : ""}`
          ),
        h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["what happened", "samples", "an example",
            "why"
          ].map(t => h("th", { scope: "col" }, t)))),
          h("tbody", {}, kinds.map(([status, s]) => h("tr", {}, h("td", {}, h("span", { class: "pill err" }, status)),
            h("td", { class: "num" }, num(s.count)), h("td", {}, h("a", { href: groupAddress(run, s) },
              `step ${s.step}, prompt ${s.uid}, #${s.sample}`)), h("td", { class: "mono" }, s.message ?? "–"))))))
      ]));
  };
  look().catch(e => errors.replaceChildren(problem(e)));
  return { destroy: () => { group.destroy();
      held.chart.destroy(); }, update: what => { if (what === "steps") { cards.draw();
        look().catch(() => {}); } } };
}

/* ---- time and memory ---- */

function memory(plan) {
  if (!plan || !Array.isArray(plan.parts) || !plan.parts.length) return h("p", { class: "quiet" },
    "run.db has no memory plan: the run's device has no limit, or an older verlc wrote it.");
  const total = plan.total || plan.parts.reduce((a, p) => a + p.bytes, 0),
    all = Math.max(plan.limit || 0, total),
    turns = plan.parts.filter(p => p.block);
  const bar = (p, kind = "") => [h("span", {}, p.name), h("span", { class: "num right" }, gib(p.bytes)), h(
  "span", { class: `track ${kind}` }, h("i", { style: { width: `${100 * Math.min(1, p.bytes / all)}%` } })), p.note ? h(
  "span", { class: "quiet small note" }, p.note) : null];
  return h("div", {}, h("p", {}, h("b", { class: "num" }, gib(total)), plan.limit ? ` of ${gib(plan.limit)}` : "", h(
    "span", { class: "quiet" }, plan.limit ? ` · ${gib(Math.max(0, plan.limit - total))} free` : "")),
    h("div", { class: "pl" }, plan.parts.filter(p => !p.block).flatMap(p => bar(p))),
    turns.length ? [h("p", { class: "quiet" }, "These take turns in one block, of the size of the largest:"), h(
    "div", { class: "pl" }, turns.flatMap(p => bar(p, "turns")))] : null);
}

export async function timePage({ run, main }) {
  const group = new Group({ open: openStep(run) }),
    phases = phaseChart(run, group),
    all = run.info.names.map(n => n.name);
  const names = [...all.filter(n => /^timing_s\/step$|^perf\//.test(n)), ...all.filter(n =>
    /^timing_s\/(testing|save_checkpoint)$/.test(n))].slice(0, 24);
  const cards = cardsOf(run, names, group),
    shares = h("div", { class: "pl" });
  const draw = async () => {
    await phases.update();
    cards.draw();
    const parts = all.filter(isPhase).map(n => [n, run.series.get(n)])
      .filter(([, s]) => s).map(([n, s]) => [n.slice(9), s.value.slice(-50).reduce((a, b) => a + (b || 0), 0) / Math.max(1,
        Math.min(50, s.value.length)), s.value.length]);
    const most = Math.max(1e-9, ...parts.map(p => p[1]));
    shares.replaceChildren(...parts.filter(p => p[1] > 0).sort((a, b) => b[1] - a[1]).flatMap(([n, v]) => [h("span", {}, n),
      h("span", { class: "num right" }, span(v)), h("span", { class: "track" }, h(
      "i", { style: { width: `${100 * v / most}%` } }))
    ]));
  };
  main.replaceChildren(h("h1", { class: "sr" }, `${title(run.info)}: time and memory`), h("div", { class: "grid two" }, phases
    .chart.element, panel("Mean of the last 50 steps", shares)), panel("Memory plan", memory(run.info.plan)), cards.element);
  await run.need(names);
  await draw();
  return { destroy: () => group.destroy(), update: what => what === "steps" && draw() };
}
