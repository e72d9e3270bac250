"""Owners of time that a few recorded facts name: real training runs with the fault, and their healthy twins."""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from faults import with_free_cores
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.cli.main import main
from lightning_memprof.judge import Facts, facts
from lightning_memprof.judge.bound import nothing_found
from lightning_memprof.judge.rules.growth import outliving_graph
from lightning_memprof.report.opened import opened
from lightning_memprof.report.view import View
from training import only_run, trainer

Shown = dict[str, dict[str, Any]]
LATE = Schedule(skip_first=4, wait=8, warmup=1, active=2, repeat=0)


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a training and returns the findings of its page on a machine with free cores, by rule."""
    monkeypatch.setattr(facts, "run_ledger", with_free_cores)

    def run(name: str, model: pl.LightningModule, data: Any, *callbacks: pl.Callback, **options: Any) -> Shown:
        ours = MemProfilerCallback(schedule=LATE, output=OutputOptions(summary=False))
        options = {"profiler": ExtendedPyTorchProfiler(), **options}
        made = trainer(tmp_path / name, ours, *callbacks, **options)
        made.fit(model, **{"datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders": data})
        capsys.readouterr()
        assert main(["show", str(only_run(tmp_path / name)), "--format", "json"]) == 0
        page = json.loads(capsys.readouterr().out)
        return {finding["rule"]: finding for finding in page["findings"]}

    return run


def severe(found: Shown) -> set[str]:
    """The rules of findings above info."""
    return {rule for rule, finding in found.items() if finding["severity"] in {"warning", "critical"}}


class Model(pl.LightningModule):
    """A regression by whatever network, and by default a step of some ms."""

    def __init__(self, network: nn.Module | None = None, **optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = network or nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, **self.optimizer)


def batches(count: int, *shape: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, *shape)), batch_size=None)


class Signals(IterableDataset[Any]):
    """Signals of which each has another length."""

    def __iter__(self) -> Iterator[Any]:
        for step in range(60):
            yield (torch.randn(4, 1, 200 + 8 * (step // 2)),)


@pytest.mark.parametrize("dynamic", [False, True])
def test_code_that_is_compiled_for_each_length_is_named(shown: Any, dynamic: bool) -> None:
    torch.compiler.reset()
    layers = (nn.Conv1d(1, 16, 9), nn.ReLU(), nn.Conv1d(16, 16, 9), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    model = Model(nn.Sequential(*layers))
    model.network.forward = torch.compile(model.network.forward, backend="eager", dynamic=dynamic)
    with torch._dynamo.config.patch(recompile_limit=64):
        # The first compilations of a process import what compiles: no later one may be a quarter of all.
        for length in (100, 120):
            model.network(torch.randn(4, 1, length))
        found = shown("run", model, DataLoader(Signals(), batch_size=None))
    assert ("recompilation" in found) == (not dynamic)
    if not dynamic:
        finding = found["recompilation"]
        assert finding["title"].startswith("torch.compile recompiles: compiling takes ")
        assert "dynamic=True" in finding["remedies"][0]["text"]
        assert finding["numbers"]["count_per_step"] == pytest.approx(0.5, abs=0.2)
        assert finding["recovers"]["max"] <= finding["numbers"]["ns"] + 1


class Block(nn.Module):
    """A block whose inner activations are saved, or computed twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "saved":
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["saved", "reentrant", "in hooks"])
def test_forwards_that_run_again_in_backward_are_named(shown: Any, how: str) -> None:
    network = nn.Sequential(nn.Linear(32, 128), *(Block(how) for _ in range(6)), nn.Linear(128, 1))
    found = shown("run", Model(network), batches(24, 2048, 32))
    assert ("recomputation" in found) == (how != "saved")
    if how != "saved":
        finding = found["recomputation"]
        assert "forwards again" in finding["title"]
        assert finding["remedies"][0]["id"] == "save_activations"
        # How long they take is the machine's.
        assert 0 < finding["recovers"]["max"] <= finding["recovers"]["whole"]
        assert finding["recovers"]["max"] == pytest.approx(finding["numbers"]["ns"], abs=1)


class Grouped(Model):
    """A group of parameters for each tensor, or for each setting."""

    def __init__(self, *, is_joined: bool) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(32, 32) for _ in range(240))))
        self.is_joined = is_joined

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        biases = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        if self.is_joined:
            joined: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
            return torch.optim.AdamW(joined, fused=True)
        groups: list[dict[str, Any]] = [{"params": [weight]} for weight in weights]
        groups += [{"params": [bias], "weight_decay": 0.0} for bias in biases]
        return torch.optim.AdamW(groups, fused=True)


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_group_of_parameters_per_tensor_is_named(shown: Any, is_joined: bool) -> None:
    found = shown("run", Grouped(is_joined=is_joined), batches(30, 8, 32))
    # An optimizer without needless groups may be named too, if it takes most of so small a model's step.
    named = found.get("optimizer_bound", {"title": "", "remedies": [{"text": ""}]})
    assert ("in 480 parameter groups" in named["title"]) == (not is_joined)
    assert ("2 instead of 480" in named["remedies"][0]["text"]) == (not is_joined)


class Prices(pl.LightningDataModule):
    """Reads its prices when a loader is made, or once."""

    def __init__(self, *, is_read_once: bool) -> None:
        super().__init__()
        self.rows = self.read() if is_read_once else None

    def read(self) -> Tensor:
        text = "\n".join(",".join(["0.25"] * 32) for _ in range(3000))
        return torch.tensor([[float(value) for value in line.split(",")] for line in text.splitlines()])

    def train_dataloader(self) -> Any:
        rows = self.read() if self.rows is None else self.rows
        return DataLoader(TensorDataset(rows), batch_size=600)


@pytest.mark.parametrize("is_read_once", [False, True])
def test_loaders_that_are_built_for_each_epoch_are_named(shown: Any, is_read_once: bool) -> None:
    data = Prices(is_read_once=is_read_once)
    found = shown("run", Model(), data, max_epochs=8, reload_dataloaders_every_n_epochs=1)
    assert ("hook_bound" in found) == (not is_read_once)
    if not is_read_once:
        assert found["hook_bound"]["title"].startswith("The hook Prices.train_dataloader of the module takes ")
        assert "reload_dataloaders_every_n_epochs" in found["hook_bound"]["remedies"][0]["text"]


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_a_batch_of_numbers_that_the_transfer_visits_is_named(shown: Any, kind: str) -> None:
    boxes: Any = [[0.1, 0.2, 0.3, 0.4] for _ in range(3000)]
    data = [(torch.randn(64, 32), {"boxes": boxes if kind == "numbers" else torch.tensor(boxes)}) for _ in range(24)]
    found = shown("run", Model(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert ("transfer_bound" in found) == (kind == "numbers")
    if kind == "numbers":
        assert "batch_to_device" in found["transfer_bound"]["title"]
        assert "visits each object" in found["transfer_bound"]["why"]
        assert "tensors from collate_fn" in found["transfer_bound"]["remedies"][0]["text"]


class Noisy(Model):
    """Adds noise to the signals of a batch, one after the other or at once."""

    def __init__(self, *, one_by_one: bool) -> None:
        super().__init__(nn.Linear(32, 1))
        self.one_by_one = one_by_one

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        signals = batch[0]
        if self.one_by_one:
            return [torch.stack([torch.cumsum(signal + torch.randn(32), 0) for signal in signals])]
        return [torch.cumsum(signals + torch.randn(len(signals), 32), 1)]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_transfer_hook_that_takes_samples_one_by_one_is_named(shown: Any, one_by_one: bool) -> None:
    found = shown("run", Noisy(one_by_one=one_by_one), batches(24, 1500, 32))
    remedies = [each["id"] for finding in found.values() for each in finding["remedies"]]
    assert ("whole_batch" in remedies) == one_by_one
    if one_by_one:
        finding = found["transfer_bound"]
        assert finding["numbers"]["action"] == "Noisy.on_after_batch_transfer"
        assert "Noisy.on_after_batch_transfer" in finding["title"]
        assert re.search(r"aten::\w+ 1,500 times", finding["why"])
        assert finding["remedies"][0]["id"] == "whole_batch"


class Scores(pl.Callback):
    """Counts how often the model is right, with a forward of its own or that of the step."""

    def __init__(self, *, own: bool) -> None:
        self.own = own
        self.right = 0

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scores = pl_module.network(batch[0]) if self.own else outputs["loss"][None]
        self.right += int((scores > 0).sum())


@pytest.mark.parametrize("own", [True, False])
def test_a_callback_that_runs_the_model_again_is_named(shown: Any, own: bool) -> None:
    network = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
    found = shown("run", Model(network), batches(24, 512, 32), Scores(own=own))
    assert ("callback_bound" in found) == own
    if own:
        finding = found["callback_bound"]
        assert finding["numbers"]["action"] == "Scores.on_train_batch_end"
        assert "Scores.on_train_batch_end" in finding["title"]
        assert "runs network." in finding["why"]
        assert finding["remedies"][0]["id"] == "reuse_outputs"


@pytest.fixture
def without_collections() -> Iterator[None]:
    """No pauses of the garbage collector: one that loses its core is as long as the fetch in which it falls."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("at_once", [False, True])
def test_thousands_of_samples_that_are_fetched_one_by_one_are_named(shown: Any, at_once: bool) -> None:
    table = TensorDataset(torch.randn(3000, 32), torch.randn(3000))
    # Of so many recorded steps, one in which the sampler loses its core does not decide.
    drawn = RandomSampler(table, num_samples=3000 * 40, replacement=True)
    sampler = BatchSampler(drawn, 3000, drop_last=True)
    loader = (
        DataLoader(table, sampler=sampler, batch_size=None)
        if at_once
        else DataLoader(table, batch_size=3000, sampler=drawn)
    )
    found = shown("run", Model(), loader)
    steps = [finding["remedies"][0]["text"] for finding in found.values()]
    assert any(step.startswith("Fetch all samples of a batch at once: ") for step in steps) == (not at_once)
    if not at_once:
        assert "one by one, 3,000 in a batch" in found["input_bound"]["why"]


class Tables(Dataset[tuple[Tensor]]):
    """Numbers; each process first computes a table for 150 ms."""

    def __init__(self) -> None:
        self.numbers, self.has_table = torch.randn(60 * 256, 32), False

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        end = 0.0 if self.has_table else time.process_time() + 0.15
        while time.process_time() < end:
            pass
        self.has_table = True
        return (self.numbers[index],)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the cores of a process cannot be limited")
@pytest.mark.parametrize("workers", [6, 1])
def test_the_start_of_more_workers_than_cores_is_named(shown: Any, workers: int) -> None:
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        found = shown("run", Model(), DataLoader(Tables(), 256, num_workers=workers, persistent_workers=True))
    finally:
        os.sched_setaffinity(0, cores)
    assert ("worker_start" in found) == (workers > 1)
    if workers > 1:
        assert found["worker_start"]["title"].startswith("6 DataLoader workers for 1 core: their start takes ")
        assert found["worker_start"]["remedies"][0]["id"] == "fewer_workers"
        assert "num_workers=1)" in found["worker_start"]["remedies"][0]["text"]


class Converted(Dataset[tuple[Tensor]]):
    """Numbers that are stored as they were read, or converted at once."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 20 * 256

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.numbers[index].float(),)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_data_set_that_is_converted_at_once_is_a_note(shown: Any, dtype: torch.dtype) -> None:
    rows = max(psutil.Process().memory_info().rss // 128, 20 * 256)
    found = shown("run", Model(), DataLoader(Converted(torch.ones(rows, 32, dtype=dtype)), 256))
    finding = found["data_memory"]
    assert finding["severity"] == "info"
    assert (finding["numbers"]["owner"], finding["numbers"]["dtype"]) == ("Converted.numbers", str(dtype)[6:])
    assert "Converted.numbers" in finding["title"]
    assert finding["numbers"]["bytes"] == pytest.approx(rows * 32 * dtype.itemsize, rel=0.01)
    # Only what was converted can be smaller.
    assert (finding["remedies"][0]["id"] == "smaller_dtype") == (dtype == torch.float32)


class Ticker(pl.Callback):
    """A thread that counts, all the time or once in a while."""

    def __init__(self, *, is_busy: bool) -> None:
        self.pause = 0.001 if is_busy else 5.0
        self.ended = threading.Event()
        self.counted = 0

    def on_fit_start(self, *_: Any) -> None:
        self.thread = threading.Thread(target=self.count, name="ticker", daemon=True)
        self.thread.start()

    def count(self) -> None:
        while not self.ended.wait(self.pause):
            self.counted += sum(number % 7 for number in range(200_000))

    def on_fit_end(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()


class Pythonic(Model):
    """Many small operators, each called from Python."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for _ in range(60):
            x = x * 1.01 + 0.1
        loss: Tensor = self.network(x).square().mean()
        return loss


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_thread_that_takes_turns_with_the_training_is_named(shown: Any, is_busy: bool) -> None:
    found = shown("run", Pythonic(), batches(120, 16, 32), Ticker(is_busy=is_busy))
    assert ("busy_thread" in found) == is_busy
    if is_busy:
        finding = found["busy_thread"]
        assert finding["numbers"]["thread"].startswith("Ticker.count (test_findings_owners.py:")
        assert "Ticker.count " in finding["title"]
        assert finding["numbers"]["thread"] in finding["why"]
        assert finding["remedies"][0]["id"] == "thread_less"
        assert finding["numbers"]["cores"] > 0.05
        asleep_ns = finding["numbers"]["asleep_share"] * finding["numbers"]["duration_ns"]
        assert finding["recovers"]["max"] <= asleep_ns * 1.01


class Recurrent(nn.Module):
    """A recurrent network whose weight is made from another one, in each step of time or once."""

    def __init__(self, *, is_cached: bool) -> None:
        super().__init__()
        self.is_cached = is_cached
        self.cell = parametrizations.orthogonal(nn.Linear(96, 96), orthogonal_map="matrix_exp")

    def forward(self, x: Tensor) -> Tensor:
        if self.is_cached:
            with parametrize.cached():
                return self.run(x)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(30):
            state = torch.tanh(self.cell(state))
        return state


@pytest.mark.parametrize("is_cached", [True, False])
def test_parameters_that_are_made_in_a_loop_are_named(shown: Any, is_cached: bool) -> None:
    found = shown("run", Model(Recurrent(is_cached=is_cached)), batches(20, 64, 96))
    steps = [each["text"] for each in found.get("hot_line", {"remedies": [{"text": ""}]})["remedies"]]
    assert ("parametrize.cached()" in steps[0]) == (not is_cached)


class Chamfer(nn.Module):
    """Absolute distances of all pairs of points, by a tensor of all differences or by torch."""

    def __init__(self, *, is_broadcast: bool) -> None:
        super().__init__()
        self.is_broadcast = is_broadcast
        self.points = nn.Parameter(torch.randn(400, 32))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_broadcast:
            return (x[:, None] - self.points[None]).abs().sum(-1).min(1).values
        return torch.cdist(x, self.points, p=1.0).min(1).values


@pytest.mark.parametrize("is_broadcast", [True, False])
def test_a_tensor_of_all_pairs_is_named(tmp_path: Path, shown: Any, is_broadcast: bool, capsys: Any) -> None:
    profiler = ExtendedPyTorchProfiler(record_shapes=True)
    shown("run", Model(Chamfer(is_broadcast=is_broadcast)), batches(24, 400, 32), profiler=profiler)
    assert main(["show", str(only_run(tmp_path / "run")), "--format", "json"]) == 0
    page = json.loads(capsys.readouterr().out)
    told = json.dumps([page["verdict"], *page["findings"]])
    assert ("on all pairs of 400x1x32 and 1x400x32" in told) == is_broadcast
    assert ("no_pairs" in told) == is_broadcast


class Repeated(Model):
    """Runs a network once, or more often: for a metric, pairs of inputs, two losses, block by block, or in backward."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)))
        self.enter, self.how = nn.Linear(256, 256) if how == "shared block" else nn.Identity(), how
        self.heads = nn.ModuleList(nn.Linear(256, 1) for _ in range(2 if how == "two losses" else 0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "two losses":
            return torch.stack([head(self.network(batch[0])).square().mean() for head in self.heads]).sum()
        x = self.enter(batch[0])
        if self.how == "checkpoint":
            y = checkpoint(self.network, x.requires_grad_(), use_reentrant=False)
        elif self.how in {"shared block", "loop"}:
            y = self.network(self.network(x))
            y = y if self.how == "shared block" else self.network(self.network(y))
        elif self.how == "pairs":
            first, second = x.chunk(2)
            y = self.network(first) - self.network(second)
        else:
            y = self.network(x)
        if self.how == "metric":
            with torch.no_grad():
                self.log("mean", self.network(x).mean())
        return y.square().mean()


@pytest.mark.parametrize(
    ("how", "forwards"),
    [("once", 1), ("metric", 2), ("pairs", 2), ("two losses", 2), ("shared block", 1), ("loop", 1), ("checkpoint", 1)],
)
def test_a_model_that_runs_several_times_per_step_is_told(tmp_path: Path, shown: Any, how: str, forwards: int) -> None:
    shown("run", Repeated(how), batches(24, 512, 256))
    with opened([str(only_run(tmp_path / "run"))]) as view:
        assert isinstance(view, View)
        found = nothing_found(Facts.of(view.run, view.traces))
    assert found.numbers["forwards"] == forwards
    assert "network" in found.title
    assert (f" in {forwards} forwards per step" in found.title) == (forwards > 1)
    first = found.remedies[0]
    assert (not isinstance(first, str) and first.id == "forward_once") == (forwards > 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Operators of one thread, which wait for no second core: other tests may have it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Sentences(Model):
    """Small layers on the vectors of a sentence, each four times: of that many calls, few lose their core."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(10)]
        super().__init__(nn.Sequential(*(4 * layers)))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("samples", [1, 16])
def test_single_sentences_whose_gradients_accumulate_are_a_small_batch(shown: Any, samples: int) -> None:
    data = DataLoader(TensorDataset(torch.randn(512 if samples == 16 else 64, 25, 16)), batch_size=samples)
    found = shown("run", Sentences(), data, accumulate_grad_batches=16 // samples)
    assert ("small_batch" in found) == (samples == 1)
    if samples == 1:
        step = found["small_batch"]["remedies"][0]["text"]
        assert step.endswith("DataLoader(batch_size=16), Trainer(accumulate_grad_batches=1).")


class Retaining(Model):
    """Keeps the loss of the step before, with its graph or as a number."""

    def __init__(self, *, is_retained: bool) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16))))
        self.is_retained = is_retained

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=self.is_retained)
        self.before = loss if self.is_retained else loss.detach()


@pytest.mark.parametrize("is_retained", [True, False])
def test_a_graph_that_outlives_its_step_is_named(tmp_path: Path, is_retained: bool) -> None:
    profiler = ExtendedPyTorchProfiler(profile_memory=True)
    made = trainer(tmp_path, MemProfilerCallback(schedule=LATE), profiler=profiler)
    made.fit(Retaining(is_retained=is_retained), batches(16, 4096, 256))
    with opened([str(only_run(tmp_path))]) as view:
        assert isinstance(view, View)
        found = outliving_graph(Facts.of(view.run, view.traces, view.snapshots, view.memory))
    # Its share is not asserted: much of the peak of this process is other tests'.
    assert (found is not None) == is_retained
    if found is not None:
        numbers = found[1].numbers
        assert numbers["retained_bytes"] >= 0.9 * numbers["activation_bytes"]


class Asleep(Model):
    """Sleeps for most of each step, somewhere."""

    def __init__(self, place: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(32, 16), Nap() if place == "forward" else nn.Tanh(), nn.Linear(16, 1)))
        self.place = place

    def nap(self, place: str) -> None:
        if self.place == place:
            time.sleep(0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.nap("training_step")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.nap("backward")
        loss.backward()

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.nap("optimizer_zero_grad")
        super().optimizer_zero_grad(*args)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.nap("optimizer_step")
        super().optimizer_step(*args, **kwargs)


class Nap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "rule", "owner"),
    [
        ("training_step", "hot_line", "Asleep.nap"),
        ("forward", "hot_line", "Nap.forward"),
        ("backward", "nothing_found", "Asleep.nap"),
        ("optimizer_zero_grad", "hook_bound", "Asleep.optimizer_zero_grad"),
        ("optimizer_step", "hook_bound", "Asleep.optimizer_step"),
    ],
)
def test_a_sleep_of_most_of_a_step_is_named_where_it_is(shown: Any, place: str, rule: str, owner: str) -> None:
    # More samples than a small batch has.
    found = shown(place, Asleep(place), batches(30, 16, 32))
    finding = next(iter(found.values()))
    assert finding["rule"] == rule
    told = finding["title"] + finding["why"]
    assert owner in told
    assert place in told or finding["rule"] == "hot_line"
    assert "time.sleep(0.02)" in told
    assert finding["remedies"][0]["id"] == "wait_outside"
