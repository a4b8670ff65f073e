/* metrics.js - pages of curves: a run's overview, any metric of it. */

import { Chart, Group } from "./chart.js";
import { f64, i32, i64, json, matching, smooth, title } from "./data.js";
import { breath, clock, css, h, num } from "./elements.js";
import { notesPanel } from "./notes.js";
import { isPhase } from "./stats.js";

/* The tutorial's plots; a pattern with * takes every metric that fits. */
const FRONT = [
  { title: "Reward", names: ["critic/rewards/mean", "critic/score/mean"] },
  { title: "Validation", names: ["val-core/*", "val/loss"], all: true },
  { title: "KL from the reference", names: ["actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"] },
  { title: "Gradient norm", names: ["actor/grad_norm", "train/grad_norm"], log: true },
  { title: "Response length", names: ["response_length/mean"] },
  { title: "Entropy", names: ["actor/entropy", "actor/entropy_loss"] },
  { title: "Load of experts", names: ["actor/router/load_entropy", "train/router/load_entropy"] },
  { title: "Groups all alike", names: ["train/zero_variance_groups"] },
  { title: "Loss", names: ["train/loss"] },
  { title: "Throughput", names: ["perf/throughput"] }
];
const fits = (name, pattern) => pattern.endsWith("*") ? name.startsWith(pattern.slice(0, -1)) : name === pattern;

export function frontOf(names) {
  return FRONT.map(f => {
    const first = f.names.find(p => names.some(n => fits(n, p)));
    return first && { ...f, found: names.filter(n => fits(n, first)).slice(0, f.all ? 4 : 1) };
  }).filter(Boolean);
}

const SMOOTH = [1, 5, 10, 25, 50, 100, 200];
let shownSteps = 0; // of the page's runs: more steps want a longer mean
export const showing = steps => { shownSteps = steps; };
export const smoothing = () => +(localStorage.getItem("smooth") ?? SMOOTH.findLast(n => n <= Math.max(10, shownSteps / 40)));

export function smoothControl(change) {
  const at = h("output", { class: "num" });
  const show = () => { at.textContent = smoothing() === 1 ? "each step" : `mean of ${smoothing()} steps`; };
  const range = h("input", {
    type: "range",
    min: 0,
    max: SMOOTH.length - 1,
    value: Math.max(0, SMOOTH.indexOf(smoothing())),
    "aria-label": "Smoothing",
    oninput: e => { localStorage.setItem("smooth", SMOOTH[+e.target.value]);
      show();
      change(); }
  });
  show();
  return h("label", {}, "Smoothing", range, at);
}

/* A line of a metric; few points are shown as they are. */
export function line(name, color, s, x = s?.step) {
  if (!s) return { name, color, x: [], raw: [] };
  const raw = s.value.map(v => Number.isFinite(v) ? v : null);
  return { name, color, x, raw, smooth: raw.length > 2 * smoothing() ? smooth(raw, smoothing()) : raw };
}
const short = name => name.replace(/^val-core\//, "").replace(/^timing_s\//, "");

export const openStep = run => x => { location.hash = `#/${run.id}/samples/${Math.round(x)}`; };

/* ---- the overview ---- */

export async function overviewPage({ run, main }) {
  shownSteps = run.info.step;
  const names = run.info.names.map(n => n.name),
    front = frontOf(names),
    group = new Group({ open: openStep(run) });
  const cards = front.map(f => new Chart({ title: f.title, entry: run.name(f.found[0]), group, log: f.log }));
  const kpis = h("dl", { class: "kpis" }),
    events = h("ul", { class: "events" }),
    eventPanel = h("section", { class: "panel", "aria-label": "Events" },
      h("header", {}, h("h2", {}, "Events")), h("div", { class: "body" }, events));
  const heat = heatmap(run, group),
    phases = phaseChart(run, group),
    notes = notesPanel(() => run.info);
  const draw = async () => {
    for (const [i, f] of front.entries()) { // each as soon as it is drawn
      cards[i].set(f.found.map((n, k) => line(f.found.length > 1 ? short(n) : n, f.found.length > 1 ? k : i, run.series.get(
        n))), run.events);
      await breath();
    }
  };
  const tell = () => {
    kpis.replaceChildren(...front.slice(0, 8).map(f => kpi(f, run.series.get(f.found[0]))));
    drawEvents(events, run);
    eventPanel.hidden = run.events.length === 0;
  };
  const fresh = front.length ? null : h("p", { class: "panel pad" }, run.info.state === "running" ?
    "The run has no metrics yet: the first step is being made. They appear here by themselves." : "The run has no metrics.");
  await run.need(front.flatMap(f => f.found));
  main.replaceChildren(h("h1", { class: "sr" }, `${title(run.info)}: overview`), h("div", { class: "tools" }, smoothControl(draw),
      h("span", { class: "quiet small keys" }, "Drag to zoom, double-click to see all, click a step for its samples")), kpis,
    fresh ?? "", h("div", { class: "grid" }, cards.map(c => c.element)),
    h("div", { class: "grid two" }, heat.chart.element, phases.chart.element, eventPanel, notes.element));
  tell();
  await draw();
  heat.update();
  phases.update();
  return {
    destroy: () => group.destroy(),
    update: what => {
      notes.update();
      if (what !== "steps") return;
      if (frontOf(run.info.names.map(n => n.name)).length !== front.length) return document.dispatchEvent(new Event("theme"));
      tell();
      draw();
      heat.update();
      phases.update();
      return undefined;
    }
  };
}

function kpi(f, s) {
  const v = s?.value ?? [],
    last = v.at(-1),
    back = v.length > 20 ? v.slice(0, 10).reduce((a, b) => a + b, 0) / 10 : null;
  const late = v.length > 20 ? v.slice(-10).reduce((a, b) => a + b, 0) / 10 : last;
  return h("div", { class: "kpi" }, h("dt", { title: f.found[0] }, f.title), h("dd", {}, num(late, 3), back !== null ? h(
    "small", {}, ` from ${num(back, 3)}`) : ""));
}

const KINDS = { warning: "warn", reward_error: "bad" };

function drawEvents(list, run) {
  list.replaceChildren(...run.events.slice(-200).reverse().map(e => h("li", {}, h("a", { href: `#/${run.id}/samples/${e.step}`,
      class: "num" }, `step ${e.step}`),
    h("span", { class: `${KINDS[e.kind] ?? "quiet"} small` }, e.kind.replace("_", " ")), h("span", {}, e.message, " ", h(
      "span", { class: "quiet small" }, clock(e.wall))))));
}

/* How many samples have which score, by step. */
export function heatmap(run, group, { name = "score", title: text = "Rewards of a step's samples", validation = 0 } = {}) {
  let data = { step: [], range: [], counts: [], bins: 0 },
    lo = 0,
    hi = 1,
    most = 1,
    cells = null;
  const chart = new Chart({
    title: text,
    group,
    tall: true,
    entry: { name: text,
      text: `How many samples have which ${name === "score" ? "score" : "length"}, by step: the darker, the more. The line is the mean.` },
    underlay: (canvas, area, g) => {
      if (!data.step.length) return;
      const [x0, x1] = g.xAxisRange(), shade = css("--seq"), half = Math.max(.5, (data.step.at(-1) - data.step[0]) / Math.max(
        1, data.step.length - 1) / 2);
      const columns = new Map(); // left edge -> [right edge, steps]: those that share a column of pixels are added up
      data.step.forEach((s, i) => {
        if (s + half < x0 || s - half > x1) return;
        const left = Math.max(area.x, Math.round(g.toDomXCoord(s - half))),
          right = Math.min(area.x + area.w, Math.max(left + 1, Math.round(g.toDomXCoord(s + half))));
        if (columns.has(left)) columns.get(left)[1].push(i);
        else columns.set(left, [right, [i]]);
      });
      for (const [left, [right, steps]] of columns)
        for (let b = 0; b < cells; b++) {
          let n = 0;
          for (const i of steps) n += data.binned[i * cells + b];
          n /= steps.length;
          if (!n) continue;
          canvas.fillStyle = `rgb(${shade} / ${(.1 + .9 * Math.sqrt(n / most)).toFixed(3)})`;
          const top = g.toDomYCoord(lo + (hi - lo) * (b + 1) / cells),
            bottom = g.toDomYCoord(lo + (hi - lo) * b / cells);
          canvas.fillRect(left, Math.round(top), right - left, Math.max(1, Math.round(bottom) - Math.round(top)));
        }
    }
  });
  const bin = () => {
    cells = 24;
    lo = Infinity;
    hi = -Infinity;
    for (let i = 0; i < data.step.length; i++) { lo = Math.min(lo, data.range[2 * i]);
      hi = Math.max(hi, data.range[2 * i + 1]); }
    if (!(hi > lo)) { lo -= .5;
      hi += .5; }
    data.binned = new Float64Array(data.step.length * cells);
    most = 1;
    const mean = [];
    for (let i = 0; i < data.step.length; i++) {
      const a = data.range[2 * i],
        width = data.range[2 * i + 1] / data.bins - a / data.bins; // no overflow
      let n = 0,
        sum = 0;
      for (let b = 0; b < data.bins; b++) {
        const count = data.counts[i * data.bins + b];
        if (!count) continue;
        const v = width > 0 ? (b === data.bins - 1 ? a + width * data.bins : b === 0 ? a : a + (b + .5) * width) : a;
        data.binned[i * cells + Math.max(0, Math.min(cells - 1, Math.floor((v / 2 - lo / 2) / (hi / 2 - lo / 2) * cells)))] +=
          count;
        n += count;
        sum += count * (v / 2);
      }
      mean.push(n ? sum / n * 2 : null);
    }
    for (const v of data.binned) most = Math.max(most, v);
    const pad = (hi - lo) * .02;
    chart.range = [lo - pad, hi + pad];
    chart.set([{ name: "mean", color: 0, x: data.step, raw: mean }], run.events);
  };
  return {
    chart,
    update: async () => {
      const since = data.step.at(-1) ?? -1;
      const d = await json("histograms", { run: run.id, name, validation, since }).catch(() => null);
      chart.element.hidden = since < 0 && !(d?.bins > 0);
      if (!d || d.bins === 0) return;
      const join = (a, b) => Array.from(a).concat(Array.from(b));
      if (since >= 0 && d.bins !== data.bins) return;
      data = { step: data.step.concat(i64(d.step)), range: join(data.range, f64(d.range)), counts: join(data.counts, i32(d
          .counts)), bins: d.bins };
      bin();
    }
  };
}

/* The phases of each step on each other. */
export function phaseChart(run, group, tall = true) {
  const chart = new Chart({ title: "Seconds of a step by phase", group, stacked: true, tall, entry: run.name("timing_s/step"),
    format: v => num(v, 3) });
  return {
    chart,
    update: async () => {
      const names = run.info.names.map(n => n.name).filter(isPhase);
      const all = await run.need(names);
      const total = s => s ? s.value.reduce((a, b) => a + (b || 0), 0) : 0;
      const parts = names.map((n, i) => [n, all[i]]).filter(([, s]) => total(s) > 0).sort((a, b) => total(b[1]) - total(a[1]))
        .slice(0, COLORS_OF_PHASES);
      const steps = [...new Set(parts.flatMap(([, s]) => s.step))].sort((a, b) => a - b);
      chart.set(parts.map(([n, s], i) => {
        const at = new Map(s.step.map((x, k) => [x, s.value[k]]));
        return { name: short(n), color: i, x: steps, raw: steps.map(x => at.get(x) ?? 0) };
      }), run.events);
    }
  };
}
const COLORS_OF_PHASES = 8;

/* ---- any metric ---- */

const SHOWN = 60; // plots at once

export async function metricsPage({ run, query, go, main }) {
  shownSteps = run.info.step;
  const group = new Group({ open: openStep(run) }),
    grid = h("div", { class: "grid" }),
    count = h("span", { class: "quiet small", role: "status" });
  let cards = [],
    turn = 0;
  const search = h("input", {
    type: "search",
    placeholder: "kl, grad_norm, timing_s …",
    "aria-label": "Metrics whose names have these words",
    value: query.get("q") ?? "",
    size: 26,
    oninput: () => { go(`#/${run.id}/metrics${search.value ? `?q=${encodeURIComponent(search.value)}` : ""}`, true);
      show(); }
  });
  const draw = async () => {
    const mine = cards;
    for (const [c, n, i] of mine) {
      if (mine !== cards) return;
      c.set([line(n, i, run.series.get(n))], run.events);
      await breath();
    }
  };
  const show = async () => {
    const mine = ++turn,
      found = matching(run.info.names.map(n => n.name), search.value),
      names = found.slice(0, SHOWN);
    count.textContent = found.length > SHOWN ? `${SHOWN} of ${found.length} metrics: more words find fewer` :
      `${found.length} metrics`;
    await run.need(names);
    if (mine !== turn) return;
    group.destroy();
    let part = "";
    cards = names.map((n, i) => [new Chart({ title: n, entry: run.name(n), group, log: /grad_norm/.test(n) }), n, i]);
    grid.replaceChildren(...cards.flatMap(([c, n]) => {
      const head = n.split("/")[0],
        first = head !== part;
      part = head;
      return first ? [h("h2", { style: { gridColumn: "1 / -1", marginTop: "6px" } }, head), c.element] : [c.element];
    }));
    draw();
  };
  main.replaceChildren(h("h1", { class: "sr" }, "Metrics"), h("div", { class: "tools" }, search, smoothControl(draw), h("a", { href:
      `#/${run.id}/scatter` }, "two metrics against each other"), count), grid);
  await show();
  if (matchMedia("(pointer: fine)").matches) search.focus({ preventScroll: true });
  return { destroy: () => group.destroy(), update: what => what === "steps" && draw() };
}
