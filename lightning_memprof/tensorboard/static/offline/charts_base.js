// Base of the Google Charts replacement: data tables, events, SVG, tooltips and number formats.
// It implements the part of https://developers.google.com/chart/interactive/docs/reference that torch-tb-profiler uses.
// Text inherits its colour, for light and dark pages.
'use strict';

window.memprofCharts = (() => {
  const PALETTE = ['#3b7dd8', '#e07b39', '#3aa76d', '#b45ec4', '#d6a419', '#d0506b', '#2ba6b8', '#8a7a5c', '#7381e0',
    '#93a72b', '#e58cb1', '#5f8f8a', '#b0522f', '#6c6f7a'];

  // A cell is a value or {v: value, f: text}.
  const isPair = cell => cell !== null && typeof cell === 'object' && 'v' in cell;
  const valueOf = cell => (isPair(cell) ? cell.v : cell);

  // Six significant digits with thousands separators; other values are unchanged.
  function number(value) {
    if (typeof value !== 'number') return value === null || value === undefined ? '' : String(value);
    if (Number.isInteger(value) || Math.abs(value) >= 1e5) return Math.round(value).toLocaleString('en-US');
    return Number(value.toPrecision(6)).toLocaleString('en-US', {maximumFractionDigits: 12});
  }

  const textOf = cell => (isPair(cell) && cell.f !== undefined && cell.f !== null ? String(cell.f) : number(valueOf(cell)));

  class DataTable {
    constructor() {
      this.columns = [];
      this.rows = [];
      this.properties = new Map();
    }

    addColumn(column, label) {
      this.columns.push(typeof column === 'string' ? {type: column, label: label || ''} : {...column});
      return this.columns.length - 1;
    }

    addRow(row) {
      return this.addRows([row]);
    }

    addRows(rows) {
      for (const row of rows) this.rows.push([...row]);
      return this.rows.length - 1;
    }

    setProperty(row, column, name, value) {
      this.properties.set(`${row} ${column} ${name}`, value);
    }

    property(row, column, name) {
      return this.properties.get(`${row} ${column} ${name}`);
    }

    label(column) {
      const {label, id} = this.columns[column];
      return label || id || '';
    }

    // A column with a role, such as a tooltip, is not a series.
    series() {
      return this.columns.flatMap((column, index) => (index > 0 && !column.role ? [index] : []));
    }

    // Column of a series' tooltip; -1 if there is none.
    tooltip(series) {
      for (let index = series + 1; this.columns[index]?.role; index += 1) {
        if (this.columns[index].role === 'tooltip') return index;
      }
      return -1;
    }
  }

  // The first row holds the column names; a column has the type of its first value.
  function arrayToDataTable(rows) {
    const table = new DataTable();
    const [names, ...cells] = rows;
    names.forEach((name, index) => {
      const found = cells.map(row => valueOf(row[index])).find(value => value !== null && value !== undefined);
      const type = typeof found === 'number' ? 'number' : 'string';
      table.addColumn(typeof name === 'object' && name !== null ? {type, ...name} : {type, label: String(name)});
    });
    table.addRows(cells);
    return table;
  }

  const listeners = new WeakMap();
  const events = {
    addListener(source, name, call) {
      if (!listeners.has(source)) listeners.set(source, []);
      listeners.get(source).push({name, call});
    },
    trigger(source, name, detail) {
      for (const listener of listeners.get(source) || []) if (listener.name === name) listener.call(detail);
    },
  };

  function svg(name, attributes = {}, parent = null, text = null) {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function html(name, className, parent = null, text = null) {
    const made = document.createElement(name);
    made.className = className;
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const PLAIN = new Set(['B', 'BR', 'DIV', 'SPAN', 'I', 'STRONG', 'EM', 'P', 'UL', 'LI']);

  // Server markup can contain names from the traced program: keep its text and line breaks only.
  function appendMarkup(parent, markup) {
    const copy = (from, to) => {
      for (const node of from.childNodes) {
        if (node.nodeType === Node.TEXT_NODE) to.append(node.data);
        else if (node.nodeType !== Node.ELEMENT_NODE) continue;
        else if (PLAIN.has(node.tagName)) copy(node, to.appendChild(document.createElement(node.tagName)));
        else if (!['SCRIPT', 'STYLE', 'TEMPLATE'].includes(node.tagName)) copy(node, to);
      }
    };
    copy(new DOMParser().parseFromString(String(markup), 'text/html').body, parent);
  }

  // Ticks at multiples of 1, 2, 2.5 or 5; the first is at or below `low`, the last at or above `high`.
  function ticks(low, high, count) {
    const span = high - low || Math.abs(high) || 1;
    const rough = span / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
    const found = [];
    for (let at = Math.floor(low / step); ; at += 1) {
      found.push(Number((at * step).toPrecision(12)));
      if (at * step >= high - step * 1e-9 || found.length > 200) return found;
    }
  }

  // About 6.2 px per character at 12 px; measuring would force a layout per label.
  const letters = width => Math.max(Math.floor(width / 6.2), 1);
  const shorten = (text, width) => (text.length <= letters(width) ? text : `${text.slice(0, letters(width) - 1)}…`);

  // The chart drawn last into each element; the next one replaces it.
  const drawn = new WeakMap();

  class Chart {
    constructor(element) {
      this.element = element;
      this.selection = [];
      this.hoverBox = null;
    }

    draw(table, options = {}) {
      this.table = table;
      this.options = options;
      drawn.get(this.element)?.clearChart();
      drawn.set(this.element, this);
      this.paint();
      this.watchWidth();
      // Deferred: pages add listeners before or after they draw.
      setTimeout(() => events.trigger(this, 'ready'));
    }

    get width() {
      return Math.max(this.element.clientWidth || this.element.parentElement?.clientWidth || 600, 160);
    }

    watchWidth() {
      this.drawnWidth = this.width;
      if (this.observer) return;
      this.observer = new ResizeObserver(() => {
        if (!this.root || Math.abs(this.width - this.drawnWidth) < 2) return;
        this.drawnWidth = this.width;
        this.clear();
        this.paint();
      });
      this.observer.observe(this.element);
    }

    frame(height) {
      this.root = html('div', 'memprof-chart', this.element);
      this.root.style.height = `${height}px`;
      const width = this.width;
      this.canvas = svg('svg', {width, height, viewBox: `0 0 ${width} ${height}`, role: 'img'}, this.root);
      if (this.options.title) this.canvas.setAttribute('aria-label', this.options.title);
      this.root.addEventListener('mouseleave', () => this.hideHover());
      return this.canvas;
    }

    colour(index) {
      const colours = this.options.colors || PALETTE;
      return colours[index % colours.length];
    }

    // `fill` writes into the tooltip; x and y are pixels from the chart's corner.
    showHover(x, y, fill) {
      this.hideHover();
      this.hoverBox = html('div', 'memprof-hover', this.root);
      this.hoverBox.setAttribute('role', 'tooltip');
      fill(this.hoverBox);
      const {offsetWidth, offsetHeight} = this.hoverBox;
      const left = x + 14 + offsetWidth > this.width ? Math.max(x - 14 - offsetWidth, 0) : x + 14;
      this.hoverBox.style.left = `${left}px`;
      this.hoverBox.style.top = `${Math.max(y - offsetHeight / 2, 0)}px`;
    }

    hideHover() {
      this.hoverBox?.remove();
      this.hoverBox = null;
    }

    getSelection() {
      return this.selection;
    }

    setSelection(selection) {
      this.selection = selection || [];
      if (this.root) this.showSelection();
    }

    showSelection() {}

    clear() {
      this.hideHover();
      this.root?.remove();
      this.root = null;
    }

    clearChart() {
      this.clear();
      this.observer?.disconnect();
      this.observer = null;
    }
  }

  return {
    PALETTE, Chart, DataTable, appendMarkup, arrayToDataTable, events, html, number, shorten, svg, textOf, ticks, valueOf,
  };
})();
