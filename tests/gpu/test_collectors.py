"""The collectors on a real device; one step of a small model works for some milliseconds."""

from __future__ import annotations

import pickle
import pickletools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.artifacts.series import PHASES, PULSE_COLUMNS
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.clock import AcceleratorTimer, device_timer
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory, start_memory_history
from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.named_snapshots import NamedSnapshots
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.sources.memory import memory_stats, peak_allocated_bytes
from lightning_memprof.schedule import Action, Schedule
from lightning_memprof.units import MIB
from recorded_rows import read_pulse, read_rows, read_series
from sessions import context, drive, session

pytestmark = pytest.mark.gpu

FORWARD = PHASES.index("forward")


@pytest.fixture
def device() -> Iterator[torch.device]:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    yield torch.device(accelerator.type, 0)
    torch.accelerator.synchronize()


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("the accelerator is not CUDA")
    return device


@pytest.fixture
def run(device: torch.device, tmp_path: Path) -> Iterator[RunContext]:
    with context(tmp_path, str(device)) as made:
        yield replace(made, model=nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()).to(device))


def training_step(made: Session, run: RunContext, repeat: int = 20) -> Callable[[int], None]:
    """Queue a forward and a backward of some milliseconds; the host does not wait for them."""
    batch = torch.randn(2048, 2048, device=run.device)

    def step(_: int) -> None:
        made.clock.enter(made.clock.slot("forward", FORWARD))
        out = batch
        for _ in range(repeat):
            out = run.model(out)
        made.clock.leave()
        made.clock.enter(made.clock.slot("backward", PHASES.index("backward")))
        out.sum().backward()
        made.clock.leave()

    return step


def never(_: int) -> Action:
    return Action.NONE


def test_the_devices_clock_measures_what_was_queued(device: torch.device) -> None:
    timer = device_timer(device)
    assert isinstance(timer, AcceleratorTimer)
    work = torch.randn(4096, 4096, device=device)
    work @ work
    torch.accelerator.synchronize()
    began = time.perf_counter_ns()
    start = timer.record()
    for _ in range(20):
        work @ work
    end = timer.record()
    torch.accelerator.synchronize()
    waited = time.perf_counter_ns() - began
    assert timer.reached(end)
    assert 0 < timer.elapsed_ns(start, end) <= 1.1 * waited
    timer.release(start)
    assert timer.record() is start


def test_the_phases_of_the_device_sum_to_its_step_and_are_not_the_hosts(run: RunContext, tmp_path: Path) -> None:
    with session(run, never, [Pulse()]) as made:
        drive(made, range(200), training_step(made, run))
        torch.accelerator.synchronize()
    rows = read_pulse(tmp_path / "memprofiler/pulse.rank00000.csv")
    assert [row["step"] for row in rows] == list(range(200))
    # Of short steps some have the device's timestamps.
    timed = [row for row in rows if row["device_duration_ns"] is not None]
    assert len(timed) > 2
    for row in timed:
        phases = [row[f"device_{phase}_ns"] or 0 for phase in PHASES]
        assert sum(phases) == row["device_duration_ns"]
        assert phases[FORWARD] > 0
        assert row["device_callbacks_ns"] is None
    # Memory is read at most every 10 ms: rows in between have no peak.
    peaks = [row["device_peak_bytes"] for row in rows if row["device_peak_bytes"] is not None]
    assert peaks
    assert min(peaks) > 16 * MIB
    host, on_device = (sum(row[name] or 0 for row in timed[1:]) for name in ("forward_ns", "device_forward_ns"))
    assert on_device > host


def test_the_pulse_waits_for_nothing(run: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        msg = "the pulse synchronised"
        raise AssertionError(msg)

    with session(run, never, [Pulse()]) as made:
        step = training_step(made, run, repeat=100)
        drive(made, range(2), step)
        torch.accelerator.synchronize()
        with monkeypatch.context() as patch:
            for owner in (torch.accelerator, torch.cuda):
                patch.setattr(owner, "synchronize", forbidden)
            if run.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                drive(made, range(2, 5), step)
            finally:
                if run.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
    rows = read_pulse(tmp_path / "memprofiler/pulse.rank00000.csv")
    assert len(rows) == 5
    for row in rows:
        values = {name: row[name] for name in PULSE_COLUMNS if name.startswith("device_") and name.endswith("_ns")}
        values.pop("device_callbacks_ns")
        # Those that the device had not reached when the run ended are empty as a whole.
        assert all(value is None for value in values.values()) or None not in values.values()


def test_events_are_used_again(run: RunContext) -> None:
    with session(run, never, [Pulse()]) as made:
        step = training_step(made, run, repeat=1)
        for number in range(50):
            drive(made, [number], step)
            torch.accelerator.synchronize()
    timer: Any = run.timer
    assert len(timer._pool) < 30


def test_every_mark_has_the_statistics_of_torch_and_the_peak_is_never_reset(run: RunContext, tmp_path: Path) -> None:
    before = peak_allocated_bytes(run.device)
    with session(run, Schedule(), [AllocatorStats()]) as made:
        drive(made, range(6), training_step(made, run))
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.allocator.jsonl")
    assert len(rows) == 3 * 8
    assert set(memory_stats(run.device)) <= set(rows[0])
    peaks = [row["allocated_bytes.all.peak"] for row in rows]
    assert peaks == sorted(peaks)
    assert before <= peaks[-1] == peak_allocated_bytes(run.device)
    assert all(row["allocated_bytes.all.peak"] >= row["allocated_bytes.all.current"] for row in rows)


def test_a_snapshot_has_the_windows_allocations_with_python_stacks(cuda: torch.device, run: RunContext) -> None:
    with session(run, Schedule(), [AllocatorHistory()]) as made:
        drive(made, range(6), training_step(made, run))
    (path,) = run.sink.place.directory.glob("*.pickle")
    assert path.name == "cuda_alloc_rank_0.training_step.4.end.pickle"
    data = path.read_bytes()
    assert next(iter(pickletools.genops(data)))[1] == 4
    snapshot = pickle.loads(data)  # noqa: S301 our own
    events = [event for trace in snapshot["device_traces"] for event in trace]
    allocations = [event for event in events if event["action"] == "alloc" and event["size"] >= 16 * MIB]
    assert allocations
    frames = [frame["filename"] for event in allocations for frame in event.get("frames", ())]
    assert any(name == __file__ for name in frames)
    assert not any(name.endswith((".cpp", ".so")) for name in frames)


def test_afterwards_the_history_is_off_also_where_the_step_failed(cuda: torch.device, run: RunContext) -> None:
    def fail(_: int) -> None:
        torch.empty(2**50, dtype=torch.uint8, device=cuda)

    with session(run, Schedule(), [AllocatorHistory()]) as made:
        drive(made, range(2), training_step(made, run))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            drive(made, [2], fail)
        made.close(reason=str(caught.value))
    assert [path.name for path in run.sink.place.directory.glob("*.pickle")] == [
        "cuda_alloc_rank_0.training_step.3.end.pickle"
    ]
    torch.empty(MIB, device=cuda)
    assert not any(torch.cuda.memory._snapshot(cuda)["device_traces"])
    assert [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"] == []


def test_a_history_that_was_started_early_holds_the_model(cuda: torch.device, run: RunContext) -> None:
    start_memory_history()
    early = torch.empty(48 * MIB, dtype=torch.uint8, device=cuda)
    with session(run, Schedule(), [AllocatorHistory()]) as made:
        drive(made, range(6), training_step(made, run))
    (path,) = run.sink.place.directory.glob("*.pickle")
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301 our own
    sizes = {event["size"] for trace in snapshot["device_traces"] for event in trace}
    assert early.nbytes in sizes


def test_named_snapshots_have_the_allocators_statistics(cuda: torch.device, tmp_path: Path) -> None:
    held = torch.empty(MIB, device=cuda)
    named = NamedSnapshots()
    named.place(tmp_path, 0)
    named.take("x", "snapshot", None)
    (row,) = read_series(tmp_path / "snapshots.rank00000.jsonl")
    assert row["allocated_bytes.all.current"] >= held.nbytes
