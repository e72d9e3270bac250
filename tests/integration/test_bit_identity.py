"""The table of the promise: every kind of model, trained with each memory collector and with all, to the last bit."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    FunctionMemory,
    GarbageCollection,
    HookTimings,
    HostMemory,
    ModuleMemory,
    ModuleRss,
    OOMAutopsy,
    OperatorTrace,
    Pulse,
    SavedTensors,
    SystemStats,
    Throughput,
)
from models import MODELS, Mlp, Outcome, fit
from training import only_run, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WINDOWS = Schedule(wait=1, warmup=1, active=2, repeat=1)
FUNCTIONS = ("training_step", "backward", "optimizer_step", "on_before_optimizer_step")

EACH: dict[str, Callable[[], Collector]] = {
    "FunctionMemory": lambda: FunctionMemory(functions=FUNCTIONS),
    "FunctionMemory with npp": lambda: FunctionMemory(saved_tensors_hooks=True),
    "SavedTensors": SavedTensors,
    "ModuleMemory": ModuleMemory,
    "ModuleRss": ModuleRss,
    "System": lambda: SystemStats(interval=0.1, always=True),
    "Throughput": lambda: Throughput(flops=True),
    "Garbage": lambda: GarbageCollection(cycles=True),
    "HookTimings": HookTimings,
}


def all_of_them() -> list[Collector]:
    trace = OperatorTrace(record_shapes=True, profile_memory=True, with_stack=True)
    return [
        Pulse(),
        HostMemory(),
        HookTimings(),
        GarbageCollection(cycles=True),
        FunctionMemory(functions=FUNCTIONS, saved_tensors_hooks=True),
        SavedTensors(),
        ModuleMemory(),
        ModuleRss(),
        SystemStats(),
        Throughput(flops=True),
        OOMAutopsy(),
        trace,
    ]


def callback(*collectors: Collector) -> MemProfilerCallback:
    return MemProfilerCallback(schedule=WINDOWS, collectors=list(collectors), output=OutputOptions(summary=False))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    @cache
    def trained(name: str) -> Outcome:
        return fit(MODELS[name], tmp_path_factory.mktemp("bare"))

    return trained


def assert_same(outcome: Outcome, other: Outcome) -> None:
    assert len(outcome) == len(other)
    differing = [index for index, (a, b) in enumerate(zip(outcome, other, strict=True)) if not torch.equal(a, b)]
    assert not differing


@pytest.mark.parametrize("collector", EACH)
@pytest.mark.parametrize("name", MODELS)
def test_a_collector_changes_no_bit(name: str, collector: str, bare: Callable[[str], Outcome], tmp_path: Path) -> None:
    assert_same(bare(name), fit(MODELS[name], tmp_path, callback(EACH[collector]())))
    run = only_run(tmp_path)
    assert [row["steps"] for row in rows_of(run, "window") if row["event"] == "close"] == [[2, 3]]


@pytest.mark.parametrize("name", MODELS)
def test_all_collectors_together_change_no_bit(name: str, bare: Callable[[str], Outcome], tmp_path: Path) -> None:
    assert_same(bare(name), fit(MODELS[name], tmp_path, callback(*all_of_them())))


class ModifiedInPlace(Mlp):
    """What autograd refuses: the sigmoid's output is needed for backward, and is changed before it."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        value = torch.sigmoid(self.net(batch))
        loss = value.square().mean()
        if self.global_step >= 2:
            with torch.no_grad():
                value.add_(1)
        return loss


@pytest.mark.parametrize("collector", [*EACH, "all"])
def test_an_in_place_error_is_still_raised(collector: str, tmp_path: Path) -> None:
    collectors = all_of_them() if collector == "all" else [EACH[collector]()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(ModifiedInPlace, tmp_path, callback(*collectors))
