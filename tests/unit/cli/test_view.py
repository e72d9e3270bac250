from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.cli.command import sigterm_as_ctrl_c
from lightning_memprof.cli.main import main

pytestmark = pytest.mark.slow


@contextmanager
def viewing(environment: dict[str, str], *arguments: str, end: int = signal.SIGINT) -> Iterator[str]:
    """Run ``view`` until the context is left, then end it by the signal; gives the address."""
    command = [sys.executable, "-m", "lightning_memprof", "view", "--no-browser", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r" at (http://127\.0\.0\.1:\d+/\S*)", line):
                break
        else:
            pytest.fail("".join(printed))
        yield found[1]
        process.send_signal(end)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(f"{address}{trace_name(address)}", timeout=20) as answer:  # noqa: S310 it is ours
        content: bytes = answer.read()
        return content


def trace_name(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 it is ours
        return answer.read().decode().partition('data-trace="')[2].partition('"')[0]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_merged_and_served_until_a_signal_and_nothing_is_left(tmp_path, environment, end):
    run = make_run(tmp_path / "run", FakeRun(world_size=2))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with viewing(environment | {"TMPDIR": str(temporary)}, str(run), "--steps", "3", end=end) as address:
        events = json.loads(fetched(address))["traceEvents"]
    steps = [event["name"] for event in events if event.get("cat") == "step"]
    assert steps == ["step 3", "step 3"]
    assert list(temporary.iterdir()) == []


def test_without_a_target_the_run_that_started_last_is_served(tmp_path, environment, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for version in (1, 0):
        make_run(tmp_path / f"lightning_logs/version_{version}")
    with viewing(environment) as address:
        assert trace_name(address) == "trace/version_0.json"


def test_a_trace_is_served_as_it_is(tmp_path, environment):
    trace = tmp_path / "some.json"
    trace.write_text('{"traceEvents": []}')
    with viewing(environment, str(trace)) as address:
        assert fetched(address) == trace.read_bytes()


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--steps", "a"], ["--steps", "5-2"]])
def test_a_wrong_option_is_named(tmp_path, capsys, arguments):
    trace = tmp_path / "some.json"
    trace.write_text("[]")
    assert main(["view", str(trace), *arguments]) == 1
    assert arguments[0] in capsys.readouterr().err


def test_a_file_that_is_no_trace_is_refused_before_a_page_opens(tmp_path, capsys):
    table = tmp_path / "fit-fts_extended_pytorch_profiler-0.txt"
    table.write_text("Name  Self CPU %\n")
    assert main(["view", str(table), "--no-browser"]) == 1
    assert "is neither a trace" in capsys.readouterr().err


def test_a_trace_that_a_browser_would_fail_on_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_memprof.cli.view._LARGE_BYTES", 1000)
    monkeypatch.setattr("lightning_memprof.cli.view.open_in_browser", lambda _: os.kill(os.getpid(), signal.SIGINT))
    trace = tmp_path / "large.json"
    trace.write_text('{"traceEvents": [' + " " * 2000 + "]}")
    assert main(["view", str(trace)]) == 0
    assert "--steps" in capsys.readouterr().out


def test_without_the_ui_a_runs_timeline_is_written_and_a_trace_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lightning_memprof.report.perfetto.ui_directory", lambda: None)
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "logs/version_3")
    assert main(["view", str(run)]) == 0
    timeline = tmp_path / "version_3-timeline.json.gz"
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "step" for event in events)
    assert main(["view", str(timeline)]) == 0
    ways = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines() if "viztracer" in line]
    assert ways == [timeline.name, str(timeline)]


TWO_STEPS: dict[str, Any] = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": ts, "dur": 90}
        for step, ts in ((1, 0), (2, 100))
    ],
}


def test_several_traces_and_directories_of_them_are_merged_on_one_clock(tmp_path, environment):
    reduces = [
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": ts, "dur": 5}
        for ts in (20, 120, 140)
    ]
    for rank, name in enumerate(("one.json", "two.json")):
        recorded = [{**event, "ts": event["ts"] + 5_000_000 * rank} for event in (*TWO_STEPS["traceEvents"], *reduces)]
        info = {"rank": rank, "world_size": 2}
        (tmp_path / name).write_text(json.dumps({"traceEvents": recorded, "distributedInfo": info}))
    for arguments in ([str(tmp_path / "one.json"), str(tmp_path / "two.json")], [str(tmp_path), "--steps", "2"]):
        with viewing(environment, *arguments) as address:
            events = json.loads(fetched(address))["traceEvents"]
        steps = [event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")]
        assert steps.count("ProfilerStep#2") == 2
        assert len({event["ts"] for event in events if event.get("name") == "ProfilerStep#2"}) == 1
        assert steps.count("ProfilerStep#1") == (0 if "--steps" in arguments else 2)


def test_a_snapshot_has_no_timeline_and_says_where_to_look(tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}, protocol=4))
    assert main(["view", str(path), "--no-browser"]) == 1
    assert "lightning-memprof report" in capsys.readouterr().err


def test_what_a_command_was_told_to_ignore_it_goes_on_ignoring():
    # As nohup does.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
