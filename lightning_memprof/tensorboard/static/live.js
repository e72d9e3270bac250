// The live page of a run: parts of its document, as texts.
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

  stack({ title, bars }) {
    const whole = element("div", { class: "whole", "aria-hidden": "true" });
    const legend = element("ul", { class: "legend" });
    for (const bar of bars) {
      const percent = `${Math.round(100 * bar.share)}%`;
      const stretch = element("span", { class: bar.class, title: `${bar.name}: ${bar.text}, ${percent}` });
      stretch.style.flexGrow = bar.share.toFixed(5);
      whole.append(stretch);
      legend.append(element("li", {}, element("i", { class: bar.class }), element("span", {}, bar.name), element("b", {}, percent)));
    }
    return titled(title, whole, legend);
  },

  table: ({ columns, rows }) => element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { class: "number" }, name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { class: "number" }, text)))))),
};

export function drawLive(place, { parts }) {
  place.hidden = !parts.length;
  place.replaceChildren(...parts.map((part) => draw[part.part](part)));
}
