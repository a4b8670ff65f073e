/* app.js - addresses (#/RUN/PAGE/...), the top of the page, and the clock that asks what is new. */

import { json, run as runOf, title } from "./data.js";
import { $, h, hideTip, num, problem, span } from "./elements.js";
import { comparePage } from "./compare.js";
import { configPage } from "./config.js";
import { groupPage } from "./group.js";
import { watchKeys } from "./keys.js";
import { metricsPage, overviewPage } from "./metrics.js";
import { promptPage } from "./prompt.js";
import { rewardsPage, searchPage, timePage } from "./run_pages.js";
import { runsPage } from "./runs.js";
import { samplesPage } from "./samples.js";
import { scatterPage } from "./scatter.js";

const PAGES = {
  overview: ["Overview", overviewPage],
  metrics: ["Metrics", metricsPage],
  samples: ["Samples", samplesPage],
  search: ["Search", searchPage],
  rewards: ["Rewards", rewardsPage],
  time: ["Time & memory", timePage],
  config: ["Configuration", configPage]
};
/* Pages without a tab of their own: the name, what makes them, the tab that they belong to. */
const MORE = { scatter: ["Two metrics", scatterPage, "metrics"], prompt: ["Prompt", promptPage, "samples"] };

let page = null,
  run = null,
  runs = [],
  turn = 0,
  stopWatching = () => {};

/* #/a/b?c=d -> {path: ["a", "b"], query} */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/* Another address; replace: without a step in the browser's history. */
export function go(hash, replace) {
  if (replace) {
    history.replaceState(null, "", hash);
  } else location.hash = hash;
}

function notice(text) {
  $("notice").textContent = text ?? "";
  $("notice").hidden = !text;
}

function drawTop(current) {
  const brand = h("a", { class: "brand", href: "#/", "aria-label": "verlc: all runs" }, h("img", { src: "/favicon.svg", alt: "" }),
    "verlc");
  const keys = h("button", { class: "icon ask", type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: () => openKeys() },
    "?");
  const bar = h("div", { class: "bar" }, brand);
  $("top").replaceChildren(bar);
  if (!run?.info) {
    bar.append(h("span", { class: "crumb" }, current), h("span", { class: "state" }), keys);
    return;
  }
  const i = run.info;
  bar.append(h("span", { class: "crumb", title: i.dir }, h("b", {}, title(i))), h("span", { class: "state",
  id: "state", "aria-live": "off" }), keys);
  $("top").append(h("nav", { class: "tabs", "aria-label": "Pages of the run" }, Object.entries(PAGES).map(([key, [name]]) =>
    h("a", { href: `#/${run.id}/${key}`, "aria-current": key === current ? "page" : null }, name))), h(
  "div", { class: "progress" }, h("i", { id: "progress" })));
  drawState();
}

export const STATES = { running: "running", done: "done", failed: "failed", killed: "stopped", lost: "gone", unknown: "no word of its end", broken: "unreadable" };
export const badge = (state, why) => h("span", { class: `badge ${state}`, title: why ?? null }, STATES[state] ?? state);

function drawState() {
  const i = run?.info,
    at = $("state");
  if (!i || !at) return;
  const s = i.status,
    running = i.state === "running",
    parts = [];
  if (running && s) {
    if (s.phase) parts.push(s.total > 0 ? `${s.phase} ${s.done}/${s.total}` : `${s.phase} ${span(Math.max(0, i.now - s.since))}`);
    if (s.tok_s > 0) parts.push(`${num(Math.round(s.tok_s))} tok/s`);
    if (i.total > 0 && i.step > 0 && run.pace) parts.push(`ends in ${span((i.total - i.step) * run.pace)}`);
  } else if (i.exit && i.state !== "done") parts.push(i.exit);
  at.replaceChildren(h("span", { class: "grow quiet num", title: parts.join(" · ") }, parts.join(" · ")),
    h("span", { class: "num" }, "step ", h("b", {}, num(Math.max(0, i.step))), i.total > 0 ? ` of ${num(i.total)}` : ""),
    badge(i.state, i.state === "lost" ? "The process is no longer there and has not said that it ended: it was killed." : i.exit));
  $("progress").style.width = i.total > 0 ? `${100 * Math.min(1, Math.max(0, i.step) / i.total)}%` : "0";
}

/* Seconds of a step lately, for the time to the end. */
async function measurePace() {
  const [s] = await run.need(["timing_s/step"]);
  const last = s?.value.slice(-20) ?? [];
  run.pace = last.length ? last.reduce((a, b) => a + b, 0) / last.length : 0;
}

async function open() {
  const mine = ++turn,
    { path, query } = address();
  hideTip();
  try {
    if (path[0] === "compare" || !path.length) {
      runs = (await json("runs")).runs;
      if (!path.length && runs.length === 1 && !query.has("all")) return go(`#/${runs[0].id}/overview`, true), open();
    }
    if (mine !== turn) return undefined;
    const id = path[0] && path[0] !== "compare" ? path[0] : null,
      next = id ? await runOf(id).open() : null;
    if (mine !== turn) return undefined;
    page?.destroy?.();
    stopWatching();
    page = null;
    run = next;
    notice(null);
    const key = run ? (path[1] in PAGES || path[1] in MORE ? path[1] : "overview") : null,
      [name, pageOf, tab] = PAGES[key] ?? MORE[key] ?? [];
    const make = run ? (key === "samples" && path.length > 3 ? groupPage : pageOf) : path[0] === "compare" ? comparePage :
      runsPage;
    document.title = run ? `${title(run.info)} · ${name} · verlc` : "verlc";
    drawTop(run ? tab ?? key : path[0] === "compare" ? "Comparison of runs" : "Runs");
    const main = $("main"),
      shown = await make({ run, runs, path: path.slice(2), query, go, main });
    if (mine !== turn) return shown.destroy?.();
    page = shown;
    main.setAttribute("aria-busy", "false");
    if (run) {
      const stops = run.watch(what => { drawState(); if (what === "run") open();
        else page?.update?.(what); });
      stopWatching = stops;
      measurePace().then(drawState, () => {});
      if (!run.asked) { run.asked = true;
        clearTimeout(timer);
        timer = setTimeout(tick, 50); } // its events
    }
  } catch (e) {
    if (mine !== turn) return undefined;
    page = null;
    $("main").setAttribute("aria-busy", "false");
    drawTop(run ? path[1] ?? "overview" : "Runs");
    $("main").replaceChildren(problem(e), h("p", { class: "pad" }, h("a", { href: "#/" }, "All runs")));
  }
  return undefined;
}

/* Asks every second while the run goes on and somebody looks, every ten seconds otherwise. */
async function tick() {
  let wait = 10;
  if (!document.hidden) {
    try {
      if (run?.info) {
        await run.refresh();
        if (run.info.step !== run.measured) { run.measured = run.info.step;
          measurePace().catch(() => {}); }
        wait = run.info.state === "running" ? 1 : 5;
      } else if (page?.poll) {
        await page.poll();
        wait = 3;
      } else if (!page) await open();
      notice(null);
    } catch (e) {
      notice(e.message);
      wait = 2;
    }
  }
  clearTimeout(timer);
  timer = setTimeout(tick, 1000 * wait);
}
const openKeys = watchKeys(() => page);
let timer = setTimeout(tick, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer);
    tick(); } });
document.addEventListener("theme", () => open());
addEventListener("hashchange", open);
open();