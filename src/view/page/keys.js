/* keys.js - the list of keys, over the page: ? opens and closes it. The keys that every page has are here too. */

import { h } from "./elements.js";

const EVERYWHERE = [
  ["?", "this list"],
  ["/", "the page's field for words"],
  ["1 … 7", "the pages of a run, as they are in the row on top"],
  ["0", "all runs"],
  ["Tab", "the next control; Enter and Space press it"],
  ["Esc", "closes what is open; goes back from a prompt to its step"]
];
const PLOTS = [
  ["← →", "move the cursor of a plot that has the focus, with Shift in larger strides"],
  ["Home End", "its first and last value"],
  ["Enter", "the samples of the step under the cursor"]
];

const row = ([keys, what]) => [h("dt", {}, keys.split(" ").map((k, i) => [i ? " " : "", k === "…" ? k : h("kbd", {}, k)])), h(
  "dd", {}, what)];
const part = (name, list) => list?.length ? [h("h3", {}, name), h("dl", { class: "keylist" }, list.map(row))] : [];

const typing = e => e.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea, [contenteditable]");

/* page: what is open, {keys}; tabs: links of the run's pages. */
export function watchKeys(page) {
  const dialog = h("dialog", { class: "keys-of", "aria-label": "Keys", onclick: e => { if (e.target === dialog) dialog.close(); } });
  document.body.append(dialog);
  const open = () => {
    const plots = document.querySelector(".plot");
    dialog.replaceChildren(h("header", {}, h("h2", {}, "Keys"), h("button", { type: "button", class: "icon",
      "aria-label": "Close", onclick: () => dialog.close() }, "×")), ...part("On this page", page()?.keys), ...(plots ? part(
      "Plots", PLOTS) : []), ...part("Everywhere", EVERYWHERE));
    dialog.showModal();
  };
  document.addEventListener("keydown", e => {
    if (e.altKey || e.ctrlKey || e.metaKey || typing(e)) return;
    if (e.key === "?") { e.preventDefault();
      return dialog.open ? dialog.close() : open(); }
    if (dialog.open) return undefined;
    if (e.key === "/") {
      const field = document.querySelector("main input[type=search]");
      if (field) { e.preventDefault();
        field.focus();
        field.select(); }
    }
    if (e.key === "0") location.hash = "#/?all";
    const tab = document.querySelectorAll("nav.tabs a")[+e.key - 1];
    if (/^[1-9]$/.test(e.key) && tab) location.hash = tab.hash;
    return undefined;
  });
  return open;
}
