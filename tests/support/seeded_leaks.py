"""Twelve trainings of different models with a leak each; a comment marks the line that the page must name."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryPrecisionRecallCurve

STEPS: Final = 160
LATENTS: dict[int, dict[str, torch.Tensor]] = {}  # leak: module global


class Samples(Dataset[torch.Tensor]):
    """Noise of one shape."""

    def __init__(self, *shape: int, samples: int) -> None:
        self.shape, self.samples = shape, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(self.shape)


class Trained(pl.LightningModule):
    """A model with its optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Translator(Trained):
    """Keeps the attention of each batch for a plot."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(16, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 16)
        self.maps: list[torch.Tensor] = []  # leak: list on the module

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        states, _ = self.encoder(batch)
        mixed, weights = self.attention(states, states, states)
        self.maps.append(weights.detach())
        return nn.functional.mse_loss(self.head(mixed), batch)


class Autoencoder(Trained):
    """A variational one, whose latent variables of all batches are kept in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64))
        self.decode = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 784), nn.Sigmoid())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        mean, log_variance = self.encode(batch).chunk(2, dim=1)
        rebuilt = self.decode(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        LATENTS[batch_idx] = {"mean": mean.detach(), "rebuilt": rebuilt.detach()}
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).mean()
        return nn.functional.mse_loss(rebuilt, batch) + 0.01 * divergence


@functools.lru_cache(maxsize=None)  # noqa: UP033 # leak: lru_cache
def rotations(start: int, length: int) -> torch.Tensor:
    """Return the rotary embedding of positions."""
    return torch.outer(torch.arange(start, start + length), 10000 ** -torch.linspace(0, 1, 256)).cos()


class StreamingTransformer(Trained):
    """Its positions continue from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 256)
        self.block = nn.TransformerEncoderLayer(256, 4, 256, batch_first=True)
        self.head = nn.Linear(256, 16)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        positions = rotations(batch_idx * 512, 512)
        return nn.functional.mse_loss(self.head(self.block(self.embed(batch) * positions)), batch)


def tracker() -> Callable[[torch.Tensor], int]:
    """Return a function that remembers what it is called with."""
    history: list[torch.Tensor] = []  # leak: closure

    def track(value: torch.Tensor) -> int:
        history.append(value.clone())
        return len(history)

    return track


class Classifier(Trained):
    """A convolutional network that tracks its features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2))
        self.head = nn.Linear(16, 10)
        self.track = tracker()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        features = self.features(batch)
        self.track(features.detach())
        labels = torch.randint(10, batch.shape[:1])
        return nn.functional.cross_entropy(self.head(features.mean((2, 3))), labels)


class Residual(Trained):
    """A residual network with a hook that collects activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        activations: dict[str, list[torch.Tensor]] = {"block": []}  # leak: forward hook

        def collect(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            activations["block"].append(output.detach())

        self.block.register_forward_hook(collect)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        stem = self.stem(batch)
        return (stem + self.block(stem)).square().mean()


class Tabular(Trained):
    """Keeps the exceptions of the batches that it skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.skipped: list[Exception] = []  # leak: exception traceback

    def scores(self, batch: torch.Tensor) -> torch.Tensor:
        embedded = self.embed((batch * 1000).long())
        scores: torch.Tensor = self.net(embedded)
        if batch.max() > 0.9:
            raise ValueError("an outlier")
        return scores

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        try:
            return self.scores(batch).square().mean()
        except ValueError as error:
            self.skipped.append(error)
            return self.net(self.embed.weight).square().mean()


class Router(nn.Module):
    """Sends tokens to experts; all routers share what they have seen."""

    seen: ClassVar[list[torch.Tensor]] = []  # leak: class attribute

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens.detach())
        weights: torch.Tensor = self.gate(tokens).softmax(-1)
        return weights


class Experts(Trained):
    """A mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for router in self.routers:
            weights = router(batch)
            batch = sum(weights[..., n, None] * expert(batch) for n, expert in enumerate(self.experts))
        return batch.square().mean()


class Node:  # leak: reference cycle
    """A node of a tree that knows its parent."""

    def __init__(self, features: torch.Tensor, parent: Node | None = None) -> None:
        self.features, self.parent = features, parent
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


class Trees(Trained):
    """A recursive network; automatic garbage collection is disabled, to avoid its pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(128, 128)

    def on_train_start(self) -> None:
        gc.disable()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        root = Node(self.merge(batch).detach())
        for _ in range(3):
            Node(self.merge(root.features).detach(), root)
        return self.merge(batch + sum(child.features for child in root.children)).square().mean()


class Segmenter(Trained):
    """A small U-Net with a curve over all of its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 1, 2, 2)
        self.curve = BinaryPrecisionRecallCurve()  # leak: metric state

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.up(self.down(batch).relu())
        masks = (batch > 0.5).int()
        self.curve.update(logits.detach().sigmoid(), masks)
        return nn.functional.binary_cross_entropy_with_logits(logits, masks.float())


class ImageLogger(CSVLogger):
    """Keeps images until they are written at the end."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.images: list[dict[str, Any]] = []  # leak: logger buffer

    def log_image(self, step: int, image: torch.Tensor) -> None:
        self.images.append({"step": step, "image": image.numpy()})


class Denoiser(Trained):
    """A diffusion model in small that logs its images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = torch.randn_like(batch)
        found = self.net(batch + noise)
        logger: Any = self.logger
        logger.log_image(batch_idx, found.detach())
        return nn.functional.mse_loss(found, noise)


class Forecaster(Trained):
    """An LSTM with a running mean of another error, of which no backward frees the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, 16)
        self.running: Any = 0.0  # leak: retained graph

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        states, _ = self.lstm(batch[:, :-1])
        loss = nn.functional.mse_loss(self.head(states), batch[:, 1:])
        rebuilt, _ = self.lstm(batch)
        self.running = 0.98 * self.running + 0.02 * nn.functional.mse_loss(self.head(rebuilt), batch)
        return loss


class Bank(nn.Module):
    """Negatives in a list of TorchScript: only C++ refers to its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = torch.jit.Attribute([], list[torch.Tensor])

    def forward(self, row: torch.Tensor) -> int:
        self.rows.append(row.clone())
        return len(self.rows)


class Contrastive(Trained):
    """Compares two views of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512))
        self.bank = torch.jit.script(Bank())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        first, second = self.net(batch), self.net(batch + 0.1 * torch.randn_like(batch))
        self.bank(second.detach())
        return nn.functional.cross_entropy(first @ second.T, torch.arange(len(batch)))


@dataclass(frozen=True)
class Leak:
    """A model, the shape of a batch, the holder on the page, and where one leaked object is.

    Without ``leaked`` no object of Python refers to it, or it must be looked for after the training.
    """

    model: type[Trained]
    shape: tuple[int, ...]
    holder: str
    leaked: Callable[[Any, Any], Any] | None = None
    options: Callable[[Path], dict[str, Any]] = field(default=lambda directory: {})


LEAKS: Final = {
    "list on the module": Leak(Translator, (24, 64, 16), "Translator.maps", lambda model, _: model.maps[-1]),
    "module global": Leak(
        Autoencoder, (256, 784), "seeded_leaks.LATENTS", lambda *_: list(LATENTS.values())[-1]["rebuilt"]
    ),
    "lru_cache": Leak(
        StreamingTransformer, (1, 512, 16), "lru_cache of seeded_leaks.rotations", lambda *_: rotations(512, 512)
    ),
    "closure": Leak(
        Classifier, (32, 3, 64, 64), "tracker.<locals>.track (closure variable history)",
        lambda model, _: model.track.__closure__[0].cell_contents[-1],
    ),
    "forward hook": Leak(
        Residual, (8, 3, 48, 48), "forward hook of Residual.block",
        lambda model, _: next(iter(model.block._forward_hooks.values())).__closure__[0].cell_contents["block"][-1],
    ),
    # objgraph searches for minutes here: the frames of a traceback lead everywhere.
    "exception traceback": Leak(Tabular, (64, 32), "Tabular.skipped"),
    "class attribute": Leak(Experts, (32, 64, 64), "Router.seen", lambda *_: Router.seen[-1]),
    "reference cycle": Leak(Trees, (512, 128), "reference cycle -> Node"),
    "metric state": Leak(Segmenter, (16, 1, 64, 64), "Segmenter.curve", lambda model, _: model.curve.preds[-1]),
    "logger buffer": Leak(
        Denoiser, (16, 3, 48, 48), "ImageLogger.images", lambda _, trainer: trainer.logger.images[-1]["image"],
        lambda directory: {"logger": ImageLogger(directory)},
    ),
    "retained graph": Leak(Forecaster, (32, 64, 16), "Forecaster.running", lambda model, _: model.running),
    "C++ holder": Leak(Contrastive, (512, 256), "outside Python objects"),
}  # fmt: skip


def arguments(leak: Leak, directory: Path) -> tuple[Trained, DataLoader[torch.Tensor], dict[str, Any]]:
    """Return the model, its loader, and options of the Trainer."""
    samples, *shape = leak.shape
    data = Samples(*shape, samples=STEPS * samples)
    return leak.model(), DataLoader(data, samples), {"max_epochs": 1} | leak.options(directory)
