from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memprof import Schedule
from lightning_memprof.collectors import GarbageCollection
from recorded_rows import read_series
from sessions import context, drive, session


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Only the test's own collections happen."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def record(directory: Path, inside: Any, steps: int = 4) -> list[dict[str, Any]]:
    """Drive a session whose window warms up in step 1 and records 2 and 3."""
    before = list(gc.callbacks)
    with context(directory) as run:
        with session(run, Schedule(wait=1, warmup=1, active=2), [GarbageCollection()]) as made:
            drive(made, range(steps), inside)
        assert gc.callbacks == before
    path = directory / "memprofiler/window000/rank00000.garbage.jsonl"
    return read_series(path) if path.exists() else []


def cycle(kept: Any) -> None:
    ring = [kept]
    ring.append(ring)


def test_each_pause_of_the_windows_steps_is_a_row(tmp_path: Path) -> None:
    began = time.time_ns()

    def inside(step: int) -> None:
        cycle(step)
        gc.collect(step % 3)

    rows = record(tmp_path, inside, steps=6)
    assert [(row["step"], row["recorded"], row["generation"]) for row in rows] == [
        (1, False, 1), (2, True, 2), (3, True, 0),
    ]  # fmt: skip
    for row in rows:
        assert began < row["time_ns"] < time.time_ns()
        assert 0 < row["duration_ns"] < time.time_ns() - began
        assert row["collected"] >= 1
        assert row["uncollectable"] == 0


def test_a_window_without_a_pause_leaves_no_file(tmp_path: Path) -> None:
    assert record(tmp_path, lambda _: None) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin `gc.collect:UserWarning")
def test_a_collection_inside_a_compiled_call_has_nothing_of_ours_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import convert_frame, reset

    files: list[str] = []
    original = convert_frame._compile

    def compiled(code: Any, *rest: Any, **more: Any) -> Any:
        files.append(code.co_filename)
        return original(code, *rest, **more)

    monkeypatch.setattr(convert_frame, "_compile", compiled)
    reset()

    @torch.compile(backend="eager")
    def call(value: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return value + 1

    rows = record(tmp_path, lambda _: call(torch.ones(2)))
    reset()
    assert len(rows) >= 3
    assert set(files) == {__file__}
