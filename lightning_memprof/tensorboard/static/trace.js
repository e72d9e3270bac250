// The trace of a window, in the viewer of the profiler tab, and where that tab has it.
import { ask, element } from "./parts.js";

const VIEWER = "../pytorch_profiler/trace_embedding.html";

function openProfilerTab(event) {
  event.preventDefault();
  window.parent.location.hash = "pytorch_profiler";
}

function links(one, run, isThere) {
  const row = element("div", { class: "traces" });
  if (one.profiler_tab && isThere) {
    const { run: name, worker, span } = one.profiler_tab;
    const link = element("a", { href: "../../../#pytorch_profiler", id: "profiler-tab" }, "open the profiler tab");
    link.addEventListener("click", openProfilerTab);
    row.append(link, element("span", {}, "run ", element("code", {}, name)), element("span", {}, "worker ", element("code", {}, worker)),
      element("span", {}, "span ", element("code", {}, span)));
  }
  row.append(element("a", { href: `file?run=${run}&path=${encodeURIComponent(one.path)}`, id: "download" }, "download"));
  return row;
}

export async function showTrace(place, state, hasProfilerTab, isCurrent) {
  const say = (words) => place.append(element("div", { class: "wait", id: "wait" }, words));
  const found = await ask(`files?run=${state.run}`);
  if (!isCurrent()) return;
  if (found.error) return say(found.error);
  const traces = found.files.filter((one) => one.type === "trace" &&
    (!state.window || `${one.window}` === state.window) && (!state.rank || `${one.rank}` === state.rank));
  traces.sort((one, other) => one.rank - other.rank || other.window - one.window);
  const [one] = traces;
  if (!one) return say(state.window || state.rank ? "This window of this rank left no trace." : "This run left no trace: it has none without the profiler \"fts_extended\".");
  place.append(links(one, state.run, hasProfilerTab));
  place.querySelector(".traces").prepend(element("b", {}, `window ${one.window} · rank ${one.rank}`));
  if (!hasProfilerTab) return say("The viewer comes with the profiler tab: pip install torch-tb-profiler. Or: lightning-memprof view.");
  const frame = element("iframe", { class: "viewer", id: "viewer", title: "trace", src: VIEWER });
  const text = fetch(`file?run=${state.run}&as=text&path=${encodeURIComponent(one.path)}`);
  const heard = async (event) => {
    if (event.source !== frame.contentWindow || event.data?.msg !== "ready") return;
    window.removeEventListener("message", heard);
    const answer = await text;
    if (!isCurrent()) return;
    if (!answer.ok) return say((await answer.json()).error);
    frame.contentWindow.postMessage({ msg: "data", name: one.path, data: await answer.text() }, window.location.origin);
  };
  window.addEventListener("message", heard);
  place.append(frame);
}
