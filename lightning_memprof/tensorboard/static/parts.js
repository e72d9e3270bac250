// Helpers shared by the modules of the tab.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Replace a selector's options only when they change: replacing them closes an open list.
export function fill(select, options, value) {
  const words = JSON.stringify(options);
  if (select.dataset.words !== words) {
    select.dataset.words = words;
    select.replaceChildren(...options.map(([key, label]) => element("option", { value: key }, label)));
  }
  select.value = value;
}

export async function ask(route) {
  try {
    const answer = await fetch(route, { cache: "no-store" });
    return await answer.json();
  } catch {
    return { error: "TensorBoard is not responding" };
  }
}

// TensorBoard gives inactive tabs no size; browsers mark theirs as hidden.
export const isSeen = () => !document.hidden && window.innerWidth > 0 && window.innerHeight > 0;

function outerTheme() {
  try {
    return window.parent.document.body.classList.contains("dark-mode") ? "dark" : "light";
  } catch {
    return "";
  }
}

// The tab follows TensorBoard's theme; in the report, the reader's own choice has priority.
export function themed(frame) {
  const theme = outerTheme();
  let own = "auto";
  try { own = localStorage.getItem("memprof-theme") || "auto"; } catch { /* no local storage */ }
  for (const [root, chosen] of [[document.documentElement, "auto"], [frame?.contentDocument?.documentElement, own]]) {
    if (root && theme && chosen === "auto") root.dataset.theme = theme;
  }
}

export function followTheme() {
  themed(null);
  try {
    const watch = new MutationObserver(() => themed(document.querySelector("#page")));
    watch.observe(window.parent.document.body, { attributeFilter: ["class"] });
  } catch { /* not inside TensorBoard */ }
}
