from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_devices import FakeTimer
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.saved_tensors import NO_BACKWARD, SavedTensors
from lightning_memprof.capture.session import Session
from lightning_memprof.schedule import Point, Schedule
from recorded_rows import read_series
from sessions import context, positions, session
from training import manifest

ONE_STEP = Schedule(wait=0, warmup=0, active=1)


class Steps:
    """Training steps that a test runs by hand on a model, with the points that Lightning would mark."""

    def __init__(self, run: RunContext, made: Session) -> None:
        self.feed: Any = run.training
        self.session = made
        self._positions = positions(range(100))

    def begin(self, batch: Any = None) -> None:
        self.session.begin_step(next(self._positions))
        if batch is not None:
            for listener in tuple(self.feed.batch):
                listener(batch)
        self.session.mark(Point.BATCH_START)

    def backward(self, loss: torch.Tensor) -> None:
        for listener in tuple(self.feed.loss):
            listener(loss)
        self.session.mark(Point.BEFORE_BACKWARD)
        loss.backward()
        self.session.mark(Point.AFTER_BACKWARD)


@contextmanager
def steps(directory: Path, model: nn.Module, schedule: Schedule = ONE_STEP, **changes: Any) -> Iterator[Steps]:
    with context(directory, on_error="raise") as run:
        changed = dataclasses.replace(run, model=model, **changes)
        with session(changed, schedule, [SavedTensors()]) as made:
            yield Steps(changed, made)


def rows(directory: Path) -> list[dict[str, Any]]:
    return read_series(directory / "memprofiler/window000/rank00000.saved_tensors.jsonl")


def backwards(directory: Path) -> list[dict[str, Any]]:
    return [row for row in rows(directory) if row["point"] == "before_backward"]


def own(row: dict[str, Any]) -> dict[str, int]:
    return {path: values[0] for path, values in row.get("modules", {}).items()}


def inclusive(row: dict[str, Any]) -> dict[str, int]:
    return {path: values[1] for path, values in row["modules"].items()}


def calls(row: dict[str, Any]) -> dict[str, int]:
    return {path: values[2] for path, values in row["modules"].items()}


def given(row: dict[str, Any]) -> dict[str, int]:
    return {path: values[4] for path, values in row["modules"].items()}


def one_step(directory: Path, model: nn.Module, loss: Callable[[], torch.Tensor]) -> dict[str, Any]:
    with steps(directory, model) as run:
        run.begin()
        run.backward(loss())
    (row,) = backwards(directory)
    assert row["activation_bytes"] == row["unattributed_bytes"] + sum(own(row).values())
    assert row["activation_bytes"] == sum(row.get("dtypes", {}).values())
    return row


def test_each_module_has_what_its_own_forward_saved_and_what_those_below_it_saved(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"net": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "idle": nn.Linear(1, 1)}
    )
    batch = torch.randn(5, 8)
    row = one_step(tmp_path, model, lambda: model["net"](batch).square().mean())
    first, hidden, out = 5 * 8 * 4, 5 * 16 * 4, 5 * 4 * 4
    assert own(row) == {"net": 0, "net.0": first, "net.1": hidden, "net.2": 0, "": out}
    assert inclusive(row) == {
        "net": first + hidden,
        "net.0": first,
        "net.1": hidden,
        "net.2": 0,
        "": first + hidden + out,
    }
    assert calls(row) == {"net": 1, "net.0": 1, "net.1": 1, "net.2": 1, "": 0}
    assert given(row) == {"net": first, "net.0": first, "net.1": hidden, "net.2": hidden, "": 0}
    assert (row["storages"], row["dtypes"], row.get("attribution")) == (3, {"float32": first + hidden + out}, None)
    times = {path: values[3] for path, values in row["modules"].items()}
    assert times["net"] >= times["net.0"] + times["net.1"] + times["net.2"] > 0


def test_a_module_called_twice_has_both_calls_bytes(tmp_path: Path) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 8)})
    batch = torch.randn(5, 8)
    row = one_step(tmp_path, model, lambda: model["layer"](model["layer"](batch)).sum())
    assert row["modules"]["layer"][:3] == [2 * 160, 2 * 160, 2]
    assert row["modules"]["layer"][4] == 2 * 160


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.kept: list[torch.Tensor] = []

    def forward(self, value: torch.Tensor) -> None:
        self.kept.append((value * self.scale).exp())


def test_a_module_that_returns_nothing_has_what_it_saved(tmp_path: Path) -> None:
    silent = Silent()
    model = nn.ModuleDict({"silent": silent})

    def loss() -> torch.Tensor:
        silent(torch.randn(3, 4))
        return silent.kept.pop().sum()

    assert own(one_step(tmp_path, model, loss)) == {"silent": 2 * 3 * 4 * 4, "": 0}


def test_what_is_given_in_lists_counts_as_input(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, pair: dict[str, list[torch.Tensor]], other: None, number: int) -> torch.Tensor:
            return pair["x"][0] + pair["x"][1] + number

    model = nn.ModuleDict({"adds": Adds()})
    value = torch.randn(3, requires_grad=True)
    row = one_step(tmp_path, model, lambda: model["adds"]({"x": [value, torch.ones(3)]}, None, 2).sum())
    assert given(row) == {"adds": 24, "": 0}


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_input_of_a_checkpoint_belongs_to_the_module_that_called_it(tmp_path: Path, reentrant: bool) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                value = checkpoint(block, value, use_reentrant=reentrant)
            return value

    model = nn.ModuleDict({"stack": Stack()})
    batch = torch.randn(5, 8, requires_grad=True)
    row = one_step(tmp_path, model, lambda: model["stack"](batch).sum())
    assert {path: size for path, size in own(row).items() if size} == {"stack": 2 * 160}
    assert calls(row)["stack.blocks.0"] == calls(row)["stack.blocks.1.1"] == 1
    assert given(row)["stack.blocks.1"] == 160


def test_the_forwards_of_a_recomputation_are_no_calls_of_the_next_backward(tmp_path: Path) -> None:
    block, batch = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(5, 8, requires_grad=True)
    with steps(tmp_path, nn.ModuleDict({"block": block})) as run:
        run.begin()
        for _ in range(2):
            run.backward(checkpoint(block, batch, use_reentrant=False).sum())
    assert [calls(row)["block.0"] for row in backwards(tmp_path)] == [1, 1]


def test_several_backwards_of_one_step_have_a_row_each_with_their_own_calls(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(4, 1)})
    with steps(tmp_path, model) as run:
        run.begin()
        first, second = model["a"](torch.randn(5, 8)).sum(), model["b"](torch.randn(5, 4)).sum()
        run.backward(first)
        run.backward(second)
    a, b = backwards(tmp_path)
    assert (own(a), calls(a)) == ({"a": 160, "b": 0, "": 0}, {"a": 1, "b": 1, "": 0})
    assert (own(b), calls(b)) == ({"b": 80, "": 0}, {"b": 0, "": 0})


def test_what_was_saved_before_the_step_is_unattributed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    early = model["a"](torch.randn(5, 8))
    row = one_step(tmp_path, model, lambda: model["a"](early).sum())
    assert (row["activation_bytes"], row["unattributed_bytes"], own(row)) == (320, 160, {"a": 160, "": 0})


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(value))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [False, True])
def test_what_compiled_code_saves_belongs_to_the_compiled_module(tmp_path: Path, wraps: bool) -> None:
    model = nn.Sequential(TwoLayers(), nn.GELU())
    if wraps:
        model[0] = torch.compile(model[0], backend="aot_eager")  # type: ignore[assignment]
    else:
        model[0].compile(backend="aot_eager")
    batch = torch.randn(5, 8)
    row = one_step(tmp_path, model, lambda: model(batch).sum())
    # The batch and the first layer's result.
    assert own(row) == {"0": 320, "1": 160, "": 0}
    assert row["modules"]["0"][1:3] == [320, 1]
    assert row["activation_bytes"] == 480


def test_the_row_of_a_step_has_what_is_held_and_the_batch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with steps(tmp_path, model, Schedule(wait=0, warmup=1, active=1)) as run:
        run.feed.given_optimizers.append(optimizer)
        for _ in range(2):
            run.begin({"x": torch.randn(5, 8), "n": 3})
            run.backward(model(torch.randn(5, 8)).sum())
            optimizer.step()
    warm, row = (row for row in rows(tmp_path) if row["point"] == "step_end")
    assert (warm["recorded"], row["recorded"], row["step"]) == (False, True, 1)
    numbers = 8 * 4 + 4 + 4 + 4
    assert row["held"] == {
        "parameter_bytes": 4 * numbers,
        "buffer_bytes": 4 * 4 * 2 + 8,
        "gradient_bytes": 4 * numbers,
        "optimizer_state_bytes": 2 * 4 * numbers + 4 * 4,
        "input_bytes": 160,
    }
    assert row["parameters"] == {"": [176, 176], "0": [144, 144], "1": [32, 32]}
    assert "note" not in row


def test_a_step_whose_backward_is_its_own_says_that_nothing_was_seen_of_it(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    with steps(tmp_path, model) as run:
        run.begin()
        model(torch.randn(2, 8)).sum().backward()
    (row,) = rows(tmp_path)
    assert (row["point"], row["note"]) == ("step_end", NO_BACKWARD)
    assert row["held"]["input_bytes"] is None


def test_times_come_from_the_devices_clock_and_every_moment_is_given_back(tmp_path: Path) -> None:
    timer = FakeTimer()

    class Works(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            timer.work(1000)
            return super().forward(value)

    model = nn.Sequential(Works(8, 8), Works(8, 8))
    with steps(tmp_path, model, Schedule(wait=0, warmup=0, active=2), timer=timer) as run:
        for done in (True, False):
            run.begin()
            run.backward(model(torch.randn(2, 8)).sum())
            if done:
                timer.catch_up()
    assert timer.held == []
    times = [{path: values[3] for path, values in row["modules"].items()} for row in backwards(tmp_path)]
    assert times == [{"": 2000, "0": 1000, "1": 1000}, {"": None, "0": None, "1": None}]


def test_the_time_of_a_module_is_unknown_where_the_device_has_done_only_one_of_its_calls(tmp_path: Path) -> None:
    timer = FakeTimer()

    class Works(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            timer.work(1000)
            return super().forward(value)

    layer = Works(8, 8)
    with steps(tmp_path, nn.ModuleDict({"layer": layer}), timer=timer) as run:
        run.begin()
        first = layer(torch.randn(2, 8))
        timer.catch_up()
        run.backward(layer(first).sum())
    (row,) = backwards(tmp_path)
    assert row["modules"]["layer"][2:4] == [2, None]
    assert timer.held == []


def test_a_forward_that_raises_ends_and_the_next_step_is_attributed(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            raise ValueError

    model = nn.ModuleDict({"outer": nn.Sequential(nn.Linear(8, 8), Fails()), "good": nn.Linear(8, 1)})
    with steps(tmp_path, model) as run:
        run.begin()
        with pytest.raises(ValueError):
            model["outer"](torch.randn(5, 8))
        run.backward(model["good"](torch.randn(5, 8)).square().sum())
    (row,) = backwards(tmp_path)
    assert own(row) == {"outer": 0, "outer.0": 0, "outer.1": 0, "good": 160, "": 20}


def test_no_tensor_of_a_step_outlives_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    seen: list[weakref.ref[torch.Tensor]] = []
    model[1].register_forward_hook(lambda _module, args, output: seen.extend(map(weakref.ref, (*args, output))))
    gc.disable()
    try:
        with steps(tmp_path, model) as run:
            batch = torch.randn(5, 8)
            run.begin(batch)
            seen.append(weakref.ref(batch))
            loss = model(batch).sum()
            run.backward(loss)
            del batch, loss
            assert [reference() for reference in seen] == [None] * 3
    finally:
        gc.enable()


def test_a_stage_without_a_backward_is_no_error_and_says_so(tmp_path: Path) -> None:
    with steps(tmp_path, nn.Linear(1, 1), stage="validate") as run:
        run.begin()
    (row,) = [row for row in manifest(tmp_path / "memprofiler") if row["kind"] == "unavailable"]
    assert (row["collector"], row["reason"]) == ("saved_tensors", "validate has no backward")
    assert not (tmp_path / "memprofiler/window000").exists()


def test_a_failure_while_reading_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        msg = "broken"
        raise KeyError(msg)

    monkeypatch.setattr("lightning_memprof.capture.collectors.saved_tensors.SavedGraph.read", broken)
    monkeypatch.setattr("lightning_memprof.capture.collectors.saved_tensors.tensors_in", broken)
    model = nn.Linear(8, 1)
    with context(tmp_path) as run:
        changed = dataclasses.replace(run, model=nn.ModuleDict({"a": model}))
        with session(changed, ONE_STEP, [SavedTensors()]) as made:
            training = Steps(changed, made)
            training.begin()
            with pytest.raises(TypeError):
                model("no tensor")
            for _ in range(2):
                training.backward(model(torch.randn(2, 8)).sum())
    errors = [row for row in manifest(tmp_path / "memprofiler") if row["kind"] == "error"]
    assert {(row["collector"], row["where"]) for row in errors} == {("saved_tensors", "hook")}
    assert len(errors) <= 2
    assert [row["point"] for row in rows(tmp_path)] == ["step_end"]
