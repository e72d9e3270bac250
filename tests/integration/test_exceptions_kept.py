"""An exception of the program has the context, the cause and the traceback that it has without this package."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import Profiler

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from training import Perceptron, loader


class ProgramError(Exception):
    pass


class Failing:
    """Raises at the third call for a place, and at each one after it."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._calls: Counter[str] = Counter()

    def reach(self, place: str) -> None:
        self._calls[place] += place == self._place
        if self._calls[place] >= 3:
            raise ProgramError(place)


class Net(Perceptron):
    def __init__(self, failing: Failing) -> None:
        super().__init__()
        self.failing = failing
        self.net[0].register_forward_hook(lambda *_: failing.reach("forward hook"))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.failing.reach("training_step")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        failing = self.failing

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                failing.reach("optimizer")
                return result

        return Optimizer(self.parameters(), 1e-2)


class Hook(pl.Callback):
    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    def on_train_batch_start(self, *_: object) -> None:
        self._failing.reach("callback")

    def on_before_backward(self, *_: object) -> None:
        self._failing.reach("callback in a step")


class Timing(Profiler):
    def __init__(self, failing: Failing) -> None:
        super().__init__()
        self._failing = failing

    def start(self, action_name: str) -> None:
        if action_name.endswith(".training_step"):
            self._failing.reach("profiler start")

    def stop(self, action_name: str) -> None:
        if action_name.endswith(".training_step"):
            self._failing.reach("profiler stop")


PLACES = ["training_step", "forward hook", "optimizer", "callback", "callback in a step"]
PROFILED = ["profiler start", "profiler stop"]


def raised(place: str, *ours: pl.Callback) -> ProgramError:
    failing = Failing(place)
    hooks = [] if place in PROFILED else [Hook(failing)]
    trainer = pl.Trainer(
        callbacks=[*hooks, *ours], profiler=Timing(failing) if place in PROFILED else None, max_epochs=1,
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ProgramError) as error:
        trainer.fit(Net(failing), loader(6))
    return error.value


def recorder(tmp_path: Path) -> MemProfilerCallback:
    output = OutputOptions(summary=False, report=False, dirpath=tmp_path)
    return MemProfilerCallback(schedule=Schedule(wait=0, warmup=1, active=5, repeat=1), output=output)


def told(error: ProgramError) -> tuple[Any, ...]:
    frames = len(traceback.extract_tb(error.__traceback__))
    return repr(error.__context__), repr(error.__cause__), error.__suppress_context__, frames


@pytest.mark.parametrize("place", [*PLACES, *PROFILED])
def test_context_cause_and_length_of_the_traceback_are_those_of_the_bare_run(place: str, tmp_path: Path) -> None:
    assert told(raised(place, recorder(tmp_path))) == told(raised(place))
