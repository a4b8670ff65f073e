/* notes.js - notes and tags of a run, which `verlc note` writes; the page shows them. */

import { clock, h } from "./elements.js";
import { tagWord } from "./stats.js";

/* A tag is a link to the runs that have it. */
export const tagList = tags => h("span", { class: "tags" }, (tags ?? []).map(t => h("a", { class: "tag", href:
    `#/?${new URLSearchParams([["all", ""], ["q", tagWord(t)]])}`, title: `runs with the tag ${t}` }, t)));

/* A panel of them; without any it says how they are made. */
export function notesPanel(info) {
  const body = h("div", { class: "body" }),
    box = h("section", { class: "panel", "aria-label": "Notes" }, h("header", {}, h("h2", {}, "Notes"), h("span", {})), body);
  let shown = "";
  const update = () => {
    const now = JSON.stringify([info().tags, info().notes]);
    if (now === shown) return;
    shown = now;
    const { tags = [], notes = [], dir } = info();
    box.querySelector("header").lastChild.replaceWith(tagList(tags));
    body.replaceChildren(notes.length ? h("ul", { class: "notes" }, [...notes].reverse().map(n => h("li", {}, h("span",
        { class: "quiet small num" }, clock(n.wall)), h("span", {}, n.text)))) : h("p", { class: "quiet small" },
      "None. In a terminal: ", h("code", {}, `verlc note ${dir} "what there is to say" --tag baseline`)));
  };
  update();
  return { element: box, update };
}
