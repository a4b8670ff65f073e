/* data.js - what the page knows of a run, and keeps up to date while it goes on. */

const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;
export const f32 = text => text === null ? null : new Float32Array(bytes(text));
export const f64 = text => new Float64Array(bytes(text));
export const i32 = text => text === null ? null : new Int32Array(bytes(text));
export const i64 = text => Array.from(new BigInt64Array(bytes(text)), Number);

/* params: an object; an array gives a name several times. Errors have the server's message. */
export async function get(path, params = {}, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params))
    for (const v of [value].flat()) query.append(name, v);
  let answer;
  try {
    answer = await fetch(`/api/${path}?${query}`, { signal });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw Object.assign(new Error("verlc view no longer answers; start it again"), { gone: true });
  }
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? answer.statusText);
  return answer;
}
export const json = async (...args) => (await get(...args)).json();

const MAX_NAMES = 50; // of one request

/* One run: info is /api/run, series the metrics that were asked for. Whoever watches is called after a change. */
export class Run {
  constructor(id) {
    this.id = id;
    this.watchers = new Set();
    this.clear();
  }

  clear() {
    this.info = null;
    this.series = new Map(); // name -> {step, value}
    this.events = [];
    this.partial = new Map(); // name -> promise of its first values
  }

  async open() {
    this.info ??= await json("run", { run: this.id });
    return this;
  }

  /* The values of these metrics; those that are there are not asked for again. */
  async need(names) {
    const missing = names.filter(name => !this.partial.has(name));
    for (let i = 0; i < missing.length; i += MAX_NAMES) {
      const part = missing.slice(i, i + MAX_NAMES);
      const answer = this.load(part, -1);
      for (const name of part) this.partial.set(name, answer);
    }
    await Promise.all(names.map(name => this.partial.get(name)));
    return names.map(name => this.series.get(name));
  }

  async load(names, since) {
    const { series } = await json("series", { run: this.id, name: names, since });
    for (const [name, s] of Object.entries(series)) {
      const old = since < 0 ? undefined : this.series.get(name);
      const step = i64(s.step),
        value = Array.from(f64(s.value));
      if (!old) this.series.set(name, { step, value });
      else if (step.length) this.series.set(name, { step: old.step.concat(step), value: old.value.concat(value) });
    }
  }

  watch(f) {
    this.watchers.add(f);
    return () => this.watchers.delete(f);
  }

  /* Asks what is new. What changed: "run" (all of it is another), "steps", "state". */
  async refresh() {
    const before = this.info;
    const state = await json("state", { run: this.id, event: this.events.at(-1)?.id ?? 0 });
    if (before && state.epoch !== before.epoch) {
      this.clear();
      await this.open();
      this.tell("run");
      return;
    }
    const { events, ...head } = state, grown = head.step > (before?.step ?? -1), first = before?.step < 0;
    this.info = { ...before, ...head };
    this.events.push(...events);
    if (grown) {
      if (first || head.step - before.step > 0 && !this.named) this.info.names = (await json("run", { run: this.id })).names;
      this.named = this.info.names.length > 0 && head.step >
      20; // by then every metric has been seen; a later one at the next visit
      const names = [...this.series.keys()];
      for (let i = 0; i < names.length; i += MAX_NAMES) await this.load(names.slice(i, i + MAX_NAMES), before.step);
    }
    this.tell(grown || events.length ? "steps" : "state");
  }

  tell(what) { for (const f of [...this.watchers]) f(what); }

  name(metric) { return this.info.names.find(n => n.name === metric); }
}

const runs = new Map();
export function run(id) {
  if (!runs.has(id)) runs.set(id, new Run(id));
  return runs.get(id);
}

export const title = info => info.project || info.experiment ? [info.project, info.experiment].filter(Boolean).join(" / ") : info
  .dir.split("/").at(-1);

/* A list of names that match words, each somewhere in it. */
export function matching(names, words) {
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  return names.filter(name => parts.every(p => name.toLowerCase().includes(p)));
}

/* Mean of the last n values; gaps stay gaps. */
export function smooth(values, n) {
  if (n <= 1) return values;
  const out = new Array(values.length);
  let sum = 0,
    count = 0;
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) { sum += values[i];
      count++; }
    const old = values[i - n];
    if (i >= n && Number.isFinite(old)) { sum -= old;
      count--; }
    out[i] = count > 0 && Number.isFinite(values[i]) ? sum / count : null;
  }
  return out;
}