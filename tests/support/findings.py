"""The findings of made-up runs and traces by rule, and what these runs record."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from device_traces import Recording
from fake_runs import HEALTHY, FakeRun, make_run
from kineto import write_trace
from ledger_lines import out_of_bounds
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, examine, examine_files, nothing_in_files
from lightning_memprof.judge.finding import Recovery
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

STEPS = 29
# What a search for holders found.
HISTORY = {
    "kind": "attribute",
    "place": "Net.history[...]",
    "content": "Tensor[8,8]",
    "line": "a/train.py:14",
    "source": "self.history = []",
    "count": 120,
    "added": 99,
    "added_bytes": 396 * MIB,
}


def found(tmp_path: Path, fake: FakeRun, *totals: dict[str, Any]) -> dict[str, Finding]:
    """The findings of a run with these action totals."""
    directory = make_run(tmp_path, fake)
    if totals:
        write_rows(directory / "actions.rank00000.jsonl", *totals)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}


def found_in_run(directory: Path) -> dict[str, Finding]:
    """The findings of a run with those about its memory."""
    run = load_run(directory)
    found = examine(Facts.of(run, memory=memory_report(run)))
    assert "rule_failed" not in {finding.rule for finding in found}
    return {finding.rule: finding for finding in found}


def found_with_lines(directory: Path, *totals: dict[str, Any], host: tuple[TimeLine, ...] = ()) -> dict[str, Finding]:
    """The findings of a run with these action totals, and a trace with these lines."""
    write_rows(directory / "actions.rank00000.jsonl", *totals)
    ledger = TimeLedger(step_ns=20e6, median_ns=20e6, steps=2, basis="", lines=host)
    trace = replace(trace_report(write_trace(directory.parent / "made.json", [])), host_ledger=ledger if host else None)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory), (trace,)))}


def found_in_trace(path: Path) -> dict[str, Finding]:
    """The findings; each recovers something, and no more than its lines hold, if they hold any."""
    report = trace_report(path)
    findings = {finding.rule: finding for finding in examine_files((report,), ())}
    assert not out_of_bounds(findings.values(), report.host_ledger, report.device_ledger)
    for rule, finding in findings.items():
        is_looked_at = finding.remedies[0].is_look or rule in {"cold_start", "recording_overhead"}
        assert (finding.recovers is None) == is_looked_at
    return findings


def bound(made: Recording, path: Path, **metadata: Any) -> Finding:
    return nothing_in_files([trace_report(made.write(path / "trace.pt.trace.json", **metadata))], [])


def recovery(finding: Finding) -> Recovery:
    assert finding.recovers is not None
    return finding.recovers


def ids(remedies: Iterable[Remedy]) -> list[str]:
    return [each.id for each in remedies]


def phases(**changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _rank, _step: {**HEALTHY, **changes}


def in_some(steps: Callable[[int], bool], **changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _, step: {**HEALTHY, **changes} if steps(step) else HEALTHY


def action(name: str, ns: int, phase: str = "other", *, count: int = STEPS, max_ns: int | None = None) -> Any:
    """A row of the action totals: an action that takes ``ns`` in the mean step."""
    return {
        "kind": "total", "action": name, "phase": phase, "in_window": False, "steps": STEPS, "count": count,
        "total_ns": ns * STEPS, "max_ns": max_ns or ns, "max_step": 3,
    }  # fmt: skip


def noisy(step: int) -> int:
    return 500 * MIB + random.Random(step).randrange(-40, 40) * MIB


def write_rows(path: Path, *found: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def limited(directory: Path, limit: int, name: str = "memory_bytes") -> None:
    """Give the machine of a run so many bytes of memory."""
    path = directory / "manifest.rank00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["environment"] = {**lines[0].get("environment", {}), name: limit}
    write_rows(path, *lines)


def loader(**settings: Any) -> dict[str, Any]:
    usual = {"num_workers": 0, "batch_size": 8, "pin_memory": False, "prefetch_factor": None}
    return {"dataloaders": [{**usual, "persistent_workers": False, **settings}]}


def optimizer(**settings: Any) -> dict[str, Any]:
    usual = {"name": "AdamW", "foreach": None, "fused": None, "parameters": 1000, "device": "cpu"}
    return {"optimizers": [{**usual, **settings}]}
