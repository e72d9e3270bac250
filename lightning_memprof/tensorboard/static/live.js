// Progress, speed, phases and memory of a live run.
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
  for (const phase of rows) {
    const bar = element("span", { class: phase.class, title: `${phase.name}: ${phase.text}, ${phase.percent}` });
    bar.style.flexGrow = phase.share.toFixed(5);
    whole.append(bar);
    legend.append(element("li", {}, element("i", { class: phase.class }), element("span", {}, phase.name), element("b", {}, phase.percent)));
  }
  return element("div", {}, element("h2", {}, "recent steps"), whole, legend);
}

function ranks(rows, found, worldSize) {
  const names = ["rank", "steps", "step time", "data wait", "RSS"];
  const body = rows.map((rank) => element("tr", {}, ...[
    `${rank.rank}`, rank.has_ended ? "ended" : number(rank.steps), rank.step || "-", rank.data_wait || "-", rank.rss || "-",
  ].map((text) => element("td", { class: "number" }, text))));
  const here = found < worldSize ? `${found} of ${worldSize} ranks` : `${found} ranks`;
  return element("div", {}, element("h2", {}, here), element("table", {},
    element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { class: "number" }, name)))),
    element("tbody", {}, ...body)));
}

export function drawLive(place, { run, lead, ranks: all, found, world_size: worldSize }) {
  place.hidden = !lead;
  if (!lead) return;
  const hasTotal = lead.total && lead.total > 0;
  const now = element("div", { class: "now" },
    figure("state", run.state === "running" ? "running" : "silent", run.state === "running" ? "" : run.words.replace(/^silent /, "")),
    figure("steps", number(lead.steps), hasTotal ? `of ${number(lead.total)}, ${Math.floor((100 * lead.steps) / lead.total)}%` : ""));
  if (lead.step) now.append(figure("step time", lead.step, `${lead.data_wait || "-"} data wait`));
  if (lead.rss) now.append(figure("RSS", lead.rss));
  if (lead.device_peak) now.append(figure("device peak", lead.device_peak));
  now.append(figure("windows", `${run.windows.filter((window) => window.closed).length}`, run.windows.some((window) => !window.closed) ? "1 open" : ""));
  place.replaceChildren(now);
  if (lead.phases.length) place.append(phases(lead.phases));
  if (lead.durations_ns.length > 1) place.append(curve("step time over the run", lead.durations_ns));
  if (lead.rss_bytes.length > 1) place.append(curve("RSS over the run", lead.rss_bytes));
  if (all.length) place.append(ranks(all, found, worldSize));
  for (const error of lead.errors) place.append(element("p", { class: "bad" }, `failed: ${error}`));
}
