/* elements.js - small pieces of the page. Text of a run reaches the page as text, never as markup. */

export function h(tag, props, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props ?? {})) {
    if (v === undefined || v === null || v === false) continue;
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "class") e.className = v;
    else if (k === "style") Object.assign(e.style, v);
    else e.setAttribute(k, v === true ? "" : v);
  }
  e.append(...children.flat(9).filter(c => c !== null && c !== undefined && c !== false));
  return e;
}
export const $ = id => document.getElementById(id);
const styles = new Map(); // of this colour scheme
document.addEventListener("theme", () => styles.clear());
export function css(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}
export const breath = () => new Promise(done => setTimeout(done)); // lets the browser paint and take input
export const COLORS = 8;
export const color = i => css(`--c${i % COLORS}`);

/* ---- numbers ---- */
export function num(v, digits = 4) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  if (v === 0) return "0";
  const a = Math.abs(v);
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  if (a >= 1e9 || a < 1e-4) return v.toExponential(2).replace("e+", "e").replace("-", "−");
  const text = Number.isInteger(v) || a >= 10 ** Math.min(digits, 3) ? Math.round(v).toLocaleString("en-US") : v.toPrecision(digits)
    .replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return text.replace("-", "−");
}
export function gib(v) {
  const unit = v >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  return `${(v / unit[0]).toFixed(unit[1] === "GiB" ? 2 : 1)} ${unit[1]}`;
}
export function span(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.round(s % 86400 / 3600)} h`;
}
export const clock = wall => wall ? new Date(wall * 1000).toLocaleString(undefined, { month: "short", day: "numeric",
  hour: "2-digit", minute: "2-digit" }) : "–";
export const ago = (wall, now) => wall ? `${span(Math.max(0, now - wall))} ago` : "–";

/* ---- tooltip: of pointer and focus alike ---- */
const tip = $("tip");
export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}
export function hideTip() { tip.hidden = true; }
addEventListener("scroll", hideTip, { capture: true, passive: true });
addEventListener("keydown", e => { if (e.key === "Escape") hideTip(); });
export function withTip(e, text) {
  const at = () => { const b = e.getBoundingClientRect();
    showTip(text, b.left, b.bottom - 12); };
  e.addEventListener("mouseenter", at);
  e.addEventListener("focus", at);
  e.addEventListener("click", at);
  e.addEventListener("mouseleave", hideTip);
  e.addEventListener("blur", hideTip);
  return e;
}
/* What a metric is: verlc explain's text. */
export function explained(entry) {
  if (!entry?.text) return null;
  const text = entry.reading ? `${entry.text}\n\n${entry.reading}` : entry.text;
  return withTip(h("button", { class: "help", type: "button", "aria-label": `What ${entry.name} is: ${text}` }, "?"), text);
}

/* ---- controls ---- */
export function choice(label, options, value, change) {
  const group = h("span", { class: "seg", role: "group", "aria-label": label });
  for (const [key, name] of options)
    group.append(h("button", {
      type: "button",
      "aria-pressed": String(key === value),
      onclick: e => {
        for (const b of group.children) b.setAttribute("aria-pressed", String(b === e.currentTarget));
        change(key);
      }
    }, name));
  return group;
}
export function panel(heading, ...body) {
  return h("section", { class: "panel", "aria-label": heading }, h("header", {}, h("h2", {}, heading)), h("div", { class: "body" },
    body));
}
export const problem = e => h("p", { class: "pad bad", role: "alert" }, e.message);

/* Rows of one height, of which only those in sight exist. fill(element, index) makes a row's content. */
export class VirtualList {
  constructor({ height, label, fill, open, kind }) {
    Object.assign(this, { height, fill, open, kind, rows: 0, at: -1, live: new Map(), free: [] });
    this.inner = h("div", { style: { position: "relative" } });
    this.element = h("div", { class: "vlist", tabindex: 0, role: "listbox", "aria-label": label, onkeydown: e => this.key(e) },
      this.inner);
    this.element.addEventListener("scroll", () => this.plan(), { passive: true });
    new ResizeObserver(() => this.plan()).observe(this.element);
  }

  set(rows, at = -1) {
    this.rows = rows;
    this.inner.style.height = `${rows * this.height}px`;
    this.element.style.height = `${Math.max(1, rows) * this.height}px`; // up to the style's limit
    for (const e of this.live.values()) this.retire(e);
    this.live.clear();
    this.at = at;
    if (at >= 0) this.reveal();
    this.draw();
  }

  retire(e) { e.remove();
    this.free.push(e); }
  plan() { this.frame ??= requestAnimationFrame(() => { this.frame = undefined;
      this.draw(); }); }

  draw() {
    const from = Math.max(0, Math.floor(this.element.scrollTop / this.height) - 6);
    const to = Math.min(this.rows, Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.height) + 6);
    for (const [i, e] of this.live)
      if (i < from || i >= to) { this.retire(e);
        this.live.delete(i); }
    for (let i = from; i < to; i++)
      if (!this.live.has(i)) this.live.set(i, this.row(i));
    this.from = from;
    this.to = to;
    this.seen?.(from, to);
  }

  row(i) {
    const e = this.free.pop() ?? h("div", { class: `item ${this.kind}`, role: "option", onclick: x => { this.at = +x.currentTarget
          .dataset.row;
        this.open(this.at); } });
    e.style.height = `${this.height}px`;
    e.style.transform = `translateY(${i * this.height}px)`;
    e.id = `row-${i}`;
    e.dataset.row = i;
    e.setAttribute("aria-selected", String(i === this.at));
    e.setAttribute("aria-setsize", this.rows);
    e.setAttribute("aria-posinset", i + 1);
    this.fill(e, i);
    this.inner.append(e);
    return e;
  }

  refill() { for (const [i, e] of this.live) this.fill(e, i); }

  reveal() {
    const top = this.at * this.height,
      box = this.element;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + this.height > box.scrollTop + box.clientHeight) box.scrollTop = top + this.height - box.clientHeight;
  }

  key(e) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const to = { ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0,
      End: this.rows - 1 } [e.key];
    if (e.key === "Enter" && this.at >= 0) this.open(this.at);
    if (to === undefined || e.altKey || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    this.at = Math.max(0, Math.min(this.rows - 1, to));
    this.reveal();
    this.draw();
    for (const [i, row] of this.live) row.setAttribute("aria-selected", String(i === this.at));
    this.element.setAttribute("aria-activedescendant", `row-${this.at}`);
  }
}