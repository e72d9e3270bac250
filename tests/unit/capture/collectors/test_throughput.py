from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.throughput import FlopCount
from lightning_memprof.capture.sources.batches import batch_elements, batch_samples
from lightning_memprof.collectors import Throughput
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point, Schedule
from recorded_rows import read_series
from sessions import POINTS, Tensors, context, positions, session
from training import manifest

WARMED = Schedule(wait=1, warmup=1, active=2, repeat=1)
COLD = Schedule(wait=1, warmup=0, active=2, repeat=1)


@dataclass
class Pair:
    label: str
    image: torch.Tensor


class Named(NamedTuple):
    name: str
    image: torch.Tensor


class Images(UserDict):
    """What libraries of language models give: no dict, but like one."""


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 3), 5),
        (torch.zeros(()), None),
        ((torch.zeros(4, 2), torch.zeros(9)), 4),
        ([torch.tensor(1.0), torch.zeros(7)], 7),
        ({"mask": None, "image": torch.zeros(6, 1)}, 6),
        (Images(image=torch.zeros(3)), 3),
        (UserList([torch.zeros(2)]), 2),
        (Pair("x", torch.zeros(8, 8)), 8),
        (Named("x", torch.zeros(8, 8)), 8),
        ({"texts": ["a", "b", "c"]}, 3),
        ({"a": {"b": {"c": torch.zeros(2)}}}, 2),
        ("text", None),
        (b"bytes", None),
        ([], None),
        (object(), None),
        (None, None),
        (torch.zeros(0, 3), 0),
        (torch.zeros(3, 3).to_sparse(), 3),
        (torch.zeros(3, 3, device="meta"), 3),
    ],
)
def test_samples_are_the_first_dimension_of_the_first_tensor(batch: Any, samples: int | None) -> None:
    assert batch_samples(batch) == samples


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert batch_samples(batch) is None
    assert batch_elements(batch) is None


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (torch.zeros(3, 4), 12),
        ({"x": torch.zeros(3, 4), "more": [torch.zeros(2), "text", None, torch.tensor(1)]}, 15),
        (["text"], None),
        (None, None),
    ],
)
def test_elements_are_those_of_all_tensors(batch: Any, elements: int | None) -> None:
    assert batch_elements(batch) == elements


@pytest.mark.parametrize("options", [{"samples": 3}, {"tokens": "len"}, {"flops": "yes"}])
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Throughput(**options)


def drive(
    run: RunContext,
    collectors: list[Any],
    schedule: Schedule = WARMED,
    inside: Callable[[], object] = lambda: None,
    batch: Callable[[int], Any] = lambda step: torch.zeros(step + 1, 2),
) -> None:
    assert isinstance(run.training, Tensors)
    with session(run, schedule, collectors) as made:
        for position in positions(range(5)):
            made.begin_step(position)
            for listener in tuple(run.training.batch):
                listener(batch(position.step))
            for point in POINTS:
                made.mark(point)
                if point is Point.AFTER_FORWARD:
                    inside()


def rows(directory: Path) -> list[dict[str, Any]]:
    return read_series(directory / "memprofiler/window000/rank00000.throughput.jsonl")


def test_each_recorded_step_has_one_row_with_its_batch(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        drive(run, [Throughput(tokens=lambda batch: batch.numel())])
    found = rows(tmp_path)
    assert [(row["step"], row["point"], row["samples"], row["tokens"], row["elements"]) for row in found] == [
        (2, "step_end", 3, 6, 6),
        (3, "step_end", 4, 8, 8),
    ]
    assert all(row["duration_ns"] > 0 and row["recorded"] for row in found)
    assert all(row["flops"] is None and row["peak_flops"] is None for row in found)


def test_a_count_on_the_device_is_read_when_the_window_has_closed(tmp_path: Path) -> None:
    class OnDevice:
        """A number that may not be waited for in a step."""

        read_in_steps: ClassVar[list[int]] = []

        def __int__(self) -> int:
            self.read_in_steps.append(len(steps))
            return 11

    steps: list[int] = []
    with context(tmp_path) as run:
        count: Any = lambda _: OnDevice()  # noqa: E731
        drive(run, [Throughput(tokens=count)], inside=lambda: steps.append(1))
    assert OnDevice.read_in_steps == [4, 4]
    assert [row["tokens"] for row in rows(tmp_path)] == [11, 11]


def test_what_a_function_of_the_users_raises_is_reported_and_leaves_the_count_unknown(tmp_path: Path) -> None:
    def samples(_: Any) -> int:
        raise KeyError("image")

    with context(tmp_path) as run:
        drive(run, [Throughput(samples=samples)])
        errors = [row["message"] for row in manifest(run.sink.place.directory) if row["kind"] == "error"]
    assert len(errors) == 1
    assert "image" in errors[0]
    assert [row["samples"] for row in rows(tmp_path)] == [None, None]


def train_step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def of_torch(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def of_ours(work: Callable[[], object]) -> int:
    with FlopCount() as count:
        work()
    assert count.failure is None
    return count.flops


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(4, 8)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 8, 8)),
    "transposed": lambda: (nn.ConvTranspose1d(3, 4, 3), torch.randn(2, 3, 8)),
    "bilinear": lambda: (nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), torch.randn(2, 3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_torchs_own_count(name: str) -> None:
    model, batch = MODELS[name]()
    model(batch)
    expected = of_torch(lambda: train_step(model, batch))
    assert of_ours(lambda: train_step(model, batch)) == expected > 0


def test_backward_of_a_linear_model_is_twice_its_forward_without_the_first_inputs_gradient() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)), torch.randn(4, 8)
    forward = 2 * 4 * (8 * 16 + 16 * 2)
    assert of_ours(lambda: model(batch)) == forward
    assert of_ours(lambda: train_step(model, batch)) == 3 * forward - 2 * 4 * 8 * 16


def test_attention_on_a_cpu_is_counted() -> None:
    query, key, value = (torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3))
    one_product = 2 * (2 * 2) * 4 * 4 * 8
    attention = lambda: functional.scaled_dot_product_attention(query, key, value)  # noqa: E731
    assert of_ours(attention) == 2 * one_product
    # Backward computes the scores again.
    assert of_ours(lambda: attention().sum().backward()) == 7 * one_product


def test_composite_operators_of_inference_mode_are_counted_and_give_the_same_bits() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.Conv1d(4, 2, 3)), torch.randn(4, 8)
    with torch.inference_mode():
        bare = model(batch)
        with FlopCount() as count:
            counted = model(batch)
    assert torch.equal(bare, counted)
    assert count.flops == 2 * 4 * 8 * 16 + 2 * 2 * 4 * 3 * 14


def test_a_shard_counts_what_this_process_computes() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.randn(4, 8), torch.randn(4, 8))
    assert of_ours(lambda: pair @ torch.randn(8, 2)) == 2 * (2 * 4 * 8 * 2)


def test_a_formula_that_fails_does_not_reach_the_training() -> None:
    class Failing(FlopCount):
        def __init__(self) -> None:
            super().__init__()
            self._formulas = {torch.ops.aten.mm: lambda *_, **__: 1 // 0}

    with Failing() as count:
        assert torch.equal(torch.eye(2) @ torch.eye(2), torch.eye(2))
    assert isinstance(count.failure, ZeroDivisionError)


def multiply() -> None:
    torch.zeros(4, 8) @ torch.zeros(8, 2)


@pytest.mark.parametrize(("schedule", "steps"), [(WARMED, [1]), (COLD, [1])])
def test_one_step_is_counted_in_the_first_window_and_no_more(
    schedule: Schedule, steps: list[int], tmp_path: Path
) -> None:
    seen = []

    def step() -> None:
        seen.append(bool(_get_current_dispatch_mode_stack()))
        multiply()

    with context(tmp_path) as run:
        drive(run, [Throughput(flops=True)], schedule, step)
    assert [index for index, mode in enumerate(seen) if mode] == steps
    assert {row["flops"] for row in rows(tmp_path)} == {2 * 4 * 8 * 2}


def test_a_further_window_does_not_count_again(tmp_path: Path) -> None:
    seen = []
    with context(tmp_path) as run:
        drive(
            run, [Throughput(flops=True)], Schedule(wait=0, warmup=1, active=1, repeat=2),
            lambda: seen.append(bool(_get_current_dispatch_mode_stack())),
        )  # fmt: skip
    assert seen == [True, False, False, False, False]


def test_what_follows_the_batch_in_its_step_is_not_counted(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, WARMED, [Throughput(flops=True)]) as made:
        for position in positions(range(4)):
            made.begin_step(position)
            multiply()
            for point in POINTS:
                made.mark(point)
            multiply()
        reasons = [row["reason"] for row in manifest(run.sink.place.directory) if row["kind"] == "unavailable"]
    assert not reasons
    assert [row["flops"] for row in rows(tmp_path)] == [None, None]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def unavailable(directory: Path) -> list[str]:
    return [row["reason"] for row in manifest(directory / "memprofiler") if row["kind"] == "unavailable"]


def test_under_another_dispatch_mode_nothing_is_counted_and_the_reason_is_said(tmp_path: Path) -> None:
    with Mode(), context(tmp_path) as run:
        drive(run, [Throughput(flops=True)], inside=multiply)
    assert "another torch dispatch mode" in unavailable(tmp_path)[0]
    assert [row["flops"] for row in rows(tmp_path)] == [None, None]


def test_a_compiled_model_is_not_counted_and_the_reason_is_said(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        run.model.compile(backend="eager")
        drive(run, [Throughput(flops=True)], inside=multiply)
    assert "is compiled" in unavailable(tmp_path)[0]


def test_a_model_without_products_has_no_count_rather_than_zero(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        drive(run, [Throughput(flops=True)])
    assert "no matrix product" in unavailable(tmp_path)[0]
    assert [row["flops"] for row in rows(tmp_path)] == [None, None]


def test_an_exception_in_the_counted_step_leaves_no_mode_behind(tmp_path: Path) -> None:
    def fail() -> None:
        assert _get_current_dispatch_mode_stack()
        raise ZeroDivisionError

    schedule = Schedule(wait=0, warmup=1, active=1, repeat=1)
    with pytest.raises(ZeroDivisionError), context(tmp_path) as run:
        drive(run, [Throughput(flops=True)], schedule, fail)
    assert not _get_current_dispatch_mode_stack()


def test_shapes_that_are_tried_without_values_run_as_ever_and_count_nothing() -> None:
    """What a sharded tensor does to find out how an operator can be sharded."""
    made = torch.ones(4, 4)
    with FlopCount() as count:
        made @ made
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(made)
            found = (fake @ fake).mul_(0.9)
            (torch.empty(4, 4) @ torch.empty(4, 4)).sum()
        made @ made
    assert (found.shape, type(found)) == (made.shape, type(fake))
    assert count.failure is None
    assert count.flops == 2 * (2 * 4 * 4 * 4)
