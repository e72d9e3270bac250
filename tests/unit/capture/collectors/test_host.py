from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from lightning_memprof import Collector, RunContext
from lightning_memprof.capture.base import StepRecord
from lightning_memprof.capture.collectors.host import ActionMemory, HostMemory, ProcessLog
from lightning_memprof.capture.loader_workers import worker_memory, worker_pids
from lightning_memprof.capture.sources.memory import HeapSize, ResidentSize
from lightning_memprof.capture.threads import CoreWait
from lightning_memprof.collectors import Window
from lightning_memprof.schedule import Mark, Point, Schedule
from lightning_memprof.units import GIB, MIB
from recorded_rows import read_series
from sessions import POINTS, Times, context, drive, session
from training import manifest


def test_every_mark_has_sizes_and_only_the_end_of_the_window_the_unique_one(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory()]) as made:
        drive(made, range(6))
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")
    points = [Point.STEP_START, *POINTS, Point.STEP_END]
    assert [(row["step"], row["point"]) for row in rows] == [(step, point) for step in (1, 2, 3) for point in points]
    for row in rows:
        assert row["peak_rss_bytes"] >= row["rss_bytes"] > MIB
        assert row["vms_bytes"] >= row["rss_bytes"]
        assert (row["uss_bytes"] is not None) == ((row["step"], row["point"]) == (3, "step_end"))
        assert row["recorded"] == (row["step"] > 1)
    assert [row["time_ns"] for row in rows] == sorted(row["time_ns"] for row in rows)


def test_the_unique_size_is_read_while_the_others_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = threading.Event()
    others: list[bool] = []

    class Saving(Collector):
        name: ClassVar[str] = "saving"

        @contextmanager
        def record(self, run: RunContext, window: Window) -> Iterator[None]:
            yield
            saved.set()

    read = psutil.Process.memory_full_info

    def slow(process: psutil.Process) -> Any:
        others.append(saved.wait(60))
        return read(process)

    monkeypatch.setattr(psutil.Process, "memory_full_info", slow)
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory(), Saving()]) as made:
        drive(made, range(6))
    assert others == [True]
    assert read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")[-1]["uss_bytes"] > MIB


def test_a_unique_size_that_cannot_be_read_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    with context(tmp_path) as run, session(run, Schedule(), [HostMemory()]) as made:
        drive(made, range(6))
    last = read_series(tmp_path / "memprofiler/window000/rank00000.host.jsonl")[-1]
    assert (last["step"], last["point"], last["uss_bytes"]) == (3, "step_end", None)
    assert last["rss_bytes"] > MIB
    assert [row["collector"] for row in manifest(run.sink.place.directory) if row["kind"] == "error"] == ["host"]


def record(step: int, window: int | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        global_step=step,
        epoch=0,
        window=window,
        start_ns=0,
        duration_ns=1,
        times=Times(),
        moments=None,
    )


def test_a_validation_is_a_row_with_the_resident_memory_at_its_batches(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    log.on_step(record(0))
    for _ in range(5):
        log.validation_batch()
    log.on_step(record(1))
    for _ in range(200):
        log.validation_batch()
    assert log.close()
    first, last = read_series(tmp_path / "processes.jsonl")
    assert (first["kind"], first["step"], first["batches"], len(first["rss_bytes"])) == ("validation", 1, 5, 5)
    assert (last.get("step"), last["batches"]) == (None, 200)
    assert 16 <= len(last["rss_bytes"]) <= 32
    assert min(last["rss_bytes"]) > MIB


def test_a_rise_of_the_peak_is_that_of_the_innermost_action_outside_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([100, 400, 410, 700, 705, 900, 900])
    monkeypatch.setattr("lightning_memprof.capture.collectors.host.peak_rss_bytes", lambda _: next(peaks) * MIB)
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    # What steps add before an action is not its own, nor is what an inner one adds.
    for action in ("outer", "inner", None, None, "later", None):
        log.rare_action(action)
    assert log.close()
    found = [(row["kind"], row["action"], row["rss_bytes"]) for row in read_series(tmp_path / "processes.jsonl")]
    assert found == [("peak", "inner", [410 * MIB, 700 * MIB])]


@pytest.mark.parametrize(("resident", "is_written"), [(200, True), (890, False)])
def test_a_peak_before_the_run_is_a_row_where_its_memory_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int, is_written: bool
) -> None:
    monkeypatch.setattr("lightning_memprof.capture.collectors.host.peak_rss_bytes", lambda _: 900 * MIB)
    size = ResidentSize()
    monkeypatch.setattr(size, "read", lambda: resident * MIB)
    log = ProcessLog(tmp_path / "processes.jsonl", 0, size)
    log.begin()
    assert log.close() is is_written
    rows = read_series(tmp_path / "processes.jsonl") if is_written else []
    assert [(row["action"], row["rss_bytes"]) for row in rows] == [
        ("before_steps", [200 * MIB, 900 * MIB])
    ] * is_written


@pytest.mark.skipif(CoreWait().read() is None, reason="the kernel does not count the times of threads")
def test_a_thread_that_computes_in_a_short_window_is_watched_for_longer(tmp_path: Path) -> None:
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    log, path = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize()), tmp_path / "processes.jsonl"
    log.on_step(record(0, window=0))
    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        until = time.monotonic() + 60
        while not log._busy and time.monotonic() < until:
            time.sleep(0.05)
            log.on_step(record(1, window=0))
        log.on_step(record(2))
        time.sleep(0.3)
        log.on_step(record(3))
        (row,) = read_series(path)
        log.on_step(record(4))
    finally:
        ended.set()
        spinning.join()
    assert row["kind"] == "thread"
    assert row["elapsed_ns"] >= 300_000_000
    assert log.close()
    assert len(read_series(path)) == 1


def test_a_run_without_workers_and_validations_has_no_file(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    log.on_step(record(0))
    assert not log.close()
    assert not list(tmp_path.iterdir())


class Child:
    """A worker that runs, or ended with a code."""

    daemon = True

    def __init__(self, pid: int, code: int | None = None) -> None:
        self.pid = pid
        self._popen = type("Popen", (), {"returncode": code})


def test_worker_processes_are_sampled_when_their_time_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("lightning_memprof.capture.collectors.host.perf_counter_ns", lambda: now[0])
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    worker = context.Process(target=stop.wait, daemon=True)
    worker.start()
    try:
        assert worker.pid in worker_pids()
        log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
        for step, second in enumerate((0.5, 20.1, 20.2, 21.2)):
            now[0] = int(second * 1e9)
            log.on_step(record(step))
        assert log.close()
    finally:
        stop.set()
        worker.join()
    rows = read_series(tmp_path / "processes.jsonl")
    sums = [row for row in rows if row["kind"] == "workers"]
    assert [(row["step"], row["workers"]) for row in sums] == [(1, 1), (3, 1)]
    assert all(row["pss_bytes"] >= row["private_bytes"] > 0 for row in rows)
    assert {row["pid"] for row in rows if row["kind"] == "worker"} == {worker.pid}


@pytest.mark.parametrize(("seconds", "sampled"), [((1.5, 1.7), [0, 1]), (range(1, 36), [0, 1, 2, 4, 8, 18, 28])])
def test_a_short_run_has_a_last_sample_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float], sampled: list[int]
) -> None:
    now = sampling(monkeypatch, [Child(1)])
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    for step, second in enumerate(seconds):
        now[0] = int(second * 1e9)
        log.on_step(record(step))
    assert log.close()
    rows = read_series(tmp_path / "processes.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "workers"] == sampled


WORKER = {"pss_bytes": 2 * MIB, "private_bytes": MIB, "shared_bytes": 4 * MIB}


def sampling(monkeypatch: pytest.MonkeyPatch, children: list[Child]) -> list[int]:
    """Return the time, after replacing the processes of this machine."""
    now = [0]
    host = "lightning_memprof.capture.collectors.host."
    monkeypatch.setattr(f"{host}perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(f"{host}new_workers", lambda _: children)
    monkeypatch.setattr(f"{host}worker_memory", lambda _: dict(WORKER))
    return now


@pytest.mark.parametrize("is_readable", [True, False])
def test_workers_whose_memory_this_system_does_not_have_are_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    sampling(monkeypatch, [Child(1)])
    if not is_readable:
        monkeypatch.setattr("lightning_memprof.capture.collectors.host._SIZES", tmp_path / "missing")
    with context(tmp_path) as run, session(run, Schedule(skip_first=100), [HostMemory()]) as made:
        drive(made, range(3))
    reasons = [row["reason"] for row in manifest(tmp_path / "memprofiler") if row["kind"] == "unavailable"]
    assert reasons == ([] if is_readable else ["DataLoader workers: /proc/PID/smaps_rollup cannot be read here"])


def test_a_step_reads_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = sampling(monkeypatch, [Child(1), Child(2), Child(3)])
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    now[0] = 20_000_000_000
    written = []
    for step in range(3):
        log.on_step(record(step))
        written.append([row["kind"] for row in read_series(tmp_path / "processes.jsonl")])
    assert written == [["worker"], ["worker"] * 2, [*["worker"] * 3, "workers"]]
    assert log.close()
    rows = read_series(tmp_path / "processes.jsonl")
    assert (rows[3]["workers"], rows[3]["private_bytes"], rows[3]["step"]) == (3, 3 * MIB, 0)


def test_a_wait_for_a_core_does_not_delay_the_next_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = sampling(monkeypatch, [Child(1)])

    def read(_: int) -> dict[str, int]:
        # Processor time is next to nothing.
        now[0] += 200_000_000
        return dict(WORKER)

    monkeypatch.setattr("lightning_memprof.capture.collectors.host.worker_memory", read)
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    for step in range(45):
        now[0] = max(now[0], step * 100_000_000)
        log.on_step(record(step))
    assert len([row for row in read_series(tmp_path / "processes.jsonl") if row["kind"] == "workers"]) == 3
    assert log.close()


def test_a_worker_that_died_has_its_exit_code_and_its_last_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [Child(1), Child(2), Child(3)]
    now = sampling(monkeypatch, children)
    log = ProcessLog(tmp_path / "processes.jsonl", 0, ResidentSize())
    now[0] = 20_000_000_000
    for step in range(3):
        log.on_step(record(step))
    # Killed, ended, and terminated by the loader.
    for child, code in zip(children, (-9, 0, -15), strict=True):
        child._popen.returncode = code
    assert log.close()
    rows = [row for row in read_series(tmp_path / "processes.jsonl") if "exit_code" in row]
    assert [(row["pid"], row["exit_code"], row["private_bytes"]) for row in rows] == [(1, -9, MIB)]


def test_the_heap_has_what_is_allocated_whether_or_not_its_memory_was_freed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The heap of a process that has run many tests may take too long to be read again.
    monkeypatch.setattr("lightning_memprof.capture.sources.memory.thread_time_ns", lambda: 0)
    heap = HeapSize()
    before = heap.read()
    if before is None:
        pytest.skip("needs glibc 2.33 or later")
    size = 3 * MIB
    first = torch.ones(size // 4)
    assert size <= (heap.read() or 0) - before < size + MIB
    del first
    again = torch.ones(size // 4)
    assert size <= (heap.read() or 0) - before < size + MIB
    del again


def test_a_heap_that_takes_long_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0, 10_000_000))
    monkeypatch.setattr("lightning_memprof.capture.sources.memory.thread_time_ns", lambda: next(now))
    heap = HeapSize()
    first = heap.read()
    assert heap.read() is None
    assert first is None or first > 0


def test_a_process_that_is_gone_has_no_memory() -> None:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=int)
    worker.start()
    worker.join()
    assert worker.pid is not None
    assert worker_memory(worker.pid) == {}


def test_only_the_programs_own_actions_have_a_change_of_resident_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = [GIB]
    monkeypatch.setattr(ResidentSize, "read", lambda _: resident[0])
    hook, fetch = "[Callback]Keeps.on_train_batch_end", "[_TrainingEpochLoop].train_dataloader_next"
    actions = ActionMemory({hook, fetch, "[LightningModule]Net.optimizer_step", "save_checkpoint"}, ResidentSize())
    actions.mark = Mark(step=3, global_step=3, point=Point.STEP_START, time_ns=0, recorded=True)
    for name in ("[LightningModule]Net.optimizer_step", "save_checkpoint", fetch, hook):
        actions.start(name)
        resident[0] += 8 * MIB if name == hook else 0
        actions.stop(name)
    assert [(row.action, row.step, row.rss_change_bytes) for row in actions.rows] == [(fetch, 3, 0), (hook, 3, 8 * MIB)]


def test_the_heap_of_a_hook_is_not_read_again_where_that_takes_longer_than_the_hook_is_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if HeapSize().read() is None:
        pytest.skip("needs glibc 2.33 or later")
    now = itertools.count(0, 80_000)
    monkeypatch.setattr("lightning_memprof.capture.sources.memory.thread_time_ns", lambda: next(now))
    hook = "[Callback]Keeps.on_train_batch_end"
    actions = ActionMemory({hook}, ResidentSize())
    actions.mark = Mark(step=3, global_step=3, point=Point.STEP_START, time_ns=0, recorded=True)
    actions.start(hook)
    actions.stop(hook)
    assert [row.heap_change_bytes for row in actions.rows] == [None]
