// Charts with two axes: lines, columns, stepped areas and a mix of columns and lines.
'use strict';

(() => {
  const {Chart, appendMarkup, events, html, number, shorten, svg, textOf, ticks, valueOf} = window.memprofCharts;

  class AxesChart extends Chart {
    // Type of series `index` (from 0): 'line', 'bars' or 'area'.
    kind() {
      return 'line';
    }

    get stacked() {
      return false;
    }

    // Whether the axis shows the numbers of the first column instead of one category per row.
    get continuous() {
      return false;
    }

    paint() {
      const height = this.options.height || 400;
      const canvas = this.frame(height);
      this.series = this.table.series();
      this.second = this.series.map((_, index) => this.options.series?.[index]?.targetAxisIndex === 1);
      const bottom = 30 + (this.options.hAxis?.title ? 20 : 0) + (this.series.length ? 28 : 0);
      const right = this.second.includes(true) ? 90 : 24;
      this.area = {left: 92, top: this.options.title ? 34 : 14, right: this.width - right, bottom: height - bottom};
      this.area.right = Math.max(this.area.right, this.area.left + 20);
      this.places();
      this.scales = [this.scale(false), this.scale(true)];
      this.titles(canvas, height);
      this.horizontal(canvas);
      this.vertical(canvas, 0);
      if (this.second.includes(true)) this.vertical(canvas, 1);
      this.marks = svg('g', {}, canvas);
      this.paintSeries();
      this.legend();
      this.chosen = svg('g', {}, canvas);
      this.hover(canvas);
      this.showSelection();
    }

    // Positions of the rows: `first` and `last` are the ends of the axis, `at[row]` is the row's position.
    places() {
      const rows = this.table.rows;
      if (this.continuous) {
        this.at = rows.map(row => Number(valueOf(row[0])));
        let [first, last] = [Infinity, -Infinity];
        for (const at of this.at) [first, last] = [Math.min(first, at), Math.max(last, at)];
        this.whole = Number.isFinite(first) ? [first, first === last ? first + 1 : last] : [0, 1];
      } else {
        this.at = rows.map((_, row) => row);
        this.whole = [-0.5, Math.max(rows.length, 1) - 0.5];
      }
      [this.first, this.last] = this.zoomed || this.whole;
    }

    x(at) {
      return this.area.left + ((at - this.first) / (this.last - this.first)) * (this.area.right - this.area.left);
    }

    y(value, second) {
      const {low, high} = this.scales[second ? 1 : 0];
      return this.area.bottom - ((value - low) / (high - low)) * (this.area.bottom - this.area.top);
    }

    amount(row, column) {
      return Number(valueOf(this.table.rows[row][column])) || 0;
    }

    scale(second) {
      let [low, high] = [0, 0];
      this.table.rows.forEach((_, row) => {
        let [up, down] = [0, 0];
        this.series.forEach((column, index) => {
          if (this.second[index] !== second) return;
          const value = this.amount(row, column);
          if (!this.stacked) [up, down] = [Math.max(up, value), Math.min(down, value)];
          else if (value > 0) up += value;
          else down += value;
        });
        [low, high] = [Math.min(low, down), Math.max(high, up)];
      });
      const marks = ticks(low, high === low ? low + 1 : high, 5);
      return {marks, low: marks[0], high: marks[marks.length - 1]};
    }

    titles(canvas, height) {
      const {title, hAxis, vAxis} = this.options;
      const middle = (this.area.left + this.area.right) / 2;
      if (title) svg('text', {x: this.area.left, y: 18, class: 'memprof-title'}, canvas, shorten(title, this.width - 100));
      if (hAxis?.title) {
        svg('text', {x: middle, y: height - 36, class: 'memprof-middle memprof-axis-name'}, canvas, hAxis.title);
      }
      if (vAxis?.title) {
        const y = (this.area.top + this.area.bottom) / 2;
        const turned = {x: 0, y: 0, transform: `translate(16 ${y}) rotate(-90)`};
        svg('text', {...turned, class: 'memprof-middle memprof-axis-name'}, canvas, vAxis.title);
      }
    }

    horizontal(canvas) {
      const y = this.area.bottom + 18;
      const wide = this.area.right - this.area.left;
      if (this.continuous) {
        for (const at of ticks(this.first, this.last, wide / 110)) {
          if (at < this.first || at > this.last) continue;
          const x = this.x(at);
          svg('line', {x1: x, x2: x, y1: this.area.top, y2: this.area.bottom, class: 'memprof-grid'}, canvas);
          svg('text', {x, y, class: 'memprof-middle'}, canvas, number(at));
        }
        return;
      }
      const names = this.table.rows.map(row => String(valueOf(row[0])));
      const longest = Math.min(names.reduce((most, name) => Math.max(most, name.length), 1) * 6.2 + 14, 160);
      const every = Math.max(Math.ceil((names.length * Math.min(longest, 160)) / wide), 1);
      for (let row = 0; row < names.length; row += every) {
        const space = (wide / names.length) * every - 6;
        const text = svg('text', {x: this.x(row), y, class: 'memprof-middle'}, canvas, shorten(names[row], space));
        svg('title', {}, text, names[row]);
      }
    }

    vertical(canvas, which) {
      const {marks} = this.scales[which];
      for (const value of marks) {
        const y = this.y(value, which === 1);
        if (which === 0) {
          const name = value === 0 ? 'memprof-base' : 'memprof-grid';
          svg('line', {x1: this.area.left, x2: this.area.right, y1: y, y2: y, class: name}, canvas);
        }
        const place = which === 0 ? {x: this.area.left - 7, class: 'memprof-end'} : {x: this.area.right + 7};
        svg('text', {...place, y: y + 4}, canvas, number(value));
      }
    }

    paintSeries() {
      const below = {up: this.at.map(() => 0), down: this.at.map(() => 0)};
      const bars = this.series.map((_, index) => index).filter(index => this.kind(index) === 'bars');
      this.series.forEach((column, index) => {
        if (this.kind(index) === 'line') this.line(column, index);
        else this.blocks(column, index, below, bars);
      });
    }

    // Bars and areas: one rectangle per row, on top of previous series if stacked.
    blocks(column, index, below, bars) {
      const slot = (this.area.right - this.area.left) / Math.max(this.at.length, 1);
      const area = this.kind(index) === 'area';
      const beside = this.stacked || area ? 1 : bars.length;
      const whole = area ? slot : Math.min(slot * 0.62, 90 * beside);
      const width = whole / beside;
      const shift = beside > 1 ? bars.indexOf(index) * width : 0;
      this.at.forEach((at, row) => {
        const value = this.amount(row, column);
        const side = value >= 0 ? below.up : below.down;
        const base = this.stacked ? side[row] : 0;
        if (this.stacked) side[row] += value;
        const [one, two] = [this.y(base, this.second[index]), this.y(base + value, this.second[index])];
        const mark = svg('rect', {
          x: this.x(at) - whole / 2 + shift, y: Math.min(one, two), width: Math.max(width, 0.5), height: Math.abs(one - two),
          fill: this.colour(index), class: 'memprof-mark', 'data-series': this.table.label(column), 'data-row': row,
          'data-name': valueOf(this.table.rows[row][0]), 'data-value': value,
        }, this.marks);
        if (area) mark.setAttribute('fill-opacity', this.options.areaOpacity ?? 0.4);
        mark.addEventListener('mousemove', event => this.tell(event, row, column));
        mark.addEventListener('mouseleave', () => this.hideHover());
        mark.addEventListener('click', () => {
          this.setSelection([{row, column}]);
          events.trigger(this, 'select', {});
        });
      });
    }

    line(column, index) {
      if (this.at.length === 0) return;
      const points = [];
      let [at, low, high, last] = [null, 0, 0, 0];
      const put = () => {
        if (at === null) return;
        points.push(`${at} ${low.toFixed(1)}`);
        if (high !== low) points.push(`${at} ${high.toFixed(1)}`);
        if (last !== high) points.push(`${at} ${last.toFixed(1)}`);
      };
      // 100,000 points on 1,000 pixels: each half pixel keeps its min, max and last point.
      this.at.forEach((place, row) => {
        const x = (Math.round(this.x(place) * 2) / 2).toFixed(1);
        const y = this.y(this.amount(row, column), this.second[index]);
        if (x !== at) {
          put();
          [at, low, high, last] = [x, y, y, y];
        } else {
          [low, high, last] = [Math.min(low, y), Math.max(high, y), y];
        }
      });
      put();
      const clip = `memprof-clip-${Math.random().toString(36).slice(2)}`;
      const {left, top, right, bottom} = this.area;
      const shape = svg('clipPath', {id: clip}, this.marks);
      svg('rect', {x: left - 1, y: top - 2, width: right - left + 2, height: bottom - top + 4}, shape);
      const path = {d: `M${points.join('L')}`, stroke: this.colour(index), 'clip-path': `url(#${clip})`};
      svg('path', {...path, class: 'memprof-line', 'data-series': this.table.label(column)}, this.marks);
    }

    legend() {
      if (this.options.legend === 'none' || this.series.length === 0) return;
      const list = html('div', 'memprof-legend memprof-below', this.root);
      this.series.forEach((column, index) => {
        const entry = html('div', 'memprof-entry', list);
        html('i', 'memprof-key', entry).style.background = this.colour(index);
        html('span', '', entry, this.table.label(column));
      });
    }

    place(event) {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    tell(event, row, column) {
      this.showHover(...this.place(event), box => {
        const tooltip = this.table.tooltip(column);
        if (tooltip >= 0 && valueOf(this.table.rows[row][tooltip])) {
          appendMarkup(box, valueOf(this.table.rows[row][tooltip]));
          return;
        }
        html('div', 'memprof-name', box, textOf(this.table.rows[row][0]));
        html('b', '', box, `${this.table.label(column)}: ${textOf(this.table.rows[row][column])}`);
      });
    }

    hover() {}
  }

  class ColumnChart extends AxesChart {
    kind() {
      return 'bars';
    }

    get stacked() {
      return Boolean(this.options.isStacked);
    }
  }

  class SteppedAreaChart extends ColumnChart {
    kind() {
      return 'area';
    }
  }

  class ComboChart extends AxesChart {
    kind(index) {
      return this.options.series?.[index]?.type || this.options.seriesType || 'line';
    }
  }

  class LineChart extends AxesChart {
    get continuous() {
      return this.table.columns[0]?.type === 'number';
    }

    // Drawing other rows resets the zoom.
    draw(table, options) {
      this.zoomed = null;
      super.draw(table, options);
    }

    nearest(x) {
      const wanted = this.first + ((x - this.area.left) / (this.area.right - this.area.left)) * (this.last - this.first);
      let [low, high] = [0, this.at.length - 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.at[middle] < wanted) low = middle + 1;
        else high = middle;
      }
      return low > 0 && wanted - this.at[low - 1] < this.at[low] - wanted ? low - 1 : low;
    }

    hover(canvas) {
      if (this.at.length === 0) return;
      canvas.addEventListener('mousemove', event => this.follow(event));
      const zooms = this.continuous && this.options.explorer?.actions?.includes('dragToZoom');
      if (!zooms) return;
      canvas.addEventListener('mousedown', event => {
        if (event.button === 0) this.startZoom(event);
      });
      canvas.addEventListener('contextmenu', event => {
        event.preventDefault();
        this.zoomTo(null);
      });
    }

    // Values of all series at the row nearest to the pointer.
    follow(event) {
      const [x, y] = this.place(event);
      if (x < this.area.left || x > this.area.right || y > this.area.bottom) {
        this.hideHover();
        return;
      }
      const row = this.nearest(x);
      this.showHover(this.x(this.at[row]), y, box => {
        html('div', 'memprof-name', box, `${this.options.hAxis?.title || this.table.label(0)}: ${textOf(this.table.rows[row][0])}`);
        for (const column of this.series) {
          const line = html('div', '', box, `${this.table.label(column)}: `);
          html('b', '', line, textOf(this.table.rows[row][column]));
          const tooltip = this.table.tooltip(column);
          if (tooltip >= 0 && valueOf(this.table.rows[row][tooltip])) appendMarkup(box, valueOf(this.table.rows[row][tooltip]));
        }
      });
    }

    startZoom(start) {
      start.preventDefault();
      const {left, right, top, bottom} = this.area;
      const inside = event => Math.min(Math.max(this.place(event)[0], left), right);
      const from = inside(start);
      const band = svg('rect', {x: from, y: top, width: 0, height: bottom - top, class: 'memprof-zoom'}, this.canvas);
      const move = event => {
        band.setAttribute('x', Math.min(from, inside(event)));
        band.setAttribute('width', Math.abs(inside(event) - from));
      };
      const end = event => {
        window.removeEventListener('mousemove', move);
        window.removeEventListener('mouseup', end);
        band.remove();
        if (!this.root) return;
        const [one, two] = [Math.min(from, inside(event)), Math.max(from, inside(event))];
        if (two - one > 4) this.zoomTo([this.valueAt(one), this.valueAt(two)]);
      };
      window.addEventListener('mousemove', move);
      window.addEventListener('mouseup', end);
    }

    zoomTo(ends) {
      this.zoomed = ends;
      this.clear();
      this.paint();
    }

    valueAt(x) {
      if (Math.abs(x - this.area.right) < 1e-6) return this.last;
      return this.first + ((x - this.area.left) / (this.area.right - this.area.left)) * (this.last - this.first);
    }

    getChartLayoutInterface() {
      const {left, top, right, bottom} = this.area;
      return {
        getChartAreaBoundingBox: () => ({left, top, width: right - left, height: bottom - top}),
        getHAxisValue: x => this.valueAt(x),
        getXLocation: value => this.x(value),
      };
    }

    showSelection() {
      this.chosen.replaceChildren();
      for (const {row, column} of this.selection) {
        const index = this.series.indexOf(column);
        if (index < 0 || !this.table.rows[row] || this.at[row] < this.first || this.at[row] > this.last) continue;
        const [x, y] = [this.x(this.at[row]), this.y(this.amount(row, column), this.second[index])];
        svg('line', {x1: x, x2: x, y1: this.area.top, y2: this.area.bottom, class: 'memprof-base'}, this.chosen);
        svg('circle', {cx: x, cy: y, r: 4.5, fill: this.colour(index)}, this.chosen);
      }
    }
  }

  Object.assign(window.memprofCharts, {ColumnChart, ComboChart, LineChart, SteppedAreaChart});
})();
