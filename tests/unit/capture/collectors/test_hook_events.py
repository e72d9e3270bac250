from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader
from torch.utils.data._utils import fetch

from lightning_memprof.capture.base import TimedPart
from lightning_memprof.capture.collectors.hook_events import timed_fetches, timed_parts


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


def test_a_part_is_copied_and_pickled_without_us() -> None:
    heard, part = Heard(), sgd()
    with timed_parts([TimedPart(part, "step", "step")], heard.start, heard.stop):
        copied, pickled = copy.deepcopy(part), pickle.loads(pickle.dumps(part))  # noqa: S301 our own
        copied.step()
        pickled.step()
    assert heard.events == []


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
