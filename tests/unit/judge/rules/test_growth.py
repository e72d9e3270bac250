from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fake_devices import FakeCuda
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.snapshot.report import snapshot_report
from lightning_memprof.schedule import Schedule
from lightning_memprof.units import GIB, MIB
from sessions import context, drive, session
from snapshots import MODEL, MODEL_LINE, TRAIN, block, event, segment, snapshot, write_snapshot

WINDOWS = Schedule(wait=2, warmup=1, active=2, repeat=0)
STEPS = 25  # five windows


def leaks(cuda: FakeCuda, step: int) -> None:
    """Keep 20 MiB of each step's 120."""
    cuda.allocate(100 * MIB)
    cuda.allocate(20 * MIB + step)
    cuda.allocate(-100 * MIB)


def grows_once(cuda: FakeCuda, step: int) -> None:
    """Make the optimizer's state after the first window."""
    if step in (0, 6):
        cuda.allocate(500 * MIB)
    cuda.allocate(100 * MIB)
    cuda.allocate(-100 * MIB)


def varies(cuda: FakeCuda, step: int) -> None:
    """Keep a batch until the next one comes, of changing length."""
    if step:
        cuda.allocate(-(100 + 50 * ((step - 1) % 3)) * MIB)
    cuda.allocate((100 + 50 * (step % 3)) * MIB)


def trained(directory: Path, step: Callable[[FakeCuda, int], None]) -> Path:
    """Record the windows of a training on a device that is not there."""
    with FakeCuda().installed() as cuda, context(directory, "cuda:0") as run:
        run.sink.manifest.append("run", schema_version=1, stage="fit", rank=0, world_size=1)
        cuda.allocate(64 * MIB)
        with session(run, WINDOWS, [AllocatorHistory()]) as made:
            drive(made, range(STEPS), lambda number: step(cuda, number))
        return run.sink.place.directory


def found(directory: Path, *, with_snapshots: bool = True, with_allocations: bool = False) -> Mapping[str, Finding]:
    run = load_run(directory)
    snapshots = [snapshot_report(artifact.file) for artifact in run.artifacts if artifact.type == "snapshot"]
    memory = memory_report(run, run_allocations(run)) if with_allocations else None
    facts = Facts.of(run, (), tuple(snapshots) if with_snapshots else (), memory)
    return {finding.rule: finding for finding in examine(facts)}


def test_a_leak_on_a_device_is_said_with_the_line_that_leaks(tmp_path):
    finding = found(trained(tmp_path, leaks))["device_memory_growth"]
    assert finding.severity is Severity.CRITICAL
    assert finding.numbers["windows"] == [0, 1, 2, 3, 4]
    assert finding.numbers["live_bytes"][0] // MIB == 64 + 5 * 20
    assert finding.numbers["added_bytes"] // MIB == 20 * 20
    # Blocks keep their stacks when the history goes off; those from between the windows have none. 3 of 5 steps.
    (line,) = finding.numbers["lines"]
    assert "test_growth.py" in line["line"]
    assert line["line"].endswith(": leaks")
    assert line["bytes"] // MIB == 20 * 12
    assert finding.title.startswith("Memory of cuda:0 grows from window to window, mostly from ")
    assert [(evidence.window, evidence.rank) for evidence in finding.evidence] == [(0, 0), (4, 0)]
    assert finding.evidence[0].artifact.endswith("cuda_alloc_rank_0.training_step.5.end.pickle")


@pytest.mark.parametrize("step", [grows_once, varies])
def test_what_grows_once_or_goes_up_and_down_is_no_leak(tmp_path, step):
    directory = trained(tmp_path, step)
    assert "device_memory_growth" not in found(directory, with_allocations=True)


def test_without_analysed_snapshots_the_windows_rings_show_it(tmp_path):
    finding = found(trained(tmp_path, leaks), with_snapshots=False, with_allocations=True)["device_memory_growth"]
    assert len(finding.numbers["windows"]) == 5
    assert [evidence.window for evidence in finding.evidence] == [0, 4]


def test_blocks_that_stay_from_window_to_window_are_told_from_those_that_grew(tmp_path):
    directory = trained(tmp_path, leaks)
    for number, path in enumerate(sorted(directory.glob("*.pickle"), key=lambda path: int(path.name.split(".")[2]))):
        kept = [block(8 * GIB + n * 30 * MIB, 30 * MIB, MODEL) for n in range(number)]
        ring = [event("alloc", 8 * GIB, 30 * MIB, MODEL)]
        write_snapshot(path, snapshot([segment(block(0, GIB, TRAIN), *kept)], ring))
    finding = found(directory)["device_memory_growth"]
    assert finding.numbers["lines"] == [{"line": MODEL_LINE, "bytes": 120 * MIB}]
    assert finding.severity is Severity.WARNING
    assert finding.next_steps[0] == f"Look at {MODEL_LINE}: its allocations outlive their step."


def test_the_variable_that_keeps_the_tensors_is_named(tmp_path: Path) -> None:
    directory = trained(tmp_path, leaks)
    row: dict[str, str | int] = {"kind": "attribute", "place": "Net.outputs[...]", "content": "Tensor[9]"}
    row |= {
        "line": "a/train.py:3",
        "step": 24,
        "since_step": 4,
        "added": 20,
        "added_bytes": 400 * MIB,
        "source": "self.outputs = []",
    }
    (directory / "holders.rank00000.jsonl").write_text(json.dumps(row) + "\n")
    finding = found(directory)["device_memory_growth"]
    assert finding.next_steps[0].startswith("Clear or bound Net.outputs, assigned in a/train.py:3: self.outputs = []")
    assert "Net.outputs gained 20 Tensor[9] (400 MiB) since step 4." in finding.why
