"""Holders of growing memory: trainings that keep something with every step, and healthy ones that do not."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import leaking
from leaking import LEAKS, SIZE, Images, InCallback, InCpp, Leaking
from lightning_memprof import MemProfilerCallback, OutputOptions, StageSchedules
from lightning_memprof.artifacts.trigger import Request, write_request
from lightning_memprof.collectors import Holders, Pulse
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.view import run_view
from training import Noise, loader, only_run, trainer

SOURCE = Path(leaking.__file__).read_text(encoding="utf-8").splitlines()
STEPS = 12
OF_MODULE = ("global", "lru_cache", "class attribute", "default")
OUTPUT = OutputOptions(summary=False, on_error="raise", report=False, curves=False)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Free what the trainings leave in modules, classes and the C allocator."""
    yield
    leaking.release()


class Asks(pl.Callback):
    """Requests a window after a few steps."""

    def __init__(self, memprof: MemProfilerCallback, at: int = 3) -> None:
        self.memprof = memprof
        self.at = at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.memprof.trigger(STEPS, leaks=True)


class Cached(Noise):
    """Keeps what it has read: by index, or in the order in which it was read."""

    def __init__(self, *, by_index: bool) -> None:
        super().__init__(STEPS + 8)
        self.cache: dict[Any, torch.Tensor] = {}
        self.by_index = by_index

    def __getitem__(self, index: int) -> torch.Tensor:
        self.cache[index if self.by_index else f"{index}"] = torch.zeros(SIZE)
        return super().__getitem__(index)


def searched(
    directory: Path, model: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, **options: Any
) -> list[Any]:
    """Train with a window that asks who holds what grows; return the rows."""
    memprof = MemProfilerCallback(StageSchedules(fit=None), [Pulse(), Holders(seconds=60)], output=OUTPUT)
    training = trainer(directory, *callbacks, Asks(memprof), memprof, max_steps=STEPS + 6, **options)
    training.fit(model, data or loader(STEPS + 8))
    (file,) = directory.rglob("holders.rank00000.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def line_of(mark: str) -> str:
    (number,) = (number for number, line in enumerate(SOURCE, start=1) if line.endswith(f"# {mark}"))
    return f"support/leaking.py:{number}"


@pytest.mark.parametrize("kind", LEAKS)
def test_the_holder_and_the_line_of_its_variable_are_named(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    if kind in OF_MODULE:
        request.getfixturevalue("thawed")
    model, place = LEAKS[kind]
    options = {"logger": Images(), "default_root_dir": tmp_path} if kind == "logger" else {}
    found = searched(tmp_path, model(), **options)
    row = found[0]
    assert place in row["place"]
    assert row["line"] == line_of(kind)
    assert row["source"] == SOURCE[int(row["line"].rpartition(":")[2]) - 1].strip()
    # Twelve blocks of 1 MiB or about as many; an address that is used again may hide one.
    assert 6 << 20 < row["added_bytes"] < 20 << 20
    assert row["asked"]
    assert len([other for other in found if other.get("place")]) == 1


class Frozen(leaking.InList):
    """Exempts from garbage collection what is there when the training starts."""

    def on_train_start(self) -> None:
        gc.collect()
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_a_holder_that_the_program_has_frozen_is_named_and_stays_frozen(tmp_path: Path) -> None:
    (row,) = searched(tmp_path, Frozen())
    assert (row["place"], row["line"]) == ("Frozen.history[...]", line_of("list"))
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_arrays_that_a_callback_keeps_are_found_without_any_tensor(tmp_path: Path) -> None:
    row = searched(tmp_path, Leaking(), InCallback())[0]
    assert (row["kind"], row["place"], row["line"]) == ("callback", "InCallback.weights[...]", line_of("numpy"))
    assert (row["content"], row["added"]) == ("ndarray[512,512] float32", STEPS)


@pytest.mark.parametrize(("by_index", "kind"), [(True, "sample cache"), (False, "data set")])
def test_a_cache_of_samples_by_index_is_told_from_other_growth_of_a_data_set(
    tmp_path: Path, by_index: bool, kind: str
) -> None:
    row = searched(tmp_path, Leaking(), data=DataLoader(Cached(by_index=by_index), batch_size=None))[0]
    assert (row["kind"], row["place"]) == (kind, "Cached.cache[...]")


def test_memory_that_no_python_object_holds_is_named_with_its_size(tmp_path: Path) -> None:
    found = searched(tmp_path, InCpp())
    # Pages that other tests of this process have left may be touched meanwhile.
    (row,) = (row for row in found if row["kind"] not in {"first touch", "mapped file"})
    assert row["kind"] == "remainder"
    assert row["added_bytes"] > (STEPS - 1) * (36 << 20)


class Healthy(Leaking):
    """Buffers, caches and averages of many kinds that do not grow once they are full."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [torch.zeros(SIZE) for _ in range(4)]
        self.register_buffer("queue", torch.zeros(8, *SIZE))
        self.recent: deque[torch.Tensor] = deque(maxlen=3)
        self.by_length: dict[int, torch.Tensor] = {}
        self.lru: OrderedDict[int, torch.Tensor] = OrderedDict()
        self.best: torch.Tensor | None = None
        self.losses: list[float] = []
        self.outputs: list[torch.Tensor] = []
        self.last_batch: torch.Tensor | None = None
        self.hidden = torch.zeros(SIZE)
        self.net[1].register_forward_hook(self._note)
        self.seen: list[torch.Tensor] = []

    def _note(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen[:] = [output.detach()]

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def mask(length: int) -> torch.Tensor:
        return torch.ones(length, SIZE[1])

    def keep(self, batch: torch.Tensor, step: int) -> None:
        value = torch.randn(SIZE)
        for average in self.average:  # an exponential moving average, in place
            average.lerp_(value, 0.1)
        self.get_buffer("queue")[step % 8] = value  # a ring in one tensor
        self.recent.append(value)  # a bounded deque
        self.by_length.setdefault(step % 2, value)  # a cache that is full after two steps
        self.lru[step] = value  # one that drops its oldest entry
        if len(self.lru) > 2:
            self.lru.popitem(last=False)
        self.best = value if self.best is None or value.norm() > self.best.norm() else self.best
        self.losses.append(float(value.mean()))  # numbers
        self.outputs.append(value)  # cleared every three steps
        if len(self.outputs) == 3:
            self.outputs.clear()
        self.last_batch = value
        self.hidden = (0.5 * self.hidden + value).detach()  # a recurrent state without its graph
        self.mask(SIZE[0] - step % 2)
        try:
            raise ValueError(step)  # noqa: TRY301 an exception that nobody keeps
        except ValueError:
            pass


def test_buffers_caches_and_averages_that_are_full_are_not_reported(tmp_path: Path) -> None:
    rows = searched(tmp_path, Healthy())
    assert [row for row in rows if row.get("place")] == []


def trained(directory: Path, *callbacks: pl.Callback) -> tuple[list[torch.Tensor], torch.Tensor]:
    model = leaking.InList()
    torch.manual_seed(5)
    trainer(directory, *callbacks, max_steps=STEPS + 6).fit(model, loader(STEPS + 8))
    return [*model.state_dict().values(), *model.history], torch.get_rng_state()


def test_a_training_is_the_same_bit_for_bit_with_a_search(tmp_path: Path) -> None:
    bare, state = trained(tmp_path / "bare")
    memprof = MemProfilerCallback(StageSchedules(fit=None), [Pulse(), Holders(seconds=60)], output=OUTPUT)
    ours, our_state = trained(tmp_path / "ours", Asks(memprof), memprof)
    assert len(bare) > STEPS
    assert all(torch.equal(one, other) for one, other in zip(bare, ours, strict=True))
    assert torch.equal(state, our_state)
    assert list(tmp_path.rglob("holders.rank00000.jsonl"))


class Inside(pl.Callback):
    """Asks from the inside of a run: by a file, as the command does, and at once."""

    def __init__(self, memprof: MemProfilerCallback) -> None:
        self.memprof = memprof
        self.answers: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            directory = self.memprof.run_directory
            assert directory is not None
            write_request(directory, Request(id="mine", cause="a test", active=STEPS, warmup=0, leaks=True))
            # Rank 0 looks for a request every 50 ms.
            time.sleep(0.06)
        if batch_idx == 7:
            self.answers = self.memprof.holders(module.history[-1])


def test_a_request_in_the_run_directory_and_a_question_are_answered(tmp_path: Path) -> None:
    memprof = MemProfilerCallback(StageSchedules(fit=None), [Pulse(), Holders(seconds=60)], output=OUTPUT)
    inside = Inside(memprof)
    training = trainer(tmp_path, inside, memprof, max_steps=STEPS + 8)
    training.fit(leaking.InList(), loader(STEPS + 10))
    assert inside.answers == [f"InList.history[6] ({line_of('list')})"]
    (file,) = tmp_path.rglob("holders.rank00000.jsonl")
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert (row["place"], row["added"], row["asked"]) == ("InList.history[...]", STEPS, True)
    page = run_document(run_view(load_run(only_run(tmp_path))))
    section = next(section for section in page.sections if section.id == "holders")
    assert section.title == "Who keeps the memory"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_names_leaks_with_its_defaults_and_reports_nothing_of_a_healthy_training() -> None:
    program = Path(__file__).parents[1] / "programs" / "leaks.py"
    command = [sys.executable, str(program), "--only", "hook", "cycle", "cache by length"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
