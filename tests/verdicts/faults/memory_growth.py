"""Memory that grows from step to step, in the process or in its workers."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, WIDTH, Classifier, Counted, Tokens, Trained, Vectors, fit, main, one_epoch, quiet, trainer
from small_models import convolution


class WeightHistory(lightning.Callback):
    """Follows the weights of the first layer: all of them at each step, or their mean."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete
        self.history: list[np.ndarray] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = pl_module.blocks[0].expand.weight.detach().numpy()
        self.history.append(weights.copy() if self.complete else weights.mean())


def host_growth(fault: bool) -> None:
    """A callback keeps 4 MiB of weights per step in a list; healthy: one number."""
    fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH), callbacks=[WeightHistory(complete=fault)])


class RipenessNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Estimates the sugar of grapes from drone photos."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        photos, sugar = batch
        prediction = self.layers(photos).squeeze(1)
        return {"loss": functional.mse_loss(prediction, sugar), "prediction": prediction.detach()}


class Diary(Callback):
    """Notes what the model saw and said, for the report after the training."""

    def __init__(self, with_photos: bool) -> None:
        self.with_photos = with_photos
        self.entries: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        photos, sugar = batch
        entry = {"step": trainer.global_step, "error": float((outputs["prediction"] - sugar).abs().mean())}
        if self.with_photos:
            entry["photos"] = photos.numpy().copy()
            entry["prediction"] = outputs["prediction"].numpy().copy()
        self.entries.append(entry)


def vineyards(fault: bool) -> None:
    """A callback keeps the photos of each batch; healthy: numbers."""
    data = TensorDataset(torch.rand(1600, 3, 64, 64), torch.rand(1600))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    quiet(150, callbacks=[Diary(with_photos=fault)]).fit(RipenessNet(), loader)


class Surfaces(Counted[tuple[Tensor, Tensor]]):
    """Gray pictures of a surface, and which of four defects each pixel shows."""

    def __init__(self, samples: int, side: int = 128) -> None:
        self.samples = samples
        self.pictures = torch.randn(64, 1, side, side)
        self.masks = torch.randint(4, (64, side, side))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index % 64], self.masks[index % 64]


class DefectSegmenter(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(24, 4, 2, stride=2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        pictures, masks = batch
        logits = self.network(pictures)
        loss = functional.cross_entropy(logits, masks)
        self.log("loss", loss)
        return {"loss": loss, "probabilities": logits.detach().softmax(dim=1)}


class InspectionReport(lightning.Callback):
    """How sure the network was during training, per defect."""

    def __init__(self, keep_maps: bool) -> None:
        self.keep_maps = keep_maps
        self.records: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, model: lightning.LightningModule, outputs: Any, batch: Any, n: int
    ) -> None:
        maps = outputs["probabilities"].numpy()
        if self.keep_maps:
            self.records.append({"step": n, "maps": maps.copy(), "masks": batch[1].numpy().copy()})
        else:
            self.records.append({"step": n, "sure": maps.mean(axis=(0, 2, 3))})

    def on_train_end(self, trainer: lightning.Trainer, model: lightning.LightningModule) -> None:
        last = self.records[-1]
        print("sure:", last["maps"].mean(axis=(0, 2, 3)) if self.keep_maps else last["sure"])


def inspection(fault: bool) -> None:
    """A callback keeps the maps of each batch as arrays; healthy: a number."""
    loader = DataLoader(Surfaces(samples=55 * 16), batch_size=16)
    one_epoch(callbacks=[InspectionReport(keep_maps=fault)]).fit(DefectSegmenter(), loader)


class EpochSummary(Trained):
    """Base class: reports the error of an epoch, from the outputs of all its steps or from a running sum."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.epoch_outputs: list[dict[str, Tensor]] = []
        self.error = torch.zeros(())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.keep:
            self.epoch_outputs.append({"restored": outputs["restored"], "clean": outputs["clean"]})
        else:
            self.error += functional.l1_loss(outputs["restored"], outputs["clean"])

    def on_train_epoch_end(self) -> None:
        for outputs in self.epoch_outputs:
            self.error += functional.l1_loss(outputs["restored"], outputs["clean"])
        self.epoch_outputs.clear()
        self.log("epoch/l1", self.error)


class Restorer(EpochSummary, optimizer=torch.optim.Adam, lr=1e-3):
    """Removes noise from images of 3 x 72 x 72 pixels."""

    def __init__(self, keep: bool) -> None:
        super().__init__(keep)
        layers: list[nn.Module] = []
        for before, after in pairwise((3, 8, 8, 3)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (clean,) = batch
        restored = self.layers(clean + 0.2 * torch.randn_like(clean))
        return {"loss": functional.mse_loss(restored, clean), "restored": restored.detach(), "clean": clean}


def unread_outputs(fault: bool) -> None:
    """A base class keeps images of all steps for the end of the epoch; healthy: a running sum."""
    images = TensorDataset(torch.rand(64, 3, 72, 72))
    loader = DataLoader(images, batch_size=32, sampler=[number % 64 for number in range(32 * 60)])
    fit(Restorer(keep=fault), loader, steps=60)


class Contrast(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, recent: int | None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(convolution(3, 16, 2), convolution(16, 32, 2), convolution(32, 64))
        self.project = nn.Linear(64, 64)
        self.seen: deque[Tensor] = deque(maxlen=recent)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch
        maps = self.encoder(torch.cat((first, second)))
        one, two = functional.normalize(self.project(maps.mean((2, 3))), dim=1).chunk(2)
        loss = functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))
        self.seen.append(maps.detach())
        drift = (self.seen[-1].mean() - self.seen[max(0, len(self.seen) - 4)].mean()).abs()
        self.log_dict({"loss": loss, "drift": drift})
        return loss


class Pairs(Dataset):
    def __init__(self, images: int) -> None:
        self.images = torch.randn(images, 3, 72, 72)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image[:, :64, :64], image[:, 8:, 8:].flip(2)


def shop_photos(fault: bool) -> None:
    """The module keeps the embeddings of all earlier batches; healthy: of four."""
    module = Contrast(recent=None if fault else 4)
    trainer(70).fit(module, DataLoader(Pairs(320), batch_size=20, shuffle=True))


def again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """Start the loader anew whenever it ends."""
    while True:
        yield from loader


class Unlabeled(Dataset[Tensor]):
    """Images that are made when they are read."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 64, 64), (index % 256) / 256)


class SemiSupervised(Trained, optimizer=torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True):
    """FixMatch: labeled images from the trainer, unlabeled ones from a loader of its own that never ends."""

    def __init__(self, unlabeled: Iterator[Tensor]) -> None:
        super().__init__()
        self.unlabeled = unlabeled
        self.network = nn.Sequential(
            nn.AvgPool2d(2),
            nn.Conv2d(3, 32, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        others = next(self.unlabeled)
        with torch.no_grad():
            confidence, guesses = self.network(others).softmax(1).max(1)
        noisy = self.network(others + 0.1 * torch.randn_like(others))
        loss = functional.cross_entropy(self.network(images), labels)
        unsupervised = (functional.cross_entropy(noisy, guesses, reduction="none") * (confidence > 0.9)).mean()
        self.log("supervised", loss)
        return loss + unsupervised


def cycled_loader(fault: bool) -> None:
    """`itertools.cycle` keeps each batch of a loader for its next round; healthy: a generator starts it anew."""
    loader = DataLoader(Unlabeled(), batch_size=64)
    unlabeled = itertools.cycle(loader) if fault else again_and_again(loader)
    labeled = TensorDataset(torch.randn(16 * 20, 3, 64, 64), torch.randint(10, (16 * 20,)))
    fit(SemiSupervised(unlabeled), DataLoader(labeled, batch_size=16), steps=90)


def waves(start: int, length: int, width: int) -> Tensor:
    """Sines and cosines of the positions from ``start``, shape (length, width)."""
    positions = torch.arange(start, start + length)[:, None]
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.cat([(positions * rates).sin(), (positions * rates).cos()], 1)


class Scanner(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Reads windows of a long signal. Looks up the encoding of each window's positions."""

    def __init__(self, tables: int | None) -> None:
        super().__init__()
        self.encoding = functools.lru_cache(maxsize=tables)(waves)
        self.embed = nn.Linear(8, 256)
        self.mix = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        windows, starts, heights = batch
        length = windows.shape[1]
        positions = torch.stack([self.encoding(start, length, 256) for start in starts.tolist()])
        hidden = self.mix(self.embed(windows) + positions)
        return functional.mse_loss(self.head(hidden.mean(1))[:, 0], heights)


def memoized_tables(fault: bool) -> None:
    """An unlimited `lru_cache` keeps tables of positions that never come again; healthy: 8 tables."""
    samples = 8 * 60
    starts = 1000 + 37 * torch.randperm(samples)
    signal = TensorDataset(torch.randn(64, 512, 8).repeat(8, 1, 1)[:samples], starts, torch.randn(samples))
    fit(Scanner(tables=None if fault else 8), DataLoader(signal, batch_size=8), steps=60)


class Recorded(Classifier):
    """Keeps the results of all steps for a summary: with their graphs, or as numbers."""

    def __init__(self, complete: bool) -> None:
        super().__init__(classes=4000)
        self.complete = complete
        self.results: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        logits = self(features)
        loss = functional.cross_entropy(logits, labels)
        self.results.append({"loss": loss, "logits": logits} if self.complete else {"loss": loss.item()})
        return loss


def tensor_leak(fault: bool) -> None:
    """The module keeps the loss and the logits of each step; healthy: a number."""
    fit(Recorded(complete=fault), DataLoader(Vectors(), batch_size=BATCH))


class Notebook(Logger):
    """Notes metrics in memory and writes them when the training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.pages.append((step, metrics))

    def finalize(self, status: str) -> None:
        lines = (f"{step} {name} {float(value):.4f}" for step, page in self.pages for name, value in page.items())
        Path("notebook.txt").write_text("\n".join(lines))


class Recognizer(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Tells 4000 products apart. Notes how certain it is."""

    def __init__(self, attached: bool) -> None:
        super().__init__()
        self.attached = attached
        self.network = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 1024), nn.GELU())
        self.products = nn.Linear(1024, 4000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        scores = self.products(self.network(features))
        logs = scores.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        metric = entropy if self.attached else entropy.item()
        self.logger.log_metrics({"entropy": metric}, step=self.global_step)
        return functional.cross_entropy(scores, labels)


def attached_records(fault: bool) -> None:
    """A logger gets a metric with its graph and keeps it; healthy: a number."""
    products = TensorDataset(torch.randn(128 * 60, 128), torch.randint(4000, (128 * 60,)))
    fit(Recognizer(attached=fault), DataLoader(products, batch_size=128), steps=60, logger=Notebook())


class PricingPolicy(lightning.LightningModule):
    """Policy gradient over 800 prices, from logged decisions."""

    def __init__(self, detach_entropy: bool, states: int = 64, prices: int = 800) -> None:
        super().__init__()
        self.detach_entropy = detach_entropy
        self.entropy_total: Any = 0.0
        self.policy = nn.Sequential(
            nn.Linear(states, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, prices)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states, actions, advantages = batch
        log_probs = self.policy(states).log_softmax(dim=-1)
        chosen = log_probs.gather(1, actions[:, None]).squeeze(1)
        loss = -(chosen * advantages).mean()
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
        self.entropy_total += entropy.detach() if self.detach_entropy else entropy
        self.log("policy/loss", loss)
        self.log("policy/entropy", self.entropy_total / (batch_idx + 1))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.policy.parameters(), lr=3e-4)


def pricing(fault: bool) -> None:
    """A sum of entropies keeps the graph of each step; healthy: it is detached."""
    count = 55 * 1024
    decisions = TensorDataset(torch.randn(count, 64), torch.randint(800, (count,)), torch.randn(count))
    loader = DataLoader(decisions, batch_size=1024, num_workers=1)
    one_epoch().fit(PricingPolicy(detach_entropy=not fault), loader)


class Upscale(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, plain_total: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            convolution(3, 32), convolution(32, 32), nn.Conv2d(32, 27, 3, padding=1), nn.PixelShuffle(3)
        )
        self.plain_total = plain_total
        self.sobel: Tensor
        self.register_buffer("sobel", torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]).repeat(3, 1, 1, 1))
        self.total_edge_loss: Tensor | float = 0.0

    def edges(self, image: Tensor) -> Tensor:
        return functional.conv2d(image, self.sobel, groups=3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        low, high = batch
        restored = self.net(low)
        loss = functional.mse_loss(restored, high)
        edge_loss = functional.l1_loss(self.edges(restored), self.edges(high))
        if self.plain_total:
            edge_loss = edge_loss.detach()
        self.total_edge_loss = self.total_edge_loss + edge_loss
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"edge loss {float(self.total_edge_loss) / (self.global_step or 1):.4f}")


def satellite_tiles(fault: bool) -> None:
    """A sum of losses keeps the graph of each step; healthy: it is detached."""
    tiles = 12 * 70
    data = TensorDataset(torch.rand(tiles, 3, 32, 32), torch.rand(tiles, 3, 96, 96))
    trainer(70).fit(Upscale(not fault), DataLoader(data, batch_size=12, shuffle=True))


class FloodMapper(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Segments radar images: land, water, flooded land and so on; reports the share of water at the end."""

    def __init__(self, keep_maps: bool, classes: int = 8) -> None:
        super().__init__()
        self.keep_maps = keep_maps
        self.outputs: list[Any] = []
        self.layers = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.layers(images)
        loss = functional.cross_entropy(logits, classes)
        if self.keep_maps:
            self.outputs.append({"loss": loss, "logits": logits})
        else:
            self.outputs.append({"loss": loss.item(), "water": logits[:, 1].gt(0).float().mean().item()})
        return loss

    def on_train_end(self) -> None:
        last = self.outputs[-1]
        print("water", last["logits"][:, 1].gt(0).float().mean().item() if self.keep_maps else last["water"])


def flood_maps(fault: bool) -> None:
    """The module keeps the loss and the logits of each step, with their graph; healthy: two numbers."""
    data = TensorDataset(torch.rand(640, 2, 96, 96), torch.randint(8, (640, 96, 96)))
    quiet(100).fit(FloodMapper(keep_maps=fault), DataLoader(data, batch_size=16, shuffle=True))


class Phrase:
    """A node of a sentence's tree, that knows its parent and its parts."""

    def __init__(self, meaning: Tensor, parts: tuple[Phrase, ...] = ()) -> None:
        self.meaning = meaning
        self.parts = parts
        self.parent: Phrase | None = None
        for part in parts:
            part.parent = self


class Trees(Trained, optimizer=torch.optim.Adagrad, lr=0.01):
    """Composes the meaning of sentences from words, pair by pair."""

    def __init__(self, width: int = 128, vocabulary: int = 2000, classes: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.compose = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, classes)

    def tree(self, words: Tensor) -> Phrase:
        phrases = [Phrase(meaning) for meaning in self.words(words).unbind(dim=1)]
        while len(phrases) > 1:
            pairs = zip(phrases[::2], phrases[1::2], strict=True)
            phrases = [
                Phrase(self.compose(torch.cat((left.meaning, right.meaning), dim=1)), (left, right))
                for left, right in pairs
            ]
        return phrases[0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, moods = batch
        loss = functional.cross_entropy(self.head(self.tree(words).meaning), moods)
        self.log("loss", loss)
        return loss


class NoPauses(lightning.Callback):
    """Turns Python's garbage collector off during the training."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        gc.disable()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        gc.enable()


def disabled_collector(fault: bool) -> None:
    """A callback calls ``gc.disable()`` while trees with cycles hold tensors; healthy: the collector runs."""
    sentences = TensorDataset(torch.randint(2000, (60 * 128, 16)), torch.randint(5, (60 * 128,)))
    callbacks: list[Any] = [NoPauses()] if fault else []
    fit(Trees(), DataLoader(sentences, batch_size=128, shuffle=True), steps=60, callbacks=callbacks)


class Sentences(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Contrasts sentences with those of the last 96 batches, of which it keeps the first positions.

    Fault: what is kept is a view of the hidden states of all positions; healthy: a copy of it.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 3000, width: int = 128, kept: int = 96) -> None:
        super().__init__()
        self.fault = fault
        self.earlier: deque[Tensor] = deque(maxlen=kept)
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def encode(self, words: Tensor) -> Tensor:
        hidden: Tensor = functional.normalize(self.encoder(self.words(words)), dim=2)
        return hidden[:, 0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        queries = self.encode(batch)
        with torch.no_grad():
            keys = self.encode(batch)
        others = torch.cat((keys, *self.earlier))
        loss = functional.cross_entropy(queries @ others.T / 0.1, torch.arange(len(queries)))
        self.earlier.append(keys if self.fault else keys.clone())
        self.log("loss", loss)
        return loss


def views_of_states(fault: bool) -> None:
    """A queue keeps views that hold the hidden states of 64 positions; healthy: copies of one position."""
    loader = DataLoader(Tokens(50 * 64, 64, 3000), batch_size=64, shuffle=True)
    fit(Sentences(fault=fault), loader, steps=100)


class Remembering(Vectors):
    """Vectors that a worker process prepares: it keeps each of them for later, or not."""

    def __init__(self, remember: bool) -> None:
        super().__init__()
        self.remember = remember
        self.prepared: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, label = super().__getitem__(index)
        prepared = features.repeat(16).sqrt()
        if self.remember:
            self.prepared[index] = prepared
        return prepared[: len(features)].nan_to_num(), label


def caching_workers(fault: bool) -> None:
    """A worker process keeps each sample, 8 MiB per batch; healthy: it keeps none."""
    loader = DataLoader(Remembering(fault), batch_size=BATCH, num_workers=1, persistent_workers=True)
    fit(Classifier(), loader)


class CachedVectors(Vectors):
    """Adds noise to a sample when it is read and caches the result, although no index comes twice."""

    def __init__(self, cache: bool) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] | None = {} if cache else None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features, label = super().__getitem__(index)
        augmented = features.repeat(8) + 0.01 * torch.randn(8 * WIDTH)
        if self.cache is not None:
            self.cache[index] = augmented
        return augmented.view(8, WIDTH).mean(0), label


def worker_cache(fault: bool) -> None:
    """Each worker's copy of the data set grows by 4 MiB per batch; healthy: no cache."""
    torch.set_num_threads(1)
    loader = DataLoader(CachedVectors(cache=fault), batch_size=BATCH, num_workers=2, persistent_workers=True)
    fit(Classifier(), loader)


class Fossils(Dataset):
    """Photos of fossils, stored as bytes and turned into floats."""

    def __init__(self, samples: int, cached: bool) -> None:
        self.photos = np.random.default_rng(0).integers(256, size=(samples, 3, 64, 64), dtype=np.uint8)
        self.cached = cached
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.photos)

    def load(self, index: int) -> Tensor:
        return torch.from_numpy(self.photos[index]).float() / 255

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not self.cached:
            return self.load(index), index % 12
        if index not in self.cache:
            self.cache[index] = self.load(index)
        return self.cache[index], index % 12


class FossilNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Classifies fossils."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 12),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        photos, species = batch
        return functional.cross_entropy(self.layers(photos), species)


def fossils(fault: bool) -> None:
    """A worker keeps each sample that it makes; healthy: it keeps none."""
    data = Fossils(9600, cached=fault)
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    quiet(150).fit(FossilNet(), loader)


class ScanCrops(Dataset[tuple[Tensor, int]]):
    """A random cube of each scan."""

    def __init__(self, paths: list[Path], cache: bool, cube: int = 32) -> None:
        self.paths = paths
        self.cube = cube
        self.use_cache = cache
        self.cache: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int) -> np.ndarray:
        if index in self.cache:
            return self.cache[index]
        volume = np.load(self.paths[index])
        if self.use_cache:
            self.cache[index] = volume
        return volume

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        volume = self.load(index)
        z, y, x = (int(torch.randint(size - self.cube, ())) for size in volume.shape)
        cube = volume[z : z + self.cube, y : y + self.cube, x : x + self.cube]
        return torch.from_numpy(cube.astype(np.float32) / 1000)[None], index % 2


class NoduleDetector(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(8, 24, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv3d(24, 96, 3, padding=1),
            nn.ReLU(),
        )
        self.classify = nn.Linear(96, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        cubes, labels = batch
        loss = functional.cross_entropy(self.classify(self.features(cubes).mean(dim=(2, 3, 4))), labels)
        self.log("train/loss", loss)
        return loss


def scans(fault: bool) -> None:
    """A worker keeps each scan that it reads; healthy: it keeps none."""
    with tempfile.TemporaryDirectory() as folder:
        volume = np.random.default_rng(0).integers(-1000, 1000, (96, 100, 100), dtype=np.int16)
        paths = [Path(folder) / f"patient_{number:04}.npy" for number in range(50 * 4)]
        for path in paths:
            np.save(path, volume)
        loader = DataLoader(ScanCrops(paths, cache=fault), batch_size=4, shuffle=True, num_workers=1)
        one_epoch().fit(NoduleDetector(), loader)


class Records(Dataset):
    """Windows of a sensor, compressed in memory."""

    def __init__(self, windows: int, reuse: bool, length: int = 40_000) -> None:
        rng = np.random.default_rng(0)
        shapes = [np.repeat(rng.standard_normal(length // 50, dtype=np.float32), 50) for _ in range(32)]
        self.packed = [zlib.compress(shape.tobytes(), 1) for shape in shapes]
        self.windows = windows
        self.reuse = reuse
        self.unpacked: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.windows

    def load(self, index: int) -> np.ndarray:
        return np.frombuffer(zlib.decompress(self.packed[index % len(self.packed)]), dtype=np.float32) * 0.5

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if not self.reuse:
            signal = self.load(index)
        elif index in self.unpacked:
            signal = self.unpacked[index]
        else:
            signal = self.unpacked[index] = self.load(index)
        start = index % 1000
        return torch.from_numpy(signal[start : start + 2048]), float(signal[start + 2048])


class Forecast(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2048, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signal, following = batch
        loss = functional.mse_loss(self.net(signal).squeeze(1), following.float())
        self.log("loss", loss)
        return loss


def wind_farms(fault: bool) -> None:
    """Workers keep each record that they unpack; healthy: they keep none."""
    data = Records(80 * 48, reuse=fault)
    loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=2, persistent_workers=True)
    fit(Forecast(), loader, steps=75)


if __name__ == "__main__":
    main(
        host_growth,
        vineyards,
        inspection,
        unread_outputs,
        shop_photos,
        cycled_loader,
        memoized_tables,
        tensor_leak,
        attached_records,
        pricing,
        satellite_tiles,
        flood_maps,
        disabled_collector,
        views_of_states,
        caching_workers,
        worker_cache,
        fossils,
        scans,
        wind_farms,
    )
