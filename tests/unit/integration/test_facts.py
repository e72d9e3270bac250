from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.integration.facts import (
    _large_hyperparameters,
    _loader_facts,
    _not_optimized,
    _optimizer_facts,
    _zero_lr,
    training_facts,
)


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
    assert facts.found["detect_anomaly"] is True
    assert facts.found["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("value", "is_large"),
    [
        pytest.param({f"item {number}": [number] for number in range(5000)}, True, id="many objects"),
        pytest.param({f"item {number}": [number] for number in range(500)}, False, id="some"),
        pytest.param([torch.zeros(512, 512)], True, id="a tensor"),
        pytest.param([np.zeros(8)], False, id="a small array"),
        pytest.param("a" * (1 << 20), True, id="a text"),
    ],
)
def test_hyperparameters_with_much_more_than_settings_are_listed(value: Any, is_large: bool) -> None:
    class Saving(LightningModule):
        def __init__(self, catalogue: Any, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert _large_hyperparameters(Saving(value, 0.1)) == ["catalogue"] * is_large
    assert _large_hyperparameters(LightningModule()) == _large_hyperparameters(None) == []


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
