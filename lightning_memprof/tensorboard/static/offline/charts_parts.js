// Pie chart and table.
'use strict';

(() => {
  const {Chart, appendMarkup, events, html, shorten, svg, textOf, valueOf} = window.memprofCharts;

  class PieChart extends Chart {
    paint() {
      const height = this.options.height || 300;
      const canvas = this.frame(height);
      const values = this.table.rows.map(row => Math.max(Number(valueOf(row[1])) || 0, 0));
      const total = values.reduce((sum, value) => sum + value, 0);
      const wide = this.options.legend !== 'none';
      const top = this.options.title ? 28 : 6;
      const space = wide ? Math.min(this.width * 0.5, this.width - 150) : this.width;
      const radius = Math.max(Math.min(space, height - top - 8) / 2 - 4, 20);
      const centre = [wide ? radius + 12 : this.width / 2, top + (height - top) / 2];
      if (this.options.title) {
        svg('text', {x: 6, y: 17, class: 'memprof-title'}, canvas, shorten(this.options.title, this.width * 0.9));
      }
      this.slices = [];
      if (total === 0) {
        svg('text', {x: centre[0], y: centre[1], class: 'memprof-middle'}, canvas, 'no time recorded');
      } else {
        let before = 0;
        values.forEach((value, row) => {
          this.slice(row, before / total, value / total, centre, radius);
          before += value;
        });
      }
      this.total = total;
      this.values = values;
      if (wide) this.legend(2 * radius + 30, top, height - top - 4);
      this.showSelection();
    }

    slice(row, start, share, [x, y], radius) {
      const inner = radius * (this.options.pieHole || 0);
      const at = (part, from) => {
        const angle = 2 * Math.PI * part;
        return `${x + from * Math.sin(angle)} ${y - from * Math.cos(angle)}`;
      };
      // A full ring cannot be drawn as one arc: its ends coincide.
      const end = start + Math.min(share, 0.99999);
      const big = end - start > 0.5 ? 1 : 0;
      const d = `M${at(start, inner)}L${at(start, radius)}A${radius} ${radius} 0 ${big} 1 ${at(end, radius)}`
        + `L${at(end, inner)}A${inner} ${inner} 0 ${big} 0 ${at(start, inner)}Z`;
      const name = String(valueOf(this.table.rows[row][0]));
      const mark = svg('path', {d, fill: this.colour(row), class: 'memprof-mark', 'data-row': row}, this.canvas);
      mark.setAttribute('data-name', name);
      mark.setAttribute('data-value', valueOf(this.table.rows[row][1]));
      this.listen(mark, row);
      this.slices[row] = {mark, middle: start + share / 2, centre: [x, y], radius};
      if (share < 0.05) return;
      const angle = 2 * Math.PI * (start + share / 2);
      const from = inner ? (inner + radius) / 2 : radius * 0.65;
      const place = {x: x + from * Math.sin(angle), y: y - from * Math.cos(angle) + 4, class: 'memprof-share'};
      svg('text', place, this.canvas, `${(share * 100).toFixed(1)}%`);
    }

    listen(mark, row) {
      mark.addEventListener('mouseenter', () => events.trigger(this, 'onmouseover', {row, column: null}));
      mark.addEventListener('mouseleave', () => events.trigger(this, 'onmouseout', {row, column: null}));
      mark.addEventListener('click', () => {
        this.setSelection([{row, column: null}]);
        events.trigger(this, 'select');
      });
    }

    legend(left, top, height) {
      const list = html('div', 'memprof-legend memprof-side', this.root);
      list.style.left = `${left}px`;
      list.style.top = `${top}px`;
      list.style.maxHeight = `${height}px`;
      this.table.rows.forEach((row, index) => {
        const entry = html('div', 'memprof-entry', list);
        html('i', 'memprof-key', entry).style.background = this.colour(index);
        html('span', '', entry, String(valueOf(row[0])));
        entry.title = String(valueOf(row[0]));
        this.listen(entry, index);
      });
    }

    showSelection() {
      this.hideHover();
      for (const {mark} of this.slices.filter(Boolean)) mark.classList.remove('memprof-chosen');
      const [chosen] = this.selection;
      const slice = chosen && this.slices[chosen.row];
      if (!slice) return;
      slice.mark.classList.add('memprof-chosen');
      const angle = 2 * Math.PI * slice.middle;
      const [x, y] = [slice.centre[0] + slice.radius * 0.8 * Math.sin(angle), slice.centre[1] - slice.radius * 0.8 * Math.cos(angle)];
      this.showHover(x, y, box => this.tell(box, chosen.row));
    }

    tell(box, row) {
      const [name, value] = this.table.rows[row];
      const tooltip = this.table.tooltip(1);
      if (tooltip >= 0) {
        appendMarkup(box, valueOf(this.table.rows[row][tooltip]));
        return;
      }
      const share = `${((this.values[row] / this.total) * 100).toFixed(1)}%`;
      html('div', 'memprof-name', box, String(valueOf(name)));
      html('b', '', box, this.options.tooltip?.text === 'percentage' ? share : `${textOf(value)} (${share})`);
    }
  }

  class Table extends Chart {
    paint() {
      const height = this.fixedHeight();
      this.root = html('div', 'memprof-table', this.element);
      if (height > 0) this.root.style.maxHeight = `${height}px`;
      this.order = this.table.rows.map((_, row) => row);
      this.page = 0;
      this.sorted = {column: this.options.sortColumn, up: this.options.sortAscending !== false};
      if (Number.isInteger(this.sorted.column) && this.sorted.column >= 0) this.sort();
      this.fill();
    }

    // Height from the page's style sheet; 0 if the element grows with the table. The element's inline height is that of
    // the previous table.
    fixedHeight() {
      const place = this.element.parentElement;
      if (!place || this.options.height !== '100%') return 0;
      const {height} = place.style;
      place.style.height = '';
      const fixed = place.clientHeight;
      place.style.height = height;
      return fixed;
    }

    // Numbers sort by value, everything else as text; missing values sort first in ascending order.
    sort() {
      const {column, up} = this.sorted;
      const compare = (one, two) => {
        const [a, b] = [valueOf(this.table.rows[one][column]) ?? '', valueOf(this.table.rows[two][column]) ?? ''];
        if (typeof a === 'number' && typeof b === 'number') return a - b;
        return String(a).localeCompare(String(b), 'en', {numeric: true});
      };
      this.order.sort((one, two) => (up ? compare(one, two) : compare(two, one)) || one - two);
    }

    fill() {
      this.root.replaceChildren();
      const table = html('table', '', this.root);
      this.head(table.createTHead().insertRow());
      const body = table.createTBody();
      const size = this.options.page === 'enable' ? this.options.pageSize || 10 : this.order.length;
      for (const row of this.order.slice(this.page * size, (this.page + 1) * size)) this.row(body.insertRow(), row);
      if (this.order.length > size) this.pages(size);
    }

    shown() {
      return this.table.columns.flatMap((column, index) => (column.role ? [] : [index]));
    }

    head(line) {
      for (const column of this.shown()) {
        const cell = html('th', '', line);
        const chosen = this.sorted.column === column;
        cell.setAttribute('aria-sort', chosen ? (this.sorted.up ? 'ascending' : 'descending') : 'none');
        const button = html('button', '', cell, this.table.label(column));
        if (chosen) html('span', 'memprof-arrow', button, this.sorted.up ? ' ▲' : ' ▼');
        button.addEventListener('click', () => {
          this.sorted = {column, up: chosen ? !this.sorted.up : true};
          this.page = 0;
          this.sort();
          this.fill();
        });
      }
    }

    row(line, row) {
      for (const column of this.shown()) {
        const value = this.table.rows[row][column];
        const cell = line.insertCell();
        if (typeof valueOf(value) === 'number') cell.className = 'memprof-number';
        if (this.options.allowHtml) appendMarkup(cell, textOf(value));
        else cell.textContent = textOf(value);
        // The page passes a style only to get a grey background, which would not fit dark pages.
        if (/background/.test(this.table.property(row, column, 'style') || '')) cell.classList.add('memprof-shaded');
      }
    }

    pages(size) {
      const last = Math.ceil(this.order.length / size) - 1;
      const bar = html('div', 'memprof-pages', this.root);
      const turn = (text, page) => {
        const button = html('button', '', bar, text);
        button.disabled = page < 0 || page > last;
        button.addEventListener('click', () => {
          this.page = page;
          this.fill();
        });
      };
      turn('◀', this.page - 1);
      html('span', '', bar, `${this.page + 1} of ${last + 1}`);
      turn('▶', this.page + 1);
    }

    // A table has the width of its element; no redraw.
    watchWidth() {}
  }

  Object.assign(window.memprofCharts, {PieChart, Table});
})();
