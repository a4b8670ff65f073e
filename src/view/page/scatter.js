/* scatter.js - two metrics against each other, a point a step, of one run or several: the later a step, the darker its point. */

import { json, run as runOf } from "./data.js";
import { color, css, h, hideTip, num, showTip } from "./elements.js";
import { labelsOf } from "./compare.js";
import { correlation, paired } from "./stats.js";

const FIRST = [
  ["response_length/mean", "critic/rewards/mean"],
  ["actor/kl_loss", "critic/rewards/mean"],
  ["actor/entropy", "critic/rewards/mean"]
];

export async function scatterPage({ run, query, go, main }) {
  const ids = query.getAll("with").filter(id => id !== run.id),
    { runs } = await json("runs"),
    stores = [run, ...await Promise.all(ids.filter(id => runs.some(r => r.id === id && !r.error)).map(id => runOf(id).open()))],
    label = labelsOf(stores),
    names = [...new Set(stores.flatMap(r => r.info.names.map(n => n.name)))].sort(),
    start = FIRST.find(pair => pair.every(n => names.includes(n))) ?? [names[0], names[1] ?? names[0]];
  let x = names.includes(query.get("x")) ? query.get("x") : start[0],
    y = names.includes(query.get("y")) ? query.get("y") : start[1],
    graph = null,
    points = []; // as they lie in the graph's rows
  const plot = h("div", { class: "plot", role: "img" }),
    legend = h("div", { class: "legend" }),
    heading = h("h3", {}),
    fact = h("span", { class: "value", role: "status" });
  const keep = () => go(`#/${run.id}/scatter?${new URLSearchParams([["x", x], ["y", y], ...ids.map(id => ["with", id])])}`, true);
  const select = (name, value, change) => h("label", {}, name, h("select", { "aria-label": `Metric of ${name}`, onchange: e => {
      change(e.target.value);
      keep();
      show(); } }, names.map(n => h("option", { value: n, selected: n === value }, n))));
  const dot = i => (g, series, canvas, cx, cy, fill, size, at) => {
    const p = points[at];
    canvas.globalAlpha = p ? .18 + .72 * p.age : .6;
    canvas.fillStyle = color(i);
    canvas.beginPath();
    canvas.arc(cx, cy, 2.6, 0, 7);
    canvas.fill();
    canvas.globalAlpha = 1;
  };
  const draw = all => {
    points = all.flatMap((p, k) => p.step.map((step, i) => ({ k, step, x: p.x[i], y: p.y[i], age: p.step.length > 1 ? i / (p.step
      .length - 1) : 1 }))).sort((a, b) => a.x - b.x);
    graph?.destroy();
    graph = null;
    heading.textContent = `${y} against ${x}`;
    if (!points.length) return plot.replaceChildren(h("span", { class: "empty" }, "no step has both"));
    plot.replaceChildren();
    graph = new Dygraph(plot, points.map(p => [p.x, ...stores.map((_, k) => k === p.k ? p.y : null)]), {
      labels: ["x", ...label.map((l, k) => l + "\u200b".repeat(k))],
      colors: stores.map((_, k) => color(k)),
      series: Object.fromEntries(label.map((l, k) => [l + "\u200b".repeat(k), { drawPointCallback: dot(k) }])),
      strokeWidth: 0,
      drawPoints: true,
      pointSize: 3,
      highlightCircleSize: 0,
      rightGap: 12,
      xRangePad: 10,
      yRangePad: 10,
      gridLineColor: css("--line"),
      axisLineColor: css("--line2"),
      axes: { x: { axisLabelFormatter: v => num(v, 3), pixelsPerLabel: 70 }, y: { axisLabelFormatter: v => num(v, 3),
          axisLabelWidth: 50, pixelsPerLabel: 26 } }
    });
    return undefined;
  };
  /* The point that is nearest to the pointer, within 14 pixels. */
  const near = e => {
    const box = plot.getBoundingClientRect();
    let best = null,
      least = 14 ** 2;
    for (const p of graph ? points : []) {
      const d = (graph.toDomXCoord(p.x) - e.clientX + box.left) ** 2 + (graph.toDomYCoord(p.y) - e.clientY + box.top) ** 2;
      if (d < least) { least = d;
        best = p; }
    }
    return best;
  };
  plot.addEventListener("mousemove", e => { const p = near(e);
    plot.style.cursor = p ? "pointer" : "";
    if (p) showTip(`${stores.length > 1 ? `${label[p.k]}\n` : ""}step ${num(p.step)}\n${x} ${num(p.x)}\n${y} ${num(p.y)}`, e.clientX,
      e.clientY);
    else hideTip(); });
  plot.addEventListener("mouseleave", hideTip);
  plot.addEventListener("click", e => { const p = near(e);
    if (p) location.hash = `#/${stores[p.k].id}/samples/${p.step}`; });
  const show = async () => {
    await Promise.all(stores.map(r => r.need([x, y])));
    const none = { step: [], value: [] },
      all = stores.map(r => paired(r.series.get(x) ?? none, r.series.get(y) ?? none)),
      r = all.map(p => correlation(p.x, p.y));
    fact.textContent = stores.length > 1 ? "" : `${num(all[0].step.length)} steps, correlation ${num(r[0], 2)}`;
    legend.replaceChildren(...(stores.length > 1 ? stores.map((_, k) => h("span", {}, h("i", { style: { background: color(k) } }),
      label[k], h("b", {}, ` correlation ${num(r[k], 2)}`))) : []));
    draw(all);
    plot.setAttribute("aria-label", `${heading.textContent}: ${all.map((p, k) => `${label[k]}, ${p.step.length} steps, correlation ${num(r[k], 2)}`).join("; ")}`);
  };
  main.replaceChildren(h("h1", { class: "sr" }, "Two metrics"), h("div", { class: "tools" }, select("x", x, v => { x = v; }), select(
      "y", y, v => { y = v; }), h("button", { type: "button", onclick: () => { location.hash =
        `#/${run.id}/scatter?${new URLSearchParams([["x", y], ["y", x], ...ids.map(id => ["with", id])])}`; } }, "Swap"), h("span",
      { class: "quiet small keys" }, "A point a step, the later the darker; a click opens its samples, dragging zooms")),
    h("section", { class: "panel chart scatter", "aria-label": "Two metrics against each other" }, h("header", {}, heading, fact),
      plot, legend));
  await show();
  return { destroy: () => { graph?.destroy();
      hideTip(); }, update: what => what === "steps" && show() };
}
