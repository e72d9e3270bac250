from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.cli.command import sigterm_as_ctrl_c
from lightning_memprof.cli.main import main
from lightning_memprof.cli.view import tensorboard_directory
from lightning_memprof.errors import ReportError
from ports import free_port

pytestmark = pytest.mark.slow

# What a native trace processor does as far as the page's start is concerned; the real one is a download of its own.
NATIVE = """#!{python}
import http.server, pathlib, sys
pathlib.Path({told!r}).write_text("\\n".join(sys.argv[1:]))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), http.server.BaseHTTPRequestHandler).serve_forever()
"""
# The UI knows one port only, which another test run may use at the same time.
OTHER_PORTS = """
import sys
from lightning_memprof.report import perfetto
perfetto.TRACE_PROCESSOR_PORT, perfetto.TRACE_PROCESSOR_PAGE_PORT = map(int, sys.argv[1:3])
from lightning_memprof.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


@contextmanager
def viewing(
    environment: dict[str, str], *arguments: str, end: int = signal.SIGINT, ports: Sequence[int] = ()
) -> Iterator[str]:
    """Run ``view`` until the context is left, then end it by the signal; gives the address."""
    program = ["-c", OTHER_PORTS, *map(str, ports)] if ports else ["-m", "lightning_memprof"]
    command = [sys.executable, *program, "view", "--no-browser", *arguments]
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


def processes_of_the_profiler_tab(pid: int) -> list[psutil.Process]:
    """All processes below one, when the profiler tab has begun to read."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = psutil.Process(pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):
            if any("multiprocessing.spawn" in " ".join(one.cmdline()) for one in found):
                return found
        time.sleep(0.1)
    pytest.fail("the profiler tab reads nothing")


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


def test_a_native_trace_processor_is_started_on_the_whole_and_ended(tmp_path, environment):
    program, told = tmp_path / "trace_processor_shell", tmp_path / "told"
    program.write_text(NATIVE.format(python=sys.executable, told=str(told)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    trace = tmp_path / "some.json"
    trace.write_text('{"traceEvents": []}')
    port, page_port = free_ports(2)
    with viewing(environment, str(trace), "--trace-processor", str(program), ports=(port, page_port)) as address:
        assert address == f"http://127.0.0.1:{page_port}/"
        with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 it is ours
            assert f"ws://127.0.0.1:{port}" in answer.headers["Content-Security-Policy"]
    assert told.read_text().splitlines() == ["--httpd", "--http-port", str(port), str(trace)]


def test_a_program_that_is_no_trace_processor_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_memprof.report.perfetto.TRACE_PROCESSOR_PORT", *free_ports(1))
    trace = tmp_path / "some.json"
    trace.write_text('{"traceEvents": []}')
    assert main(["view", str(trace), "--no-browser", "--trace-processor", str(tmp_path / "none")]) == 1
    assert "--trace-processor" in capsys.readouterr().err
    assert main(["view", str(trace), "--no-browser", "--trace-processor", "/bin/false"]) == 1
    assert "ended with 1 before it had loaded some.json" in capsys.readouterr().err


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
    assert "is not a trace" in capsys.readouterr().err


def test_a_trace_that_a_browser_would_fail_on_is_told(tmp_path, monkeypatch, capsys):
    from lightning_memprof.cli import view

    monkeypatch.setattr(view, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(view, "_served", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    trace = tmp_path / "large.json"
    trace.write_text('{"traceEvents": [' + " " * 2000 + "]}")
    assert main(["view", str(trace)]) == 0
    assert "--steps" in capsys.readouterr().out


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


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_tensorboard_is_started_on_the_directory_of_the_traces_and_ended_with_all_its_processes(
    tmp_path, environment, end
):
    run = make_run(tmp_path / "run", FakeRun(steps=5))
    # The process in which the profiler tab reads it waits for ever.
    os.mkfifo(tmp_path / "run/slow.pt.trace.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_memprof", "view", "--tensorboard", "--no-browser", str(run)],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "tensorboard --logdir run\n"
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+/", line)))
        tabs = [process.stdout.readline().split()[0] for _ in range(4)]
        assert tabs == [f"{address}#{tab}" for tab in ("memprof", "pytorch_profiler", "timeseries", "custom_scalars")]
        with urllib.request.urlopen(address, timeout=20) as answer:  # noqa: S310 it is ours
            assert answer.status == 200
        began = processes_of_the_profiler_tab(process.pid)
        process.send_signal(end)
        assert process.wait(20) == 0
        assert psutil.wait_procs(began, timeout=30)[1] == []
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(address, timeout=20)  # noqa: S310 it is ours
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_command_was_told_to_ignore_it_goes_on_ignoring():
    # As nohup does.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_tensorboard_that_does_not_start_says_why(tmp_path, environment):
    run = make_run(tmp_path / "run", FakeRun(steps=5))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "lightning_memprof", "view", "--tensorboard", "--no-browser", str(run)]
        ended = subprocess.run(
            [*command, "--port", str(taken.getsockname()[1])],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ended.returncode != 0
    assert "already in use" in ended.stdout


def test_tensorboard_gets_a_run_s_log_directory_also_where_it_has_no_trace(tmp_path):
    make_run(tmp_path / "logs/version_0", FakeRun(steps=5))
    assert tensorboard_directory([tmp_path / "logs"]) == tmp_path / "logs/version_0"


def test_tensorboard_shows_several_runs_of_a_directory_and_without_one_what_is_here(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        make_run(tmp_path / name / "version_0", FakeRun())
    assert tensorboard_directory([tmp_path]) == tmp_path
    started: list[list[str]] = []
    program = "lightning_memprof.cli.view.subprocess.Popen"
    monkeypatch.setattr(program, lambda command, **_: started.append(command))
    monkeypatch.setattr("lightning_memprof.cli.view._follow", lambda *_, **__: 0)
    monkeypatch.setattr("lightning_memprof.cli.view._end", lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--tensorboard", "--no-browser"]) == 0
    (command,) = started
    assert command[command.index("--logdir") + 1] == str(tmp_path)
    assert capsys.readouterr().out == "tensorboard --logdir .\n"


def test_tensorboard_gets_what_it_can_read_and_nothing_else(tmp_path):
    for name in ("a/x.pt.trace.json", "b/y.pt.trace.json", "odd.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(TWO_STEPS))
    assert tensorboard_directory([tmp_path]) == tmp_path
    assert tensorboard_directory([tmp_path / "a"]) == tmp_path / "a"
    with pytest.raises(ReportError, match=r"TensorBoard reads files named \*\.pt\.trace\.json"):
        tensorboard_directory([tmp_path / "odd.json"])
    assert main(["view", "--tensorboard", "--steps", "1", str(tmp_path)]) == 1


def test_ctrl_c_amid_the_start_of_tensorboard_ends_it(tmp_path, monkeypatch):
    make_run(tmp_path / "version_0", FakeRun())
    pids: list[int] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *given: object, **named: object) -> None:
            super().__init__(*given, **named)  # type: ignore[call-overload]  # as given
            pids.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lightning_memprof.cli.view.subprocess.Popen", Interrupted)
    assert main(["view", "--tensorboard", "--no-browser", str(tmp_path)]) == 0
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])
