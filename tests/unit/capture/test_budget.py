from __future__ import annotations

import gzip
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.budget import Budget, Export, Ledger, TraceLevel
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Schedule
from lightning_memprof.testing import FakeCollector
from recorded_rows import read_rows
from sessions import context, drive, session

CYCLES = Schedule(wait=0, warmup=1, active=4, repeat=0)


def rows(run: RunContext, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == kind]


def traces(directory: Path) -> Iterator[list[dict[str, Any]]]:
    for path in sorted(directory.glob("*.pt.trace.json.gz"), key=lambda path: path.name.split(".")[-5]):
        yield json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def recorded_steps(events: list[dict[str, Any]]) -> int:
    return sum(str(event.get("name")).startswith("ProfilerStep#") for event in events)


def record(run: RunContext, budget: Budget, windows: int) -> None:
    """Record windows of five steps with everything that a trace can hold."""
    bounded = replace(run, ledger=Ledger(budget))
    trace = OperatorTrace(with_stack=True, record_shapes=True)
    with session(bounded, CYCLES, [trace]) as made:
        for window in range(windows):
            drive(made, range(5 * window, 5 * window + 5), lambda _: run.model(torch.zeros(1, 4)))
            run.sink.drain()
    run.sink.drain()


def export(window: int = 0, **cost: Any) -> Export:
    return Export(**{"window": window, "seconds": 1.0, "bytes": 100, "steps": 8, **cost})


def test_over_budget_traces_lose_stacks_then_shapes_then_steps_and_the_manifest_says_why(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        record(run, Budget(max_trace_bytes=1), 5)
        budget, exports = rows(run, "budget"), rows(run, "export")
    assert [(row["window"], row["level"], row["active_steps"]) for row in budget] == [
        (1, "no_stack", None),
        (2, "no_shapes", None),
        (3, "active_steps", 1),
    ]
    assert budget[0]["reason"].startswith("the trace of window 0 was ")
    assert budget[0]["reason"].endswith(", max_trace_bytes is 1 B")
    made = list(traces(tmp_path))
    categories = [{event.get("cat") for event in events} for events in made]
    assert ["python_function" in found for found in categories] == [True, False, False, False, False]
    shapes = [any("Input Dims" in event.get("args", {}) for event in events) for events in made]
    assert shapes == [True, True, False, False, False]
    assert list(map(recorded_steps, made)) == [4, 4, 4, 1, 1]
    assert [row["window"] for row in exports] == list(range(5))
    assert all(row["seconds"] > 0 for row in exports)
    sizes = [row["bytes"] for row in exports]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


def test_a_trace_that_ends_before_its_window_leaves_the_other_collectors_the_whole_of_it(tmp_path: Path) -> None:
    other = FakeCollector("other")
    with context(tmp_path) as run:
        ledger = Ledger(Budget(max_trace_bytes=1))
        ledger.level = TraceLevel(active_steps=2)
        with session(replace(run, ledger=ledger), Schedule(active=4), [other, OperatorTrace()]) as made:
            inside = [False]
            drive(made, range(7), lambda _: inside.append(torch.autograd._profiler_enabled()))
        closed = rows(run, "window")[-1]
    (events,) = traces(tmp_path)
    assert recorded_steps(events) == 2
    assert inside[1:] == [False, False, True, True, False, False, False]
    assert closed["steps"] == [2, 3, 4, 5]
    assert len({mark.step for mark in other.marks}) == 5


def test_within_its_budget_a_run_keeps_everything(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        record(run, Budget(max_trace_bytes=10**9, max_export_seconds=60), 2)
        assert rows(run, "budget") == []
    assert list(map(recorded_steps, traces(tmp_path))) == [4, 4]


def test_steps_shrink_by_as_much_as_the_trace_was_too_large() -> None:
    ledger = Ledger(Budget(max_trace_bytes=50))
    ledger.charge(export(bytes=100, steps=8))
    assert ledger.tighten() is not None
    assert ledger.level == TraceLevel(active_steps=4)
    assert ledger.tighten() is None
    ledger.charge(export(1, bytes=51, steps=4))
    ledger.tighten()
    assert ledger.level == TraceLevel(active_steps=3)


def test_one_step_is_the_least_and_is_not_lowered_again() -> None:
    ledger = Ledger(Budget(max_trace_bytes=1))
    ledger.charge(export(steps=1))
    assert ledger.tighten() is None


def test_seconds_are_a_budget_as_bytes_are_and_the_worse_one_counts() -> None:
    ledger = Ledger(Budget(max_trace_bytes=50, max_export_seconds=0.125))
    ledger.charge(export())
    reason = "the export of window 0 took 1 s, max_export_seconds is 0.125 s"
    assert ledger.tighten() == ("active_steps", reason)
    assert ledger.level.active_steps == 1


def test_an_export_of_more_than_half_of_the_process_groups_timeout_is_warned_of_once() -> None:
    ledger = Ledger(timeout_seconds=20)
    assert ledger.charge(export(seconds=10)) == []
    (warning,) = ledger.charge(export(1, seconds=10.5))
    assert "the export of window 1 took 10.5 s while the other ranks waited" in warning
    assert "more than half of the process group's timeout of 20 s" in warning
    assert "Budget(max_export_seconds=5)" in warning
    assert ledger.charge(export(2, seconds=19)) == []


@pytest.mark.parametrize(
    ("cost", "advice"),
    [
        ({"stack": True, "shapes": True}, "record fewer steps than 8, no with_stack, no record_shapes, or set"),
        ({"steps": 1}, "record fewer ranks, or set"),
    ],
)
def test_a_trace_of_more_than_400_mb_is_warned_of_with_what_makes_it_smaller(cost: Any, advice: str) -> None:
    assert Ledger().charge(export(bytes=400_000_000)) == []
    (warning,) = Ledger().charge(export(bytes=400_000_001, **cost))
    assert "is 381 MiB uncompressed" in warning
    assert advice in warning
    assert "lightning-memprof view RUN --steps" in warning


def test_a_warning_is_logged_and_noted_in_the_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with context(tmp_path) as run, caplog.at_level(logging.WARNING):
        slow = replace(run, ledger=Ledger(timeout_seconds=1e-9))
        with session(slow, Schedule(), [OperatorTrace()]) as made:
            drive(made, range(6))
        (note,) = rows(run, "note")
    assert (note["collector"], "process group's timeout" in note["message"]) == ("operator_trace", True)
    assert [record.getMessage() for record in caplog.records] == [f"rank 0: {note['message']}"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"max_trace_bytes": 0}, "max_trace_bytes=0.: must be an integer of at least 1"),
        ({"max_trace_bytes": 1.5}, "must be an integer"),
        ({"keep_windows": True}, "keep_windows=True.: must be an integer"),
        ({"max_export_seconds": -1}, "max_export_seconds=-1.: must be a number of seconds above 0"),
        ({"max_export_seconds": float("nan")}, "must be a number of seconds above 0"),
    ],
)
def test_a_bound_that_bounds_nothing_is_refused(values: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Budget(**values)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from lightning_memprof.schedule import Schedule
from sessions import context, drive, session


def most_bytes(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def record(root, before, after):
    with context(root) as run:
        most_bytes(before)
        trace = OperatorTrace(profile_memory=True, record_shapes=True, on_trace_ready=lambda _: most_bytes(after))
        with session(run, Schedule(wait=0, active=9), [trace]) as made:
            drive(made, range(12), lambda _: run.model(torch.zeros(1, 4)))
        run.sink.drain()


signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
record(Path(sys.argv[1]) / "exit", 9_000, 9_000)
record(Path(sys.argv[1]) / "write", 10**9, 6_000)
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_an_error_row_and_leaves_a_whole_trace_or_none(tmp_path: Path) -> None:
    support = Path(__file__).parents[2] / "support"
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(support)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # While torch writes, and while its trace is compressed.
    for where, message in (
        ("exit", r"wrote .*B of the trace, .*B free .*/window000/rank"),
        ("write", "too large"),
    ):
        found, torn = read_rows(tmp_path / where / "memprofiler/manifest.rank00000.jsonl")
        (error,) = [row for row in found if row["kind"] == "error"]
        assert (error["collector"], error["where"], torn) == ("operator_trace", where, False)
        assert re.search(message, error["message"])
        left = {path.name for path in (tmp_path / where).rglob("*") if path.is_file()} - {"manifest.rank00000.jsonl"}
        listed = {Path(row["path"]).name for row in found if row["kind"] == "artifact"}
        assert left == listed
        # What cannot be compressed is kept as torch wrote it.
        assert [Path(name).suffixes[-3:] for name in left] == {"exit": [], "write": [[".pt", ".trace", ".json"]]}[where]
        assert f"collector operator_trace failed on {where} and is disabled; training continues" in done.stderr
