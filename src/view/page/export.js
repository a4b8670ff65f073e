/* export.js - a plot as a file: its values as CSV, its picture as PNG. Made in the browser; nothing is asked of the server. */

import { css, h } from "./elements.js";
import { csvOf, fileName } from "./stats.js";

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/* The canvases of a plot, its labels, title and key on one canvas. */
function picture(chart) {
  const plot = chart.plot,
    scale = devicePixelRatio > 1 ? devicePixelRatio : 2,
    pad = 14,
    head = 30,
    keys = chart.lines.length > 1 ? chart.lines : [],
    foot = keys.length ? 26 : 8,
    w = plot.clientWidth + 2 * pad,
    height = plot.clientHeight + head + foot;
  const canvas = h("canvas", { width: Math.round(w * scale), height: Math.round(height * scale) }),
    c = canvas.getContext("2d"),
    font = getComputedStyle(document.body).fontFamily,
    box = plot.getBoundingClientRect();
  c.scale(scale, scale);
  c.fillStyle = css("--panel");
  c.fillRect(0, 0, w, height);
  c.fillStyle = css("--ink");
  c.font = `600 13px ${font}`;
  c.fillText(chart.title, pad, 20, w - 2 * pad);
  for (const e of plot.querySelectorAll("canvas")) {
    const b = e.getBoundingClientRect();
    c.drawImage(e, pad + b.left - box.left, head + b.top - box.top, b.width, b.height);
  }
  c.font = `11px ${font}`;
  c.fillStyle = css("--ink2");
  c.textBaseline = "middle";
  for (const e of plot.querySelectorAll(".dygraph-axis-label")) {
    const b = e.getBoundingClientRect(),
      y = e.className.includes("-x");
    c.textAlign = y ? "center" : "right";
    c.fillText(e.textContent, pad + (y ? b.left + b.width / 2 : b.right - 3) - box.left, head + b.top + b.height / 2 - box.top);
  }
  c.textAlign = "left";
  let x = pad;
  for (const [i, l] of keys.entries()) {
    c.fillStyle = css(`--c${l.color % 8}`);
    c.fillRect(x, height - 17, 10, 10);
    c.fillStyle = css("--ink2");
    c.fillText(l.name, x + 15, height - 12);
    x += 30 + c.measureText(keys[i].name).width;
  }
  return canvas;
}

export const savePng = chart => picture(chart).toBlob(blob => blob && save(blob, fileName(chart.title, "png")), "image/png");
export const saveCsv = chart => save(new Blob([csvOf(chart.lines, chart.x)], { type: "text/csv;charset=utf-8" }), fileName(chart
  .title, "csv"));

/* The small menu of a card. */
export function exportMenu(chart) {
  const menu = h("details", { class: "menu", onkeydown: e => { if (e.key === "Escape" && menu.open) { menu.open = false;
        e.stopPropagation();
        menu.firstChild.focus(); } }, onfocusout: e => { if (!menu.contains(e.relatedTarget)) menu.open = false; } },
    h("summary", { class: "toggle", "aria-label": `Export ${chart.title}`, title: "Export" }, "↓"),
    h("div", {}, [
      ["CSV", "the values", saveCsv],
      ["PNG", "the picture", savePng]
    ].map(([name, what, f]) => h("button", { type: "button", onclick: () => { f(chart);
        menu.open = false; } }, name, h("span", { class: "quiet" }, ` ${what}`)))));
  return menu;
}
