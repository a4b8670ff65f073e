/* chart.js - a card with a plot by dygraphs: one cursor and one zoom for all plots of a page, keys, events of the run. */

import { COLORS, color, css, explained, h, num } from "./elements.js";
import { exportMenu } from "./export.js";

/* Plots that share a cursor and a zoom. */
export class Group {
  constructor({ open } = {}) {
    this.charts = new Set();
    this.open = open; // of a click on a step
    this.window = null;
  }

  cursor(x, from) {
    for (const c of this.charts)
      if (c !== from) c.cursor(x);
  }

  zoom(window, from) {
    this.window = window;
    for (const c of this.charts)
      if (c !== from) c.zoom(window);
  }

  destroy() { for (const c of [...this.charts]) c.destroy(); }
}

const EVENT_COLORS = { warning: "--warn", reward_error: "--bad", resume: "--info", checkpoint: "--line2" };

Dygraph.PLUGINS = Dygraph.PLUGINS.filter(p => p !== Dygraph.Plugins
.Legend); // the card has its own, and that one needs inline styles

/* At most this many points of a line: more than a plot has pixels. */
const MAX_POINTS = 4000;

/* lines: [{name, color (index), x, raw, smooth, band}]: arrays of one length; raw is drawn thin where smooth differs; band:
 * {lo, hi} around raw, filled. */
function table(lines) {
  const columns = lines.flatMap(l => [
    [l, l.raw], ...(l.smooth && l.smooth !== l.raw ? [
      [l, l.smooth]
    ] : []), ...(l.band ? [
      [l, l.band.lo],
      [l, l.band.hi]
    ] : [])
  ]);
  const kind = (l, v) => v === l.band?.lo ? "\u200b\u200b" : v === l.band?.hi ? "\u200b\u200b\u200b" : v === l.raw && l.smooth && l
    .smooth !== l.raw ? "\u200b" : "";
  const labels = ["x", ...columns.map(([l, v]) => l.name + kind(l, v))]; // labels have to differ
  let rows;
  if (lines.every(l => l.x === lines[0]?.x)) rows = (lines[0]?.x ?? []).map((x, i) => [x, ...columns.map(([, v]) => v[i])]);
  else {
    const at = new Map();
    columns.forEach(([l, v], c) => l.x.forEach((x, i) => {
      if (!at.has(x)) at.set(x, [x, ...columns.map(() => null)]);
      at.get(x)[c + 1] = v[i];
    }));
    rows = [...at.values()].sort((a, b) => a[0] - b[0]);
  }
  if (rows.length > MAX_POINTS) {
    const every = Math.ceil(rows.length / MAX_POINTS);
    rows = rows.filter((_, i) => i % every === 0 || i === rows.length - 1);
  }
  return { labels, rows, columns };
}

/* As many digits as tell the labels of an axis apart. */
const digitsOf = ([lo, hi]) => Math.max(3, Math.min(9, Math.ceil(Math.log10(Math.max(Math.abs(lo), Math.abs(hi)) / (hi - lo || 1))) + 2));

export class Chart {
  /* title, entry (its explanation), group; log: on a log scale at first; format: of values; x: of the axis ("step");
   * stacked: bars on each other; range: of the y axis; underlay(canvas, area, dygraph): drawn below the lines. */
  constructor(o) {
    Object.assign(this, { format: num, x: "step", lines: [], events: [], log: false }, o);
    this.value = h("span", { class: "value", "aria-live": "off" });
    this.plot = h("div", { class: "plot", tabindex: 0, role: "img", "aria-label": this.title, onkeydown: e => this.key(e) });
    this.legend = h("div", { class: "legend" });
    this.switch = h("button", { class: "toggle", type: "button", "aria-pressed": String(this
      .log), "aria-label": `${this.title} on a log scale`, onclick: () => this.setLog(!this.log) }, "log");
    this.menu = exportMenu(this);
    this.element = h("section", { class: `panel chart ${this.tall ? "tall" : ""}`, "aria-label": this.title },
      h("header", {}, h("h3", {}, this.title), explained(this.entry), this.stacked || this.underlay ? null : this.switch, this
        .menu, this.value), this.plot, this.legend);
    this.group?.charts.add(this);
  }

  destroy() {
    this.graph?.destroy();
    this.graph = null;
    this.group?.charts.delete(this);
  }

  setLog(on) {
    this.log = on;
    this.switch.setAttribute("aria-pressed", String(on));
    this.draw();
  }

  set(lines, events = this.events) {
    this.lines = lines;
    this.events = events;
    this.draw();
  }

  options() {
    const t = this.data,
      many = t.rows.length > 60,
      series = {};
    t.columns.forEach(([l, v], i) => {
      const thin = v === l.raw && l.smooth && l.smooth !== l.raw;
      const edge = l.band && v !== l.raw && v !== l.smooth;
      series[t.labels[i + 1]] = edge ? { color: color(l.color), strokeWidth: 0, drawPoints: false, highlightCircleSize: 0 } : { color: color(l.color), strokeWidth: thin ? 1 : this.stacked ? 0 : 1.8, ...(thin ?
        { plotter: thinLine } : {}) };
    });
    const positive = this.log && t.rows.some(r => r.slice(1).some(v => v > 0));
    return {
      file: t.rows,
      labels: t.labels,
      series,
      logscale: positive,
      drawPoints: !many && !this.stacked,
      pointSize: 2,
      connectSeparatedPoints: true,
      stackedGraph: !!this.stacked,
      stepPlot: !!this.stacked,
      fillAlpha: .85,
      highlightCircleSize: 3,
      highlightSeriesOpts: undefined,
      gridLineColor: css("--line"),
      axisLineColor: css("--line2"),
      gridLineWidth: 1,
      valueRange: this.range ?? null,
      dateWindow: this.group?.window ?? this.window ?? null,
      axes: { x: { axisLabelFormatter: v => this.x === "step" && !Number.isInteger(v) ? "" : num(v), axisLabelWidth: 46, pixelsPerLabel: 60, drawGrid: false },
        y: { axisLabelFormatter: (v, _, __, g) => this.format(v, digitsOf(g.yAxisRange())), axisLabelWidth: 50, pixelsPerLabel: 26 } }
    };
  }

  draw() {
    this.data = table(this.lines);
    const empty = this.data.rows.length === 0;
    this.menu.hidden = empty;
    if (empty) {
      this.graph?.destroy();
      this.graph = null;
      this.plot.replaceChildren(h("span", { class: "empty" }, "no values yet"));
    } else if (this.plot.isConnected) {
      if (this.graph && this.graph.getLabels().join("\n") === this.data.labels.join("\n")) this.graph.updateOptions(this
      .options());
      else this.create();
    }
    const many = this.lines.length > 1;
    this.legend.hidden = !many;
    this.legend.replaceChildren(...(many ? this.lines.map(l => h("span", {}, h("i", { style: { background: color(l.color) } }), l
      .name)) : []));
    this.show(null);
  }

  create() {
    this.graph?.destroy();
    this.plot.replaceChildren();
    const { file, ...options } = this.options();
    this.graph = new Dygraph(this.plot, file, {
      ...options,
      animatedZooms: false,
      rightGap: 12,
      xRangePad: 0,
      yRangePad: 8,
      panEdgeFraction: .1,
      ...(matchMedia("(pointer: coarse)").matches ? { interactionModel: { click: Dygraph.defaultInteractionModel.click } } :
        {}), // touch scrolls the page
      highlightCallback: (e, x) => { this.show(x);
        this.group?.cursor(x, this); },
      unhighlightCallback: () => { this.show(null);
        this.group?.cursor(null, this); },
      zoomCallback: () => { if (this.syncing) return;
        this.window = this.graph.isZoomed("x") ? this.graph.xAxisRange() : null;
        this.group?.zoom(this.window, this); },
      clickCallback: (e, x) => this.group?.open?.(x),
      underlayCallback: (canvas, area, g) => { this.underlay?.(canvas, area, g);
        this.bands(canvas, g);
        this.mark(canvas, area, g); }
    });
  }

  /* What lies between the edges of a band. */
  bands(canvas, g) {
    for (const l of this.lines.filter(v => v.band)) {
      const at = this.data.columns.findIndex(([o, v]) => o === l && v === l.band.lo) + 1;
      const edge = (rows, k) => { for (const r of rows)
          if (r[at] !== null && r[at] !== undefined) canvas.lineTo(g.toDomXCoord(r[0]), g.toDomYCoord(r[at + k])); };
      canvas.fillStyle = color(l.color);
      canvas.globalAlpha = .18;
      canvas.beginPath();
      edge(this.data.rows, 0);
      edge([...this.data.rows].reverse(), 1);
      canvas.fill();
      canvas.globalAlpha = 1;
    }
  }

  /* Vertical lines where something happened. */
  mark(canvas, area, g) {
    for (const e of this.events) {
      const x = g.toDomXCoord(e.step);
      if (x < area.x || x > area.x + area.w) continue;
      canvas.strokeStyle = css(EVENT_COLORS[e.kind] ?? "--line2");
      canvas.setLineDash(e.kind === "checkpoint" ? [2, 3] : []);
      canvas.lineWidth = 1;
      canvas.beginPath();
      canvas.moveTo(Math.round(x) + .5, area.y);
      canvas.lineTo(Math.round(x) + .5, area.y + area.h);
      canvas.stroke();
      if (e.kind === "checkpoint") continue;
      canvas.fillStyle = canvas.strokeStyle;
      canvas.beginPath();
      canvas.moveTo(x - 4, area.y);
      canvas.lineTo(x + 4, area.y);
      canvas.lineTo(x, area.y + 6);
      canvas.fill();
    }
    canvas.setLineDash([]);
  }

  row(x) {
    const rows = this.data.rows;
    let lo = 0,
      hi = rows.length - 1;
    while (lo < hi) {
      const mid = (lo + hi) >> 1;
      if (rows[mid][0] < x) lo = mid + 1;
      else hi = mid;
    }
    if (lo > 0 && Math.abs(rows[lo - 1][0] - x) < Math.abs(rows[lo][0] - x)) lo--;
    return lo;
  }

  /* The values at x; null: the last ones. */
  show(x) {
    const rows = this.data?.rows ?? [];
    const at = x === null ? rows.length - 1 : this.row(x),
      row = rows[at];
    if (!row) return this.value.replaceChildren();
    const raw = this.data.columns.map(([l, v], i) => [l, v, row[i + 1]]).filter(([l, v]) => v === l.raw);
    if (raw.length === 1) {
      let v = raw[0][2],
        k = at;
      if (x === null)
        while ((v === null || v === undefined) && k > 0) v = rows[--k][1];
      const smooth = this.lines[0].smooth && this.lines[0].smooth !== this.lines[0].raw && x !== null ? row[2] : null;
      this.value.replaceChildren(h("b", {}, this.format(v)), smooth !== null && smooth !== undefined ?
        ` mean ${this.format(smooth)}` : "", ` ${this.x} ${num(row[0])}`);
    } else {
      this.value.replaceChildren(`${this.x} ${num(row[0])}`);
      raw.forEach(([, , v], i) => {
        const mark = this.legend.children[i];
        if (mark) mark.replaceChildren(mark.firstChild, `${this.lines[i].name} `, h("b", {}, x === null ? "" : this.format(
          v)));
      });
    }
    this.plot.setAttribute("aria-label",
      `${this.title}, ${this.x} ${num(row[0])}: ${raw.map(([l, , v]) => `${raw.length > 1 ? `${l.name} ` : ""}${this.format(v)}`).join(", ")}. Arrow keys move the cursor${this.group?.open ? ", Enter opens the step" : ""}.`
      );
    return undefined;
  }

  cursor(x) {
    if (!this.graph) return;
    if (x === null) this.graph.clearSelection();
    else this.graph.setSelection(this.row(x));
    this.show(x);
  }

  zoom(window) {
    this.window = window;
    if (!this.graph) return;
    this.syncing = true;
    this.graph.updateOptions({ dateWindow: window });
    this.syncing = false;
  }

  key(e) {
    const rows = this.data?.rows ?? [];
    if (!rows.length || !this.graph) return;
    const now = this.graph.getSelection(),
      stride = e.shiftKey ? Math.max(1, Math.round(rows.length / 20)) : 1;
    const at = now < 0 ? rows.length - 1 : now;
    const to = { ArrowLeft: at - (now < 0 ? 0 : stride), ArrowRight: at + stride, Home: 0, End: rows.length - 1 } [e.key];
    if (e.key === "Enter" && now >= 0) this.group?.open?.(rows[now][0]);
    if (e.key === "Escape") { this.cursor(null);
      this.group?.cursor(null, this); }
    if (to === undefined) return;
    e.preventDefault();
    const k = Math.max(0, Math.min(rows.length - 1, to));
    this.graph.setSelection(k);
    this.show(rows[k][0]);
    this.group?.cursor(rows[k][0], this);
  }
}

/* The raw values behind their mean: thin and pale. */
function thinLine(e) {
  e.drawingContext.globalAlpha = .32;
  Dygraph.Plotters.linePlotter(e);
  e.drawingContext.globalAlpha = 1;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
export const legendColor = i => color(i % COLORS);