from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader
from torch.utils.data._utils import fetch

from lightning_memprof.artifacts.series import HookRow
from lightning_memprof.capture.base import TimedPart, unix_offset_ns
from lightning_memprof.capture.collectors.hook_timings import ActionLog, HookTimings, timed_fetches, timed_parts
from lightning_memprof.schedule import Mark, Point, Schedule
from recorded_rows import read_series
from sessions import POINTS, context, drive, session


@dataclass
class Node:
    """An action: how long it takes before, between and after the actions in it."""

    name: str
    pause: int
    inner: list[Node] = field(default_factory=list)


names = st.sampled_from(["a", "b", "[Strategy]X.backward", "step"])
leaves = st.builds(Node, names, st.integers(1, 1000))
trees = st.recursive(leaves, lambda inner: st.builds(Node, names, st.integers(1, 1000), st.lists(inner, max_size=3)))
steps_of_trees = st.lists(st.lists(trees, max_size=4), max_size=4)


class Script:
    """Plays actions into a log on a clock of its own, and writes down what should come out."""

    def __init__(self) -> None:
        self.now = 10**12
        self.offset = 10**18
        self.expected: list[HookRow] = []
        clock = SimpleNamespace(perf_counter_ns=lambda: self.now)
        self._patch = mock.patch("lightning_memprof.capture.collectors.hook_timings.time", clock)
        self.log = ActionLog(self.offset)

    def play(self, step: int, trees: list[Node]) -> None:
        with self._patch:
            self.mark(step, Point.STEP_START)
            row = self.row("step", step, -1)
            for node in trees:
                self.action(node, step, 0)
            row.duration_ns = self.now + self.offset - (row.start_ns or 0)
            self.mark(step, Point.STEP_END)

    def action(self, node: Node, step: int, depth: int) -> None:
        row = self.row(node.name, step, depth)
        self.log.start(node.name)
        self.now += node.pause
        for inner in node.inner:
            self.action(inner, step, depth + 1)
            self.now += node.pause
        row.duration_ns = self.now + self.offset - (row.start_ns or 0)
        self.log.stop(node.name)

    def mark(self, step: int, point: Point) -> None:
        self.log.mark(Mark(step, step, point, recorded=step > 0, time_ns=self.now + self.offset))

    def row(self, name: str, step: int, depth: int) -> HookRow:
        row = HookRow(
            step=step,
            global_step=step,
            recorded=step > 0,
            action=name,
            start_ns=self.now + self.offset,
            depth=depth,
        )
        self.expected.append(row)
        return row


@pytest.mark.slow
@given(steps_of_trees)
def test_nested_actions_come_back_with_their_exact_names_times_and_depths(steps: list[list[Node]]) -> None:
    script = Script()
    for step, trees in enumerate(steps):
        script.play(step, trees)
    assert script.log.rows() == script.expected


def mark(point: Point, step: int = 2) -> Mark:
    return Mark(step, step, point, recorded=True, time_ns=time.time_ns())


def actions(log: ActionLog) -> list[tuple[str | None, int | None]]:
    return [(row.action, row.depth) for row in log.rows()]


def test_the_end_of_an_action_that_began_before_the_log_is_left_out() -> None:
    log = ActionLog(unix_offset_ns())
    log.stop("earlier")
    log.mark(mark(Point.STEP_START))
    log.stop("earlier")
    log.start("a")
    log.stop("a")
    log.mark(mark(Point.STEP_END))
    assert actions(log) == [("step", -1), ("a", 0)]
    assert all((row.duration_ns or 0) >= 0 for row in log.rows())


def test_an_action_that_did_not_end_is_left_out_and_its_inner_ones_stay() -> None:
    log = ActionLog(unix_offset_ns())
    log.mark(mark(Point.STEP_START))
    log.start("interrupted")
    log.start("a")
    log.stop("a")
    log.mark(mark(Point.STEP_END))
    log.mark(mark(Point.STEP_START, 3))
    log.start("b")
    log.stop("b")
    log.mark(mark(Point.STEP_END, 3))
    assert actions(log) == [("step", -1), ("a", 1), ("step", -1), ("b", 0)]


def test_the_collector_listens_in_its_window_only_and_writes_its_rows(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        feed: Any = run.actions
        listening: list[int] = []

        def inside(step: int) -> None:
            listening.append(len(feed.listeners))
            with feed.action("outer"), feed.action("inner"):
                pass

        with session(run, Schedule(), [HookTimings()]) as made:
            drive(made, range(6), inside)
        assert listening == [0, 1, 1, 1, 0, 0]
        assert feed.listeners == []
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.hooks.jsonl")
    assert [(row["step"], row["recorded"], row["action"], row["depth"]) for row in rows] == [
        (step, step > 1, action, depth)
        for step in (1, 2, 3)
        for action, depth in (
            ("step", -1),
            ("[MemProfiler]batch_start", 0),
            ("[MemProfiler]after_forward", 0),
            ("outer", 0),
            ("inner", 1),
            *((f"[MemProfiler]{point.value}", 0) for point in POINTS[2:]),
        )
    ]
    assert all(row["duration_ns"] >= 0 for row in rows)


def test_a_window_that_breaks_off_keeps_the_actions_so_far(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        feed: Any = run.actions
        with session(run, Schedule(wait=0, warmup=0), [HookTimings()]) as made:
            drive(made, [0], lambda _: feed.listeners[0][0]("training_step"))
            made.close(reason="ValueError: no")
    rows = read_series(tmp_path / "memprofiler/window000/rank00000.hooks.jsonl")
    assert [row["action"] for row in rows if not row["action"].startswith("[MemProfiler]")] == ["step"]


class Heard:
    """What was told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, action: str) -> None:
        self.events.append(f"+{action}")

    def stop(self, action: str) -> None:
        self.events.append(f"-{action}")


class Worker:
    """Does some work."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def work(self, value: Any, *, fails: bool = False) -> Any:
        self.calls.append(value)
        if fails:
            raise ValueError(value)
        return value


class Heir(Worker):
    """Inherits all."""


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.5)


def test_calls_of_the_part_are_told_and_those_of_other_instances_are_not() -> None:
    heard, part, other = Heard(), Worker(), Worker()
    with timed_parts([TimedPart(part, "work", "work")], heard.start, heard.stop):
        assert part.work(1) == 1
        assert other.work(2) == 2
    assert heard.events == ["+work", "-work"]
    assert (part.calls, other.calls) == ([1], [2])


def test_the_class_is_as_it_was_when_the_context_ends() -> None:
    before = vars(Worker)["work"]
    heard = Heard()
    part, heir = Worker(), Heir()
    with timed_parts([TimedPart(part, "work", "a"), TimedPart(heir, "work", "b")], heard.start, heard.stop):
        assert vars(Worker)["work"] is not before
        held = part.work
        heir.work(1)
    assert vars(Worker)["work"] is before
    assert "work" not in vars(Heir)
    held(1)
    assert heard.events == ["+b", "-b"]


def test_what_a_part_raises_is_the_programs_and_its_end_is_told() -> None:
    heard, part = Heard(), Worker()
    with (
        timed_parts([TimedPart(part, "work", "work")], heard.start, heard.stop),
        pytest.raises(ValueError, match="no"),
    ):
        part.work("no", fails=True)
    assert heard.events == ["+work", "-work"]


def test_calls_of_other_threads_are_not_told() -> None:
    heard, part = Heard(), Worker()
    with timed_parts([TimedPart(part, "work", "work")], heard.start, heard.stop):
        thread = threading.Thread(target=part.work, args=(1,))
        thread.start()
        thread.join()
    assert (heard.events, part.calls) == ([], [1])


def test_an_optimizer_whose_step_a_scheduler_has_taken_is_told_and_gets_the_same_step_back() -> None:
    heard, optimizer = Heard(), sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    taken = vars(optimizer)["step"]
    with timed_parts([TimedPart(optimizer, "step", "step")], heard.start, heard.stop):
        optimizer.step()
        scheduler.step()
    assert vars(optimizer)["step"] is taken
    assert heard.events == ["+step", "-step"]


def test_an_optimizer_made_while_steps_are_told_is_hooked_once() -> None:
    heard, optimizer = Heard(), sgd()
    before = vars(torch.optim.SGD)["step"]
    with timed_parts([TimedPart(optimizer, "step", "step")], heard.start, heard.stop):
        made = sgd()
        with torch.profiler.profile() as profiler:
            made.step()
    assert vars(torch.optim.SGD)["step"] is before
    names = [event.name for event in profiler.events() or ()]
    assert names.count("Optimizer.step#SGD.step") == 1


class Numbers(Dataset[int]):
    """Gives what it is asked for."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[int]):
    """Counts."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def fetched(loader: DataLoader[Any]) -> tuple[list[Any], list[str]]:
    heard = Heard()
    with timed_fetches(heard.start, heard.stop):
        iterator = iter(loader)
        batches = [next(iterator).tolist() for _ in range(2)]
        del iterator
    return batches, heard.events


@pytest.mark.parametrize("dataset", [Numbers(), Endless()])
def test_the_parts_of_a_fetch_in_this_process_are_told(dataset: Any) -> None:
    name = f"[DataLoader]{type(dataset).__name__}"
    batches, events = fetched(DataLoader(dataset, batch_size=2))
    assert batches == [[0, 1], [2, 3]]
    assert events == [
        f"{sign}{name}.{what}"
        for _ in range(2)
        for sign, what in (
            ("+", "sampler"), ("-", "sampler"), ("+", "fetch"), ("+", "collate"), ("-", "collate"), ("-", "fetch"),
        )
    ]  # fmt: skip


def test_a_data_set_may_be_a_tensor_which_has_no_truth_value() -> None:
    batches, events = fetched(DataLoader(torch.arange(4), batch_size=2))  # type: ignore[arg-type]
    assert batches == [[0, 1], [2, 3]]
    assert "+[DataLoader]Tensor.fetch" in events


@pytest.fixture
def child_handler() -> Iterator[None]:
    """Torch sets its own handler with the first worker and leaves it."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("child_handler")
def test_the_wait_for_workers_is_told_and_their_own_fetches_are_not() -> None:
    batches, events = fetched(DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
    assert batches == [[0, 1], [2, 3]]
    assert "+[DataLoader]Numbers.workers" in events
    assert not [event for event in events if event.endswith(("fetch", "collate"))]


def test_torchs_loaders_are_as_they_were_when_the_context_ends() -> None:
    classes = (
        dataloader._BaseDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
        fetch._MapDatasetFetcher,
        fetch._IterableDatasetFetcher,
    )
    before = [dict(vars(loader_class)) for loader_class in classes]
    iterator = iter(DataLoader(Numbers(), batch_size=2))
    with timed_fetches(lambda _: None, lambda _: None):
        next(iterator)
        assert [dict(vars(loader_class)) for loader_class in classes] != before
    assert [dict(vars(loader_class)) for loader_class in classes] == before
    assert next(iterator).tolist() == [2, 3]
