// The trace of a window in the profiler tab's viewer, with its run, worker and span in that tab.
import { ask, element } from "./parts.js";

const VIEWER = "../pytorch_profiler/trace_embedding.html";

function openProfilerTab(event) {
  event.preventDefault();
  window.parent.location.hash = "pytorch_profiler";
}

function links(trace, run, hasProfilerTab) {
  const row = element("div", { class: "traces" });
  if (trace.profiler_tab && hasProfilerTab) {
    const { run: name, worker, span } = trace.profiler_tab;
    const link = element("a", { href: "../../../#pytorch_profiler", id: "profiler-tab" }, "open the profiler tab");
    link.addEventListener("click", openProfilerTab);
    row.append(link, element("span", {}, "run ", element("code", {}, name)), element("span", {}, "worker ", element("code", {}, worker)),
      element("span", {}, "span ", element("code", {}, span)));
  }
  row.append(element("a", { href: `file?run=${run}&path=${encodeURIComponent(trace.path)}`, id: "download" }, "download"));
  return row;
}

export async function showTrace(place, state, hasProfilerTab, isCurrent) {
  const say = (message) => place.append(element("div", { class: "wait", id: "wait" }, message));
  const found = await ask(`files?run=${state.run}`);
  if (!isCurrent()) return;
  if (found.error) return say(found.error);
  const traces = found.files.filter((file) => file.type === "trace" &&
    (!state.window || `${file.window}` === state.window) && (!state.rank || `${file.rank}` === state.rank));
  traces.sort((a, b) => a.rank - b.rank || b.window - a.window);
  const [trace] = traces;
  if (!trace) return say(state.window || state.rank ? "No trace for this window and rank." : "No trace in this run; record traces with profiler=\"memprof\".");
  place.append(links(trace, state.run, hasProfilerTab));
  place.querySelector(".traces").prepend(element("b", {}, `window ${trace.window} · rank ${trace.rank}`));
  if (!hasProfilerTab) return say("The trace viewer needs the profiler tab: pip install torch-tb-profiler, or use lightning-memprof view.");
  const frame = element("iframe", { class: "viewer", id: "viewer", title: "trace", src: VIEWER });
  const response = fetch(`file?run=${state.run}&as=text&path=${encodeURIComponent(trace.path)}`);
  const onMessage = async (event) => {
    if (event.source !== frame.contentWindow || event.data?.msg !== "ready") return;
    window.removeEventListener("message", onMessage);
    const answer = await response;
    if (!isCurrent()) return;
    if (!answer.ok) return say((await answer.json()).error);
    frame.contentWindow.postMessage({ msg: "data", name: trace.path, data: await answer.text() }, window.location.origin);
  };
  window.addEventListener("message", onMessage);
  place.append(frame);
}
