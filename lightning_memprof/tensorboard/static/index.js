// The Memprof tab: selection of run, window and rank. Names from a run are inserted as text, never as HTML.
import { drawLive } from "./live.js";
import { element, fill, ask, isSeen, followTheme, themed } from "./parts.js";

const POLL_MS = 2000;
const WAIT_MS = 400;
// A live run changes with every file it writes; its page is rendered at most this often.
const RENDER_MS = 6000;

const state = { run: "", window: "", rank: "", other: "" };
const shown = { key: "", revision: "", at: 0, frame: null, asking: 0, isAsking: false, list: "" };
let runs = [];
let parts = {};

export async function render() {
  for (const name of ["page.css", "memprof.css"]) document.head.append(element("link", { rel: "stylesheet", href: name }));
  document.title = "Memprof";
  build();
  followTheme();
  await loadRuns();
  restore();
  draw();
  for (;;) {
    await new Promise((done) => setTimeout(done, POLL_MS));
    if (!isSeen()) continue;
    await loadRuns();
    await refresh();
  }
}

function build() {
  const select = (name, label) => {
    const made = element("select", { id: name });
    made.addEventListener("change", () => change({ [name]: made.value }));
    return element("label", {}, `${label} `, made);
  };
  const all = element("button", { type: "button", id: "all" }, "all runs");
  all.addEventListener("click", () => change({ run: "", other: "" }));
  parts = {
    bar: element("div", { class: "bar", role: "toolbar", "aria-label": "Selection" },
      all, select("run", "run"), select("other", "compare with"), select("window", "window"), select("rank", "rank"),
      element("output", { id: "said", "aria-live": "polite" })),
    live: element("div", { class: "live", id: "live", hidden: "" }),
    place: element("div", { class: "place", id: "place" }),
  };
  document.body.append(parts.bar, parts.live, parts.place);
}

async function loadRuns() {
  const found = await ask("runs");
  if (found.error) return say(found.error, true);
  runs = found.runs;
  parts.places = found.places;
  parts.isCut = found.is_cut;
}

const runById = (id) => runs.find((run) => run.id === id);

function restore() {
  try {
    const saved = JSON.parse(sessionStorage.getItem("memprof-tab") || "{}");
    if (runById(saved.run)) Object.assign(state, saved);
  } catch { /* no session storage */ }
  if (!runById(state.other)) state.other = "";
  if (!state.run && runs.length === 1) state.run = runs[0].id;
}

function change(selection) {
  if ("run" in selection && selection.run !== state.run) Object.assign(state, { window: "", rank: "" });
  Object.assign(state, selection);
  if (state.other === state.run) state.other = "";
  try { sessionStorage.setItem("memprof-tab", JSON.stringify(state)); } catch { /* no session storage */ }
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
  return askPage();
}

function drawBar() {
  const run = runById(state.run);
  const option = (row) => [row.id, `${row.label}${row.state === "finished" ? "" : ` (${row.state})`}`];
  fill(parts.bar.querySelector("#run"), [["", "select a run"], ...runs.map(option)], state.run);
  fill(parts.bar.querySelector("#other"), [["", "none"], ...runs.filter((row) => row.id !== state.run).map(option)], state.other);
  const windows = run && !state.other ? run.windows : [];
  fill(parts.bar.querySelector("#window"), [["", "all"], ...windows.map((window) => [`${window.index}`, windowName(window)])], state.window);
  const ranks = run && !state.other ? run.ranks : [];
  fill(parts.bar.querySelector("#rank"), [["", "lowest"], ...ranks.map((rank) => [`${rank}`, `${rank}`])], state.rank);
  parts.bar.querySelector("#rank").parentElement.hidden = ranks.length < 2;
  parts.bar.querySelector("#window").parentElement.hidden = !windows.length;
  parts.bar.querySelector("#other").parentElement.hidden = !run || runs.length < 2;
  parts.bar.hidden = !runs.length;
}

const windowName = (window) => {
  const steps = window.steps.length ? `steps ${window.steps[0]}–${window.steps.at(-1)}` : "no steps";
  return `${window.index}: ${steps}${window.closed ? "" : ", open"}`;
};

function drawEmpty() {
  parts.live.hidden = true;
  const where = parts.places?.length ? `No lightning-memprof run below ${parts.places.join(", ")}.` :
    "TensorBoard's log directory is remote; this tab reads local files only.";
  parts.place.append(element("div", { class: "empty" },
    element("h1", {}, "No runs"),
    element("p", {}, where),
    element("p", {}, "Train with the callback, or start TensorBoard on a directory with a run below it:"),
    element("pre", {}, "trainer = Trainer(profiler=\"memprof\")"),
    element("pre", {}, "tensorboard --logdir lightning_logs"),
    element("p", {}, "This page updates automatically.")));
}

function drawList() {
  parts.live.hidden = true;
  const heads = ["run", "state", "stage", "model", "ranks", "steps", "windows", "started"];
  const body = element("tbody");
  for (const run of runs) {
    const open = element("button", { type: "button" }, run.label);
    open.addEventListener("click", () => change({ run: run.id }));
    const started = run.started_ns ? new Date(run.started_ns / 1e6).toLocaleString() : "-";
    const ranks = run.world_size && run.world_size > run.ranks.length ? `${run.ranks.length} of ${run.world_size}` : `${run.ranks.length}`;
    body.append(element("tr", {},
      element("th", { scope: "row", class: "code wide" }, open),
      element("td", { class: run.state === "exception" ? "bad wide" : "wide" }, element("i", { class: `dot ${run.state}` }), run.words),
      element("td", {}, run.stage || "-"), element("td", {}, run.model || "-"), element("td", { class: "number" }, ranks),
      element("td", { class: "number" }, run.steps === null ? "-" : run.steps.toLocaleString("en").replaceAll(",", " ")),
      element("td", { class: "number" }, `${run.windows.filter((window) => window.closed).length}`),
      element("td", {}, started)));
  }
  const kinds = { run: "wide", state: "wide", ranks: "number", steps: "number", windows: "number" };
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col", class: kinds[name] || "" }, name)));
  const cut = parts.isCut ? " The list is truncated; start TensorBoard on a subdirectory to see other runs." : "";
  parts.place.replaceChildren(element("div", { class: "list" },
    element("h1", {}, runs.length === 1 ? "1 run" : `${runs.length} runs`),
    element("p", { class: "lead" }, `Below ${parts.places.join(", ")}, newest first.${cut}`),
    element("div", { class: "scroll" }, element("table", { id: "runs" }, element("thead", {}, head), body))));
  shown.list = JSON.stringify(runs);
}

async function refresh() {
  drawBar();
  if (!runs.length) {
    if (!parts.place.querySelector(".empty")) draw();
    return;
  }
  const run = runById(state.run);
  if (!run) {
    if (state.run) {
      change({ run: "", other: "" });
      return say("the selected run no longer exists");
    }
    if (parts.place.querySelector(".empty") && runs.length === 1) return change({ run: runs[0].id });
    if (shown.list !== JSON.stringify(runs)) drawList();
    return;
  }
  await drawNow();
  const revision = [runById(state.other), run].filter(Boolean).map((row) => row.revision).join(".");
  const isOld = shown.revision && shown.revision !== revision;
  // A run that ended is rendered at once, a live run every few seconds; polling continues meanwhile.
  if (isOld && !shown.isAsking && (run.state !== "running" || Date.now() - shown.at > RENDER_MS)) askPage();
}

async function drawNow() {
  const id = state.run;
  const run = runById(id);
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
  const query = new URLSearchParams();
  for (const name of ["run", "other", "window", "rank"]) if (state[name]) query.set(name, state[name]);
  if (!shown.frame) parts.place.replaceChildren(element("div", { class: "wait", id: "wait" }, "Rendering the page …"));
  // A live run gets a new page per revision; the key identifies the page in progress.
  let found = await ask(`page?${query}`);
  const { key, revision } = found;
  for (;;) {
    if (mine !== shown.asking) return;
    if (found.error || found.state === "failed") return failed({ revision, ...found }, query);
    if (found.state === "ready") return showPage(key, revision);
    wait(found);
    await new Promise((done) => setTimeout(done, WAIT_MS));
    found = await ask(`page?key=${key}`);
  }
}

function wait(found) {
  if (shown.frame) return say("updating …");
  const words = found.state === "waiting" ? "Waiting for other pages to render …" : "Rendering the page …";
  parts.place.replaceChildren(element("div", { class: "wait", id: "wait" }, words, element("progress")));
}

function failed(found, query) {
  const again = element("button", { type: "button" }, "retry");
  again.addEventListener("click", async () => { await ask(`page?${query}&again=1`); draw(); });
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

function say(message, isBad = false) {
  const output = parts.bar.querySelector("#said");
  output.textContent = message;
  output.className = isBad ? "bad" : "";
}

