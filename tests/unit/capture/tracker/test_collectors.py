"""ModuleMemory's configuration, and which step of a window it takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_memprof.capture.tracker.collectors import ModuleMemory
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point, Schedule
from recorded_rows import read_rows, read_series
from sessions import Tensors, context, drive, session

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.capture.base import RunContext


@pytest.mark.parametrize("options", [{"step": -1}, {"step": True}])
def test_what_could_never_be_recorded_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ModuleMemory(**options)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_stage_has_memory_by_module(tmp_path: Path, stage: str) -> None:
    with context(tmp_path) as run:
        object.__setattr__(run, "stage", stage)
        assert ModuleMemory().unavailable(run) is None


def test_a_torch_without_its_tracker_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning_memprof.capture.tracker.sharded_tracker", raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed._tools.fsdp2_mem_tracker", None)
    with context(tmp_path) as run:
        assert "no supported memory tracker" in (ModuleMemory().unavailable(run) or "")


def work(run: RunContext, tracked: list[bool]) -> Any:
    def inside(_step: int) -> None:
        tracked.append(_get_current_dispatch_mode() is not None)
        run.model(torch.ones(2, 4)).sum().backward()

    return inside


@pytest.mark.parametrize("step", [0, 1])
def test_one_recorded_step_of_a_window_is_tracked_and_no_other(tmp_path: Path, step: int) -> None:
    tracked: list[bool] = []
    schedule = Schedule(wait=1, warmup=1, active=2)
    with context(tmp_path) as run, session(run, schedule, [ModuleMemory(step=step)]) as made:
        drive(made, range(6), work(run, tracked))
    assert [index for index, was in enumerate(tracked) if was] == [2 + step]
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.module_memory.jsonl")
    assert {(row["step"], row["point"]) for row in rows} == {(2 + step, "step_end")}
    assert _get_current_dispatch_mode() is None


def test_a_window_with_fewer_recorded_steps_has_no_series(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(wait=0, warmup=0, active=1), [ModuleMemory(step=3)]) as made:
        drive(made, range(3))
    assert not (tmp_path / "memprofiler/window000").exists()


def test_the_batch_that_came_before_the_step_began_is_its_input(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(wait=0, warmup=0, active=1), [ModuleMemory()]) as made:
        assert isinstance(run.training, Tensors)
        batch = {"rows": torch.ones(2, 4), "more": [torch.ones(3)]}

        def inside(_step: int) -> None:
            run.model(batch["rows"])

        made_step = made.mark

        def mark(point: Point, **options: Any) -> None:
            if point is Point.BATCH_START:
                for listener in run.training.batch:
                    listener(batch)
            made_step(point, **options)

        made.mark = mark  # type: ignore[method-assign]
        drive(made, range(2), inside)
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.module_memory.jsonl")
    (peak,) = [row for row in rows if row["kind"] == "peak"]
    assert peak["categories"]["input"] == 4 * (2 * 4 + 3)
    assert peak["categories"]["parameter"] == 4 * (4 * 4 + 4)


def test_a_run_that_ends_inside_the_step_leaves_no_dispatch_mode(tmp_path: Path) -> None:
    def inside(_step: int) -> None:
        raise KeyboardInterrupt

    with (
        context(tmp_path) as run,
        pytest.raises(KeyboardInterrupt),
        session(run, Schedule(wait=0, warmup=0, active=1), [ModuleMemory()]) as made,
    ):
        drive(made, range(2), inside)
    assert _get_current_dispatch_mode() is None


def test_a_failure_of_the_tracker_is_told_at_the_next_point_and_not_in_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr("lightning_memprof.capture.tracker.tracker.CategoryTracker._see", fail)
    done: list[int] = []

    def inside(step: int) -> None:
        torch.ones(2).add(1)
        done.append(step)

    schedule = Schedule(wait=0, warmup=0, active=1, repeat=2)
    with context(tmp_path) as run, session(run, schedule, [ModuleMemory()]) as made:
        drive(made, range(3), inside)
        assert _get_current_dispatch_mode() is None
    assert done == [0, 1, 2]
    rows, _ = read_rows(tmp_path / "memprofiler/manifest.rank00000.jsonl")
    (error,) = [row for row in rows if row["kind"] == "error"]
    assert (error["collector"], error["message"], error["window"]) == ("module_memory", "LookupError", 0)
