"""Programs near Python's recursion limit train as without the profiler, and are recorded."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    FunctionMemory,
    GarbageCollection,
    ModuleMemory,
    Throughput,
    UserHooks,
)
from recorded_rows import read_series
from stack import at_the_limit
from training import loader, only_run, rows_of, trainer

STEPS: Final = 5
IN_WINDOW: Final = 2
LEVELS: Final = 40
# Of wrappers around the whole step: two of HookTimings, one of FunctionMemory; and the hook of the innermost module.
DEFAULT_FRAMES: Final = 4
# Besides, for one call: dispatch modes, global module hooks and saved-tensor hooks, which run in C++.
ALL_FRAMES: Final = 12
HOOKS: Final = UserHooks(pre_forward=[lambda *_: None], post_forward=[lambda *_: None])


class Nest(nn.Module):
    def __init__(self, levels: int, *, has_hooks: bool) -> None:
        super().__init__()
        self.inner: nn.Module = Nest(levels - 1, has_hooks=has_hooks) if levels else nn.Linear(8, 8)
        if has_hooks:
            self.register_forward_pre_hook(lambda *_: None)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value)


def below(frames: int, call: Callable[[Any], Any], value: Any) -> Any:
    return call(value) if frames == 0 else below(frames - 1, call, value)


class Deep(pl.LightningModule):
    """Nested modules below some frames of Python, in one step."""

    automatic: ClassVar[bool] = True

    def __init__(self, frames: int, *, has_hooks: bool = False, deep_step: int = IN_WINDOW) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Nest(LEVELS, has_hooks=has_hooks)
        self.frames = frames
        self.deep_step = deep_step
        self.automatic_optimization = self.automatic

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return below(self.frames if batch_idx == self.deep_step else 0, self.work, batch)

    def work(self, batch: torch.Tensor) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def weights(directory: Path, model: pl.LightningModule, *callbacks: pl.Callback) -> list[torch.Tensor] | None:
    """Give the weights after a fit, None after a RecursionError."""
    torch.manual_seed(0)
    try:
        trainer(directory, *callbacks, max_steps=STEPS, logger=False).fit(model, loader())
    except RecursionError:
        return None
    return [parameter.detach().clone() for parameter in model.parameters()]


class Manual(Deep):
    """Its backward and its optimizer's step are as deep."""

    automatic = False

    def work(self, batch: torch.Tensor) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.net(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class Collecting(Deep):
    """Names a part for the profiler and collects garbage there."""

    def work(self, batch: torch.Tensor) -> torch.Tensor:
        with self.trainer.profiler.profile("part"):
            gc.collect()
        return self.net(batch).square().mean()


class Probing(Deep):
    """Names a part, and collects garbage, with every small number of frames left."""

    def work(self, batch: torch.Tensor) -> torch.Tensor:
        def name() -> None:
            with self.trainer.profiler.profile("part"):
                pass

        for call in (name, gc.collect):
            for spare in range(16):
                with suppress(RecursionError):
                    at_the_limit(call, spare)
        return self.net(batch).square().mean()


class Endless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self(self.layer(value))


class Failing(Deep):
    """Recurses to the limit and continues without."""

    def __init__(self) -> None:
        super().__init__(0)
        self.endless = Endless()

    def work(self, batch: torch.Tensor) -> torch.Tensor:
        with suppress(RecursionError):
            self.endless(batch)
        return self.net(batch).square().mean()


def deepest(directory: Path, kind: type[Deep] = Deep, **options: Any) -> int:
    """Give the most frames below which the model trains without the profiler."""
    least, most = 0, sys.getrecursionlimit()
    while most - least > 1:
        frames = (least + most) // 2
        trains = weights(directory, kind(frames, **options)) is not None
        least, most = (frames, most) if trains else (least, frames)
    return least


def recording(directory: Path, collectors: Sequence[Any] | None) -> MemProfilerCallback:
    return MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=2, repeat=1),
        collectors=collectors,
        output=OutputOptions(dirpath=directory, summary=False, report=False),
    )


def trained_alike(directory: Path, model: Callable[[], Deep], collectors: Sequence[Any] | None) -> Path:
    """Check that the model trains as without the profiler, within the same limit; give its run."""
    limit = sys.getrecursionlimit()
    bare = weights(directory, model())
    recorded = weights(directory, model(), recording(directory, collectors))
    assert bare is not None
    assert recorded is not None
    assert all(map(torch.equal, bare, recorded))
    assert sys.getrecursionlimit() == limit
    run = only_run(directory)
    assert not rows_of(run, "error")
    return run


EVERY: Final = (
    "default", ModuleMemory(), Throughput(flops=True),
    FunctionMemory(saved_tensors_hooks=True, user_hooks=HOOKS),
)  # fmt: skip


@pytest.mark.parametrize(
    ("collectors", "frames", "has_hooks"), [(None, DEFAULT_FRAMES, False), (EVERY, ALL_FRAMES, True)]
)
def test_the_deepest_forward_that_trains_without_the_profiler_trains_with_it(
    collectors: Sequence[Any] | None, frames: int, has_hooks: bool, tmp_path: Path
) -> None:
    most = deepest(tmp_path, has_hooks=has_hooks) - frames
    run = trained_alike(tmp_path, lambda: Deep(most, has_hooks=has_hooks), collectors)
    assert not [row for row in rows_of(run, "unavailable") if "window" in row]
    # Each module of the deep step is recorded, and the model itself.
    saved = read_series(run / "window000/rank00000.saved_tensors.jsonl")
    assert {len(row["modules"]) for row in saved if row.get("modules")} == {LEVELS + 3}


def test_outside_windows_a_step_is_as_deep_as_without_the_profiler(tmp_path: Path) -> None:
    most = deepest(tmp_path, deep_step=STEPS - 1)
    assert weights(tmp_path, Deep(most, deep_step=STEPS - 1), recording(tmp_path, None)) is not None


@pytest.mark.parametrize("kind", [Manual, Collecting])
def test_what_a_program_calls_near_the_limit_changes_nothing(
    kind: type[Deep], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    most = deepest(tmp_path, kind) - DEFAULT_FRAMES
    trained_alike(tmp_path, lambda: kind(most), None)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("collectors", [None, EVERY])
def test_a_program_that_reaches_the_limit_gets_its_error_and_continues(
    collectors: Sequence[Any] | None, tmp_path: Path
) -> None:
    run = trained_alike(tmp_path, Failing, collectors)
    # An operator that cannot be followed leaves the figures of the tracker wrong. Whether one is first at the limit
    # depends on the frames below.
    missing = {row["collector"]: row["reason"] for row in rows_of(run, "unavailable") if "window" in row}
    assert set(missing) <= (set() if collectors is None else {"module_memory"})
    assert all("sys.setrecursionlimit" in reason for reason in missing.values())


def test_actions_and_collections_where_no_frame_is_left_are_not_recorded_and_the_others_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained_alike(tmp_path, lambda: Probing(0), ["default", GarbageCollection()])
    assert [row["steps"] for row in rows_of(run, "window") if row["event"] == "close"] == [[IN_WINDOW, IN_WINDOW + 1]]
    actions = read_series(run / "window000/rank00000.hooks.jsonl")
    assert 0 < len([row for row in actions if row["action"] == "part"]) < 16
    assert "Exception ignored" not in capfd.readouterr().err
