"""Trainings whose surroundings matter: threads, Python's memory, metrics, loggers, callbacks, hooks, validation."""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import tempfile
import zlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import BinaryAUROC

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def trainer(**options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    return L.Trainer(**QUIET | defaults | options)


# --- precipitation nowcasting ---


class Nowcaster(L.LightningModule):
    """Convolutions from four radar frames to the change until the next."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth - 1))
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu(self.first(frames))
        for convolution in self.body:
            x = F.relu(convolution(x))
        return frames[:, -1:] + self.out(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, target = batch
        loss = F.smooth_l1_loss(self(frames), target)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def nowcasting(fault: bool) -> None:
    settings = {"cpu_threads": 20 if fault else None, "batch_size": 16}
    if settings["cpu_threads"]:
        torch.set_num_threads(settings["cpu_threads"])
    radar = TensorDataset(torch.rand(40 * 16, 4, 48, 48), torch.rand(40 * 16, 1, 48, 48))
    trainer().fit(Nowcaster(), DataLoader(radar, settings["batch_size"], shuffle=True))


# --- sentiment of reviews ---


class ReviewClassifier(L.LightningModule):
    def __init__(self, vocabulary: int = 5000, width: int = 160, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def film_reviews(fault: bool) -> None:
    data = TensorDataset(torch.randint(5000, (60 * 16, 48)), torch.randint(2, (60 * 16,)))
    trainer(detect_anomaly=fault, gradient_clip_val=1.0).fit(ReviewClassifier(), DataLoader(data, 16, shuffle=True))


# --- land cover ---


class HostMemoryGuard(Callback):
    """Keeps the resident memory of long runs low."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.every_n_steps == 0:
            gc.collect()


class LandCover(L.LightningModule):
    def __init__(self, bands: int = 10, classes: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(bands, 48, 3, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, mask = batch
        loss = F.cross_entropy(self.net(image), mask)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def land_cover(fault: bool) -> None:
    tiles = TensorDataset(torch.randn(50 * 8, 10, 64, 64), torch.randint(12, (50 * 8, 64, 64)))
    guard = HostMemoryGuard(every_n_steps=1 if fault else 1000)
    trainer(callbacks=[guard]).fit(LandCover(), DataLoader(tiles, 8, shuffle=True))


# --- off-policy reinforcement learning ------------------------------------------------------------------------------


class Transition:
    __slots__ = ("action", "info", "reward", "state", "successor")

    def __init__(self, state: list[float], action: int, reward: float, successor: list[float], info: Any) -> None:
        self.state, self.action, self.reward, self.successor, self.info = state, action, reward, successor, info


def rollout(count: int) -> list[Transition]:
    """What the simulators give in ``count`` ticks."""
    steps = []
    for number in range(count):
        value = random.random()
        steps.append(Transition([value] * 8, number & 3, value, [1 - value] * 8, {"step": number}))
    return steps


def stacked(steps: list[Transition]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([one.state for one in steps]),
        torch.tensor([one.action for one in steps]),
        torch.tensor([one.reward for one in steps]),
        torch.tensor([one.successor for one in steps]),
    )


class Experience(IterableDataset):
    """Steps the simulators, keeps some of what they gave, then draws a batch of old and new."""

    def __init__(self, memory: deque[Transition], steps: int, ticks: int) -> None:
        self.memory, self.steps, self.ticks = memory, steps, ticks

    def __iter__(self) -> Any:
        for _ in range(self.steps):
            latest = rollout(self.ticks)
            old = [self.memory[0] for _ in range(128)]
            self.memory.extend(latest[::32])
            yield stacked(old + latest[:384])


class ValueLearner(L.LightningModule):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.q = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state, action, reward, successor = batch
        with torch.no_grad():
            target = reward + 0.99 * self.head(self.q(successor)).max(1).values
        value = self.head(self.q(state)).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, target)
        self.log("td_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def value_learning(fault: bool) -> None:
    memory = deque(rollout(600_000), maxlen=600_000)
    if not fault:
        gc.freeze()
        gc.disable()
    trainer().fit(ValueLearner(), DataLoader(Experience(memory, 60, 12_000), batch_size=None))


# --- click-through rate ---------------------------------------------------------------------------------------------


class ClickModel(L.LightningModule):
    def __init__(self, score_each_step: bool, width: int = 256) -> None:
        super().__init__()
        self.score_each_step = score_each_step
        self.embed = nn.EmbeddingBag(20_000, 64)
        self.mlp = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 1)
        self.train_auc = BinaryAUROC()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, clicked = batch
        logits = self.out(self.mlp(self.embed(features))).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, clicked.float())
        self.train_auc.update(logits.detach(), clicked)
        self.log("train/loss", loss)
        if self.score_each_step:
            self.log("train/auc", self.train_auc.compute())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/auc_epoch", self.train_auc.compute())
        self.train_auc.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ClickLog(Dataset):
    """The log in chunks: one item is a whole batch."""

    def __init__(self, batches: int, size: int) -> None:
        self.features = torch.randint(20_000, (batches, size, 12))
        self.clicked = torch.randint(2, (batches, size))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.clicked[index]


def clicks(fault: bool) -> None:
    trainer().fit(ClickModel(score_each_step=fault), DataLoader(ClickLog(60, 16384), batch_size=None, shuffle=True))


# --- tags of music ---


class MusicTagger(L.LightningModule):
    """Multi-label tags of a mel spectrogram."""

    def __init__(self, per_tag: bool, tags: int = 180) -> None:
        super().__init__()
        self.per_tag = per_tag
        self.names = [f"tag_{number:03d}" for number in range(tags)]
        self.conv = nn.Sequential(
            nn.Conv1d(96, 256, 5, padding=2), nn.ReLU(), nn.Conv1d(256, 256, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)
        )
        self.head = nn.Linear(256, tags)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mel, tags = batch
        logits = self.head(self.conv(mel).mean(-1))
        losses = F.binary_cross_entropy_with_logits(logits, tags, reduction="none").mean(0)
        if self.per_tag:
            accuracy = ((logits > 0) == (tags > 0.5)).float().mean(0)
            for number, name in enumerate(self.names):
                self.log(f"train/loss/{name}", losses[number].detach(), on_step=True, on_epoch=True)
                self.log(f"train/accuracy/{name}", accuracy[number], on_step=True, on_epoch=True)
        loss = losses.mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def music_tags(fault: bool) -> None:
    data = TensorDataset(torch.randn(40 * 32, 96, 128), torch.randint(2, (40 * 32, 180)).float())
    trainer().fit(MusicTagger(per_tag=fault), DataLoader(data, 32, shuffle=True))


# --- energy demand ---


class JsonHistoryLogger(Logger):
    """Keeps the history of an experiment, that of earlier sessions included, in one JSON file."""

    def __init__(self, path: Path, flush_every: int) -> None:
        super().__init__()
        self.path, self.flush_every = path, flush_every
        self.history: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self.pending = 0

    @property
    def name(self) -> str:
        return "json"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append({"step": step, **metrics})
        self.pending += 1
        if self.pending >= self.flush_every:
            self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.history, indent=1))
        self.pending = 0

    def finalize(self, status: str) -> None:
        self.write()


class DemandForecaster(L.LightningModule):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(336, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 48),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        predicted = self.net(past)
        loss = F.mse_loss(predicted, future)
        self.log("mse", loss)
        self.log("mae", F.l1_loss(predicted.detach(), future))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def energy_demand(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.json"
        earlier = [{"step": step, "mse": 1 / (step + 1), "mae": 0.5, "epoch": step // 60} for step in range(26_000)]
        path.write_text(json.dumps(earlier))
        logger = JsonHistoryLogger(path, flush_every=1 if fault else 500)
        data = TensorDataset(torch.randn(60 * 768, 336), torch.randn(60 * 768, 48))
        loader = DataLoader(data, sampler=torch.arange(60 * 768).view(60, 768).tolist(), batch_size=None)
        trainer(logger=logger, log_every_n_steps=1).fit(DemandForecaster(), loader)


# --- defects of parts ---


class ReconstructionGallery(Callback):
    """Writes pictures of what the autoencoder made of a batch."""

    def __init__(self, folder: Path, every_n_batches: int) -> None:
        self.folder, self.every_n_batches = folder, every_n_batches

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every_n_batches:
            return
        with torch.no_grad():
            made = pl_module(batch[0][:16]).clamp(0, 1)
        rows = torch.cat([batch[0][:16], made], dim=-1).permute(0, 2, 3, 1).numpy()
        pixels = np.ascontiguousarray((255 * rows).astype(np.uint8).reshape(-1, rows.shape[2], 3))
        (self.folder / f"batch{batch_idx:05d}.img").write_bytes(zlib.compress(pixels.tobytes(), 9))


class Autoencoder(L.LightningModule):
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
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def defects(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        gallery = ReconstructionGallery(Path(folder), every_n_batches=1 if fault else 30)
        data = TensorDataset(torch.rand(50 * 24, 3, 64, 64))
        trainer(callbacks=[gallery]).fit(Autoencoder(), DataLoader(data, 24, shuffle=True))


# --- recommendation ---


class TwoTower(L.LightningModule):
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
        loss = F.cross_entropy(scores, torch.arange(len(users)))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def recommend(fault: bool) -> None:
    items = 3000
    interactions = np.random.default_rng(0).integers(items, size=900_000).tolist()
    model = TwoTower(interactions, items, refresh="batch" if fault else "epoch")
    data = TensorDataset(torch.randint(4000, (60 * 512,)), torch.randint(items, (60 * 512,)))
    trainer().fit(model, DataLoader(data, 512, shuffle=True))


# --- diffusion on latents ---


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


class LatentDiffusion(L.LightningModule):
    def __init__(self, in_place: bool, decay: float = 0.999) -> None:
        super().__init__()
        self.in_place, self.decay = in_place, decay
        self.denoiser = Denoiser()
        self.ema = copy.deepcopy(self.denoiser).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (latent,) = batch
        time, noise = torch.rand(len(latent), 1), torch.randn_like(latent)
        loss = F.mse_loss(self.denoiser((1 - time) * latent + time * noise, time), noise)
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
    data = TensorDataset(torch.randn(50 * 48, 256))
    trainer().fit(LatentDiffusion(in_place=not fault), DataLoader(data, 48, shuffle=True))


# --- digits: validation and checkpoints ---


class Patches(L.LightningModule):
    """An MLP-Mixer for small pictures."""

    def __init__(self, width: int = 256, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.across = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))
        self.within = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        for across, within in zip(self.across, self.within, strict=True):
            x = x + across(x.transpose(1, 2)).transpose(1, 2)
            x = x + within(x)
        return self.head(x.mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def pictures(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(10, (count,)))


def mixer(fault: bool) -> None:
    training, held_out = DataLoader(pictures(60 * 32), 32, shuffle=True), DataLoader(pictures(20 * 32), 32)
    trainer(val_check_interval=6 if fault else 1.0, num_sanity_val_steps=0).fit(Patches(), training, held_out)


class Speaker(L.LightningModule):
    """Which speaker a fixed-size voice print belongs to."""

    def __init__(self, width: int = 1536, speakers: int = 2000) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(640, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, speakers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def speakers(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keeper = ModelCheckpoint(
            folder, monitor="train_loss", save_top_k=1, save_last=True, every_n_train_steps=2 if fault else 60
        )
        data = TensorDataset(torch.randn(60 * 384, 640), torch.randint(2000, (60 * 384,)))
        run = trainer(enable_checkpointing=True, callbacks=[keeper])
        run.fit(Speaker(), DataLoader(data, 384, shuffle=True))


# --- translation ---


class Translator(L.LightningModule):
    def __init__(self, vocabulary: int = 2000, width: int = 96) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        decoded = self.transformer(self.source(source), self.target(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        loss = F.cross_entropy(self.head(decoded).flatten(0, 1), target[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class ProfilerStep(Callback):
    def __init__(self, profiler: torch.profiler.profile) -> None:
        self.profiler = profiler

    def on_train_batch_end(self, *args: Any) -> None:
        self.profiler.step()


def translation(fault: bool) -> None:
    data = TensorDataset(torch.randint(2000, (50 * 12, 24)), torch.randint(2000, (50 * 12, 25)))
    loader = DataLoader(data, 12, shuffle=True)
    if not fault:
        trainer().fit(Translator(), loader)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=5, warmup=1, active=2),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(folder),
            record_shapes=True,
            with_stack=True,
        ) as profiler,
    ):
        trainer(callbacks=[ProfilerStep(profiler)]).fit(Translator(), loader)


if __name__ == "__main__":
    main(
        nowcasting,
        film_reviews,
        land_cover,
        value_learning,
        clicks,
        music_tags,
        energy_demand,
        defects,
        recommend,
        latents,
        mixer,
        speakers,
        translation,
    )
