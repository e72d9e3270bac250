"""What a program's batches, loaders, hooks and validation are in a simulated fit."""

from __future__ import annotations

import multiprocessing
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprof import estimate
from lightning_memprof.units import MIB

pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="estimates need a platform that can fork"
)


class Net(LightningModule):
    """A layer whose output for 1,024 samples has 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def training_step(self, batch: Any) -> Any:
        loss = sum(self.layer(data).sum() for data in features(batch))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Validated(Net):
    """Keeps eight outputs of a validation."""

    def validation_step(self, batch: Any, _: int) -> None:
        self.kept = [self.layer(batch[0]) for _ in range(8)]
        self.log("quality", self.kept[0].mean())


class Filtering(Net):
    """The shapes of its validation depend on values."""

    def validation_step(self, batch: Any, _: int) -> None:
        self.layer(batch[0][batch[0].sum(1) > 0])


class Hooked(Validated):
    """Saves good weights, and acts on the end of an epoch and of the training."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.callback_metrics["quality"].cpu().numpy() > 0.5:
            torch.save(self.state_dict(), "best.pt")
            self.trainer.save_checkpoint("best.ckpt")

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"{self.trainer.callback_metrics['loss']:.3f}")

    def on_train_epoch_end(self) -> None:
        raise RuntimeError("after the simulated steps")

    on_train_end = on_train_epoch_end


class Own:
    """A batch of a class of its own."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, device: Any, **_: Any) -> Own:
        return Own(self.data.to(device))


class Encoding(UserDict[str, torch.Tensor]):
    """A batch like those of tokenizers."""

    def to(self, device: Any, **_: Any) -> Encoding:
        return Encoding({name: tensor.to(device) for name, tensor in self.data.items()})


def features(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, Own):
        return [batch.data]
    if isinstance(batch, dict):
        return [part[0] for part in batch.values()]
    return [batch["x"] if isinstance(batch, Encoding) else batch[0]]


def loader(samples: int, collate: Any = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 256)), batch_size=samples, collate_fn=collate)


def data_of(rows: Any) -> torch.Tensor:
    return torch.stack([row[0] for row in rows])


@pytest.mark.slow
def test_validation_is_part_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Validated()
    monkeypatch.setattr(model, "val_dataloader", lambda: loader(1024))
    found = estimate(model, loader(64), what_if="none")
    assert found.part == "validation"
    assert found.categories["input"] >= MIB
    # Those of the validation before are kept until the new ones replace them.
    assert 16 * MIB <= found.categories["temporary"] < 17 * MIB
    larger = estimate(model, loader(64), what_if="none", batch_size=128)
    assert 32 * MIB <= larger.categories["temporary"] < 33 * MIB
    assert larger.batch_size == 128


def test_validation_without_a_loader_changes_nothing() -> None:
    found, usual = (estimate(model, loader(64), what_if="none") for model in (Validated(), Net()))
    assert (found.reserved, found.assumptions) == (usual.reserved, usual.assumptions)


@pytest.mark.slow
def test_a_validation_that_needs_values_is_left_out_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Filtering()
    monkeypatch.setattr(model, "val_dataloader", lambda: loader(1024))
    found = estimate(model, loader(64), what_if="none")
    assert found.allocated_bytes == estimate(Net(), loader(64), what_if="none").allocated_bytes
    (reason,) = found.assumptions
    assert reason.startswith("validation is not included: a shape depends on values at ")


@pytest.mark.slow
def test_hooks_read_what_was_logged_and_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Hooked()
    monkeypatch.setattr(model, "val_dataloader", lambda: loader(64))
    found = estimate(model, loader(64), what_if="none")
    assert [words.rpartition(": ")[2] for words in found.assumptions] == [
        "a number is read from a tensor; 1 was assumed"
    ] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Own, lambda data: Encoding({"x": data})])
def test_the_tensors_of_a_batch_of_any_class_are_found_and_resized(kind: Any) -> None:
    given = loader(64, lambda rows: kind(data_of(rows)))
    found, larger = (estimate(Net(), given, what_if="none", batch_size=size) for size in (None, 2048))
    assert (found.batch, found.batch_size) == (["64x256 float32"], 64)
    assert (larger.batch, larger.batch_size) == (["2048x256 float32"], 2048)
    assert larger.categories["input"] >= 2 * MIB


def test_batches_of_several_loaders_keep_their_ratio() -> None:
    found = estimate(Net(), {"a": loader(16), "b": loader(64)}, what_if="none", batch_size=32)
    assert (found.batch, found.batch_size) == (["32x256 float32", "128x256 float32"], 32)
