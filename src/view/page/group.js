/* group.js - one prompt of a step: its samples side by side, each token coloured by what was measured of it. */

import { f32, i32, json } from "./data.js";
import { choice, h, hideTip, num, problem, showTip } from "./elements.js";
import { groupsOf, scorePill } from "./samples.js";
import { tokenTexts, turnsOf } from "./stats.js";

/* of: a token's value; shade: [class, share of the range 0..1]; most: the range's end from all values; legend: its ends. */
const COLOURS = {
  none: ["Plain"],
  logp: ["Log-prob", { of: (t, i) => t.logp?.[i], kind: "s", flip: true, most: () => 6, legend: m => ["0: sure",
      `≤ −${m}: surprising`
    ] }],
  entropy: ["Entropy", { of: (t, i) => t.entropy?.[i], kind: "s", most: v => Math.max(.5, v), legend: m => ["0: sure",
      `${num(m, 2)} nats: open`
    ] }],
  advantage: ["Advantage", { of: (t, i) => t.advantages ? t.advantages[i] : t.advantage, kind: "pn", most: v => Math.max(1e-6, v),
    legend: m => [`−${num(m, 2)}: less likely`, `${num(m, 2)}: more likely`] }],
  kl: ["KL to the reference", { of: (t, i) => t.logp && t.ref_logp ? t.logp[i] - t.ref_logp[i] : undefined, kind: "pn", most: v =>
      Math.min(4, Math.max(.05, v)), legend: m => [`−${num(m, 2)}: rarer than in the reference`, `${num(m, 2)}: likelier`] }]
};
const LEVELS = 8;

function shade(spec, v, most) {
  if (!Number.isFinite(v)) return "";
  const a = Math.min(1, (spec.flip ? Math.max(0, -v) : spec.kind === "s" ? Math.max(0, v) : Math.abs(v)) / most),
    level = Math.round(a * LEVELS);
  return level === 0 ? "" : `${spec.kind === "s" ? "s" : v > 0 ? "p" : "n"}${level}`;
}

/* A text as one span a token, special tokens by name. Without boundaries (an older run.db) the ids stand for the tokens. */
function drawTokens(c, t, text, special) {
  c.spans = tokenTexts(t.ids, t.ends, text, special).map((token, i) => {
    const e = document.createElement("span");
    e.textContent = token.text;
    if (token.special) e.className = "sp";
    e.dataset.i = i;
    return e;
  });
  const parts = c.s.segments || c.s.episode ? drawTurns(c) : c.spans;
  c.box.replaceChildren(...(parts.length ? parts : [h("span", { class: "quiet" }, "no tokens")]));
}

/* ---- turns: who wrote which tokens, calls of tools and what came of them ---- */

const seconds = v => Number.isFinite(v) ? ` ${num(v, 3)} s` : "";
const callLine = c => h("div", { class: "call" }, h("b", {}, String(c.name ?? "")), " ", String(c.arguments ?? ""));
const resultLine = (c, text) => h("div", { class: "call" }, h("b", {}, String(c.name ?? "")), " ", h("em", { class: c.status === "ok" ?
      "good" : "bad" }, String(c.status ?? "")), seconds(c.seconds), Number.isFinite(c.reward) ?
  `, reward ${num(c.reward, 3)}` : "", c.truncated === true ? h("em", { class: "warn" }, ", cut") : null, text ?
  `, not in the response: ${String(c.result ?? "")}` : "");

function drawTurns(c) {
  const { turns, left } = turnsOf(c.spans.length, c.s.segments, c.s.episode);
  const parts = turns.map((t, i) => h("div", { class: `turn ${t.who}` }, h("div", { class: "who" },
      `${i + 1}. ${t.who}, ${num(t.to - t.from)} tokens, ${t.who === "policy" ? "trained" : "mask 0"}`), t.results.map(r =>
      resultLine(r, false)), c.spans.slice(t.from, t.to), t.calls.map(callLine)));
  return left.length ? [...parts, h("div", { class: "turn" }, left.map(r => resultLine(r, true)))] : parts;
}

/* "5 turns, ended by stop; 2 calls, 1 failed" */
function episodeText(s) {
  const e = s.episode,
    failed = s.failed - (e.malformed > 0 ? e.malformed : 0),
    more = ["malformed", "dropped"].filter(k => e[k] > 0).map(k => `, ${num(e[k])} ${k}`).join("") +
      (e.outputs > 1 ? `; sample ${num(e.output + 1)} of ${num(e.outputs)} of its episode` : "");
  return `${num(s.turns)} turns, ended by ${String(e.end ?? "?")}${typeof e.reason === "string" ? ` (${e.reason})` : ""}; ` +
    `${num(s.calls)} calls${failed > 0 ? `, ${num(failed)} failed` : ""}${more}`;
}

function colour(c, t, spec, most) {
  const mine = new Uint8Array(c.spans.length).fill(1);
  let at = 0;
  for (const [n, who] of c.s.segments ?? []) mine.fill(who === "policy" ? 1 : 0, at, at += n);
  c.spans.forEach((e, i) => {
    const sp = e.classList.contains("sp"),
      on = e.classList.contains("at");
    e.className = `${spec && mine[i] ? shade(spec, spec.of(t, i), most) : ""}${sp ? " sp" : ""}${on ? " at" : ""}`.trim();
  });
}

const FACTS = [
  ["log-prob", (t, i) => t.logp?.[i]],
  ["probability", (t, i) => t.logp ? Math.exp(t.logp[i]) : undefined],
  ["entropy", (t, i) => t.entropy?.[i]],
  ["advantage", COLOURS.advantage[1].of],
  ["reference log-prob", (t, i) => t.ref_logp?.[i]],
  ["KL", COLOURS.kl[1].of]
];

function facts(t, i, text) {
  const known = t.logp === undefined ? [] : FACTS.map(([name, of]) => [name, of(t, i)]).filter(([, v]) => v !== undefined && v !== null && !Number.isNaN(v));
  return `${JSON.stringify(text)}  token ${i + 1} of ${t.ids.length}, id ${t.ids[i]}\n${known.map(([name, v]) => `${name} ${num(v)}`).join("\n")}`;
}

export async function groupPage({ run, path, query, go, main }) {
  const step = +path[0] || 0,
    uid = +path[1] || 0,
    validation = query.get("v") === "1" ? 1 : 0;
  const [{ samples }, { samples: all }] = await Promise.all([json("group", { run: run.id, step, uid, validation }), json(
    "samples", { run: run.id, step, validation })]);
  const list = JSON.parse(sessionStorage.getItem("shown") ?? "{}"),
    shown = list.at === `${run.id}/${step}/${validation}` && list.uids.includes(uid) ? list : null; // the rows that led here
  const back = shown?.address ?? `#/${run.id}/samples/${step}${validation ? "?v=1" : ""}`;
  if (!samples.length) throw new Error(`step ${step} has no samples of prompt ${uid}`);
  const uids = shown?.uids ?? groupsOf(all).map(g => g.uid),
    at = uids.indexOf(uid),
    head = samples[0],
    group = groupsOf(samples)[0];
  const to = k => `#/${run.id}/samples/${step}/${uids[k]}${validation ? "?v=1" : ""}`;
  let what = localStorage.getItem("token") in COLOURS ? localStorage.getItem("token") : "logp",
    most = 1;

  /* ---- columns ---- */
  const live = h("div", { class: "sr", "aria-live": "polite" }),
    legend = h("div", { class: "legend", "aria-label": "Legend" });
  const columns = samples.map((s, k) => {
    const box = h("pre", { class: "tokens", tabindex: 0,
  role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": `Response ${s.sample}: arrow keys go through its tokens` },
      s.response);
    const extra = s.extra && Object.keys(s.extra).length ? h("details", { class: "small" }, h("summary", {},
      "What the scorer said"), h("pre", { class: "config" }, JSON.stringify(s.extra, null, 1))) : null;
    const e = h(
    "article", { class: "panel col", "aria-label": `Sample ${s.sample}, score ${s.score === null ? s.status : num(s.score, 3)}`,
        id: `s${s.sample}` },
      h("header", {}, h("h3", {}, `#${s.sample}`), scorePill(s), h("span", { class: "num small quiet" },
          `advantage ${num(s.advantage, 3)}`), h("span", { class: "num small quiet" }, `${num(s.tokens)} tokens`), s
        .finish === "length" ? h("span", { class: "small warn" }, "cut at the limit") : null,
        s.versions ? h("span", { class: "small quiet", title: "versions of the weights that drew its tokens" },
          `weights ${s.versions.map(([n, v]) => `${v} (${n})`).join(", ")}`) : null,
        s.segments ? h("span", { class: "small quiet", title: "who wrote its tokens" },
          s.segments.map(([n, who]) => `${who} (${n})`).join(", ")) : null,
        s.episode ? h("span", { class: `small ${s.failed ? "warn" : "quiet"}` }, episodeText(s)) : null,
        s.message ? h("span", { class: "small bad" }, s.message) : null), box, extra ? h("div", { class: "body" }, extra) :
      null);
    return { s, e, box, k, spans: [], cursor: -1 };
  });
  const recolour = () => {
    const spec = COLOURS[what][1],
      ready = columns.filter(c => c.s.tokens_of);
    let top = 0;
    if (spec && ready.length) {
      for (const { s } of ready)
        for (let i = 0; i < s.tokens_of.ids.length; i++) { const v = Math.abs(spec.of(s.tokens_of, i)); if (v > top) top = v; }
      most = spec.most(top);
    }
    for (const c of ready) colour(c, c.s.tokens_of, spec, most);
    const known = spec && ready.some(({ s }) => { const v = spec.of(s.tokens_of, 0); return v !== undefined && v !== null; });
    const [from, until] = spec ? spec.legend(most) : [];
    const classes = !spec ? [] : spec.kind === "s" ? ["", ...Array.from({ length: LEVELS }, (_, i) => `s${i + 1}`)] : [...Array
      .from({ length: LEVELS }, (_, i) => `n${LEVELS - i}`), "", ...Array.from({ length: LEVELS }, (_, i) => `p${i + 1}`)
    ];
    legend.replaceChildren(...(!spec ? [] : known ? [h("span", {}, from), h("span", { class: "ramp" }, classes.map(c => h(
      "i", { class: c }))), h("span", {}, until)] :
      ready.length ? [h("span", { class: "quiet" }, what === "kl" || what === "entropy" ? "not recorded in this run" :
        "not recorded")] : []));
  };
  const load = async c => {
    if (c.asked) return;
    c.asked = true;
    try {
      const [t] = (await json("tokens", { run: run.id, id: c.s.id })).samples;
      if (!t) return;
      c.s.tokens_of = { ids: i32(t.ids), ends: i32(t.ends), logp: f32(t.logp), entropy: f32(t.entropy), ref_logp: f32(t
          .ref_logp), advantages: f32(t.advantages), advantage: t.advantage };
      drawTokens(c, c.s.tokens_of, c.s.response, run.info.special);
      if (!c.s.tokens_of.ends && c.s.response) c.box.before(h("pre", { class: "prompt pad" }, c.s.response), h(
      "p", { class: "small quiet pad" }, "This run.db does not say where a token ends in the text. Below are the ids."));
      recolour();
    } catch (e) { c.box.after(problem(e)); }
  };
  /* The prompt by its tokens, where run.db has them; its text until then. */
  const prompt = h("pre", { class: "tokens prompt", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true",
    "aria-label": "Prompt: arrow keys go through its tokens" }, head.prompt);
  const whole = { box: prompt, s: {}, spans: [], cursor: -1 };
  json("tokens", { run: run.id, id: head.id, prompt: 1 }).then(({ samples: [t] }) => {
    if (!t?.ends) return;
    whole.s.tokens_of = { ids: i32(t.ids), ends: i32(t.ends) };
    drawTokens(whole, whole.s.tokens_of, head.prompt, run.info.special);
  }, () => {}); // the text stays
  const sight = new IntersectionObserver(seen => { for (const x of seen)
      if (x.isIntersecting) load(columns.find(c => c.e === x.target)); }, { rootMargin: "0px 400px" });

  /* ---- a token's values: by pointer and by keys ---- */
  const point = (c, i, say) => {
    const e = c.spans[i];
    if (!e || !c.s.tokens_of) return;
    c.box.querySelector(".at")?.classList.remove("at");
    c.cursor = i;
    e.classList.add("at");
    const b = e.getClientRects()[0] ?? e.getBoundingClientRect(),
      text = facts(c.s.tokens_of, i, e.textContent);
    showTip(text, b.left, b.bottom - 12);
    if (say) live.textContent = text;
  };
  for (const c of [...columns, whole]) {
    c.box.addEventListener("mousemove", e => { if (e.target.dataset?.i !== undefined) { const t = e.target,
          b = t.getBoundingClientRect(); if (c.s.tokens_of) showTip(facts(c.s.tokens_of, +t.dataset.i, t.textContent), e
          .clientX, Math.max(e.clientY, Math.min(b.bottom, e.clientY + 20)) - 8); } else hideTip(); });
    c.box.addEventListener("mouseleave", hideTip);
    c.box.addEventListener("click", e => { if (e.target.dataset?.i !== undefined) point(c, +e.target.dataset.i); });
    c.box.addEventListener("blur", () => { hideTip();
      c.box.querySelector(".at")?.classList.remove("at"); });
    c.box.addEventListener("keydown", e => {
      const n = c.spans.length - 1,
        next = { ArrowRight: c.cursor + 1, ArrowLeft: c.cursor - 1, ArrowDown: c.cursor + 10, ArrowUp: c.cursor - 10, Home: 0,
          End: n } [e.key];
      if (next === undefined || e.altKey || e.ctrlKey || e.metaKey) return;
      e.preventDefault();
      e.stopPropagation();
      const i = Math.max(0, Math.min(n, next)),
        span = c.spans[i];
      if (span) c.box.scrollTop = Math.max(0, Math.min(span.offsetTop - c.box.offsetTop - 20, c.box.scrollTop > span
        .offsetTop - c.box.offsetTop - 20 ? span.offsetTop - c.box.offsetTop - 20 : Math.max(c.box.scrollTop, span
          .offsetTop - c.box.offsetTop - c.box.clientHeight + 50)));
      requestAnimationFrame(() => point(c, i, true));
    });
  }
  const keys = e => {
    if (e.target.closest?.("input, select, .seg, .tokens") || e.altKey || e.ctrlKey || e.metaKey) return;
    if (e.key === "Escape" && !document.querySelector("dialog[open]")) location.hash = back;
    if (e.key !== "ArrowLeft" && e.key !== "ArrowRight") return;
    const k = at + (e.key === "ArrowLeft" ? -1 : 1);
    if (k >= 0 && k < uids.length) location.hash = to(k);
  };
  document.addEventListener("keydown", keys);

  const bound = on => main.classList.toggle("marks", on);
  const marks = h("input", { type: "checkbox", checked: localStorage.getItem("marks") !== "0", onchange: () => {
      localStorage.setItem("marks", marks.checked ? "1" : "0");
      bound(marks.checked); } });
  bound(marks.checked);
  main.replaceChildren(h("h1", { class: "sr" }, `Step ${step}, prompt ${uid}`),
    h("div", { class: "tools" }, h("a", { href: back }, `Step ${num(step)}${validation ? " (validation)" : ""}`), h(
      "span", { class: "quiet" }, "/"), h("b", {}, `prompt ${uid}`),
      h("a", { href: at > 0 ? to(at - 1) : null, class: "button", "aria-label": "Prompt before", "aria-disabled": at <= 0 ?
          "true" : null }, "‹"), h("a", { href: at < uids.length - 1 ? to(at + 1) : null,
      class: "button", "aria-label": "Next prompt", "aria-disabled": at >= uids.length - 1 ? "true" : null }, "›"),
      h("span", { class: "quiet num small" }, `${at + 1} of ${uids.length}`), h("span", { class: "quiet small keys" }, h(
      "kbd", {}, "←"), " ", h("kbd", {}, "→"), " prompts, ", h("kbd", {}, "Esc"), " back to the step")),
    h("dl", { class: "kpis" }, [
        ["Mean score", num(group.mean, 3)],
        ["Std of the scores", num(group.std, 3)],
        ["Samples", num(samples.length)],
        ["Mean tokens", num(Math.round(group.tokens))],
        ["Data source", head.data_source || "–"],
        ["Ground truth", head.ground_truth || "–"]
      ]
      .map(([k, v]) => h("div", { class: "kpi" }, h("dt", {}, k), h("dd", { title: v, class: v.length > 12 ? "long" : null },
        v)))),
    h("section", { class: "panel", "aria-label": "Prompt" }, h("header", {}, h("h2", {}, "Prompt"), h(
    "span", { class: "quiet small num" }, `${num(head.prompt_tokens)} tokens`), h("a", { class: "small", href:
      `#/${run.id}/prompt/${uid}${validation ? "?v=1" : ""}` }, "over all steps")), h("div", { class: "body" }, prompt)),
    h("div", { class: "tools" }, choice("Colour of the tokens", Object.entries(COLOURS).map(([k, [name]]) => [k, name]), what,
      v => { what = v;
        localStorage.setItem("token", v);
        recolour(); }), h("label", {}, marks, "Token boundaries"), legend),
    h("div", { class: "columns", role: "group", "aria-label": "Samples side by side" }, columns.map(c => c.e)), live);
  for (const c of columns) sight.observe(c.e);
  if (query.has("s")) document.getElementById(`s${query.get("s")}`)?.scrollIntoView({ block: "nearest", inline: "start" });
  return { keys: [
      ["← →", "the prompt before, the next one; in a text that has the focus: its tokens"],
      ["↑ ↓", "ten tokens on, also Home and End"],
      ["Esc", "back to the step"]
    ], destroy: () => { sight.disconnect();
      bound(false);
      document.removeEventListener("keydown", keys);
      hideTip(); } };
}