// A run that goes on: how far, how fast, where the time goes, how much memory.
import { drawn, element } from "./parts.js";

const number = (value) => value.toLocaleString("en").replaceAll(",", " ");

function figure(name, value, detail = "") {
  return element("div", {}, element("span", {}, name), element("b", {}, value), element("em", {}, detail));
}

function curve(title, values) {
  const top = Math.max(...values, 1);
  const wide = Math.max(values.length - 1, 1);
  const points = values.map((value, place) => `${(place / wide) * 100},${30 - (value / top) * 28}`).join(" ");
  return element("div", {}, element("h2", {}, title),
    drawn("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": title }, drawn("polyline", { points })));
}

function phases(rows) {
  const whole = element("div", { class: "whole", "aria-hidden": "true" });
  const legend = element("ul", { class: "legend" });
  for (const one of rows) {
    const bar = element("span", { class: one.class, title: `${one.name}: ${one.text}, ${one.percent}` });
    bar.style.flexGrow = one.share.toFixed(5);
    whole.append(bar);
    legend.append(element("li", {}, element("i", { class: one.class }), element("span", {}, one.name), element("b", {}, one.percent)));
  }
  return element("div", {}, element("h2", {}, "a recent step"), whole, legend);
}

function ranks(rows, found, worldSize) {
  const names = ["rank", "steps", "a step", "data wait", "rss"];
  const body = rows.map((one) => element("tr", {}, ...[
    `${one.rank}`, one.has_ended ? "ended" : number(one.steps), one.step || "-", one.data_wait || "-", one.rss || "-",
  ].map((text) => element("td", { class: "number" }, text))));
  const here = found < worldSize ? `${found} of ${worldSize} ranks are there` : `${found} ranks`;
  return element("div", {}, element("h2", {}, here), element("table", {},
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { class: "number" }, name)))),
    element("tbody", {}, ...body)));
}

export function drawLive(place, { run, lead, ranks: all, found, world_size: worldSize }) {
  place.hidden = !lead;
  if (!lead) return;
  const isNear = lead.total && lead.total > 0;
  const now = element("div", { class: "now" },
    figure("now", run.state === "running" ? "running" : "silent", run.state === "running" ? "" : run.words.replace(/^silent /, "")),
    figure("steps", number(lead.steps), isNear ? `of ${number(lead.total)}, ${Math.floor((100 * lead.steps) / lead.total)}%` : ""));
  if (lead.step) now.append(figure("a step", lead.step, `${lead.data_wait || "-"} data wait`));
  if (lead.rss) now.append(figure("rss", lead.rss));
  if (lead.device_peak) now.append(figure("device peak", lead.device_peak));
  now.append(figure("windows", `${run.windows.filter((one) => one.closed).length}`, run.windows.some((one) => !one.closed) ? "one is open" : ""));
  place.replaceChildren(now);
  if (lead.phases.length) place.append(phases(lead.phases));
  if (lead.durations_ns.length > 1) place.append(curve("time of a step, over the run", lead.durations_ns));
  if (lead.rss_bytes.length > 1) place.append(curve("rss, over the run", lead.rss_bytes));
  if (all.length) place.append(ranks(all, found, worldSize));
  for (const error of lead.errors) place.append(element("p", { class: "bad" }, `failed: ${error}`));
}
