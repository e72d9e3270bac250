"""Memory at functions: which calls are recorded, under which number, and that each start has its end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from fake_devices import FakeCuda
from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.sources.call_memory import UserHooks
from lightning_memprof.capture.sources.methods import memprofilable
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Schedule
from recorded_rows import read_rows, read_series
from sessions import context, drive, session

SCHEDULE = Schedule(wait=1, warmup=1, active=2)
HOOKS = ("rss_pre_forward", "rss_post_forward", "rss_diff", "npp_pre_forward", "npp_post_forward", "npp_diff")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1024, 1024)

    def training_step(self) -> torch.Tensor:
        return self.net(torch.randn(1, 1024)).sum()

    def validation_step(self) -> None: ...

    def twice(self) -> None:
        self.training_step()
        self.training_step()

    def again(self, count: int) -> None:
        if count:
            self.again(count - 1)

    def idle(self) -> None: ...

    def fails(self) -> None:
        raise ArithmeticError

    def numbers(self) -> Generator[int, None, None]:
        yield 1
        yield 2

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.net(self.net(value))


@contextmanager
def recording(
    directory: Path, collector: FunctionMemory, schedule: Schedule = SCHEDULE, stage: str = "fit", device: str = "cpu"
) -> Iterator[tuple[Session, Any]]:
    with context(directory, device, on_error="raise") as run:
        model = Model()
        function = "training_step" if stage == "fit" else "validation_step"
        made = replace(run, model=model, stage=stage, function=function)
        with session(made, schedule, [collector]) as opened:
            yield opened, model


def series(directory: Path, window: int = 0) -> list[dict[str, Any]]:
    return read_series(directory / f"memprofiler/window{window:03d}/rank00000.functions.jsonl")


def counted_series(directory: Path) -> list[dict[str, Any]]:
    return read_series(directory / "memprofiler/functions.rank00000.jsonl")


def stats(directory: Path) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((directory / "memprofiler/rank_0_memory_stats.yaml").read_text())
    return loaded


def calls(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["function"], row["number"], row["point"], row["depth"]) for row in rows]


def test_recorded_steps_have_a_start_and_an_end_under_the_step_plus_one(tmp_path: Path) -> None:
    with recording(tmp_path, FunctionMemory()) as (made, model):
        drive(made, range(6), lambda _: model.training_step())
    edges = [("training_step", number, edge, 0) for number in (3, 4) for edge in ("start", "end")]
    assert calls(series(tmp_path)) == edges
    assert list(stats(tmp_path)) == [f"0.training_step.{number}.{edge}" for _, number, edge, _ in edges]
    for row in series(tmp_path):
        assert (row["step"], row["global_step"], row["recorded"]) == (row["number"] - 1, row["number"] - 1, True)
        assert row["vms"] >= row["rss"] > 1 << 20
        assert "thread" not in row
        assert row.get("raised", None) is None
        assert "npp_diff" not in row
    end = stats(tmp_path)["0.training_step.3.end"]
    assert end["rss_post_forward"] - end["rss_pre_forward"] == end["rss_diff"]
    assert set(end) == {"rss", "vms", "rss_pre_forward", "rss_post_forward", "rss_diff"}


def test_the_file_holds_every_window(tmp_path: Path) -> None:
    collector = FunctionMemory(dump_pickle=True, memory_hooks=False)
    with recording(tmp_path, collector, Schedule(wait=0, warmup=0, active=1, repeat=3)) as (made, model):
        drive(made, range(4), lambda _: model.training_step())
    numbers = [key.split(".")[2] for key in stats(tmp_path)]
    assert numbers == ["1", "1", "2", "2", "3", "3"]
    dumped = pickle.loads((tmp_path / "memprofiler/rank_0_memory_stats.pickle").read_bytes())  # noqa: S301 our own
    assert dumped == stats(tmp_path)


def test_a_closed_form_holds_for_what_is_saved_at_forwards(tmp_path: Path) -> None:
    with recording(tmp_path, FunctionMemory(saved_tensors_hooks=True)) as (made, model):
        drive(made, range(6), lambda _: model.training_step())
    found = stats(tmp_path)
    end = found["0.training_step.3.end"]
    assert (end["npp_pre_forward"], end["npp_post_forward"], end["npp_diff"]) == (0, 4096, 4096)
    assert found["0.training_step.4.end"]["npp_diff"] == 4096
    assert [found["0.training_step.3.start"][name] for name in HOOKS] == [0] * 6


def test_several_forwards_add_up_and_none_is_0(tmp_path: Path) -> None:
    collector = FunctionMemory(functions=["twice", "idle"], saved_tensors_hooks=True)
    with recording(tmp_path, collector) as (made, model):
        drive(made, range(6), lambda _: (model.twice(), model.idle()))
    assert stats(tmp_path)["0.twice.3.end"]["npp_diff"] == 2 * 4096
    assert stats(tmp_path)["0.twice.3.end"]["npp_post_forward"] == 2 * 4096
    assert [stats(tmp_path)["0.idle.3.end"][name] for name in HOOKS] == [0] * 6


def test_nested_calls_have_depths_and_their_own_figures(tmp_path: Path) -> None:
    collector = FunctionMemory(functions=["twice", "training_step"], saved_tensors_hooks=True)
    with recording(tmp_path, collector, Schedule(wait=0, warmup=0, active=1)) as (made, model):
        drive(made, range(2), lambda _: model.twice())
    rows = series(tmp_path)
    inner = [("training_step", 1, "start", 1), ("training_step", 1, "end", 1)]
    assert calls(rows) == [("twice", 1, "start", 0), *inner, *inner, ("twice", 1, "end", 0)]
    assert [row["npp_diff"] for row in rows if row["point"] == "end"] == [4096, 4096, 8192]
    # The first call of a step is the file's.
    assert len(stats(tmp_path)) == 4


def test_re_entrant_calls_each_have_a_start_and_an_end_and_the_outermost_is_the_files(tmp_path: Path) -> None:
    collector = FunctionMemory(functions=["again"])
    with recording(tmp_path, collector, Schedule(wait=0, warmup=0, active=1)) as (made, model):
        drive(made, range(2), lambda _: model.again(2))
    rows = series(tmp_path)
    assert [(row["point"], row["depth"]) for row in rows] == [
        ("start", 0), ("start", 1), ("start", 2), ("end", 2), ("end", 1), ("end", 0),
    ]  # fmt: skip
    assert stats(tmp_path)["0.again.1.end"]["rss"] == rows[-1]["rss"]


def test_a_call_that_raises_has_its_end_with_the_exceptions_name(tmp_path: Path) -> None:
    with (
        pytest.raises(ArithmeticError),
        recording(tmp_path, FunctionMemory(functions=["fails"]), Schedule(wait=0, warmup=0)) as (made, model),
    ):
        drive(made, range(2), lambda _: model.fails())
    assert [(row["point"], row.get("raised")) for row in series(tmp_path)] == [
        ("start", None),
        ("end", "ArithmeticError"),
    ]


def test_calls_of_other_threads_carry_their_name_and_no_hook_values(tmp_path: Path) -> None:
    def inside(model: Model) -> None:
        thread = Thread(target=model.training_step, name="worker")
        thread.start()
        thread.join()

    with recording(tmp_path, FunctionMemory(saved_tensors_hooks=True)) as (made, model):
        drive(made, range(6), lambda _: inside(model))
    rows = series(tmp_path)
    assert {row["thread"] for row in rows} == {"worker"}
    assert {row["depth"] for row in rows} == {0}
    assert {row[name] for row in rows for name in HOOKS} == {None}


def test_a_generator_that_is_open_when_the_window_ends_has_its_end(tmp_path: Path) -> None:
    held: list[Any] = []

    def inside(model: Model) -> None:
        held.append(model.numbers())
        next(held[-1])

    with recording(tmp_path, FunctionMemory(functions=["numbers"])) as (made, model):
        drive(made, range(6), lambda _: inside(model))
        for entry in held:
            assert list(entry) == [2]
    rows = series(tmp_path)
    assert sorted(call[:3] for call in calls(rows)) == [
        ("numbers", number, edge) for number in (3, 4) for edge in ("end", "start")
    ]
    assert {row["rss_diff"] for row in rows} == {None}


def test_a_marked_method_of_any_object_is_in_the_same_file(tmp_path: Path) -> None:
    class Tokenizer:
        @memprofilable
        def encode(self) -> None: ...

    tokenizer = Tokenizer()
    with recording(tmp_path, FunctionMemory()) as (made, model):
        drive(made, range(6), lambda _: (tokenizer.encode(), model.training_step()))
    assert [key for key in stats(tmp_path) if "encode" in key] == [
        f"0.encode.{number}.{edge}" for number in (3, 4) for edge in ("start", "end")
    ]


@pytest.mark.parametrize("last", [2, 4])
def test_by_count_the_calls_asked_for_are_recorded_whatever_the_schedule_says(tmp_path: Path, last: int) -> None:
    collector = FunctionMemory(functions=["training_step", "idle"], calls=CallRange(2, last), dump_pickle=True)
    wrapped: list[tuple[bool, bool]] = []

    def inside(model: Model, step: int) -> None:
        wrapped.append(tuple(hasattr(vars(Model)[name], "_memprof_link") for name in ("training_step", "idle")))  # type: ignore[arg-type]
        model.training_step()
        if step % 2:
            model.idle()

    with recording(tmp_path, collector) as (made, model):
        drive(made, range(10), lambda step: inside(model, step))
    numbers = [row["number"] for row in counted_series(tmp_path) if row["function"] == "training_step"]
    assert numbers == [number for number in range(2, last + 1) for _ in "se"]
    idle = [row for row in counted_series(tmp_path) if row["function"] == "idle"]
    assert [(row["number"], row["step"]) for row in idle] == [(n, 2 * n - 1) for n in range(2, last + 1) for _ in "se"]
    assert "0.training_step.2.end" in stats(tmp_path)
    assert "0.training_step.3.start" not in stats(tmp_path) or last == 4
    assert not (tmp_path / "memprofiler/window000").exists()
    # The wrappers are there until the last call of each function is done.
    assert wrapped == [(step < 2 * last,) * 2 for step in range(10)]


def test_by_count_nothing_is_lost_where_the_last_call_never_comes(tmp_path: Path) -> None:
    with (
        pytest.raises(ArithmeticError),
        recording(tmp_path, FunctionMemory(functions=["fails"], calls=CallRange(1, 9))) as (made, model),
    ):
        drive(made, range(6), lambda _: model.fails())
    assert [row.get("raised") for row in counted_series(tmp_path)] == [None, "ArithmeticError"]
    assert list(stats(tmp_path)) == ["0.fails.1.start", "0.fails.1.end"]


def test_a_users_attributes_are_read_at_each_edge_and_reset_behind_the_end(tmp_path: Path) -> None:
    def count(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        module.seen = getattr(module, "seen", 0) + 1  # type: ignore[assignment]

    def reset(model: nn.Module, names: list[str]) -> None:
        for module in model.modules():
            module.seen = 0  # type: ignore[assignment]

    class Wrapped(Model):
        def training_step(self) -> torch.Tensor:
            return self(torch.randn(1, 1024)).sum()

    hooks = UserHooks(pre_forward=[count], reset_state=[reset], save_attributes=["seen"])
    with context(tmp_path, on_error="raise") as run:
        model = Wrapped()
        with session(replace(run, model=model), SCHEDULE, [FunctionMemory(user_hooks=hooks)]) as made:
            drive(made, range(6), lambda _: model.training_step())
    assert [row["seen"] for row in series(tmp_path)] == [1, 2, 0, 1]
    assert not any(hasattr(module, "seen") for module in model.modules())


def test_a_users_hook_that_fails_is_reported_once_and_the_step_goes_on(tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError

    with context(tmp_path) as run:
        model = Model()
        collector = FunctionMemory(user_hooks=UserHooks(pre_forward=[fail], save_attributes=["seen"]))
        with session(replace(run, model=model), SCHEDULE, [collector]) as made:
            drive(made, range(6), lambda _: model.training_step())
        errors = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    assert [(row["collector"], row["where"], row["window"]) for row in errors] == [("functions", "hook", 0)]
    assert len(series(tmp_path)) == 4


def test_another_stages_step_is_recorded_in_place_of_the_training_step(tmp_path: Path) -> None:
    with recording(tmp_path, FunctionMemory(), stage="validate") as (made, model):
        drive(made, range(6), lambda _: model.validation_step())
    assert {row["function"] for row in series(tmp_path)} == {"validation_step"}


def test_of_a_compiled_model_the_hook_values_are_none_and_the_reason_is_said(tmp_path: Path) -> None:
    with context(tmp_path, on_error="raise") as run:
        model = Model()
        model.net.compile(backend="eager")
        collector = FunctionMemory(saved_tensors_hooks=True)
        with session(replace(run, model=model), SCHEDULE, [collector]) as made:
            drive(made, range(6), lambda _: model.training_step())
        reasons = [row["reason"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "unavailable"]
    assert [row[name] for row in series(tmp_path) for name in HOOKS] == [None] * 24
    (reason,) = reasons
    assert reason.startswith("memory at forwards: a part of the model is compiled")


def test_what_a_compiled_region_may_call_is_unavailable_and_the_rest_is_recorded(tmp_path: Path) -> None:
    with context(tmp_path, on_error="raise") as run:
        model = Model()
        vars(model)["training_step"] = torch.compile(model.training_step, backend="eager")
        made = replace(run, model=model)
        collector = FunctionMemory(functions=["training_step", "idle"])
        assert collector.unavailable(made) is None
        assert FunctionMemory(functions=["idle"]).unavailable(made) is not None
        with session(made, SCHEDULE, [collector]) as opened:
            drive(opened, range(6), lambda _: model.training_step())
        reasons = [row["reason"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "unavailable"]
    assert {row["function"] for row in series(tmp_path)} == {"training_step"}
    assert any(reason.startswith("Model.idle: a compiled part of the model may call it") for reason in reasons)
    torch._dynamo.reset()


def test_a_name_that_the_model_does_not_have_is_said(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        reason = FunctionMemory(functions=["training_step", "nothing"]).unavailable(replace(run, model=Model()))
    assert reason == (
        "functions holds 'nothing': Model.nothing does not exist; name methods of the LightningModule, and mark "
        "those of other objects with @memprofilable instead"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FunctionMemory(functions="training_step"), "functions='training_step'"),
        (lambda: FunctionMemory(functions=[1]), r"functions=\[1\]"),  # type: ignore[list-item]
        (lambda: FunctionMemory(allocator_snapshots="backward"), "allocator_snapshots='backward'"),
        (lambda: CallRange(0, 2), "1 <= first <= last"),
        (lambda: CallRange(3, 2), "first=3, last=2"),
    ],
)
def test_options_that_mean_nothing_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_snapshots_without_cuda_are_unavailable_with_the_reason(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert FunctionMemory(allocator_snapshots=True).unavailable(replace(run, model=Model())) == (
            "allocator_snapshots needs CUDA, and the model is on cpu"
        )


def test_on_cuda_every_statistic_is_there_and_the_allocator_is_dumped_at_the_edges(tmp_path: Path) -> None:
    with FakeCuda().installed() as cuda:

        def inside(model: Model) -> None:
            model.training_step()
            cuda.allocate(100)
            model.idle()
            model.idle()

        collector = FunctionMemory(functions=["training_step", "idle"], allocator_snapshots=["idle"])
        with recording(tmp_path, collector, device="cuda:0") as (made, model):
            drive(made, range(6), lambda _: inside(model))
    assert cuda.calls[0][0] == "on"
    assert cuda.history == "off"
    names = sorted(path.name for path in (tmp_path / "memprofiler").glob("*.pickle"))
    assert names == [f"cuda_alloc_rank_0.idle.{number}.{edge}.pickle" for number in (3, 4) for edge in ("end", "start")]
    assert stats(tmp_path)["0.idle.3.end"]["allocated_bytes.all.current"] == 300
    assert stats(tmp_path)["0.idle.3.end"]["num_ooms"] == 0


def test_by_count_the_history_is_on_until_the_last_call(tmp_path: Path) -> None:
    on: list[str] = []
    with FakeCuda().installed() as cuda:

        def inside(model: Model) -> None:
            on.append(cuda.history)
            model.training_step()

        collector = FunctionMemory(allocator_snapshots=True, calls=CallRange(2, 2))
        with recording(tmp_path, collector, device="cuda:0") as (made, model):
            drive(made, range(4), lambda _: inside(model))
    assert on == ["on", "on", "off", "off"]
    names = sorted(path.name for path in (tmp_path / "memprofiler").glob("*.pickle"))
    assert names == [f"cuda_alloc_rank_0.training_step.2.{edge}.pickle" for edge in ("end", "start")]
