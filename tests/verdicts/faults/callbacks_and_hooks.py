"""Work of callbacks, of hooks of the module and of hooks of its layers, in each step."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    BATCH,
    WIDTH,
    Classifier,
    Residual,
    Trained,
    Vectors,
    fit,
    labeled,
    main,
    one_epoch,
    quiet,
    rows_at_once,
    vector_batches,
)
from small_models import (
    Corpus,
    LeafNet,
    MiniGPT,
    SeriesModel,
    StoredPositionalEncoding,
    Tabular,
    convolution,
    perceptron,
)


class Heartbeat(lightning.Callback):
    """Reports to a slow server after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.04)


def slow_callback(fault: bool) -> None:
    """A callback waits 40 ms per step; healthy: it is not there."""
    fit(Classifier(), vector_batches(), callbacks=[Heartbeat()] if fault else [])


class ReconstructionGallery(Callback):
    """Writes pictures of what the autoencoder made of a batch."""

    def __init__(self, folder: Path, every_n_batches: int) -> None:
        self.folder, self.every_n_batches = folder, every_n_batches

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.every_n_batches:
            return
        with torch.no_grad():
            made = pl_module(batch[0][:16]).clamp(0, 1)
        rows = torch.cat([batch[0][:16], made], dim=-1).permute(0, 2, 3, 1).numpy()
        pixels = np.ascontiguousarray((255 * rows).astype(np.uint8).reshape(-1, rows.shape[2], 3))
        (self.folder / f"batch{batch_idx:05d}.img").write_bytes(zlib.compress(pixels.tobytes(), 9))


class Autoencoder(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 16, 1)
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(16, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()
        )
        self.out = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return torch.sigmoid(self.out(self.decode(self.encode(image))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[0])
        self.log("loss", loss)
        return loss


def defects(fault: bool) -> None:
    """A callback writes pictures of each batch; healthy: of each 30th."""
    with tempfile.TemporaryDirectory() as folder:
        gallery = ReconstructionGallery(Path(folder), every_n_batches=1 if fault else 30)
        data = TensorDataset(torch.rand(50 * 24, 3, 64, 64))
        one_epoch(callbacks=[gallery]).fit(Autoencoder(), DataLoader(data, 24, shuffle=True))


class TileAutoencoder(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Compresses small satellite tiles."""

    def __init__(self, width: int = 18) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            convolution(3, width, 2), convolution(width, 2 * width, 2), convolution(2 * width, 4 * width, 2)
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 2, stride=2),
        )

    def forward(self, tiles: Tensor) -> Tensor:
        return self.decoder(self.encoder(tiles)).sigmoid()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (tiles,) = batch
        restored = self(tiles)
        loss = functional.mse_loss(restored, tiles)
        self.log("mse", loss)
        return {"loss": loss, "restored": restored.detach()}


class ReconstructionSheet(lightning.Callback):
    """Saves the tiles of a batch beside their reconstructions."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every:
            return
        pairs = torch.cat([batch[0], outputs["restored"]], dim=3).clamp(0, 1)
        rows = pairs.mul(255).byte().permute(0, 2, 3, 1).numpy()
        sheet = np.concatenate([np.concatenate(list(rows[start : start + 4]), axis=1) for start in range(0, 32, 4)])
        Image.fromarray(sheet).save(self.folder / f"step_{trainer.global_step:05d}.png")


def tile_compression(fault: bool) -> None:
    """A callback saves a sheet of pictures in each step; healthy: in each 50th."""
    tiles = torch.rand(640, 3, 12, 12).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    loader = DataLoader(TensorDataset(tiles), batch_size=32, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        sheets = ReconstructionSheet(Path(folder), every=1 if fault else 50)
        quiet(50, callbacks=[sheets]).fit(TileAutoencoder(), loader)


class RankMonitor(lightning.Callback):
    """Watches how many directions the layers use."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.ranks: list[list[float]] = []

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        ranks = []
        for module in pl_module.modules():
            if isinstance(module, nn.Linear):
                spectrum = torch.linalg.svdvals(module.weight)
                share = spectrum / spectrum.sum()
                ranks.append(float(torch.exp(-(share * share.clamp_min(1e-12).log()).sum())))
        self.ranks.append(ranks)


class WineModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """The grade of a wine from its chemistry."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(48, 384, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        chemistry, grade = batch
        loss = functional.mse_loss(self.net(chemistry), grade)
        self.log("loss", loss)
        return loss


def wine_ratings(fault: bool) -> None:
    """A callback decomposes weights in each step; healthy: in each 100th."""
    data = TensorDataset(torch.randn(1536 * 20, 48), torch.rand(1536 * 20, 1))
    monitor = RankMonitor(every=1 if fault else 100)
    quiet(100, callbacks=[monitor]).fit(WineModel(), rows_at_once(data, 1536))


class HiveModel(SeriesModel):
    """Whether a hive is about to swarm; gives the probabilities with the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        hum, swarms = batch
        logits = self.net(hum)
        loss = functional.cross_entropy(logits, swarms)
        self.log("train_loss", loss)
        return {"loss": loss, "swarm": logits.detach().softmax(dim=1)[:, 1]}


class HiveReport(lightning.Callback):
    """Writes what the model says about the hives of each batch, for the web page of the beekeepers."""

    def __init__(self, path: Path, whole: bool) -> None:
        self.path, self.whole = path, whole
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        swarm = outputs["swarm"].tolist()
        step = {"step": trainer.global_step, "loss": outputs["loss"].item(), "swarm": swarm}
        if self.whole:
            self.steps.append(step)
            with self.path.open("w") as file:
                json.dump(self.steps, file, indent=1)
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(step) + "\n")


def bee_hives(fault: bool) -> None:
    """A callback writes its whole history again in each step; healthy: it appends."""
    data = TensorDataset(torch.randn(64 * 20, 2, 1024), torch.randint(2, (64 * 20,)))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        report = HiveReport(Path(folder) / "hives.json", whole=fault)
        quiet(200, callbacks=[report]).fit(HiveModel(2, 48, 2), DataLoader(data, batch_size=64, shuffle=True))


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


class Textures(Trained, optimizer=torch.optim.SGD, lr=0.01):
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


def dumped_predictions(fault: bool) -> None:
    """A callback writes the scores of each batch as JSON; healthy: of each 40th."""
    writer = SegmentationArtifacts("artifacts", every=1 if fault else 40)
    fit(Textures(), DataLoader(labeled(48 * 55, 3, 24, 24, classes=400), batch_size=48), steps=55, callbacks=[writer])


class Watch(lightning.Callback):
    """A thread that adds up the memory of each mapping of the process and keeps the highest sum."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        self.highest: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.thread = threading.Thread(target=self.watch, name="memory-watch", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        while not self.stopped.wait(self.seconds):
            for name, size in self.mappings().items():
                self.highest[name] = max(size, self.highest.get(name, 0))

    def mappings(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        name = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                name = words[5] if len(words) > 5 else "anonymous"
            elif words[-1] == "kB":
                key = f"{name}/{words[0]}"
                sizes[key] = sizes.get(key, 0) + int(words[1])
        return sizes

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.stopped.set()
        self.thread.join()


class Ratings(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    """Deep and cross network: products of features beside layers."""

    def __init__(self, width: int = 96, depth: int = 14) -> None:
        super().__init__()
        self.start = nn.Linear(40, width)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.deep = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.out = nn.Linear(2 * width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, ratings = batch
        first = crossed = hidden = self.start(features)
        for cross, deep in zip(self.crosses, self.deep, strict=True):
            crossed = first * cross(crossed).tanh() + crossed
            hidden = functional.relu(deep(hidden)) + hidden
        loss = functional.mse_loss(self.out(torch.cat([crossed, hidden], 1))[:, 0], ratings)
        self.log("rmse", loss.detach().sqrt())
        return loss


def busy_watch(fault: bool) -> None:
    """A thread of a callback reads and parses /proc without much of a pause; healthy: each 10 seconds."""
    torch.set_num_threads(1)
    ratings = TensorDataset(torch.randn(512 * 150, 40), torch.randn(512 * 150))
    fit(Ratings(), DataLoader(ratings, batch_size=512), steps=150, callbacks=[Watch(0.06 if fault else 10.0)])


class Storyteller(MiniGPT):
    """Shows what it would write."""

    def __init__(self, show_every: int) -> None:
        super().__init__(StoredPositionalEncoding(192, 512), dim=192)
        self.show_every = show_every
        self.stories: list[list[int]] = []

    @torch.no_grad()
    def write(self, start: torch.Tensor, words: int) -> torch.Tensor:
        tokens = start
        for _ in range(words):
            probabilities = self(tokens)[:, -1].softmax(dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
        return tokens

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % self.show_every == 0:
            self.eval()
            self.stories = self.write(batch[:4, :8], 40).tolist()
            self.train()


def stories(fault: bool) -> None:
    """`on_train_batch_end` writes text after each 4 steps; healthy: after 60."""
    loader = DataLoader(Corpus(1024, 64), batch_size=12, shuffle=True)
    fit(Storyteller(show_every=4 if fault else 60), loader, steps=60)


class TwoTower(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Users and items; negatives are drawn by the popularity of items."""

    def __init__(self, interactions: list[int], items: int, refresh: str, width: int = 768) -> None:
        super().__init__()
        self.interactions, self.items, self.refresh = interactions, items, refresh
        self.user = nn.Embedding(4000, 128, sparse=True)
        self.item = nn.Embedding(items, 128, sparse=True)
        self.user_tower = self.tower(width)
        self.item_tower = self.tower(width)
        self.popularity = torch.ones(items)

    def tower(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64))

    def on_train_epoch_start(self) -> None:
        self.count_popularity()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.refresh == "batch":
            self.count_popularity()

    def count_popularity(self) -> None:
        seen = Counter(self.interactions)
        self.popularity = torch.tensor([float(seen[item]) for item in range(self.items)]) ** 0.75

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        users, items = batch
        negatives = torch.multinomial(self.popularity, len(items), replacement=True)
        user = self.user_tower(self.user(users))
        scores = user @ self.item_tower(self.item(torch.cat([items, negatives]))).T
        loss = functional.cross_entropy(scores, torch.arange(len(users)))
        self.log("loss", loss)
        return loss


def recommend(fault: bool) -> None:
    """`on_train_batch_start` counts 900,000 interactions; healthy: `on_train_epoch_start` alone does."""
    items = 3000
    interactions = np.random.default_rng(0).integers(items, size=900_000).tolist()
    model = TwoTower(interactions, items, refresh="batch" if fault else "epoch")
    data = TensorDataset(torch.randint(4000, (60 * 512,)), torch.randint(items, (60 * 512,)))
    one_epoch().fit(model, DataLoader(data, 512, shuffle=True))


class AverageWeights(lightning.Callback):
    """An exponential average of the weights, from a copy of the whole model after each `every` batches."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every:
            return
        state = copy.deepcopy(pl_module.state_dict())
        self.average = {name: 0.99 * self.average.get(name, value) + 0.01 * value for name, value in state.items()}


def copied_average(fault: bool) -> None:
    """The model is copied and averaged at each step; healthy: each 30 steps."""
    model = Classifier(width=WIDTH, depth=4)
    fit(model, vector_batches(128), callbacks=[AverageWeights(every=1 if fault else 30)])


class DigitDenoiser(nn.Module):
    """A residual network over flat pictures and the noise level."""

    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(784 + 1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 784)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = self.first(torch.cat([noisy, level], dim=1))
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return self.last(hidden)


class Diffusion(lightning.LightningModule):
    def __init__(self, simple_average: bool, decay: float = 0.999) -> None:
        super().__init__()
        self.simple_average = simple_average
        self.decay = decay
        self.denoiser = DigitDenoiser()
        self.averaged = copy.deepcopy(self.denoiser).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (digits,) = batch
        level = torch.rand(len(digits), 1)
        noise = torch.randn_like(digits)
        noisy = (1 - level).sqrt() * digits + level.sqrt() * noise
        loss = functional.mse_loss(self.denoiser(noisy, level), noise)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.simple_average:
            current = copy.deepcopy(self.denoiser).state_dict()
            average = copy.deepcopy(self.averaged.state_dict())
            for key, value in average.items():
                average[key] = self.decay * value + (1 - self.decay) * current[key]
            self.averaged.load_state_dict(average)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.averaged.parameters()), list(self.denoiser.parameters()), 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.denoiser.parameters(), lr=1e-2)


def digit_diffusion(fault: bool) -> None:
    """The average of the weights is made from a copy of the model in each step; healthy: in place."""
    data = TensorDataset(torch.rand(128 * 50, 784))
    quiet(50).fit(Diffusion(simple_average=fault), DataLoader(data, batch_size=128, shuffle=True))


class Denoiser(nn.Module):
    def __init__(self, width: int = 1280, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(257, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 256)

    def forward(self, latent: Tensor, time: Tensor) -> Tensor:
        hidden = self.embed(torch.cat([latent, time], 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(hidden)


class LatentDiffusion(lightning.LightningModule):
    def __init__(self, in_place: bool, decay: float = 0.999) -> None:
        super().__init__()
        self.in_place, self.decay = in_place, decay
        self.denoiser = Denoiser()
        self.ema = copy.deepcopy(self.denoiser).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (latent,) = batch
        time, noise = torch.rand(len(latent), 1), torch.randn_like(latent)
        loss = functional.mse_loss(self.denoiser((1 - time) * latent + time * noise, time), noise)
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.in_place:
            for mean, weight in zip(self.ema.parameters(), self.denoiser.parameters(), strict=True):
                mean.lerp_(weight, 1 - self.decay)
            return
        averaged = copy.deepcopy(self.denoiser).requires_grad_(False)
        for mean, old in zip(averaged.parameters(), self.ema.parameters(), strict=True):
            mean.copy_(self.decay * old + (1 - self.decay) * mean)
        self.ema = averaged

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.denoiser.parameters(), lr=0.01)


def latents(fault: bool) -> None:
    """The average of the weights is made from a copy of the model in each step; healthy: in place."""
    data = TensorDataset(torch.randn(50 * 48, 256))
    one_epoch().fit(LatentDiffusion(in_place=not fault), DataLoader(data, 48, shuffle=True))


class CraterNet(lightning.LightningModule):
    """Finds the center and the radius of a crater; validates with the averaged weights."""

    def __init__(self, copied_average: bool, decay: float = 0.99) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(48 * 48, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 3)
        )
        self.decay = decay
        self.copied_average = copied_average
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        patches, circles = batch
        loss = functional.smooth_l1_loss(self.net(patches), circles)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.copied_average:
            old = copy.deepcopy(self.average.state_dict())
            new = copy.deepcopy(self.net.state_dict())
            mixed = {name: self.decay * old[name] + (1 - self.decay) * new[name] for name in old}
            self.average.load_state_dict(mixed)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def lunar_craters(fault: bool) -> None:
    """The average of the weights is made from a copy of the model in each step; healthy: in place."""
    data = TensorDataset(torch.randn(640 * 9, 1, 48, 48), torch.rand(640 * 9, 3))
    quiet(90).fit(CraterNet(copied_average=fault), rows_at_once(data, 640))


def histogram(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A forward hook that someone added to look at activations."""
    counts, _ = np.histogram(output.detach().numpy(), bins=100)
    module.spread = int((counts > 0).sum())  # type: ignore[assignment]  # a module takes any attribute


def slow_hook(fault: bool) -> None:
    """A forward hook of each layer computes a histogram; healthy: no hook."""
    model = Classifier()
    for module in model.blocks.modules() if fault else ():
        module.register_forward_hook(histogram)
    fit(model, vector_batches())


class ConditionProbe(lightning.Callback):
    """Looks at the singular values of what goes into each linear layer."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self.check)

    def check(self, module: nn.Module, inputs: Any) -> None:
        module.condition = float(torch.linalg.svdvals(inputs[0][:192, :192].detach())[0])  # type: ignore[assignment]


def pre_hook(fault: bool) -> None:
    """A callback registers a forward pre-hook that decomposes each input; healthy: it does not."""
    fit(Tabular(), DataLoader(Vectors(), batch_size=BATCH), callbacks=[ConditionProbe()] if fault else [])


def gradient_hook(fault: bool) -> None:
    """A hook of each parameter makes a histogram of its gradient; healthy: no hook."""
    model = Tabular()
    for parameter in model.parameters() if fault else ():
        parameter.register_hook(lambda gradient: (np.histogram(gradient.numpy(), bins=64), None)[1])
    fit(model, DataLoader(Vectors(), batch_size=BATCH))


class StrainModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Whether the strain of a bridge is as it should be; watches what its layers put out."""

    def __init__(self, watch: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(240, 512), Residual(512), Residual(512), nn.Linear(512, 2))
        self.spreads: dict[str, list[float]] = {}
        if watch:
            for name, layer in self.net.named_modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(self.watch(name))

    def watch(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            values = output.detach().numpy()
            low, middle, high = np.percentile(values, (1, 50, 99))
            self.spreads[name] = [float(low), float(middle), float(high)]

        return hook

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        strain, state = batch
        loss = functional.cross_entropy(self.net(strain), state)
        self.log("loss", loss)
        return loss


def bridge_strain(fault: bool) -> None:
    """A forward hook of each layer computes percentiles; healthy: no hook."""
    data = TensorDataset(torch.randn(256 * 20, 240), torch.randint(2, (256 * 20,)))
    quiet(80).fit(StrainModel(watch=fault), DataLoader(data, batch_size=256, shuffle=True))


class ActivationStatistics:
    """Distribution of what each watched layer puts out."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def watch(self, network: nn.Module) -> None:
        for name, layer in network.named_modules():
            if isinstance(layer, nn.ReLU):
                layer.register_forward_hook(self.recorder(name))

    def recorder(self, name: str) -> Any:
        def record(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            values = output.detach().flatten()
            counts = torch.histc(values, bins=64, min=0.0, max=6.0)
            self.rows[name] = {
                "mean": values.mean().item(),
                "std": values.std().item(),
                "dead": (values == 0).float().mean().item(),
                "low": (counts[:8].sum() / len(values)).item(),
                "high": (counts[-8:].sum() / len(values)).item(),
            }

        return record


def texture_network(fault: bool) -> None:
    """A forward hook of each layer computes statistics; healthy: no hook."""
    loader = DataLoader(
        TensorDataset(torch.rand(640, 3, 64, 64), torch.randint(12, (640,))), batch_size=64, shuffle=True
    )
    model = LeafNet(width=24)
    if fault:
        ActivationStatistics().watch(model)
    quiet(50).fit(model, loader)


class DeadUnits(lightning.Callback):
    """Watches the share of silent units in the encoder. Fault: its hooks stay on; healthy: they are removed."""

    def __init__(self, *, fault: bool) -> None:
        self.fault = fault
        self.handles: list[Any] = []
        self.silent: dict[str, Tensor] = {}

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for name, module in pl_module.named_modules():
            if name.startswith("encode") and isinstance(module, nn.ReLU):
                self.handles.append(module.register_forward_hook(self.watch(name)))

    def watch(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.silent[name] = (output.detach() == 0).float().mean()

        return hook

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pl_module.log_dict(self.silent)
        if not self.fault:
            for handle in self.handles:
                handle.remove()
            self.handles.clear()


class Faces(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """A convolutional autoencoder over small gray pictures."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (pictures,) = batch
        loss = functional.mse_loss(self.decode(self.encode(pictures)), pictures)
        self.log("loss", loss)
        return loss


def piling_hooks(fault: bool) -> None:
    """A callback adds forward hooks in each step and leaves them; healthy: it removes them after the step."""
    pictures = TensorDataset(torch.rand(20 * 48, 1, 64, 64))
    fit(Faces(), DataLoader(pictures, batch_size=48, shuffle=True), steps=50, callbacks=[DeadUnits(fault=fault)])


if __name__ == "__main__":
    main(
        slow_callback,
        defects,
        tile_compression,
        wine_ratings,
        bee_hives,
        dumped_predictions,
        busy_watch,
        stories,
        recommend,
        copied_average,
        digit_diffusion,
        latents,
        lunar_craters,
        slow_hook,
        pre_hook,
        gradient_hook,
        bridge_strain,
        texture_network,
        piling_hooks,
    )
