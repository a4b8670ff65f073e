/* samples.js - the samples of one step: their scores, their groups, and each of them in a list that draws only what is in sight. */

import { get, i64, json, title } from "./data.js";
import { VirtualList, choice, h, num } from "./elements.js";
import { anyTurns, binned, bound, fitsTurns, inRange, isOpen, toolsOf } from "./stats.js";

const BLOCK = 100; // excerpts asked for at once

/* What is known of the samples of a group. */
export function groupsOf(samples) {
  const by = new Map();
  samples.forEach((s, i) => {
    if (!by.has(s.uid)) by.set(s.uid, { uid: s.uid, first: i, samples: [] });
    by.get(s.uid).samples.push(s);
  });
  for (const g of by.values()) {
    const scores = g.samples.map(s => s.score).filter(v => v !== null);
    g.scored = scores.length;
    g.mean = scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
    g.std = scores.length ? Math.sqrt(scores.reduce((a, b) => a + (b - g.mean) ** 2, 0) / scores.length) : null;
    g.tokens = g.samples.reduce((a, s) => a + s.tokens, 0) / g.samples.length;
    g.cut = g.samples.filter(s => s.finish === "length").length;
    g.errors = g.samples.length - scores.length;
  }
  return [...by.values()];
}

export const scorePill = s => h("span", { class: `pill ${s.score === null ? "err" : s.score === 0 ? "zero" : ""}`, title: s
    .score === null ? s.status : null }, s.score === null ? s.status || "none" : num(s.score, 3));

const FILTERS = {
  all: ["All", () => true],
  mixed: ["Scores differ", g => g.std > 0],
  alike: ["Scores all alike", g => g.scored > 0 && g.std === 0],
  errors: ["Without a score", g => g.errors > 0],
  cut: ["Cut at the limit", g => g.cut > 0]
};
const SORTS = {
  uid: ["As in the data", (a, b) => a.uid - b.uid || (a.sample ?? 0) - (b.sample ?? 0)],
  worst: ["Lowest score first", (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
  best: ["Highest score first", (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity)],
  spread: ["Widest spread first", (a, b) => (b.std ?? -1) - (a.std ?? -1)],
  long: ["Longest first", (a, b) => b.tokens - a.tokens],
  short: ["Shortest first", (a, b) => a.tokens - b.tokens]
};
const select = (label, options, value, change) => h("select", { "aria-label": label, onchange: e => change(e.target.value) },
  Object.entries(options).map(([key, [name]]) => h("option", { value: key, selected: key === value }, name)));

/* One bar a sample of a group: its height is the score's. */
export function dots(samples, lo, hi) {
  return h("span", { class: "dots",
    role: "img", "aria-label": `scores ${samples.map(s => s.score === null ? "none" : num(s.score, 3)).join(", ")}` },
    samples.slice(0, 64).map(s => h("i", { class: s.score === null ? "none" : s.score === 0 ? "zero" : null, style: s.score ===
        null ? null : { height: `${Math.max(12, hi > lo ? 100 * (s.score - lo) / (hi - lo) : 100)}%` } })));
}

/* Two fields for a range of scores, from the address: {element, value(), set(range), params()}. */
export function rangeInputs(query, change) {
  const field = (name, label) => h("input", { type: "number", step: "any", class: "score", "aria-label": label, placeholder: name,
    value: bound(query.get(name)) ?? "", onchange: () => change() });
  const min = field("min", "Lowest score"),
    max = field("max", "Highest score");
  const value = () => ({ min: bound(min.value), max: bound(max.value) });
  return {
    element: h("label", { class: "range" }, "Score", min, "to", max),
    value,
    set: r => { min.value = r.min ?? "";
      max.value = r.max ?? ""; },
    params: () => Object.entries(value()).filter(([, v]) => v !== null)
  };
}

/* Conversations with tools by tool, failed calls and turns: {element, value(), params(), offer(samples)}. */
function turnInputs(query, change) {
  const tool = h("select", { "aria-label": "Tool", onchange: change }),
    failed = h("input", { type: "checkbox", checked: query.get("failed") === "1", onchange: change }),
    field = (name, label) => h("input", { type: "number", min: 1, class: "score", "aria-label": label, placeholder: name,
      value: bound(query.get(label === "Fewest turns" ? "least" : "most")) ?? "", onchange: change }),
    least = field("min", "Fewest turns"),
    most = field("max", "Most turns"),
    element = h("span", { class: "turns tools", hidden: true }, tool, h("label", {}, failed, "Failed calls"), h("label", {
      class: "range" }, "Turns", least, "to", most));
  let wanted = query.get("tool") ?? "";
  const value = () => ({ tool: tool.options.length ? tool.value : wanted, failed: failed.checked, least: bound(least.value), most: bound(
      most.value) });
  return {
    element,
    value,
    params: () => Object.entries(value()).filter(([, v]) => v).map(([k, v]) => [k, v === true ? "1" : v]),
    offer: samples => {
      const names = toolsOf(samples);
      if (tool.options.length) wanted = tool.value;
      element.hidden = !samples.some(s => s.turns !== undefined) && anyTurns({ ...value(), tool: wanted });
      if (wanted && !names.includes(wanted)) names.push(wanted);
      tool.replaceChildren(h("option", { value: "" }, "Any tool"), ...names.map(n => h("option", { value: n, selected: n ===
          wanted }, n)));
    }
  };
}

/* How many samples have which score; a click shows those alone. */
function distribution(samples, range, choose) {
  const bins = binned(samples.filter(s => s.score !== null).map(s => s.score), 20),
    most = Math.max(1, ...bins.map(b => b.n));
  return h("div", { class: "bins", role: "group", "aria-label": "Scores of the step: a button shows those samples alone" }, bins
    .map(b => {
      const on = b.n > 0 && range.min === b.min && range.max === b.max,
        text = b.lo === b.hi ? num(b.lo, 3) : `${num(b.lo, 3)} to ${num(b.hi, 3)}`;
      return h("button", { type: "button", "aria-pressed": String(on), title: `${b.n} samples with a score of ${text}`,
        "aria-label": `${b.n} samples with a score of ${text}`, disabled: b.n === 0, onclick: () => choose(on ? { min: null,
          max: null } : { min: b.min, max: b.max }) },
        h("i", { style: { height: `${Math.max(2, 58 * b.n / most)}px` } }), h("span", {}, bins.length <= 6 ? text : ""));
    }), bins.length > 6 ? h("div", { class: "ends" }, h("span", {}, num(bins[0].lo, 3)), h("span", {}, num(bins.at(-1).hi, 3))) :
    null);
}

/* The ids of a step's samples in whose texts the expression is. */
async function matches(params, signal) {
  const answer = await get("search", { ...params, ids: 1 }, signal),
    found = new Set();
  for (const line of (await answer.text()).split("\n").filter(Boolean)) {
    const m = JSON.parse(line);
    if (m.error) throw new Error(m.error);
    for (const id of m.ids ?? []) found.add(id);
  }
  return found;
}

export async function samplesPage({ run, path, query, go, main }) {
  const [train, val] = await Promise.all([0, 1].map(async validation => i64((await json("steps", { run: run.id, validation }))
    .step)));
  let validation = query.get("v") === "1" || !train.length ? 1 : 0,
    by = query.get("by") === "sample" ? "sample" : "group";
  let sort = query.get("sort") in SORTS ? query.get("sort") : "uid",
    filter = query.get("only") in FILTERS ? query.get("only") : "all",
    words = query.get("q") ?? "",
    found = null; // ids of the samples with these words; null: all
  const steps = () => validation ? val : train;
  if (!train.length && !val.length) {
    main.replaceChildren(h("h1", { class: "sr" }, "Samples"), h("p", { class: "panel pad" }, run.info.state === "running" ?
      "There are no samples yet. Those of the first step appear here." : "The run has no samples."));
    return { update: what => what === "steps" && document.dispatchEvent(new Event("theme")) };
  }
  const nearest = x => steps().reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a, steps().at(-1));
  let step = path[0] !== undefined && path[0] !== "last" ? nearest(+path[0] || 0) : steps().at(-1),
    samples = [],
    rows = [],
    blocks = new Map(),
    turn = 0,
    wanted = null,
    loading = false;

  const keep = () => {
    const q = new URLSearchParams([...(validation ? [
      ["v", 1]
    ] : []), ...(by === "sample" ? [
      ["by", by]
    ] : []), ...(sort !== "uid" ? [
      ["sort", sort]
    ] : []), ...(filter !== "all" ? [
      ["only", filter]
    ] : []), ...range.params(), ...talk.params(), ...(words ? [
      ["q", words]
    ] : [])]);
    go(`#/${run.id}/samples/${step}${q.size ? `?${q}` : ""}`, true);
  };
  const address = (uid, sample) =>
    `#/${run.id}/samples/${step}/${uid}?${new URLSearchParams([...(validation ? [["v", 1]] : []), ...(sample === undefined ? [] : [["s", sample]])])}`;

  /* ---- the list ---- */
  let lo = 0,
    hi = 1;
  const excerpt = (i, part) => blocks.get(Math.floor(i / BLOCK))?.[i % BLOCK]?.[part] ?? "";
  const one = text => text.replace(/\s+/g, " ").trim();
  const fill = (e, i) => {
    const r = rows[i];
    if (by === "group") e.replaceChildren(h("span", { class: "num quiet wide" }, r.uid), h("span", { class: "clip2" }, one(
        excerpt(r.first, 0))), dots(r.samples, lo, hi),
      h("b", { class: "num" }, num(r.mean, 3)), h("span", { class: "num wide quiet" }, num(r.std, 2)), h(
      "span", { class: "num wide" }, num(Math.round(r.tokens)), r.cut ? h("span", { class: "warn small",
        title: `${r.cut} cut at the limit` }, ` ${r.cut} cut`) : ""));
    else e.replaceChildren(h("span", { class: "num quiet" }, `${r.uid}·${r.sample}`), scorePill(r), h(
      "span", { class: "num wide" }, num(r.advantage, 3)), h("span", { class: "num wide" }, num(r.tokens)),
      h("span", { class: `small wide ${r.finish === "length" || r.failed ? "warn" : "quiet"}` }, r.turns === undefined ? r.finish ??
        "" : h("span", { title: `${num(r.calls)} calls of tools, ${num(r.failed)} failed` }, `${num(r.turns)} turns`)), h(
      "span", { class: "clip2" }, one(excerpt(r.at, 1))));
    e.setAttribute("aria-label", by === "group" ?
      `prompt ${r.uid}, mean score ${num(r.mean, 3)}, ${r.samples.length} samples: ${one(excerpt(r.first, 0)).slice(-120)}` :
      `prompt ${r.uid} sample ${r.sample}, score ${r.score === null ? r.status : num(r.score, 3)}, ${r.tokens} tokens: ${one(excerpt(r.at, 1)).slice(0, 120)}`
      );
  };
  const list = new VirtualList({ height: 46, kind: by, label: "Samples of the step", fill, open: i => { location.hash = by ===
        "group" ? address(rows[i].uid) : address(rows[i].uid, rows[i].sample); } });
  /* The excerpts in sight, one request at a time, the last view first. */
  const load = async () => {
    if (loading) return;
    loading = true;
    while (wanted) {
      const mine = turn,
        need = [...new Set(Array.from({ length: wanted[1] - wanted[0] }, (_, k) => rows[wanted[0] + k]).filter(Boolean).map(
          r => Math.floor((by === "group" ? r.first : r.at) / BLOCK)))].find(b => !blocks.has(b));
      if (need === undefined) { wanted = null; break; }
      const answer = await json("excerpts", { run: run.id, step, validation, offset: need * BLOCK, limit: BLOCK }).catch(() =>
        ({ samples: [] }));
      if (mine !== turn) continue;
      blocks.set(need, answer.samples);
      list.refill();
    }
    loading = false;
  };
  list.seen = (from, to) => { wanted = [from, to];
    load(); };

  const count = h("span", { class: "quiet small", role: "status" }),
    bins = h("div"),
    head = h("div", { class: `vhead ${by}` });
  const facts = h("dl", { class: "kpis" }),
    wrong = h("span", { class: "small bad", role: "alert" }),
    range = rangeInputs(query, () => { keep();
      draw(); }),
    talk = turnInputs(query, () => { keep();
      draw(); });
  /* Which samples have the words: asked of the server, since the list has no whole texts. */
  let looking = null,
    typed = 0;
  const look = async () => {
    looking?.abort();
    const mine = looking = new AbortController();
    wrong.textContent = "";
    try {
      found = words ? await matches({ run: run.id, q: words, step }, mine.signal) : null;
    } catch (e) {
      if (e.name === "AbortError") return;
      wrong.textContent = e.message;
      found = null;
    }
    if (mine === looking) draw();
  };
  const text = h("input", { type: "search", class: "grow", value: words, placeholder: "words or a regular expression in the texts",
    "aria-label": "Samples with this expression in prompt or response", oninput: () => { words = text.value;
      clearTimeout(typed);
      typed = setTimeout(() => { keep();
        look(); }, 250); } });
  const draw = () => {
    const turns = talk.value(),
      some = found || !isOpen(range.value()) || !anyTurns(turns),
      all = samples.filter(s => inRange(range.value(), s.score) && (!found || found.has(s.id)) && fitsTurns(turns, s)),
      [, keepIt] = FILTERS[filter],
      [, order] = SORTS[sort],
      groups = groupsOf(samples),
      chosen = some ? new Set(all.map(s => s.uid)) : null;
    const of = new Map(groups.map(g => [g.uid, g]));
    list.kind = by;
    head.className = `vhead ${by}`;
    head.replaceChildren(...(by === "group" ? [
      ["prompt", "wide"],
      ["", ""],
      ["scores", ""],
      ["mean", ""],
      ["std", "wide"],
      ["tokens", "wide"]
    ] : [
      ["sample", ""],
      ["score", ""],
      ["advantage", "wide"],
      ["tokens", "wide"],
      ["finish", "wide"],
      ["", ""]
    ]).map(([t, c]) => h("span", { class: c }, t)));
    rows = by === "group" ? groups.filter(g => keepIt(g) && (!chosen || chosen.has(g.uid))).sort(order) :
      all.filter(s => keepIt(filter === "mixed" || filter === "alike" ? of.get(s.uid) : { errors: +(s.score === null), cut: +(s
          .finish === "length") })).map(s => ({ ...s, mean: s.score, std: of.get(s.uid).std })).sort(order);
    sessionStorage.setItem("shown", JSON.stringify({ at: `${run.id}/${step}/${validation}`, address: location.hash,
      uids: [...new Set(rows.map(r => r.uid))].slice(0, 5000) })); // for a prompt's page: where back is, and which one is next
    list.free = [];
    list.set(rows.length);
    list.element.scrollTop = 0;
    count.textContent = by === "group" ? `${num(rows.length)} of ${num(groups.length)} prompts` :
      `${num(rows.length)} of ${num(samples.length)} samples`;
    bins.replaceChildren(distribution(samples, range.value(), r => { range.set(r);
      keep();
      draw(); }));
  };

  /* ---- the step ---- */
  const number = h("input", { type: "number", "aria-label": "Step", min: 0, onchange: () => show(nearest(+number.value)) });
  const slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Step", class: "grow", oninput: () => { number.value =
        steps()[+slider.value]; }, onchange: () => show(steps()[+slider.value]) });
  const move = by_ => { const s = steps(),
      at = Math.max(0, Math.min(s.length - 1, s.indexOf(step) + by_)); if (s[at] !== step) show(s[at]); };
  const back = h("button", { class: "icon", type: "button", "aria-label": "Step before", onclick: () => move(-1) }, "‹"),
    on = h("button", { class: "icon", type: "button", "aria-label": "Next step", onclick: () => move(1) }, "›");
  const place = () => {
    const s = steps(),
      at = s.indexOf(step);
    slider.max = s.length - 1;
    slider.value = at;
    number.value = step;
    back.disabled = at <= 0;
    on.disabled = at >= s.length - 1;
  };
  const show = async next => {
    const mine = ++turn;
    step = next;
    place();
    keep();
    const answer = (await json("samples", { run: run.id, step, validation })).samples;
    if (mine !== turn) return;
    samples = answer.map((s, at) => ({ ...s, at }));
    blocks = new Map();
    talk.offer(samples);
    const groups = groupsOf(samples),
      scored = samples.filter(s => s.score !== null),
      mean = scored.reduce((a, s) => a + s.score, 0) / scored.length;
    lo = Math.min(0, ...scored.map(s => s.score));
    hi = Math.max(lo + 1e-9, ...scored.map(s => s.score));
    const alike = groups.filter(g => g.scored > 0 && g.std === 0).length,
      errors = samples.length - scored.length,
      cut = samples.filter(s => s.finish === "length").length;
    facts.replaceChildren(...[
        ["Samples", num(samples.length), `${num(groups.length)} prompts`],
        ["Mean score", num(mean, 3), ""],
        ["Groups all alike", groups.length ? `${Math.round(100 * alike / groups.length)} %` : "–",
          `${alike} of ${groups.length}`
        ],
        ["Mean tokens", num(Math.round(samples.reduce((a, s) => a + s.tokens, 0) / samples.length)), ""],
        ["Cut at the limit", num(cut), ""],
        ["Without a score", num(errors), ""]
      ]
      .map(([k, v, small]) => h("div", { class: "kpi" }, h("dt", {}, k), h("dd", { class: k === "Without a score" &&
          errors ? "bad" : null }, v, small ? h("small", {}, ` ${small}`) : ""))));
    if (words) await look();
    else draw();
  };
  const part = train.length && val.length ? choice("Part of the run", [
    [0, "Training"],
    [1, "Validation"]
  ], validation, v => { validation = v;
    show(nearest(step)); }) : null;
  const keys = e => {
    if (e.target.closest?.("input, select, textarea, .seg") || e.altKey || e.ctrlKey || e.metaKey) return;
    if (e.key === "ArrowLeft" || e.key === "ArrowRight") { e.preventDefault();
      move(e.key === "ArrowLeft" ? -1 : 1); }
  };
  document.addEventListener("keydown", keys);
  main.replaceChildren(h("h1", { class: "sr" }, `${title(run.info)}: samples`), h("div", { class: "tools" }, part, h(
    "label", { class: "step" }, "Step"), back, number, on, slider),
    facts, h("section", { class: "panel", "aria-label": "Samples" }, h("div", { class: "body" }, bins, h(
    "div", { class: "tools" },
      choice("Rows", [
        ["group", "Prompts"],
        ["sample", "Samples"]
      ], by, v => { by = v;
        keep();
        draw(); }), select("Which", FILTERS, filter, v => { filter = v;
        keep();
        draw(); }), select("Order", SORTS, sort, v => { sort = v;
        keep();
        draw(); }),
      range.element, talk.element, text, count, wrong)), head, list.element));
  await show(step);
  if (matchMedia("(pointer: fine)").matches) list.element.focus({ preventScroll: true });
  return {
    keys: [
      ["← →", "the step before, the next one"],
      ["↑ ↓", "rows of the list that has the focus, also Page Up and Page Down, Home and End"],
      ["Enter", "opens the row"]
    ],
    destroy: () => { turn++;
      looking?.abort();
      clearTimeout(typed);
      document.removeEventListener("keydown", keys); },
    update: async what => {
      if (what !== "steps") return;
      const known = steps();
      for (const s of i64((await json("steps", { run: run.id, validation })).step))
        if (s > (known.at(-1) ?? -1)) known.push(s);
      place();
    }
  };
}