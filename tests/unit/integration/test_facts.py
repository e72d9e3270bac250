from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.integration.facts import (
    _loader_facts,
    _not_optimized,
    _optimizer_facts,
    _zero_lr,
    steps_ahead,
    training_facts,
    unreachable,
)
from lightning_memprof.schedule import Action, Schedule

INF = float("inf")


def trainer(batches: float = 10, **of: Any) -> Any:
    """What is asked of a Trainer: by default one epoch of a fit that has not begun."""
    progress = SimpleNamespace(ready=of.pop("ready", 0))
    module = SimpleNamespace(automatic_optimization=of.pop("automatic_optimization", True))
    given = {
        "num_training_batches": batches,
        "max_epochs": 1,
        "max_steps": -1,
        "current_epoch": 0,
        "global_step": 0,
        "accumulate_grad_batches": 1,
        "callbacks": [],
        **of,
    }
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=progress)))
    return SimpleNamespace(fit_loop=loop, lightning_module=module, **given)


@pytest.mark.parametrize(
    ("of", "steps"),
    [
        pytest.param({}, 10, id="one epoch"),
        pytest.param({"max_epochs": 3}, 30, id="three epochs"),
        pytest.param({"max_epochs": 3, "max_steps": 7}, 7, id="max_steps ends it"),
        pytest.param({"max_epochs": None, "max_steps": 7}, 7, id="no epochs"),
        pytest.param({"max_epochs": -1, "max_steps": 7}, 7, id="endless epochs"),
        pytest.param({"max_steps": 7, "accumulate_grad_batches": 2, "max_epochs": -1}, 14, id="accumulation"),
        pytest.param({"max_steps": 1, "automatic_optimization": False}, 10, id="the module steps when it wants"),
        pytest.param({"max_steps": 1, "callbacks": [GradientAccumulationScheduler({0: 8})]}, 10, id="scheduled"),
        pytest.param({"batches": INF}, None, id="a loader without length"),
        pytest.param({"batches": INF, "max_steps": 5}, 5, id="a loader without length, max_steps"),
        pytest.param({"max_epochs": -1}, None, id="no end"),
        pytest.param({"max_epochs": 3, "current_epoch": 1, "ready": 14}, 16, id="resumed inside of an epoch"),
        pytest.param({"max_epochs": 1, "current_epoch": 1, "ready": 10}, 0, id="resumed at its end"),
        pytest.param({"max_steps": 5, "global_step": 9}, 0, id="resumed beyond its end"),
        pytest.param({"batches": 0}, 0, id="no batches"),
    ],
)
def test_the_steps_of_a_fit_are_counted_where_they_can_be_known(of: dict[str, Any], steps: int | None) -> None:
    assert steps_ahead(trainer(**of), "fit") == steps


@pytest.mark.parametrize(
    ("stage", "name"),
    [("validate", "num_val_batches"), ("test", "num_test_batches"), ("predict", "num_predict_batches")],
)
def test_other_stages_count_the_batches_of_all_their_loaders(stage: str, name: str) -> None:
    of: Any = SimpleNamespace(**{name: [3, 4]})
    assert steps_ahead(of, stage) == 7
    of = SimpleNamespace(**{name: [3, INF]})
    assert steps_ahead(of, stage) is None


def test_a_schedule_that_comes_too_late_is_told_with_its_numbers() -> None:
    message = unreachable(trainer(5), "fit", Schedule(skip_first=2, wait=3, warmup=1, active=2))
    assert message == (
        "nothing will be recorded: fit has 5 steps, but the first recorded step is 6 "
        "(skip_first=2, wait=3, warmup=1); use Schedule(wait=0, warmup=0, active=5)"
    )


@pytest.mark.parametrize(("batches", "late"), [(2, True), (3, False)])
def test_one_recorded_step_is_enough(batches: int, late: bool) -> None:
    assert (unreachable(trainer(batches), "fit", Schedule()) is not None) == late


def test_a_schedule_that_counts_by_epochs_is_held_against_the_epoch() -> None:
    schedule = Schedule(wait=8, warmup=1, active=1, anchor="epoch")
    message = unreachable(trainer(5, max_epochs=4), "fit", schedule)
    assert message is not None
    assert "an epoch has 5 steps, but the first recorded step is 9" in message
    assert unreachable(trainer(5, max_epochs=4), "fit", Schedule(wait=8, warmup=1, active=1)) is None


def test_leaving_out_the_first_wait_counts() -> None:
    assert unreachable(trainer(3), "fit", Schedule(wait=5, warmup=1, active=1, skip_first_wait=1)) is None


def test_a_function_is_not_asked_ahead() -> None:
    def counting(_: int) -> Action:
        raise AssertionError

    assert unreachable(trainer(10), "fit", counting) is None


def test_where_the_length_is_unknown_nothing_is_claimed() -> None:
    assert unreachable(trainer(INF), "fit", Schedule(wait=10**6)) is None


def test_listed_steps_are_held_against_the_steps_of_the_run_resumed_ones_included() -> None:
    schedule = Schedule(steps=(3, 12))
    assert unreachable(trainer(10), "fit", schedule) is None
    assert unreachable(trainer(10, max_epochs=2, current_epoch=1, ready=10), "fit", schedule) is None
    message = unreachable(trainer(10, max_epochs=3, current_epoch=2, ready=20), "fit", schedule)
    assert message == "nothing will be recorded: fit has 10 steps starting at step 20, none of them in steps=[3, 12]"


def test_listed_steps_of_an_epoch_are_held_against_the_epoch() -> None:
    message = unreachable(trainer(5, max_epochs=4), "fit", Schedule(steps=(7,), anchor="epoch"))
    assert message == "nothing will be recorded: an epoch has 5 steps, but the first recorded step is 7"


class Text(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 8)
        self.head = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("bank", torch.zeros(100))
        self.register_buffer("place", torch.zeros(1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(batch).double()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Facts(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found, self.missing = training_facts(trainer)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4)


def test_a_loader_has_its_settings_and_whether_its_data_set_is_iterable() -> None:
    loaders = [torch.utils.data.DataLoader(Stream(), batch_size=2), torch.utils.data.DataLoader(torch.arange(4))]  # type: ignore[arg-type]
    found = [_loader_facts(loader, {}) for loader in loaders]
    assert [(facts["batch_size"], facts["num_workers"], facts["is_iterable"]) for facts in found] == [
        (2, 0, True), (1, 0, False),
    ]  # fmt: skip


class Images(torch.utils.data.Dataset[Any]):
    """A data set whose code must not run."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def all(self) -> Any:
        raise AssertionError("all")


def held(dataset: Any) -> tuple[Any, ...]:
    facts = _loader_facts(torch.utils.data.DataLoader(dataset, sampler=range(1)), {})
    return facts["data_bytes"], facts["data_largest"], facts["data_dtype"]


def test_a_loader_has_the_bytes_of_its_data_set() -> None:
    pixels, labels = torch.zeros(1000, 8), np.zeros(100, dtype=np.int16)
    images = Images(pixels=pixels, view=pixels[:10], labels=[labels], names=["a"] * 5000, more={"sizes": labels[:5]})
    assert held(images) == (32_000 + 200, "Images.pixels", "float32")
    parts = [torch.utils.data.Subset(images, [0]), torch.utils.data.TensorDataset(torch.zeros(20_000).double())]
    assert held(torch.utils.data.ConcatDataset(parts)) == (192_200, "TensorDataset.tensors", "float64")
    assert held(Images(path="a", itself=images)) == (32_200, "Images.pixels", "float32")
    halves = {"first": torch.from_numpy(labels[:60]), "second": torch.from_numpy(labels[50:])}
    assert held(Images(**halves, pairs=[(torch.zeros(2), 1), (torch.ones(2), 0)])) == (216, "Images.first", "int16")
    assert held([torch.zeros(10)] * 5) == (40, "list", "float32")
    itself = Images(rows=[])
    itself.rows += [itself] * 5
    assert held(itself) == (0, None, None)
    assert held(Images(table=torch.zeros(10, device="meta"), sparse=torch.eye(3).to_sparse())) == (0, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="mapped files are not known")
def test_mapped_files_are_not_memory_of_the_data_set(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(1 << 16))
    torch.save(torch.zeros(1 << 16), tmp_path / "b.pt")
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r+")
    loaded = torch.load(tmp_path / "b.pt", mmap=True)
    shared = torch.zeros(1 << 10).share_memory_()
    everything = Images(a=mapped, b=mapped[5:], c=np.asarray(mapped), d=torch.from_numpy(mapped), e=loaded, f=shared)
    assert held(everything) == (4096, "Images.f", "float32")


def test_the_training_row_has_dtypes_the_largest_parameters_and_anomaly_detection(tmp_path: Any) -> None:
    facts = Facts()
    trainer = Trainer(
        default_root_dir=tmp_path, max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, detect_anomaly=True, callbacks=[facts],
    )  # fmt: skip
    trainer.fit(Text(), torch.utils.data.DataLoader([torch.tensor(0), torch.tensor(1)]))  # type: ignore[arg-type]
    assert facts.found["parameter_dtypes"] == {"float32": 32000, "float64": 288}
    assert facts.found["largest_parameters"][0] == {
        "name": "embedding.weight", "module": "Embedding", "bytes": 32000, "sparse": False,
    }  # fmt: skip
    assert facts.found["largest_buffers"] == [{"name": "bank", "bytes": 400}, {"name": "place", "bytes": 4}]
    assert facts.found["detect_anomaly"] is True
    assert facts.found["threads"] == torch.get_num_threads()


class Probe(torch.nn.Module):
    """A head that is trained on a body that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleDict({"stem": torch.nn.Linear(2, 2), "neck": torch.nn.Linear(2, 2)})
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.head = torch.nn.Linear(2, 2)


def test_modules_that_need_gradients_and_are_in_no_optimizer_are_listed() -> None:
    model = Probe()
    assert _not_optimized(model, [torch.optim.SGD(model.head.parameters())]) == ["body"]
    in_part = [*model.head.parameters(), *model.body["neck"].parameters()]
    assert _not_optimized(model, [torch.optim.SGD(in_part)]) == ["body.stem"]
    assert _not_optimized(model, [torch.optim.SGD(model.parameters())]) == []
    # A strategy that shards parameters gives the optimizer others than the model's.
    assert _not_optimized(model, [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])]) == []


def test_modules_whose_learning_rate_is_0_are_listed_without_those_that_a_scheduler_warms_up() -> None:
    model = Probe()
    head = {"params": model.head.parameters(), "lr": 0.1}
    idle = {"params": model.body.parameters(), "lr": 0.0}
    assert _zero_lr(model, [torch.optim.SGD([head, idle])]) == ["body"]
    part = {"params": [*model.body["stem"].parameters(), model.head.weight], "lr": torch.tensor(0.0)}
    assert _zero_lr(model, [torch.optim.SGD([part], lr=0.1)]) == ["body.stem"]
    warmed = torch.optim.SGD([{"params": model.body.parameters()}], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(warmed, lambda step: step / 100)
    assert warmed.param_groups[0]["lr"] == 0
    assert _zero_lr(model, [warmed]) == []
    relative = torch.optim.SGD(model.parameters(), lr=0.1)
    relative.param_groups[0]["lr"] = None
    assert _zero_lr(model, [relative]) == []


def test_an_optimizer_has_the_children_of_the_model_that_it_updates() -> None:
    model = Probe()
    optimizer = torch.optim.SGD([*model.head.parameters(), *model.body["neck"].parameters()])
    assert _optimizer_facts(optimizer, model)["modules"]() == ["body", "head"]


class Unreadable:
    """A setting of a group of parameters with nothing to read."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __eq__ = __bool__ = __len__ = __float__ = __str__ = __hash__ = __repr__  # type: ignore[assignment]


class OddOptimizer(torch.optim.SGD):
    """Its learning rate is a function, its groups have keys of any kind, and its ``state`` an entry of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        group: dict[Any, Any] = self.param_groups[0]
        group |= {"rate": Unreadable(), ("a", 1): 2, 3: "b", "lr": lambda: 0.1}


class OddLoader(torch.utils.data.DataLoader[Any]):
    """Has no batch size to read."""

    is_open = False

    @property
    def prefetch_factor(self) -> Any:
        if self.is_open:
            raise ValueError("not here")
        return None

    @prefetch_factor.setter
    def prefetch_factor(self, value: Any) -> None:
        pass


class OddModel(Text):
    def training_step(self, batch: torch.Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OddOptimizer(self.parameters())


def test_a_fact_that_cannot_be_read_is_named_and_costs_no_other(tmp_path: Any) -> None:
    class Recorded(MemProfilerCallback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            OddLoader.is_open = True
            super().on_train_start(trainer, pl_module)
            OddLoader.is_open = False

    ours = Recorded(output=OutputOptions(summary=False, dirpath=tmp_path))
    trainer = Trainer(
        default_root_dir=tmp_path, max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ours],
    )  # fmt: skip
    trainer.fit(OddModel(), OddLoader(torch.arange(3)))  # type: ignore[arg-type]
    assert ours.run_directory is not None
    manifest = next(ours.run_directory.glob("manifest.*.jsonl")).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in manifest.splitlines()]
    (facts,) = [row for row in rows if row["kind"] == "training"]
    assert [row for row in rows if row["kind"] == "error"] == []
    assert [row["reason"].split()[0] for row in rows if row.get("collector") == "training"] == [
        "dataloaders[0].prefetch_factor"
    ]
    assert facts["optimizers"][0] | {"name": "OddOptimizer", "settings": 1, "groups": 1} == facts["optimizers"][0]
    assert facts["zero_lr"] == []
    assert facts["dataloaders"][0]["batch_size"] == 1
    assert [row["steps"] for row in rows if row["kind"] == "end"] == [3]


def test_settings_that_are_equal_count_once_and_others_by_identity() -> None:
    rates = [torch.ones(2), torch.ones(2)]
    parts = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.1, *rates, rates[0])]
    optimizer = torch.optim.SGD(parts[:2])
    optimizer.param_groups += parts[2:]
    for group in optimizer.param_groups[2:]:
        group |= {key: value for key, value in optimizer.defaults.items() if key != "lr"}
    assert _optimizer_facts(optimizer, Probe())["settings"]() == 3
