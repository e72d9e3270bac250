from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_memprof import Schedule
from lightning_memprof.capture.collectors import garbage
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


def record(directory: Path, collector: GarbageCollection, inside: Any, steps: int = 4) -> list[dict[str, Any]]:
    """Drive a session whose window warms up in step 1 and records 2 and 3."""
    before = list(gc.callbacks)
    with context(directory) as run:
        with session(run, Schedule(wait=1, warmup=1, active=2), [collector]) as made:
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

    rows = record(tmp_path, GarbageCollection(), inside, steps=6)
    assert [(row["step"], row["recorded"], row["generation"]) for row in rows] == [
        (1, False, 1), (2, True, 2), (3, True, 0),
    ]  # fmt: skip
    for row in rows:
        assert began < row["time_ns"] < time.time_ns()
        assert 0 < row["duration_ns"] < time.time_ns() - began
        assert row["collected"] >= 1
        assert row["uncollectable"] == 0
        assert "tensors" not in row


def test_a_window_without_a_pause_leaves_no_file(tmp_path: Path) -> None:
    assert record(tmp_path, GarbageCollection(), lambda _: None) == []


def test_tensors_that_only_a_cycle_kept_alive_are_found(tmp_path: Path) -> None:
    held = torch.zeros(5, dtype=torch.float64)

    def inside(_: int) -> None:
        cycle(torch.zeros(10, 25))
        cycle([torch.zeros(3), held, held.view(5, 1)])
        torch.zeros(1000)
        gc.collect(0)

    (row, _) = [row for row in record(tmp_path, GarbageCollection(cycles=True), inside) if row["recorded"]]
    assert row["tensors"] == [
        {"type": "Tensor", "shape": [10, 25], "dtype": "float32", "bytes": 1000},
        {"type": "Tensor", "shape": [5, 1], "dtype": "float64", "bytes": 40},
        {"type": "Tensor", "shape": [3], "dtype": "float32", "bytes": 12},
    ]
    # The view's storage is held by another tensor.
    assert row["tensor_bytes"] == 1012


def test_a_parameter_in_a_cycle_of_modules_is_found(tmp_path: Path) -> None:
    def inside(_: int) -> None:
        model: Any = torch.nn.Linear(4, 4)
        model.myself = [model]
        del model
        gc.collect(0)

    row = record(tmp_path, GarbageCollection(cycles=True), inside)[-1]
    assert [tensor["type"] for tensor in row["tensors"]] == ["Parameter", "Parameter"]
    assert row["tensor_bytes"] == 4 * (16 + 4)


def test_looking_for_tensors_keeps_none_alive(tmp_path: Path) -> None:
    sizes: list[int] = []

    def inside(_: int) -> None:
        cycle(torch.zeros(100))
        gc.collect(0)
        sizes.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects(generation=0)))

    record(tmp_path, GarbageCollection(cycles=True), inside)
    assert set(sizes) == {0}


def test_a_failure_is_reported_once_and_the_collection_goes_on(tmp_path: Path) -> None:
    with mock.patch.object(garbage, "_tensors_up_to", side_effect=ZeroDivisionError("no")):
        record(tmp_path, GarbageCollection(cycles=True), lambda _: gc.collect(0))
    rows = map(json.loads, (tmp_path / "memprofiler/manifest.rank00000.jsonl").read_text().splitlines())
    assert [row["message"] for row in rows if row["kind"] == "error"] == ["ZeroDivisionError: no"]


def test_tensors_that_a_compiler_traces_with_are_left_alone(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    def inside(_: int) -> None:
        with FakeTensorMode():
            cycle(torch.zeros(8))
        gc.collect(0)

    rows = record(tmp_path, GarbageCollection(cycles=True), inside)
    assert [(row.get("tensors"), row["tensor_bytes"]) for row in rows] == [(None, 0)] * 3
    assert all(row["collected"] >= 1 for row in rows)


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

    rows = record(tmp_path, GarbageCollection(cycles=True), lambda _: call(torch.ones(2)))
    reset()
    assert len(rows) >= 3
    assert set(files) == {__file__}
