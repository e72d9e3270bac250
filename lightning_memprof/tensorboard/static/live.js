// The live section of a run: parts of its document, as texts.
import { drawn, element } from "./parts.js";

const titled = (title, ...children) => element("div", {}, element("h2", {}, title), ...children);

const draw = {
  lines: ({ rows }) => element("dl", { class: "now" }, ...rows.flatMap(([label, words, style]) =>
    [element("dt", {}, label), element("dd", { class: style }, words)])),

  chart({ title, values }) {
    const top = Math.max(...values, 1);
    const wide = Math.max(values.length - 1, 1);
    const points = values.map((value, place) => `${(place / wide) * 100},${30 - (value / top) * 28}`).join(" ");
    const options = { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": title };
    return titled(title, drawn("svg", options, drawn("polyline", { points })));
  },

  table: ({ columns, rows }) => element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { class: "number" }, name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { class: "number" }, text)))))),
};

export function drawLive(place, { parts }) {
  place.hidden = !parts.length;
  place.replaceChildren(...parts.map((part) => draw[part.part](part)));
}
