"""The table of the promise: every kind of model, trained with each memory collector and with all, to the last bit."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils import _python_dispatch

from every_collector import every_collector
from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    FunctionMemory,
    GarbageCollection,
    HookTimings,
    ModuleMemory,
    SavedTensors,
    SystemStats,
    Throughput,
)
from models import MODELS, ODD, Mlp, Outcome, fit
from training import only_run, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WINDOWS = Schedule(wait=1, warmup=1, active=2, repeat=1)
FUNCTIONS = ("training_step", "backward", "optimizer_step", "on_before_optimizer_step")

KINDS = MODELS | ODD
# The models with which `make test` trains each collector alone; with all collectors it trains every model.
DAILY = ("MLP", "double backward")

# Those that need the program's hooks or modes for themselves, or whose figures compiled code would change.
UNAVAILABLE = {"saved_tensors", "functions", "throughput"}

EACH: dict[str, Callable[[], Collector]] = {
    "FunctionMemory": lambda: FunctionMemory(functions=FUNCTIONS),
    "FunctionMemory with npp": lambda: FunctionMemory(saved_tensors_hooks=True),
    "SavedTensors": SavedTensors,
    "ModuleMemory": ModuleMemory,
    "System": lambda: SystemStats(interval=0.1, always=True),
    "Throughput": lambda: Throughput(flops=True),
    "Garbage": GarbageCollection,
    "HookTimings": HookTimings,
}


def callback(*collectors: Collector) -> MemProfilerCallback:
    output = OutputOptions(summary=False, curves=True)
    return MemProfilerCallback(schedule=WINDOWS, collectors=list(collectors), output=output)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    @cache
    def trained(name: str) -> Outcome:
        return fit(KINDS[name], tmp_path_factory.mktemp("bare"))

    return trained


def assert_same(outcome: Outcome, other: Outcome) -> None:
    assert len(outcome) == len(other)
    differing = [index for index, (a, b) in enumerate(zip(outcome, other, strict=True)) if not torch.equal(a, b)]
    assert not differing


@pytest.mark.parametrize("collector", EACH)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.extended) for name in KINDS]
)
def test_a_collector_changes_no_bit(name: str, collector: str, bare: Callable[[str], Outcome], tmp_path: Path) -> None:
    assert_same(bare(name), fit(KINDS[name], tmp_path, callback(EACH[collector]())))
    run = only_run(tmp_path)
    assert [row["steps"] for row in rows_of(run, "window") if row["event"] == "close"] == [[2, 3]]
    assert rows_of(run, "error") == []
    assert {row["collector"] for row in rows_of(run, "unavailable")} <= UNAVAILABLE


@pytest.mark.parametrize("name", KINDS)
def test_all_collectors_together_change_no_bit(name: str, bare: Callable[[str], Outcome], tmp_path: Path) -> None:
    assert_same(bare(name), fit(KINDS[name], tmp_path, callback(*every_collector())))
    run = only_run(tmp_path)
    assert rows_of(run, "error") == []
    unavailable = {row["collector"] for row in rows_of(run, "unavailable")}
    assert unavailable <= UNAVAILABLE
    for collector in {"functions", "module_memory"} - unavailable:
        assert (run / f"window000/rank00000.{collector}.jsonl").stat().st_size > 0
    assert _python_dispatch._get_current_dispatch_mode_stack() == []
    assert not _python_dispatch.is_in_torch_dispatch_mode()


class ModifiedInPlace(Mlp):
    """What autograd refuses: the sigmoid's output is needed for backward, and is changed before it."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        value = torch.sigmoid(self.net(batch))
        loss = value.square().mean()
        if self.global_step >= 2:
            with torch.no_grad():
                value.add_(1)
        return loss


@pytest.mark.parametrize("collector", [*(pytest.param(name, marks=pytest.mark.extended) for name in EACH), "all"])
def test_an_in_place_error_is_still_raised(collector: str, tmp_path: Path) -> None:
    collectors = every_collector() if collector == "all" else [EACH[collector]()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(ModifiedInPlace, tmp_path, callback(*collectors))
