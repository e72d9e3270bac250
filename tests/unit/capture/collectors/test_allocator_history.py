from __future__ import annotations

import inspect
import pickle
import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fake_devices import FakeCuda
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.allocator_history import (
    AllocatorHistory,
    memory_history,
    start_memory_history,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Schedule
from recorded_rows import read_rows
from sessions import context, drive, session

SCHEDULE = Schedule(wait=1, warmup=1, active=2)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda().installed() as fake:
        yield fake


@pytest.fixture
def run(cuda: FakeCuda, tmp_path: Path) -> Iterator[RunContext]:
    with context(tmp_path, "cuda:0") as made:
        yield made


def snapshots(run: RunContext) -> list[str]:
    return sorted(path.name for path in run.sink.place.directory.glob("*.pickle"))


def sizes(run: RunContext, name: str) -> list[int]:
    snapshot: dict[str, Any] = pickle.loads((run.sink.place.directory / name).read_bytes())  # noqa: S301 our own
    return [event["size"] for event in snapshot["device_traces"][0]]


def allocate(cuda: FakeCuda) -> Callable[[int], None]:
    """Allocate 100 bytes and the step's number in each step."""
    return lambda step: cuda.allocate(100 + step)


def test_by_default_the_end_of_the_windows_last_step_is_dumped_before_the_ring_is_cleared(
    cuda: FakeCuda, run: RunContext
) -> None:
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    assert snapshots(run) == ["cuda_alloc_rank_0.training_step.4.end.pickle"]
    assert sizes(run, "cuda_alloc_rank_0.training_step.4.end.pickle") == [101, 102, 103]
    assert [call for call, _ in cuda.calls] == ["on", "snapshot", "off"]
    assert cuda.history == "off"


def test_snapshots_are_pickles_of_protocol_4_and_listed(cuda: FakeCuda, run: RunContext) -> None:
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    (name,) = snapshots(run)
    operations = list(pickletools.genops((run.sink.place.directory / name).read_bytes()))
    assert (operations[0][0].name, operations[0][1]) == ("PROTO", 4)
    assert max(operation.proto for operation, _, _ in operations) <= 4
    rows, _ = read_rows(run.sink.manifest.path)
    found = [(row["type"], row["path"], row["window"]) for row in rows if row["kind"] == "artifact"]
    assert found == [("snapshot", f"memprofiler/{name}", 0)]


def test_an_exception_in_a_step_still_dumps_the_ring_once_and_switches_it_off(cuda: FakeCuda, run: RunContext) -> None:
    def inside(step: int) -> None:
        cuda.allocate(100 + step)
        if step == 2:
            raise torch.OutOfMemoryError

    opened = session(run, SCHEDULE, [AllocatorHistory()])
    with pytest.raises(torch.OutOfMemoryError), opened as made:
        drive(made, range(6), inside)
    assert snapshots(run) == ["cuda_alloc_rank_0.training_step.3.end.pickle"]
    assert sizes(run, "cuda_alloc_rank_0.training_step.3.end.pickle") == [101, 102]
    assert [call for call, _ in cuda.calls] == ["on", "snapshot", "off"]


def test_a_run_that_ends_while_warming_up_dumps_nothing_and_switches_off(cuda: FakeCuda, run: RunContext) -> None:
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(2), allocate(cuda))
    assert snapshots(run) == []
    assert [call for call, _ in cuda.calls] == ["on", "off"]


def test_a_snapshot_that_cannot_be_taken_is_a_fault_and_the_history_is_off(
    cuda: FakeCuda, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        msg = "CUDA error: device-side assert triggered"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    errors = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    assert [(row["collector"], row["where"]) for row in errors] == [("allocator_history", "exit")]
    assert cuda.history == "off"
    assert list(run.sink.place.directory.glob("*.partial")) == []


def test_every_window_records_anew(cuda: FakeCuda, run: RunContext) -> None:
    with session(run, Schedule(wait=1, warmup=0, active=1, repeat=2), [AllocatorHistory()]) as made:
        drive(made, range(5), allocate(cuda))
    assert sizes(run, "cuda_alloc_rank_0.training_step.2.end.pickle") == [101]
    assert sizes(run, "cuda_alloc_rank_0.training_step.4.end.pickle") == [103]
    assert [call for call, _ in cuda.calls] == ["on", "snapshot", "off"] * 2


def test_a_history_that_was_started_before_the_model_is_in_the_first_snapshot(cuda: FakeCuda, run: RunContext) -> None:
    start_memory_history()
    cuda.allocate(7)
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    assert sizes(run, "cuda_alloc_rank_0.training_step.4.end.pickle") == [7, 100, 101, 102, 103]


def test_the_ring_is_bounded_and_the_stacks_are_pythons(cuda: FakeCuda) -> None:
    start_memory_history()
    start_memory_history(max_entries=5)
    first, second = (keywords for _, keywords in cuda.calls)
    assert (first["max_entries"], first["stacks"]) == (100_000, "python")
    assert (second["max_entries"], second["stacks"]) == (5, "python")


def test_a_torch_that_does_not_know_a_keyword_is_not_given_it() -> None:
    def older(enabled: str | None = "all", context: str | None = "all", max_entries: int = 1) -> None: ...

    with FakeCuda().installed(record_memory_history=older) as cuda:
        start_memory_history()
    assert cuda.calls == [("on", {"context": "alloc", "max_entries": 100_000})]


def test_this_torch_knows_every_keyword_that_bounds_the_history() -> None:
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries"} <= set(known)


def test_on_a_cpu_the_reason_is_that_there_is_no_cuda(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        reason = AllocatorHistory().unavailable(run)
    assert reason == ("the model is on cpu" if torch.cuda.is_available() else "CUDA is not available")


def test_a_model_on_the_cpu_of_a_machine_with_cuda_has_another_reason(cuda: FakeCuda, tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert AllocatorHistory().unavailable(run) == "the model is on cpu"


def test_with_cuda_it_is_available(run: RunContext) -> None:
    assert AllocatorHistory().unavailable(run) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_starting_a_history_without_cuda_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="no CUDA device is available; remove the call"):
        start_memory_history()


def test_contexts_that_want_the_history_share_one_switch_and_the_last_puts_it_off(cuda: FakeCuda) -> None:
    first, second = memory_history(max_entries=5), memory_history()
    with first:
        second.__enter__()
    assert cuda.history == "on"
    second.__exit__(None, None, None)
    assert [call for call, _ in cuda.calls] == ["on", "off"]
    assert cuda.calls[0][1]["max_entries"] == 5


def test_a_window_inside_of_such_a_context_leaves_the_ring_as_it_is(cuda: FakeCuda, run: RunContext) -> None:
    with memory_history():
        cuda.allocate(7)
        with session(run, SCHEDULE, [AllocatorHistory()]) as made:
            drive(made, range(6), allocate(cuda))
        assert [call for call, _ in cuda.calls] == ["on", "snapshot"]
    assert sizes(run, "cuda_alloc_rank_0.training_step.4.end.pickle") == [7, 100, 101, 102, 103]
    assert cuda.history == "off"


def test_an_exception_inside_of_such_a_context_switches_the_history_off(cuda: FakeCuda) -> None:
    with pytest.raises(ArithmeticError), memory_history():
        raise ArithmeticError
    assert [call for call, _ in cuda.calls] == ["on", "off"]


def test_a_history_of_the_program_is_used_and_goes_on(cuda: FakeCuda, run: RunContext) -> None:
    torch.cuda.memory._record_memory_history(max_entries=9)
    cuda.allocate(7)
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    assert [call for call, _ in cuda.calls] == ["on", "snapshot"]
    assert cuda.history == "on"
    assert sizes(run, "cuda_alloc_rank_0.training_step.4.end.pickle") == [7, 100, 101, 102, 103]


def test_after_a_history_that_the_program_has_stopped_windows_record_their_own(cuda: FakeCuda, run: RunContext) -> None:
    start_memory_history()
    torch.cuda.memory._record_memory_history(enabled=None)
    with session(run, SCHEDULE, [AllocatorHistory()]) as made:
        drive(made, range(6), allocate(cuda))
    assert [call for call, _ in cuda.calls] == ["on", "off", "on", "snapshot", "off"]


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_other_allocators_keep_no_history(cuda: FakeCuda, run: RunContext, backend: str) -> None:
    cuda.backend = backend
    assert AllocatorHistory().unavailable(run) == f"the {backend} allocator keeps no history"
    with pytest.raises(ConfigError, match="use the native allocator"):
        start_memory_history()
    assert cuda.calls == []


def test_before_cuda_is_initialized_torch_is_not_asked_for_a_history(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal = mock.Mock(side_effect=AssertionError("torch ends the process here"))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", fatal)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with memory_history():
        pass
    assert [call for call, _ in cuda.calls] == ["on", "off"]
