from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from corpus_files import TRACES
from fake_runs import FakeRun, make_run
from lightning_memprof import load_run
from lightning_memprof.report.perfetto import serve_trace, ui_directory
from lightning_memprof.timeline.events import Source
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.sources import run_sources
from ranks import trained

pytestmark = pytest.mark.browser

ERRORS = "select name, value from stats where severity != 'info' and value > 0"
GROUPS = "window.app.trace.workspace.children.filter(one => one.uri.startsWith('/process_')).map(one => one.name)"


def test_a_trace_opens_from_its_address_with_the_network_blocked(perfetto, asked_outside):
    assert "my_run_1.json" in perfetto.evaluate("window.memprofOpened")
    assert asked_outside == []


@contextmanager
def forwarded(port: int) -> Iterator[int]:
    """Forward a free port to another one, as ssh does."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as there:
                back = threading.Thread(target=pass_on, args=(there, self.request))
                back.start()
                pass_on(self.request, there)
                back.join()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_trace_opens_under_another_name_and_port_without_a_banner(tmp_path, context, asked_outside):
    trace = tmp_path / "there.json"
    trace.write_text('{"traceEvents":[{"ph":"X","name":"work","pid":1,"tid":1,"ts":5,"dur":7}]}')
    ui = ui_directory()
    assert ui is not None
    with serve_trace(trace, ui) as served, forwarded(served.server_port) as port:
        page = context.new_page()
        page.goto(f"http://localhost:{port}/")
        page.wait_for_function("() => window.app?.trace?.engine && !window.app.isLoadingTrace", timeout=60_000)
        assert "there.json" in page.evaluate("window.app.trace.traceInfo.traceTitle")
        assert "cookies" not in page.inner_text("body")
        page.close()
    assert asked_outside == []


def test_the_ranks_of_a_merged_run_are_in_order(tmp_path, perfetto, open_trace):
    merged = tmp_path / "three ranks.json.gz"
    merge_traces(run_sources(load_run(make_run(tmp_path / "run", FakeRun(world_size=3)))), merged)
    query = open_trace(merged)
    assert query(ERRORS) == []
    perfetto.wait_for_function("() => window.memprofOrdered?.includes('three ranks')", timeout=60_000)
    groups = [name.rsplit(" ", 1)[0] for name in perfetto.evaluate(GROUPS)]
    assert groups[0] == "findings"
    ranks = [name.split(" · ")[0] for name in groups[1:]]
    assert ranks == sorted(ranks)
    assert {"rank 0", "rank 1", "rank 2"} == set(ranks)


def test_the_errors_of_an_import_are_seen(tmp_path, open_trace):
    trace = tmp_path / "bad.json"
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 10} for name, start in (("a", 0), ("b", 5))
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    assert open_trace(trace)(ERRORS)


def test_two_ranks_of_one_training_line_up_without_an_import_error(tmp_path, open_trace):
    trained(tmp_path / "run", "ddp", "", "profiler=yes")
    merged = tmp_path / "merged.json.gz"
    run = load_run(tmp_path / "run")
    merge_traces(run_sources(run), merged)
    query = open_trace(merged)
    assert query(ERRORS) == []
    steps = query(
        "select s.name, s.ts, s.dur, process.name as rank from slice s join thread_track t on s.track_id = t.id "
        "join thread using (utid) join process using (upid) where s.category = 'step' order by s.ts"
    )
    names = sorted({row["rank"] for row in steps})
    host = run.lead.facts.host
    assert names == [f"rank 0 · {host}", f"rank 1 · {host}"]
    first, second = ([row for row in steps if row["rank"] == name] for name in names)
    assert [row["name"] for row in first] == [row["name"] for row in second]
    for expected, other in zip(first, second, strict=True):
        # DDP lets no rank go on before both have their gradients: the same steps overlap.
        assert max(expected["ts"], other["ts"]) < min(expected["ts"] + expected["dur"], other["ts"] + other["dur"])
    tracks = {row["name"] for row in query("select name from thread")}
    assert {"steps", "data fetches", "hooks", "marks"} <= tracks
    counters = {row["name"].removesuffix(" value") for row in query("select name from counter_track")}
    assert "rss_bytes" in counters


@pytest.mark.corpus
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.parent.name)
def test_a_recorded_trace_is_merged_without_an_import_error(tmp_path, trace, open_trace):
    merged = tmp_path / f"{trace.parent.name}.json"
    result = merge_traces([Source(label="", trace=trace)], merged)
    query = open_trace(merged)
    assert query(ERRORS) == []
    assert result.events
    assert query("select count(1) as slices from slice")[0]["slices"]
