"use strict";
// Draws the page's charts: visible ones first, then the others one by one, so that a printed page has all of them.
(() => {
  const LOOKS = {
    light: { text: "#424a53", line: "#8c959f", grid: "#d8dee4" },
    dark: { text: "#b6c2cf", line: "#596673", grid: "#333c46" },
  };
  const AXES = /Axis$/;
  const documents = [];
  const places = new Map();
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  const look = () => {
    const chosen = document.documentElement.dataset.theme;
    if (printing) return LOOKS.light;
    return LOOKS[chosen in LOOKS ? chosen : dark.matches ? "dark" : "light"];
  };

  const colours = (type, tags) => {
    const { text, line, grid } = look();
    if (AXES.test(type)) {
      return { axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
        major_tick_line_color: line };
    }
    if (type === "Grid") return { grid_line_color: grid };
    if (type === "Legend") return { label_text_color: text };
    return tags?.includes("text") ? { text_color: text } : {};
  };
  const paintAll = () => {
    for (const doc of documents) {
      for (const model of doc._all_models.values()) Object.assign(model, colours(model.type, model.tags));
    }
  };

  // A legend does not wrap: on a narrow page its names would be cut off at the left. A letter is 6.6 pixels
  // wide, each name has a mark and a gap of 38, and 120 are left of and right of the figure.
  const legendColumns = (names, width) => {
    const widths = names.map((name) => 6.6 * name.length + 38);
    const room = width - 120;
    if (widths.reduce((sum, wide) => sum + wide, 0) <= room) return "auto";
    return Math.min(names.length, Math.max(1, Math.floor(room / Math.max(...widths))));
  };
  const fitLegends = () => {
    for (const [doc, place] of places) {
      for (const model of doc._all_models.values()) {
        if (model.type !== "Legend") continue;
        const columns = legendColumns(model.items.map((one) => one.label?.value ?? ""), place.clientWidth);
        if (model.ncols !== columns) model.ncols = columns;
      }
    }
  };

  // Colors are set before bokeh builds the document: setting them later would draw everything twice.
  const prepare = (node, width) => {
    if (node === null || typeof node !== "object") return;
    for (const child of Object.values(node)) prepare(child, width);
    if (node.type !== "object" || node.name === undefined) return;
    const attributes = (node.attributes ??= {});
    Object.assign(attributes, colours(node.name, attributes.tags));
    if (node.name === "Legend") {
      attributes.ncols = legendColumns(attributes.items.map((one) => one.attributes.label?.value ?? ""), width);
    }
  };

  // Columns that are compact in the page and large in memory: halves of an address, indexes into a list of texts. Only
  // tooltips read them, so nothing is redrawn.
  const widen = (doc, strings) => {
    for (const source of doc._all_models.values()) {
      const plan = source.tags?.find((tag) => tag.widen !== undefined);
      if (plan === undefined) continue;
      const { low, high, text } = plan.widen;
      const highs = numbers(high);
      source.data.address = numbers(low).map((value, i) => "0x" + (highs[i] * 4294967296 + value).toString(16));
      source.data.stack = numbers(text).map((place) => strings[place] ?? "");
    }
  };

  // 32-bit numbers, little-endian as in every current browser.
  const numbers = (written) => {
    const letters = atob(written);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < bytes.length; i += 1) bytes[i] = letters.charCodeAt(i);
    return Array.from(new Uint32Array(bytes.buffer));
  };

  // Labels are cut to their rectangle, with padding; labels below three letters are omitted.
  const SHORTEST = 3;
  const pen = document.createElement("canvas").getContext("2d");
  const shortened = (words, room) => {
    if (pen.measureText(words).width <= room) return words;
    const letters = [...words];
    let low = 0, high = letters.length;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (pen.measureText(letters.slice(0, middle).join("") + "…").width <= room) low = middle;
      else high = middle - 1;
    }
    return low < SHORTEST ? "" : letters.slice(0, low).join("") + "…";
  };
  const fitting = (doc) => {
    for (const source of doc._all_models.values()) {
      const plan = source.tags?.find((tag) => tag.fit !== undefined);
      if (plan === undefined) continue;
      const [font, padding] = plan.fit;
      const plot = [...doc._all_models.values()].find(
        (one) => one.type === "Figure" && one.renderers.some((renderer) => renderer.data_source === source));
      const { left, right, words } = source.data;
      const fit = () => {
        const { start, end } = plot.x_range;
        const scale = plot.inner_width / (end - start);
        pen.font = font;
        source.data.label = Array.from(words, (text, i) =>
          shortened(text, (Math.min(right[i], end) - Math.max(left[i], start)) * scale - 2 * padding));
        source.data.begin = Array.from(left, (from) => Math.max(from, start));
        source.change.emit();
      };
      plot.x_range.change.connect(fit);
      plot.properties.inner_width.change.connect(fit);
      fit();
    }
  };

  // A path for each of 100,000 rectangles takes a second: plain filled ones are filled in one pass. If a later bokeh
  // renames this method, its own drawing is used.
  const quicken = () => {
    const view = Bokeh.Models?.get?.("Quad")?.prototype?.default_view?.prototype;
    if (typeof view?._paint !== "function") return;
    const usual = view._paint;
    view._paint = function (ctx, indices, data) {
      if (!this.model.tags.includes("plain")) return usual.call(this, ctx, indices, data);
      const { sleft, sright, stop, sbottom } = { ...this, ...data };
      this.visuals.fill.set_vectorize(ctx, 0);
      for (const i of indices) ctx.fillRect(sleft[i], stop[i], sright[i] - sleft[i], sbottom[i] - stop[i]);
    };
  };

  const frame = () => new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done, 0));
    setTimeout(done, 500);  // a hidden page has no animation frames
  });

  const draw = async (element) => {
    const place = element.querySelector(".chart-place");
    // In a folded section there may be no room yet; the chart is drawn when it is seen.
    if (element.dataset.state !== undefined || !place.clientWidth) return;
    element.dataset.state = "drawing";
    try {
      const started = performance.now();
      const { item, strings } = JSON.parse(element.querySelector("script").textContent);
      prepare(item.doc, place.clientWidth);
      await Bokeh.embed.embed_item(item, place);
      const doc = Bokeh.documents.find((one) => one.get_model_by_id(item.root_id) !== null);
      documents.push(doc);
      places.set(doc, place);
      fitting(doc);
      await frame();
      element.dataset.milliseconds = Math.round(performance.now() - started);
      widen(doc, strings);
      element.dataset.state = "drawn";
    } catch (error) {
      element.dataset.state = "failed";
      place.textContent = `This chart could not be drawn: ${error}`;
      place.classList.add("chart-failed");
    }
  };

  // One at a time: two at once would both appear late.
  let last = Promise.resolve();
  const inTurn = (element) => {
    last = last.then(() => draw(element));
    return last;
  };

  const start = async () => {
    quicken();
    const charts = [...document.querySelectorAll("figure.chart")];
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) inTurn(entry.target);
    }, { rootMargin: "400px" });
    charts.forEach((chart) => seen.observe(chart));
    await frame();
    for (const chart of charts) {
      await new Promise((done) => setTimeout(done, 50));
      await inTurn(chart);
    }
    document.documentElement.dataset.charts = "drawn";
  };

  dark.addEventListener("change", paintAll);
  addEventListener("resize", fitLegends);
  new MutationObserver(paintAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  addEventListener("beforeprint", () => { printing = true; paintAll(); });
  addEventListener("afterprint", () => { printing = false; paintAll(); });
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();
})();
