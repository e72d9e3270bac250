"""The findings of a run whose trace has one step with forward, backward and the events that a test adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_runs import FakeRun, add_series, make_run
from kineto import write_trace
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.load import load_run

FORWARD = "[pl][profile][Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[pl][profile][Strategy]SingleDeviceStrategy.backward"
BUSY = 90.0


def event(name: str, start: float, end: float) -> dict[str, Any]:
    cat = "user_annotation" if name.startswith("ProfilerStep") else "cpu_op"
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 9, "ts": start, "dur": end - start, "args": {}}


def found(
    tmp_path: Path,
    *inside: dict[str, Any],
    fake: FakeRun | None = None,
    lines: Sequence[dict[str, Any]] = (),
    saved_tensors: Sequence[dict[str, Any]] = (),
) -> dict[str, Finding]:
    """The findings of a run whose trace has a step of 4 ms: 2 ms of forward with these events, then backward."""
    around = [
        event("ProfilerStep#2", 0, 4000),
        event(FORWARD, 0, 2000),
        event(BACKWARD, 2000, 3000),
        event("aten::mm", 2000, 2900),
    ]
    tmp_path.mkdir(exist_ok=True)
    trace = trace_report(write_trace(tmp_path / "made.json", [*around, *inside]))
    directory = make_run(tmp_path / "log", fake or FakeRun())
    for collector, rows in (("lines", lines), ("saved_tensors", saved_tensors)):
        if rows:
            add_series(directory, collector, rows)
    run = load_run(directory)
    return {finding.rule: finding for finding in examine(Facts.of(run, (trace,)))}


def calls(module: str, operator: str, times: int, each: float = BUSY) -> list[dict[str, Any]]:
    """A forward of a module that calls an operator some times, 10 us apart."""
    made = [event(operator, 10 + (each + 10) * at, 10 + each + (each + 10) * at) for at in range(times)]
    return [event(f"[pl][module]Net: {module}", 0, 20 + (each + 10) * times), *made]
