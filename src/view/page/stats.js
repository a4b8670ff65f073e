/* stats.js - arithmetic of the page without the page: tables, ranges, groups of runs. Nothing here touches the document, so
 * tests/e2e/view_page_test.py runs it without a browser. */

/* Rows by a key; what has no value comes last in both directions. value(row, key): a number, a text, or null. */
export function sorted(rows, value, key, down) {
  const none = v => v === null || v === undefined || Number.isNaN(v);
  return rows.map((row, i) => [row, value(row, key), i]).sort(([, a, i], [, b, k]) => {
    if (none(a) || none(b)) return none(a) - none(b) || i - k;
    const order = typeof a === "string" ? a.localeCompare(b) : a - b;
    return (down ? -order : order) || i - k;
  }).map(([row]) => row);
}

/* Whether each word is in the text, or with # in front is one of the tags. */
export function fitsWords(words, text, tags = []) {
  return words.toLowerCase().split(/\s+/).filter(Boolean).every(w => w.startsWith("#") ?
    tags.some(t => `#${t.toLowerCase().replace(/\s+/g, "-")}` === w) : text.toLowerCase().includes(w));
}
export const tagWord = tag => `#${tag.replace(/\s+/g, "-")}`;

/* ---- a range of scores: {min, max}, null where open ---- */
export const bound = text => text === null || text === undefined || text.trim() === "" || !Number.isFinite(+text) ? null : +text;
export const isOpen = range => range.min === null && range.max === null;
/* A sample without a score is in no range but the open one. */
export const inRange = (range, score) => isOpen(range) || score !== null && (range.min === null || score >= range.min) &&
  (range.max === null || score <= range.max);

/* Scores in at most n bins: each has the smallest and the largest score in it, so that a closed range of both is the bin. */
export function binned(scores, n) {
  const values = [...new Set(scores)].sort((a, b) => a - b),
    lo = values[0],
    hi = values.at(-1);
  if (!values.length) return [];
  const place = values.length <= n ? v => values.indexOf(v) : v => Math.min(n - 1, Math.floor((v / 2 - lo / 2) / (hi / 2 -
    lo / 2) * n)); // halves do not overflow
  const bins = Array.from({ length: Math.min(n, values.length) }, (_, i) => ({
    lo: values.length <= n ? values[i] : lo + (hi / n - lo / n) * i,
    hi: values.length <= n ? values[i] : lo + (hi / n - lo / n) * (i + 1),
    min: Infinity,
    max: -Infinity,
    n: 0
  }));
  for (const v of scores) {
    const b = bins[place(v)];
    b.n++;
    b.min = Math.min(b.min, v);
    b.max = Math.max(b.max, v);
  }
  return bins;
}

/* ---- phases ---- */

/* Of each step: not all of them together, what is done once, or a part of a phase (agent_loop/..., which counts tokens too). */
export const isPhase = name => name.startsWith("timing_s/") && !/^(step|start|update_weights|.*\/.*)$/.test(name.slice(9));

/* ---- configurations ---- */

/* [[key, value as text], ...] of a tree. */
export function flat(value, prefix = "", out = []) {
  if (value && typeof value === "object" && !Array.isArray(value))
    for (const [k, v] of Object.entries(value)) flat(v, prefix ? `${prefix}.${k}` : k, out);
  else out.push([prefix, typeof value === "string" ? value : JSON.stringify(value)]);
  return out;
}

/* The keys of maps (key -> text) that are not the same in all of them, sorted. */
export const differing = maps => [...new Set(maps.flatMap(m => [...m.keys()]))].sort()
  .filter(k => new Set(maps.map(m => m.get(k))).size > 1);

/* Whether a key, or a part of the tree that it is in, is one of those that were set. */
export const isSet = (set, key) => set.some(s => s === key || key.startsWith(`${s}.`));

/* Keys that tell two runs of one setting apart: seeds, and where a run writes. */
const OWN = /(^|[._])seed($|_)|^trainer\.(default_local_dir|experiment_name|project_name|rollout_data_dir|validation_data_dir)$|^trainer\.resume/;

/* Runs that differ in their seeds alone are one group. maps: a configuration (key -> text) each; [[index, ...], ...]. */
export function seedGroups(maps) {
  const groups = new Map();
  maps.forEach((m, i) => {
    const setting = JSON.stringify([...m].filter(([k]) => !OWN.test(k)).sort(([a], [b]) => a < b ? -1 : 1));
    if (groups.has(setting)) groups.get(setting).push(i);
    else groups.set(setting, [i]);
  });
  return [...groups.values()];
}

/* ---- series: {step, value} ---- */

/* Mean and standard deviation over runs, of the steps that all of them have: {step, mean, lo, hi}. */
export function bandOf(series) {
  const maps = series.map(s => new Map(s.step.map((x, i) => [x, s.value[i]])));
  const step = (series[0]?.step ?? []).filter(x => maps.every(m => Number.isFinite(m.get(x))));
  const out = { step, mean: [], lo: [], hi: [] };
  for (const x of step) {
    const v = maps.map(m => m.get(x)),
      mean = v.reduce((a, b) => a + b, 0) / v.length,
      std = v.length > 1 ? Math.sqrt(v.reduce((a, b) => a + (b - mean) ** 2, 0) / (v.length - 1)) : 0;
    out.mean.push(mean);
    out.lo.push(mean - std);
    out.hi.push(mean + std);
  }
  return out;
}

/* Two metrics at the same steps: {step, x, y}. */
export function paired(a, b) {
  const at = new Map(b.step.map((s, i) => [s, b.value[i]])),
    out = { step: [], x: [], y: [] };
  a.step.forEach((s, i) => {
    if (!Number.isFinite(a.value[i]) || !Number.isFinite(at.get(s))) return;
    out.step.push(s);
    out.x.push(a.value[i]);
    out.y.push(at.get(s));
  });
  return out;
}

/* Pearson's correlation; null: one of them does not vary. */
export function correlation(x, y) {
  const n = x.length,
    mean = v => v.reduce((a, b) => a + b, 0) / n,
    mx = mean(x),
    my = mean(y);
  let xx = 0,
    yy = 0,
    xy = 0;
  for (let i = 0; i < n; i++) {
    xx += (x[i] - mx) ** 2;
    yy += (y[i] - my) ** 2;
    xy += (x[i] - mx) * (y[i] - my);
  }
  return n > 1 && xx > 0 && yy > 0 ? xy / Math.sqrt(xx * yy) : null;
}

/* ---- export ---- */

/* A cell of a CSV file (RFC 4180); a text that a spreadsheet would take for a formula is quoted with a mark in front. */
function cell(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "";
  const text = typeof v === "string" && /^[=+\-@\t\r]/.test(v) ? `'${v}` : String(v);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/* Lines of a plot ({name, x, raw, smooth, band}) as a table: one row an x, ascending. */
export function csvOf(lines, x = "step") {
  const columns = lines.flatMap(l => [
    [l.name, l.x, l.raw], ...(l.smooth && l.smooth !== l.raw ? [
      [`${l.name} (mean)`, l.x, l.smooth]
    ] : []), ...(l.band ? [
      [`${l.name} (low)`, l.x, l.band.lo],
      [`${l.name} (high)`, l.x, l.band.hi]
    ] : [])
  ]);
  const maps = columns.map(([, at, v]) => new Map(at.map((k, i) => [k, v[i]])));
  const rows = [...new Set(lines.flatMap(l => l.x))].filter(k => k !== null).sort((a, b) => a - b);
  return [[x, ...columns.map(([name]) => name)], ...rows.map(k => [k, ...maps.map(m => m.get(k))])]
    .map(row => `${row.map(cell).join(",")}\r\n`).join("");
}

/* A file's name from a title. */
export const fileName = (text, kind) => `${text.replace(/[^\w.@-]+/g, "_").replace(/^[_.]+|[_.]+$/g, "").slice(0, 80) || "plot"}.${kind}`;

/* ---- tokens ---- */

/* The text of each token: [{text, special}]. ends: where its text ends; special: names of those without text, by id. A part of
 * a character has no text of its own. */
export function tokenTexts(ids, ends, text, special) {
  const out = [];
  let from = 0;
  for (let i = 0; i < ids.length; i++) {
    const own = ends ? text.slice(from, ends[i]) : `${ids[i]} `;
    if (ends) from = ends[i];
    const name = own === "" ? special?.[ids[i]] : undefined;
    if (name !== undefined) out.push({ text: name, special: true });
    else if (own === "" && !special && i === ids.length - 1) out.push({ text: `⟨${ids[i]}⟩`, special: true });
    else out.push({ text: own, special: false });
  }
  return out;
}

/* ---- turns of a conversation with tools ---- */

const objects = list => Array.isArray(list) ? list.filter(c => c !== null && typeof c === "object") : [];
const calls = episode => objects(episode?.calls);

/* A response of n tokens as turns {who, from, to, calls, results}: the calls that a turn of the policy made, and what came of them
 * in the environment's after it. left: results that are in no turn. segments: [[tokens, who], ...], undefined: one of the policy. */
export function turnsOf(n, segments, episode) {
  const all = calls(episode).map((c, i) => ({ ...c, number: i })),
    done = new Set();
  let at = 0,
    open = [];
  const turns = (segments ?? [[n, "policy"]]).map(([k, who], i) => {
    const own = who === "policy" ? all.filter(c => c.segment === i) : [],
      results = who === "policy" ? [] : open;
    for (const c of results) done.add(c.number);
    open = who === "policy" ? own : [];
    at += k;
    return { who, from: at - k, to: at, calls: own, results };
  });
  return { turns, left: all.filter(c => !done.has(c.number)) };
}

/* Of samples: {tool, failed, least, most}, "" or null where open. A sample without tools fits only if all are. */
export const anyTurns = f => !f.tool && !f.failed && f.least === null && f.most === null;
export const fitsTurns = (f, s) => anyTurns(f) || s.turns !== undefined && (!f.tool || s.tools.includes(f.tool)) && (!f.failed || s
  .failed > 0) && (f.least === null || s.turns >= f.least) && (f.most === null || s.turns <= f.most);
export const toolsOf = samples => [...new Set(samples.flatMap(s => s.tools ?? []))].sort();
