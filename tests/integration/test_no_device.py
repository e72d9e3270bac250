"""A CUDA build of torch without a device: it answers zeros and empty snapshots where a CPU build raises."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from lightning_memprof import Collector, ConfigError, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.sources.memory import memory_stats, without_statistics
from lightning_memprof.collectors import AllocatorHistory, AllocatorStats, FunctionMemory
from lightning_memprof.read.run.load import load_run
from training import Perceptron, loader, manifest, only_run, rows_of, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEDULE = Schedule(wait=1, warmup=1, active=2, repeat=1)
QUIET = OutputOptions(summary=False, report=False)


@pytest.fixture(autouse=True)
def cuda_build() -> Iterator[None]:
    """Answer as torch 2.10 to 2.15 do in a CUDA build without a device; such a build itself answers so."""
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    fatal = mock.Mock(side_effect=AssertionError("torch ends the process here"))
    snapshot: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}}
    with ExitStack() as patches:
        for target, answers in (
            (torch.version, {"cuda": "13.0"}),
            (torch._C, {"_cuda_isHistoryEnabled": fatal}),
            (torch.cuda, {"memory_stats": lambda *_: {}, "memory_stats_as_nested_dict": lambda *_: {}}),
            (torch.cuda, {"memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0}),
            (torch.accelerator, {"memory_stats": lambda *_: {}, "max_memory_allocated": lambda *_: 0}),
            (torch.cuda.memory, {"_snapshot": lambda *_: snapshot}),
        ):
            patches.enter_context(mock.patch.multiple(target, create=True, **answers))
        yield


def fit(directory: Path, *collectors: Any) -> Path:
    callback = MemProfilerCallback(SCHEDULE, collectors=list(collectors), output=QUIET)
    trainer(directory, callback).fit(Perceptron(), loader(6))
    return only_run(directory)


def test_its_zeros_are_no_figures(tmp_path: Path) -> None:
    run = fit(tmp_path, "default")
    reasons = {row["collector"]: row["reason"] for row in rows_of(run, "unavailable")}
    assert reasons["allocator"] == "no accelerator"
    assert reasons["allocator_history"] == "CUDA is not available"
    assert rows_of(run, "error") == []
    assert not [row for row in manifest(run) if row["kind"] == "artifact" and row["type"] == "snapshot"]
    rank = load_run(run).lead
    assert {row["device_peak_bytes"] for row in rank.pulse} == {None}


@pytest.mark.parametrize(
    ("collector", "reason"),
    [
        (AllocatorStats(), "no accelerator"),
        (AllocatorHistory(), "CUDA is not available"),
        (FunctionMemory(allocator_snapshots=True), "allocator_snapshots needs CUDA"),
    ],
)
def test_what_needs_the_device_is_refused_by_name(tmp_path: Path, collector: Collector, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        fit(tmp_path, collector)


def test_a_device_that_is_not_there_has_no_statistics() -> None:
    assert without_statistics(torch.device("cuda")) == "CUDA is not available"
    assert memory_stats(torch.device("cuda", 0)) == {}
