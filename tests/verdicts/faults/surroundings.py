"""Faults around the computation: callbacks, hooks of a module, validation, debugging."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


def table(samples: int, *shape: int, classes: int = 10) -> TensorDataset:
    """Random samples with random labels."""
    return TensorDataset(torch.randn(samples, *shape), torch.randint(classes, (samples,)))


class ArtifactWriter(lightning.Callback):
    """Writes what ``collect`` returns into a file per batch."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder = Path(folder)
        self.every = every

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.folder.mkdir(exist_ok=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == 0:
            rows = self.collect(outputs, batch)
            (self.folder / f"{batch_idx % 5}.json").write_text(json.dumps(rows, indent=1))

    def collect(self, outputs: Any, batch: Any) -> list[Any]:
        raise NotImplementedError


class SegmentationArtifacts(ArtifactWriter):
    """Probabilities and labels of each sample."""

    def collect(self, outputs: Any, batch: Any) -> list[Any]:
        probabilities = outputs["scores"].softmax(1).tolist()
        return [
            {"id": number, "label": label, "scores": [round(score, 4) for score in scores]}
            for number, (label, scores) in enumerate(zip(batch[1].tolist(), probabilities, strict=True))
        ]


class Textures(lightning.LightningModule):
    """A convolutional network with 400 classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((3, 24, 32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classify = nn.Linear(128, 400)
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        scores = self.classify(self.features(images.contiguous(memory_format=torch.channels_last)))
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def dumped_predictions(fault: bool) -> None:
    """A callback writes the scores of each batch as JSON; healthy: of each 40th."""
    writer = SegmentationArtifacts("artifacts", every=1 if fault else 40)
    fit(Textures(), DataLoader(table(48 * 55, 3, 24, 24, classes=400), batch_size=48), steps=55, callbacks=[writer])


class Forecaster(lightning.LightningModule):
    """A transformer encoder over windows of 48 measurements. Clips outliers of gradients by a quantile, or by norm."""

    def __init__(self, quantile: float | None) -> None:
        super().__init__()
        self.quantile = quantile
        self.embed = nn.Linear(12, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        windows, labels = batch
        loss = functional.cross_entropy(self.head(self.encoder(self.embed(windows)).mean(1)), labels)
        self.log("train/loss", loss)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.quantile is None:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                limit = torch.quantile(parameter.grad.abs().flatten(), self.quantile)
                parameter.grad.clamp_(-limit, limit)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def quantile_clipping(fault: bool) -> None:
    """`configure_gradient_clipping` sorts the gradient of each parameter; healthy: it clips by norm."""
    model = Forecaster(quantile=0.99 if fault else None)
    fit(model, DataLoader(table(32 * 50, 48, 12), batch_size=32), steps=50)


class Plants(lightning.LightningDataModule):
    """Epochs of 4 batches, validated with 8."""

    def setup(self, stage: str) -> None:
        self.plants, self.others = table(4 * 512, 128), table(8 * 512, 128)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.plants, batch_size=512, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.others, batch_size=512)


class Highway(nn.Module):
    """Two layers of which one is a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, functional.gelu(self.candidate(x)), self.gate(x).sigmoid())


class PlantClassifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(128, 320), *(Highway(320) for _ in range(3)), nn.Linear(320, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.network(batch[0])
        self.log("val/accuracy", (scores.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def short_epochs(fault: bool) -> None:
    """Each epoch of 4 batches ends with a validation; healthy: each 12th."""
    options = {"check_val_every_n_epoch": 1 if fault else 12, "num_sanity_val_steps": 0}
    fit(PlantClassifier(), Plants(), steps=60, **options)  # type: ignore[arg-type]  # a data module


@contextlib.contextmanager
def guarded(is_strict: bool) -> Iterator[None]:
    """Stop at the first operator whose gradient is invalid."""
    with torch.autograd.detect_anomaly(check_nan=True) if is_strict else contextlib.nullcontext():
        yield


class Painter(lightning.LightningModule):
    """A generator of many thin layers and a judge, with an optimizer of each."""

    def __init__(self, is_strict: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_strict = is_strict
        self.painter = nn.Sequential(nn.Linear(32, 160), *(Highway(160) for _ in range(6)), nn.Linear(160, 300))
        self.judge = nn.Sequential(nn.Linear(300, 160), *(Highway(160) for _ in range(4)), nn.Linear(160, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        with guarded(self.is_strict):
            painted = self.painter(torch.randn(len(real), 32))
            self.descend(0, functional.softplus(-self.judge(painted)).mean())
            of_painted, of_real = self.judge(torch.cat([painted.detach(), real])).chunk(2)
            self.descend(1, functional.softplus(of_painted).mean() + functional.softplus(-of_real).mean())

    def descend(self, number: int, loss: Tensor) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[number]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=2e-4, fused=True) for part in (self.painter, self.judge)]


def anomaly_region(fault: bool) -> None:
    """The training step runs inside `detect_anomaly`, left over from a hunt for NaN; healthy: it does not."""
    fit(Painter(is_strict=fault), DataLoader(table(512 * 50, 300), batch_size=512), steps=2 * 50)


logger = logging.getLogger("tides")


class Tides(lightning.LightningModule):
    """A recurrent network that describes its states in debug messages, which are off."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.rnn = nn.GRU(16, 96, num_layers=2, batch_first=True)
        self.level = nn.Linear(96, 10)

    def describe(self, what: str, states: Tensor) -> None:
        if self.eager:
            logger.debug(f"{what}: {states.detach()[:, ::8, ::4]}")  # noqa: G004
        else:
            logger.debug("%s: %s", what, states)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, labels = batch
        states, last = self.rnn(series)
        self.describe("states", states)
        self.describe("last", last)
        return functional.cross_entropy(self.level(last[-1]), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def eager_messages(fault: bool) -> None:
    """Each step formats tensors for debug messages that nobody reads; healthy: arguments are formatted on demand."""
    torch.set_printoptions(profile="full")
    fit(Tides(eager=fault), DataLoader(table(32 * 50, 40, 16), batch_size=32), steps=50)


if __name__ == "__main__":
    main(dumped_predictions, quantile_clipping, short_epochs, anomaly_region, eager_messages)
