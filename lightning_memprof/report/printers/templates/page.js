"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["auto", "light", "dark"];
  const kept = () => { try { return localStorage.getItem("memprof-theme") || "auto"; } catch { return "auto"; } };
  const keep = (theme) => { try { localStorage.setItem("memprof-theme", theme); } catch { /* storage is disabled */ } };
  const apply = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme; else delete root.dataset.theme;
  };
  apply(kept());

  const compare = (first, second) => {
    const numbers = typeof first === "number" && typeof second === "number";
    return numbers ? first - second : String(first).localeCompare(String(second), "en", { numeric: true });
  };
  const valueOf = (row, column, isNumber) => {
    const cell = row.cells[column];
    const raw = cell.dataset.sort;
    if (isNumber) return raw === undefined || raw === "" ? null : Number(raw);
    return (raw ?? cell.textContent).toLowerCase();
  };
  const sort = (head) => {
    const table = head.closest("table");
    const isNumber = head.classList.contains("number");
    const first = isNumber ? "descending" : "ascending";
    const order = head.ariaSort === first ? (isNumber ? "ascending" : "descending") : first;
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    head.ariaSort = order;
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, head.cellIndex, isNumber), row]);
    // Unknown values are last in either order.
    rows.sort(([one], [other]) => one === null || other === null ? (one === null) - (other === null) : sign * compare(one, other));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  const search = (input) => {
    const figure = document.getElementById(input.dataset.table);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    const rows = figure.querySelector("tbody").rows;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    figure.querySelector(".count").textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length} rows`;
  };
  const unfold = (id) => {
    const target = document.getElementById(id);
    for (const fold of [target?.closest("details"), target?.querySelector(":scope > details.fold")]) if (fold) fold.open = true;
  };
  const reveal = () => {
    unfold(location.hash.slice(1));
    const row = document.getElementById(location.hash.slice(1))?.closest("tbody tr");
    if (row?.hidden) {
      const input = row.closest("figure").querySelector("input[type=search]");
      input.value = "";
      search(input);
      row.scrollIntoView({ block: "center" });
    }
  };
  const follow = () => {
    const links = new Map([...document.querySelectorAll("nav li a")].map((link) => [link.hash.slice(1), link]));
    const seen = new Set();
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
      const here = [...links.keys()].find((id) => seen.has(id));
      for (const [id, link] of links) id === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }, { rootMargin: "-10% 0px -60% 0px" });
    for (const section of document.querySelectorAll("main section")) watch.observe(section);
  };

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    let theme = kept();
    const say = () => { button.textContent = `colors: ${theme}`; };
    button.hidden = false;
    say();
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      keep(theme);
      apply(theme);
      say();
    });
    document.addEventListener("click", (event) => {
      const head = event.target.closest?.("table.sortable thead th");
      if (head) sort(head);
      const link = event.target.closest?.("a[href^='#']");
      if (link) unfold(link.hash.slice(1));
    });
    // Paper has everything.
    let folded = [];
    window.addEventListener("beforeprint", () => {
      folded = [...document.querySelectorAll("details.fold:not([open])")];
      for (const fold of folded) fold.open = true;
    });
    window.addEventListener("afterprint", () => { for (const fold of folded) fold.open = false; });
    document.addEventListener("input", (event) => {
      if (event.target.matches?.("input[type=search][data-table]")) search(event.target);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && event.target.matches?.("input[type=search][data-table]")) {
        event.target.value = "";
        search(event.target);
      }
    });
    window.addEventListener("hashchange", reveal);
    unfold(location.hash.slice(1));
    follow();
  });
})();
