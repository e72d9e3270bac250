// What the parts of the tab share.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const DRAWN = "http://www.w3.org/2000/svg";

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(DRAWN, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Set a selector's options where they changed: an open list would close otherwise.
export function fill(select, options, value) {
  const words = JSON.stringify(options);
  if (select.dataset.words !== words) {
    select.dataset.words = words;
    select.replaceChildren(...options.map(([key, label]) => element("option", { value: key }, label)));
  }
  select.value = value;
}

// A server that has ended gives an error in words too.
export async function ask(route) {
  try {
    const answer = await fetch(route, { cache: "no-store" });
    return await answer.json();
  } catch {
    return { error: "TensorBoard does not answer" };
  }
}

// TensorBoard hides the tabs that are not looked at, and browsers those of their own.
export const isSeen = () => !document.hidden && window.innerWidth > 0 && window.innerHeight > 0;

function outerTheme() {
  try {
    return window.parent.document.body.classList.contains("dark-mode") ? "dark" : "light";
  } catch {
    return "";
  }
}

// TensorBoard's own choice of colours is the tab's; in the page, what a person chose there comes first.
export function themed(frame) {
  const theme = outerTheme();
  let own = "auto";
  try { own = localStorage.getItem("memprof-theme") || "auto"; } catch { /* a browser that keeps nothing */ }
  for (const [root, chosen] of [[document.documentElement, "auto"], [frame?.contentDocument?.documentElement, own]]) {
    if (root && theme && chosen === "auto") root.dataset.theme = theme;
  }
}

export function followTheme() {
  themed(null);
  try {
    const watch = new MutationObserver(() => themed(document.querySelector("#page")));
    watch.observe(window.parent.document.body, { attributeFilter: ["class"] });
  } catch { /* not inside of TensorBoard */ }
}
