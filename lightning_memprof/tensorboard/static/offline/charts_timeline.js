// Timeline: one row of bars per name in the first column.
'use strict';

(() => {
  const {Chart, appendMarkup, number, shorten, svg, valueOf} = window.memprofCharts;
  const ROW = 24;

  class Timeline extends Chart {
    paint() {
      const bars = this.bars();
      const rows = [...new Set(bars.map(bar => bar.row))];
      const height = Math.max(rows.length * ROW + 34, 60);
      const canvas = this.frame(height);
      this.root.style.overflow = 'visible';
      const first = bars.reduce((least, bar) => Math.min(least, bar.start), Infinity);
      const last = bars.reduce((most, bar) => Math.max(most, bar.end), -Infinity);
      if (bars.length === 0) return;
      const scale = (this.width - 20) / (last - first || 1);
      this.axis(canvas, last - first, scale, rows.length * ROW);
      // Thousands of bars are narrower than a pixel: skip those in a pixel that the row has already filled.
      const filled = new Map();
      for (const bar of bars) {
        const x = 10 + (bar.start - first) * scale;
        const width = (bar.end - bar.start) * scale;
        if (x + width < (filled.get(bar.row) ?? -Infinity) + 0.5) continue;
        filled.set(bar.row, Math.max(x + width, x + 0.5));
        this.bar(canvas, bar, {x, y: rows.indexOf(bar.row) * ROW + 2, width: Math.max(width, 0.6), height: ROW - 4});
      }
    }

    bars() {
      const end = this.table.columns.length - 1;
      const tooltip = this.table.columns.findIndex(column => column.role === 'tooltip');
      const found = this.table.rows.map(row => ({
        row: String(valueOf(row[0])), name: String(valueOf(row[1])),
        tooltip: tooltip < 0 ? null : valueOf(row[tooltip]),
        start: Number(valueOf(row[end - 1])), end: Number(valueOf(row[end])),
      }));
      return found.sort((one, two) => Number(one.row) - Number(two.row) || one.start - two.start);
    }

    // Milliseconds since the first bar, instead of absolute timestamps.
    axis(canvas, span, scale, bottom) {
      for (const at of window.memprofCharts.ticks(0, span, this.width / 120)) {
        if (at > span) continue;
        const x = 10 + at * scale;
        svg('line', {x1: x, x2: x, y1: 0, y2: bottom, class: 'memprof-grid'}, canvas);
        const text = at * scale > this.width - 60 ? 'memprof-end' : at === 0 ? '' : 'memprof-middle';
        svg('text', {x, y: bottom + 18, class: text}, canvas, `${number(at)} ms`);
      }
    }

    bar(canvas, bar, box) {
      let colour = 0;
      for (const letter of bar.name) colour = (colour * 31 + letter.codePointAt(0)) % 9973;
      const mark = svg('rect', {...box, fill: this.colour(colour), class: 'memprof-mark', 'data-name': bar.name}, canvas);
      mark.setAttribute('data-value', bar.end - bar.start);
      mark.addEventListener('mousemove', event => {
        const corner = canvas.getBoundingClientRect();
        this.showHover(event.clientX - corner.left, event.clientY - corner.top, hover => {
          if (bar.tooltip === null) hover.append(`${bar.name}: ${number(bar.end - bar.start)} ms`);
          else appendMarkup(hover, bar.tooltip);
        });
      });
      mark.addEventListener('mouseleave', () => this.hideHover());
      if (box.width < 24) return;
      const place = {x: box.x + 4, y: box.y + 14, class: 'memprof-bar-text'};
      svg('text', place, canvas, shorten(bar.name, box.width - 6));
    }
  }

  window.memprofCharts.Timeline = Timeline;
})();
