from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.account.steps.workers import calls, pinning_ns, ready_batches
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.loader_calls import Calls, name_of, timed_calls
from lightning_memprof.capture.torch_internals import _utils
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Rank
from loading import DECODE, FLIP, MS, OWN, READ, SCALE, Chain, Decode, Flip, Images, Stream, batched, scaled
from training import only_run, trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
SAMPLES = 4
PER_SAMPLE = {"Decode.__call__": DECODE, "Flip.forward": FLIP, "scaled": SCALE}


class Net(pl.LightningModule):
    """Keeps its batches, and calls a function in each step."""

    def __init__(self, each: Callable[[], object] = int) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.each = each
        self.batches: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.each()
        self.batches.append(batch.clone())
        loss: torch.Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def recorded(place: Path, loader: Any, each: Callable[[], object] = int) -> tuple[Rank, list[torch.Tensor]]:
    """Train 16 steps, of which 2 and 3 are recorded; return the rank and the batches."""
    output = OutputOptions(summary=False, on_error="raise", report=False, curves=False)
    callback = MemProfilerCallback(collectors=[HostMemory()], output=output)
    net = Net(each)
    trainer(place, callback, max_steps=16).fit(net, loader)
    return load_run(only_run(place)).lead, net.batches


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
# Batches in flight would end a spawned worker of torch with SIGABRT, now and then.
@pytest.mark.parametrize(
    "wrap", [lambda: Images(SAMPLES * 16), lambda: Subset(Images(), range(SAMPLES * 16))], ids=["whole", "subset"]
)
def test_the_time_of_a_fetch_is_its_functions(tmp_path: Path, start: str, wrap: Any) -> None:
    loader = DataLoader(
        wrap(),
        batch_size=SAMPLES,
        num_workers=2,
        collate_fn=batched,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    lead, batches = recorded(tmp_path, loader)
    assert torch.cat(batches)[:, 0].tolist() == list(range(SAMPLES * 16))
    # Before and after the window nothing is replaced in the workers, nor ever here.
    watched = [bool(batch[0, 1]) for batch in batches]
    assert not watched[0]
    assert any(watched)
    assert not any(watched[-2:])
    assert not hasattr(Decode.__call__, "_memprof_link")

    found = {call.function: call for call in calls(lead)}
    for name, milliseconds in PER_SAMPLE.items():
        assert found[name].count == SAMPLES
        assert found[name].self_ns == found[name].total_ns
        assert found[name].self_ns >= SAMPLES * milliseconds * MS
    assert found["batched"].count == 1
    assert found["batched"].self_ns >= 6 * MS
    whole = found["Images.__getitem__"]
    assert whole.count == SAMPLES
    # A function of the module is in its caller.
    assert whole.self_ns >= SAMPLES * (OWN + READ) * MS
    assert whole.total_ns >= SAMPLES * (OWN + READ + sum(PER_SAMPLE.values())) * MS
    # A thousand calls that take no time are in their caller.
    assert "Images.tiny" not in found
    assert sum(call.share for call in found.values()) == pytest.approx(1, abs=0.001)


def numbered(index: int) -> torch.Tensor:
    return torch.full((2,), float(index))


class WithFunction(Dataset[Any]):
    """Its batches have a function that it calls."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return numbered(index), numbered


def first_and_function(samples: list[Any]) -> Any:
    return torch.stack([sample for sample, _ in samples]), samples[0][1]


class WithoutFunction(Net):
    """Trains on the tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0], batch_idx)


def test_a_batch_with_a_function_that_is_called_is_sent_in_a_window_too(tmp_path: Path) -> None:
    loader = DataLoader(
        WithFunction(), num_workers=1, collate_fn=first_and_function, multiprocessing_context="fork", timeout=60
    )
    callback = MemProfilerCallback(collectors=[HostMemory()], output=OutputOptions(summary=False, report=False))
    trainer(tmp_path, callback, max_steps=16).fit(WithoutFunction(), loader)
    assert calls(load_run(only_run(tmp_path)).lead)


def test_an_iterable_data_set_has_what_its_transforms_leave(tmp_path: Path) -> None:
    loader = DataLoader(Stream(), batch_size=SAMPLES, num_workers=1, multiprocessing_context="fork")
    lead, _ = recorded(tmp_path, loader)
    found = {call.function: call for call in calls(lead)}
    assert found["Decode.__call__"].self_ns >= SAMPLES * DECODE * MS
    assert found["Stream.__iter__"].self_ns >= SAMPLES * READ * MS
    assert found["Stream.__iter__"].total_ns >= SAMPLES * (READ + DECODE) * MS
    assert set(found) == {"Decode.__call__", "Stream.__iter__", "default_collate"}


def first_of_each(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in samples])


def test_a_data_set_without_python_methods_has_the_whole_fetch(tmp_path: Path) -> None:
    samples = TensorDataset(torch.zeros(99, 2))
    # Batches of one tensor.
    loader = DataLoader(samples, batch_size=2, num_workers=1, collate_fn=first_of_each, multiprocessing_context="fork")
    lead, _ = recorded(tmp_path, loader)
    assert {call.function for call in calls(lead)} == {"TensorDataset.__getitem__", "first_of_each"}


def test_the_queue_is_full_where_the_loop_is_slow_and_empty_where_it_is_fast(tmp_path: Path) -> None:
    def ready(seconds: float, place: str, batch: int) -> list[int]:
        samples = Images()
        samples.transform = Chain()
        loader = DataLoader(samples, batch_size=batch, num_workers=1, prefetch_factor=3, multiprocessing_context="fork")
        lead, _ = recorded(tmp_path / place, loader, lambda: time.sleep(seconds))
        return ready_batches(lead)

    assert ready(0.3, "slow", 10)[-1] >= 2
    assert ready(0.0, "fast", 40)[-1] == 0


class Pinned:
    """A batch whose copy into pinned memory takes 5 ms; real pinned memory needs an accelerator."""

    def pin_memory(self) -> Pinned:
        time.sleep(0.005)
        return self


def test_pinning_is_timed_once_per_batch_in_its_thread(tmp_path: Path) -> None:
    work: SimpleQueue[Any] = SimpleQueue()

    def pin() -> None:
        work.put({"a": Pinned(), "b": [Pinned()]})
        done.acquire()

    def loop() -> None:
        while (batch := work.get()) is not None:
            began = time.perf_counter_ns()
            _utils.pin_memory.pin_memory(batch)
            spent.append(time.perf_counter_ns() - began)
            done.release()

    spent: list[int] = []

    done = threading.Semaphore(0)
    thread = threading.Thread(target=loop)
    thread.start()
    before = _utils.pin_memory.pin_memory
    try:
        lead, _ = recorded(tmp_path, DataLoader(torch.zeros(32, 2), batch_size=2), pin)  # type: ignore[arg-type]
    finally:
        work.put(None)
        thread.join()
    assert _utils.pin_memory.pin_memory is before
    assert 10 * MS <= (pinning_ns(lead) or 0) <= max(spent)


class Broken(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.transform = self.fails

    def __len__(self) -> int:
        return 100

    def fails(self, index: int) -> torch.Tensor:
        if index > 40:
            raise ValueError(index)
        return torch.zeros(2)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(index)


def test_an_exception_in_a_watched_worker_is_the_one_without(tmp_path: Path) -> None:
    def message(record: bool) -> str:
        loader = DataLoader(Broken(), batch_size=10, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process 0") as caught:
            _ = recorded(tmp_path, loader) if record else list(loader)
        return str(caught.value)

    assert message(record=True) == message(record=False)


def test_a_recursive_call_counts_once_and_its_time_is_not_counted_twice() -> None:
    times = Calls()

    def down(depth: int) -> None:
        time.sleep(0.002)
        if depth:
            times.run("down", down, depth - 1)

    times.run("down", down, 2)
    count, own_ns, total_ns = times.times["down"]
    assert count == 1
    assert own_ns == total_ns >= 6 * MS
    thread = threading.Thread(target=times.run, args=("other", time.sleep, 0))
    thread.start()
    thread.join()
    assert set(times.times) == {"down"}


def test_functions_in_containers_without_a_length_are_timed() -> None:
    class Row(list[Any]):
        def __len__(self) -> int:
            raise TypeError

    class Table(dict[str, Any]):
        def __len__(self) -> int:
            raise TypeError

    samples = Images()
    samples.transform, samples.extra = Chain(Decode()), Table(rows=Row([scaled]))
    with timed_calls(Calls(), samples):
        assert samples.extra["rows"][0] is not scaled
    assert samples.extra["rows"][0] is scaled


def test_the_program_gets_its_objects_back() -> None:
    half = functools.partial(scaled, by=0.5)
    samples, chain = Images(), Chain(Decode(), Flip(), half)
    samples.transform, samples.extra = chain, {"half": half}
    transforms, attributes = list(chain.transforms), dict(vars(samples))
    with timed_calls(Calls(), samples):
        assert chain.transforms[2] is not half
        # A sample may contain it.
        assert isinstance(copy.deepcopy(chain.transforms[2]), functools.partial)
        assert samples.extra["half"] is not half
        chain.transforms.append(Flip())
        assert Images.__getitem__.__name__ == "__getitem__"
    assert chain.transforms[:3] == transforms
    assert vars(samples) == attributes
    assert samples.extra["half"] is half
    assert not hasattr(Images.__getitem__, "_memprof_link")
    assert "__call__" not in vars(Flip)


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (batched, ("__code__", "__globals__", "__module__", "__doc__", "__dict__")),
        (functools.partial(scaled, by=2.0), ("func", "args", "keywords", "__dict__")),
        (Images().tiny, ("__self__", "__func__", "__code__", "__module__")),
        (torch.stack, ("__self__", "__text_signature__", "__doc__")),
    ],
    ids=["function", "partial", "method", "builtin"],
)
def test_a_timed_function_is_the_function_to_the_program(function: Any, attributes: tuple[str, ...]) -> None:
    samples: Any = Images()
    samples.transform = function
    with timed_calls(Calls(), samples):
        timed = samples.transform
        assert timed is not function
        assert [getattr(timed, name) for name in attributes] == [getattr(function, name) for name in attributes]
        assert not hasattr(timed, "another")
        assert isinstance(timed, type(function))
        assert callable(timed)
        assert timed == function == timed
        assert timed != scaled
        assert {function: 1}[timed] == {timed: 1}[function] == 1
        assert (repr(timed), name_of(timed)) == (repr(function), name_of(function))
        if function is not torch.stack:
            assert inspect.signature(timed) == inspect.signature(function)
        sent = pickle.loads(pickle.dumps(timed))  # noqa: S301 its own
        for again in (copy.copy(timed), copy.deepcopy(timed), sent):
            assert type(again) is type(function)


def test_what_the_program_sets_on_a_timed_function_remains() -> None:
    samples: Any = Images()
    samples.transform = functools.partial(scaled, by=1.0)
    with timed_calls(Calls(), samples):
        samples.transform.uses = 1
        samples.transform.keywords["by"] = 0.5
    assert samples.transform.uses == 1
    assert samples.transform(torch.ones(1)).item() == 0.5


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (batched, "batched"),
        (functools.partial(scaled, by=2), "scaled"),
        (Decode(), "Decode.__call__"),
        (Images().tiny, "Images.tiny"),
        (torch.stack, "stack"),
    ],
)
def test_names_are_those_of_the_program(function: Any, name: str) -> None:
    assert name_of(function).rpartition("VariableFunctionsClass.")[2] == name
