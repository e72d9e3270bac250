"""Memory of a device that grows: the variable, or the function, that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.snapshot.report import SnapshotReport, snapshot_report
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB
from snapshots import MODEL, TRAIN, History, write_snapshot

KEPT = {**MODEL, "line": 9, "name": "keep"}


def piled_up(path: Path, steps: int, size: int) -> SnapshotReport:
    """Return a snapshot in which each step frees a block of forward, and keeps one."""
    history = History()
    for _ in range(steps):
        history.free(history.allocate(GIB, MODEL, TRAIN), history.allocate(MIB))
        history.allocate(size, KEPT, TRAIN)
    write_snapshot(path, history.data())
    return snapshot_report(path)


def grown(
    root: Path, *snapshots: SnapshotReport, per_step: int = 20 * MIB, holder: dict[str, Any] | None = None
) -> list[Finding]:
    """Return the findings about memory that grows in a run on a device."""
    directory = make_run(
        root, FakeRun(steps=120, device_bytes=lambda step: GIB + per_step * step, memory=None, trace=False)
    )
    if holder is not None:
        (directory / "holders.rank00000.jsonl").write_text(json.dumps(holder) + "\n")
    found = examine(Facts.of(load_run(directory), (), snapshots))
    return [finding for finding in found if finding.rule == "memory_growth"]


OUTPUTS: dict[str, Any] = {
    "kind": "attribute", "place": "Net.outputs[...]", "content": "Tensor[9]", "line": "a/train.py:3", "step": 119,
    "since_step": 19, "count": 120, "added": 100, "added_bytes": 2000 * MIB, "grown_bytes": 2000 * MIB,
    "source": "self.outputs = []",
}  # fmt: skip


def test_growth_of_a_device_names_the_function_whose_blocks_pile_up_in_its_snapshot(tmp_path: Path) -> None:
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB))
    assert finding.rule == "memory_growth"
    assert finding.title.endswith(": keep.")
    assert finding.remedies[0].id == "release_tensors"
    assert finding.severity is Severity.CRITICAL


def test_the_variable_that_keeps_the_tensors_is_named_before_the_function_that_allocates_them(tmp_path: Path) -> None:
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB), holder=OUTPUTS)
    assert finding.title.endswith(" in Net.outputs (a/train.py:3).")
    assert finding.remedies[0].id == "bound_holder"
    assert "self.outputs = []" in finding.next_steps[0]


@pytest.mark.parametrize(
    ("per_step", "severity"), [(5 * MIB, Severity.CRITICAL), (2 * MIB, Severity.WARNING), (MIB, Severity.INFO)]
)
def test_the_severity_of_growth_follows_from_what_it_adds_to_the_end(
    tmp_path: Path, per_step: int, severity: Severity
) -> None:
    (finding,) = grown(tmp_path, per_step=per_step)
    assert finding.severity is severity


def test_growth_of_the_host_recovers_host_memory_where_the_run_has_a_device_too(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=120, rss_bytes=lambda step: GIB + 5 * MIB * step, device_bytes=lambda _: GIB, memory=None, trace=False
    )
    (finding,) = (
        each for each in examine(Facts.of(load_run(make_run(tmp_path, fake)))) if each.rule == "memory_growth"
    )
    assert finding.recovers is not None
    assert finding.recovers.max == finding.numbers["bytes"]
