// Runs before the UI: gives it the trace by the page's address, and puts the process with the most events first.
'use strict';
(() => {
  // Hides the UI's cookie banner; nothing here sets a cookie.
  localStorage.setItem('cookieAck', 'true');
  const { trace } = document.currentScript.dataset;
  // Relative to the host and port in this browser: a forwarded port has another number.
  if (trace && !location.hash) {
    history.replaceState(null, '', `#!/?url=${encodeURIComponent(new URL(trace, location.href))}`);
  }
  let ordered = null;
  async function places(trace, sql) {
    const found = new Map();
    const rows = await trace.engine.query(sql);
    for (const row = rows.iter({}); row.valid(); row.next()) found.set(row.get('uri'), Number(row.get('place')));
    return found;
  }
  function sort(parent, places) {
    const placed = parent.children.filter(node => places.has(node.uri));
    placed.sort((one, other) => places.get(one.uri) - places.get(other.uri));
    for (const node of placed) parent.addChildLast(node);
  }
  async function order() {
    const trace = window.app?.trace;
    if (!trace?.engine || window.app.isLoadingTrace || ordered === trace) return;
    ordered = trace;
    const processes = await places(trace, `select '/process_' || upid as uri, pid as place from process where pid > 0`);
    // Merged traces number their processes 1 to n in the intended order; pids of other traces are arbitrary.
    if (Math.max(...processes.values()) !== processes.size) return;
    const threads = await places(trace, `select '/thread_' || utid as uri, tid as place from thread`);
    const workspace = trace.currentWorkspace ?? trace.workspace;
    sort(workspace, processes);
    for (const node of workspace.children) if (processes.has(node.uri)) sort(node, threads);
    window.memprofOrdered = trace.traceInfo?.traceTitle ?? true;
    window.raf?.scheduleFullRedraw?.();
  }
  // Internals of a newer UI may differ: the trace then opens in the order of the UI.
  setInterval(() => order().catch(error => console.warn('memprof: tracks keep the order of the UI', error)), 300);
})();
