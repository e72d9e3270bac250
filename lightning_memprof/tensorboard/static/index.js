// The tab: which run, window and rank is looked at, and what of it. Texts of a run are set as text, never as HTML.
import { drawLive } from "./live.js";
import { showTrace } from "./trace.js";
import { element, fill, ask, isSeen, followTheme, themed } from "./parts.js";

const LOOK_MS = 2000;
const WAIT_MS = 400;
// A run that goes on changes with every file that it writes; its page is made again this often at most.
const AGAIN_MS = 6000;

const state = { run: "", window: "", rank: "", other: "", view: "report" };
const shown = { key: "", revision: "", at: 0, frame: null, asking: 0, isAsking: false, list: "" };
let runs = [];
let hasProfilerTab = false;
let parts = {};

export async function render() {
  for (const name of ["page.css", "memprof.css"]) document.head.append(element("link", { rel: "stylesheet", href: name }));
  document.title = "Memprof";
  build();
  followTheme();
  await look();
  restore();
  draw();
  for (;;) {
    await new Promise((done) => setTimeout(done, LOOK_MS));
    if (!isSeen()) continue;
    await look();
    await refresh();
  }
}

function build() {
  const select = (name, label) => {
    const made = element("select", { id: name });
    made.addEventListener("change", () => change({ [name]: made.value }));
    return element("label", {}, `${label} `, made);
  };
  const button = (view, label) => {
    const made = element("button", { type: "button", id: `view-${view}` }, label);
    made.addEventListener("click", () => change({ view }));
    return made;
  };
  const all = element("button", { type: "button", id: "all" }, "all runs");
  all.addEventListener("click", () => change({ run: "", other: "", view: "report" }));
  parts = {
    bar: element("div", { class: "bar", role: "toolbar", "aria-label": "What is shown" },
      all, select("run", "run"), select("other", "compare with"), select("window", "window"), select("rank", "rank"),
      element("span", { class: "views" }, button("report", "report"), button("trace", "trace")),
      element("output", { id: "said", "aria-live": "polite" })),
    live: element("div", { class: "live", id: "live", hidden: "" }),
    place: element("div", { class: "place", id: "place" }),
  };
  document.body.append(parts.bar, parts.live, parts.place);
}

async function look() {
  const found = await ask("runs");
  if (found.error) return say(found.error, true);
  runs = found.runs;
  parts.places = found.places;
  parts.isCut = found.is_cut;
  hasProfilerTab = found.has_profiler_tab;
}

const of = (id) => runs.find((one) => one.id === id);

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("memprof-tab") || "{}");
    if (of(kept.run)) Object.assign(state, kept);
  } catch { /* a browser that keeps nothing */ }
  if (!of(state.other)) state.other = "";
  if (!state.run && runs.length === 1) state.run = runs[0].id;
}

function change(what) {
  if ("run" in what && what.run !== state.run) Object.assign(state, { window: "", rank: "" });
  Object.assign(state, what);
  if (state.other === state.run) state.other = "";
  if (state.other && what.view !== "trace") state.view = "report";
  if (what.view === "trace") state.other = "";
  try { sessionStorage.setItem("memprof-tab", JSON.stringify(state)); } catch { /* as above */ }
  draw();
}

function draw() {
  Object.assign(shown, { key: "", revision: "", frame: null, isAsking: false, list: "" });
  shown.asking += 1;
  say("");
  parts.place.replaceChildren();
  drawBar();
  if (!runs.length) return drawEmpty();
  if (!state.run) return drawList();
  drawNow();
  if (state.view === "trace") return drawTrace();
  return askPage();
}

function drawBar() {
  const run = of(state.run);
  const named = (one) => [one.id, `${one.label}${one.state === "finished" ? "" : ` (${one.state})`}`];
  fill(parts.bar.querySelector("#run"), [["", "choose a run"], ...runs.map(named)], state.run);
  fill(parts.bar.querySelector("#other"), [["", "nothing"], ...runs.filter((one) => one.id !== state.run).map(named)], state.other);
  const windows = run && !state.other ? run.windows : [];
  fill(parts.bar.querySelector("#window"), [["", "all"], ...windows.map((one) => [`${one.index}`, windowName(one)])], state.window);
  const ranks = run && !state.other ? run.ranks : [];
  fill(parts.bar.querySelector("#rank"), [["", "lowest"], ...ranks.map((rank) => [`${rank}`, `${rank}`])], state.rank);
  parts.bar.querySelector("#rank").parentElement.hidden = ranks.length < 2;
  parts.bar.querySelector("#window").parentElement.hidden = !windows.length;
  parts.bar.querySelector("#other").parentElement.hidden = !run || runs.length < 2;
  parts.bar.querySelector(".views").hidden = !run;
  parts.bar.hidden = !runs.length;
  for (const view of ["report", "trace"]) parts.bar.querySelector(`#view-${view}`).setAttribute("aria-pressed", `${state.view === view}`);
}

const windowName = (one) => {
  const steps = one.steps.length ? `steps ${one.steps[0]}-${one.steps.at(-1)}` : "no steps";
  return `${one.index}: ${steps}${one.closed ? "" : ", open"}`;
};

function drawEmpty() {
  parts.live.hidden = true;
  const where = parts.places?.length ? `Below ${parts.places.join(", ")} is no run of lightning-memprof yet.` :
    "TensorBoard's log directory is not on this machine; this tab reads files of this machine alone.";
  parts.place.append(element("div", { class: "empty" },
    element("h1", {}, "No run yet"),
    element("p", {}, where),
    element("p", {}, "Train with the callback, or start TensorBoard on a directory that has a run somewhere in it:"),
    element("pre", {}, "from lightning_memprof import MemProfilerCallback\n\ntrainer = Trainer(callbacks=[MemProfilerCallback()], profiler=\"fts_extended\")"),
    element("pre", {}, "tensorboard --logdir lightning_logs"),
    element("p", {}, "This page looks again by itself.")));
}

function drawList() {
  parts.live.hidden = true;
  const heads = ["run", "state", "stage", "model", "ranks", "steps", "windows", "started"];
  const body = element("tbody");
  for (const run of runs) {
    const open = element("button", { type: "button" }, run.label);
    open.addEventListener("click", () => change({ run: run.id }));
    const started = run.started_ns ? new Date(run.started_ns / 1e6).toLocaleString() : "-";
    const there = run.world_size && run.world_size > run.ranks.length ? `${run.ranks.length} of ${run.world_size}` : `${run.ranks.length}`;
    body.append(element("tr", {},
      element("th", { scope: "row", class: "code wide" }, open),
      element("td", { class: run.state === "exception" ? "bad wide" : "wide" }, element("i", { class: `dot ${run.state}` }), run.words),
      element("td", {}, run.stage || "-"), element("td", {}, run.model || "-"), element("td", { class: "number" }, there),
      element("td", { class: "number" }, run.steps === null ? "-" : run.steps.toLocaleString("en").replaceAll(",", " ")),
      element("td", { class: "number" }, `${run.windows.filter((one) => one.closed).length}`),
      element("td", {}, started)));
  }
  const kinds = { run: "wide", state: "wide", ranks: "number", steps: "number", windows: "number" };
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col", class: kinds[name] || "" }, name)));
  const cut = parts.isCut ? " There are more; start TensorBoard on a directory with fewer to see those." : "";
  parts.place.replaceChildren(element("div", { class: "list" },
    element("h1", {}, runs.length === 1 ? "1 run" : `${runs.length} runs`),
    element("p", { class: "lead" }, `Below ${parts.places.join(", ")}, the newest first.${cut}`),
    element("div", { class: "scroll" }, element("table", { id: "runs" }, element("thead", {}, head), body))));
  shown.list = JSON.stringify(runs);
}

async function refresh() {
  drawBar();
  if (!runs.length) {
    if (!parts.place.querySelector(".empty")) draw();
    return;
  }
  const run = of(state.run);
  if (!run) {
    if (state.run) {
      change({ run: "", other: "" });
      return say("that run is not there any more");
    }
    if (parts.place.querySelector(".empty") && runs.length === 1) return change({ run: runs[0].id });
    if (shown.list !== JSON.stringify(runs)) drawList();
    return;
  }
  await drawNow();
  const revision = [of(state.other), run].filter(Boolean).map((one) => one.revision).join(".");
  const isOld = shown.revision && shown.revision !== revision;
  // What ended is shown as it ended; what goes on, a few seconds later.
  // Nobody waits for it here: the run is followed while its page is made.
  if (state.view === "report" && isOld && !shown.isAsking && (run.state !== "running" || Date.now() - shown.at > AGAIN_MS)) askPage();
}

async function drawNow() {
  const id = state.run;
  const run = of(id);
  if (!run || state.other || (run.state !== "running" && run.state !== "silent")) {
    parts.live.hidden = true;
    return;
  }
  const found = await ask(`live?run=${id}`);
  if (state.run !== id || state.other) return;
  if (found.error) say(found.error, true);
  else drawLive(parts.live, found);
}

async function askPage() {
  const mine = ++shown.asking;
  shown.isAsking = true;
  await waitForPage(mine);
  if (mine === shown.asking) shown.isAsking = false;
}

async function waitForPage(mine) {
  const asked = new URLSearchParams();
  for (const name of ["run", "other", "window", "rank"]) if (state[name]) asked.set(name, state[name]);
  if (!shown.frame) parts.place.replaceChildren(element("div", { class: "wait", id: "wait" }, "Making the page …"));
  // Of a run that goes on each asking may mean another page; the one that was begun is waited for by its key.
  let found = await ask(`page?${asked}`);
  const { key, revision } = found;
  for (;;) {
    if (mine !== shown.asking) return;
    if (found.error || found.state === "failed") return failed({ revision, ...found }, asked);
    if (found.state === "ready") return showPage(key, revision);
    wait(found);
    await new Promise((done) => setTimeout(done, WAIT_MS));
    found = await ask(`page?key=${key}`);
  }
}

function wait(found) {
  const { file, done, total } = found.progress;
  const words = found.state === "waiting" ? "Waiting for other pages …" : file ? `Reading ${file} …` : "Making the page …";
  if (shown.frame) return say("updating …");
  const bar = element("progress", total && done < total ? { max: total, value: done } : {});
  parts.place.replaceChildren(element("div", { class: "wait", id: "wait" }, words, bar));
}

function failed(found, asked) {
  const again = element("button", { type: "button" }, "try again");
  again.addEventListener("click", async () => { await ask(`page?${asked}&again=1`); draw(); });
  shown.frame = null;
  shown.revision = found.revision || "";
  parts.place.replaceChildren(element("div", { class: "wait bad", id: "wait" }, found.error || found.message, " "), element("p", { class: "bar" }, again));
}

function showPage(key, revision) {
  shown.revision = revision;
  shown.at = Date.now();
  say("");
  if (key === shown.key) return;
  shown.key = key;
  const kept = shown.frame?.contentWindow?.scrollY || 0;
  const url = `page.html?key=${key}`;
  const frame = element("iframe", { id: "page", title: state.other ? "comparison" : "report", src: url });
  frame.addEventListener("load", () => {
    themed(frame);
    frame.contentWindow.scrollTo({ top: kept, behavior: "instant" });
  });
  shown.frame = frame;
  parts.place.replaceChildren(frame);
}

function drawTrace() {
  const mine = shown.asking;
  showTrace(parts.place, state, hasProfilerTab, () => mine === shown.asking);
}

function say(words, isBad = false) {
  const said = parts.bar.querySelector("#said");
  said.textContent = words;
  said.className = isBad ? "bad" : "";
}

