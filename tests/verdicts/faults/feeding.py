"""Trainings whose batches come from pictures, logs, object stores, sensors, texts, shards and sessions."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import lightning
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main


def train(model: lightning.LightningModule, loader: DataLoader, **options: Any) -> None:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "max_epochs": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(**settings | options).fit(model, loader)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class PictureClassifier(lightning.LightningModule):
    def __init__(self, channels: int = 3, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            convolution(channels, width, stride=2),
            convolution(width, 2 * width),
            convolution(2 * width, 2 * width, stride=2),
            convolution(2 * width, 4 * width),
            convolution(4 * width, 4 * width, stride=2),
            convolution(4 * width, 8 * width),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.backbone(pictures).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


# --- biopsies: tiles of scanned tissue, stored as PNG files ---


class BiopsyTiles(Dataset[tuple[Tensor, int]]):
    """PNG tiles of one side, given to the network with 96 pixels."""

    def __init__(self, folder: Path, side: int, samples: int, files: int = 24) -> None:
        self.paths = [folder / f"tile_{number:03}.png" for number in range(files)]
        self.samples = samples
        noise = np.random.default_rng(0)
        for path in self.paths:
            coarse = noise.integers(0, 255, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = Image.open(self.paths[index % len(self.paths)]).convert("RGB")
        if picture.size != (96, 96):
            picture = picture.resize((96, 96), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255)
        return pixels, index % 8


def biopsies(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiles = BiopsyTiles(Path(folder), side=640 if fault else 96, samples=50 * 8)
        train(PictureClassifier(), DataLoader(tiles, batch_size=8, shuffle=True, num_workers=1))


# --- playlists: implicit feedback, with items that a listener has not heard ---


class Listens(Dataset[tuple[int, int]]):
    def __init__(self, samples: int, users: int = 2000, items: int = 5000) -> None:
        noise = random.Random(0)
        self.users = users
        self.items = items
        self.history = [set(noise.sample(range(items), 80)) for _ in range(users)]
        self.pairs = [(user, noise.choice(list(self.history[user]))) for user in range(users)]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.pairs[index % len(self.pairs)]


def batch_with_negatives(pairs: list[tuple[int, int]], listens: Listens, count: int) -> tuple[Tensor, Tensor, Tensor]:
    negatives = []
    for user, _ in pairs:
        row: list[int] = []
        while len(row) < count:
            item = random.randrange(listens.items)
            if item not in listens.history[user]:
                row.append(item)
        negatives.append(row)
    users, items = zip(*pairs, strict=True)
    return torch.tensor(users), torch.tensor(items), torch.tensor(negatives)


def batch_with_random_items(
    pairs: list[tuple[int, int]], listens: Listens, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    users, items = zip(*pairs, strict=True)
    return torch.tensor(users), torch.tensor(items), torch.randint(listens.items, (len(pairs), count))


class PlaylistRanker(lightning.LightningModule):
    def __init__(self, users: int, items: int, width: int = 64) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return torch.bmm(self.item(items), self.user(users)[:, :, None]).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, items, negatives = batch
        scores = self(users, torch.cat([items[:, None], negatives], dim=1))
        loss = -functional.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
        self.log("bpr", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def playlists(fault: bool) -> None:
    listens = Listens(samples=60 * 512)
    collate = partial(batch_with_negatives if fault else batch_with_random_items, listens=listens, count=400)
    loader = DataLoader(listens, batch_size=512, shuffle=True, num_workers=1, collate_fn=collate)
    train(PlaylistRanker(listens.users, listens.items), loader)


# --- crops: satellite chips in an object store ---


class ObjectStore:
    """Stands for a bucket behind a network: each request takes some milliseconds, and no processor."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.content = np.random.default_rng(0).integers(0, 255, (4, 64, 64), dtype=np.uint8).tobytes()

    def get(self, key: str) -> bytes:
        time.sleep(self.latency)
        return self.content


class SatelliteChips(Dataset[tuple[Tensor, int]]):
    def __init__(self, store: ObjectStore, samples: int) -> None:
        self.store = store
        self.keys = [f"sentinel/2023/{number:06}.bin" for number in range(samples)]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raw = np.frombuffer(self.store.get(self.keys[index]), dtype=np.uint8).reshape(4, 64, 64)
        return torch.from_numpy(raw.astype(np.float32) / 255), index % 8


def crops(fault: bool) -> None:
    chips = SatelliteChips(ObjectStore(latency=0.004), samples=60 * 16)
    train(PictureClassifier(channels=4), DataLoader(chips, batch_size=16, num_workers=0 if fault else 2))


# --- gait: windows of a wearable's accelerometer; each process reads the diary of the wearers itself ---


class GaitWindows(Dataset[tuple[Tensor, int]]):
    """Windows of six channels, stretched in time and with noise."""

    def __init__(self, diary: Path, samples: int, length: int = 512) -> None:
        self.diary = diary
        self.entries: np.ndarray | None = None
        self.noise = np.random.default_rng(0)
        self.windows = np.random.default_rng(0).standard_normal((256, 6, length)).astype(np.float32)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.entries is None:
            entries = json.loads(self.diary.read_text())
            self.entries = np.array([(entry["window"], entry["activity"]) for entry in entries])
        number, activity = self.entries[index].tolist()
        window = self.windows[number % len(self.windows)]
        length = window.shape[1]
        knots = np.cumsum(self.noise.uniform(0.8, 1.2, length))
        times = knots * (length - 1) / knots[-1]
        warped = np.stack([np.interp(times, np.arange(length), channel) for channel in window])
        spectrum = np.fft.rfft(warped) * np.exp(1j * self.noise.uniform(-0.1, 0.1, (6, length // 2 + 1)))
        augmented = np.fft.irfft(spectrum, n=length) + self.noise.normal(0, 0.05, warped.shape)
        return torch.from_numpy(augmented.astype(np.float32)), activity


class GaitNetwork(lightning.LightningModule):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(6, width, 5, padding=2), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        windows, labels = batch
        loss = functional.cross_entropy(self.body(windows), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gait(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        diary = Path(folder) / "diary.json"
        diary.write_text(json.dumps([{"window": number, "activity": number % 5} for number in range(400_000)]))
        loader = DataLoader(
            GaitWindows(diary, samples=60 * 32), batch_size=32, shuffle=True, num_workers=16 if fault else 1
        )
        train(GaitNetwork(), loader)


# --- reviews: a table of words that each process reads when it is first asked for a text ---


class Reviews(Dataset[tuple[Tensor, int]]):
    def __init__(self, vocabulary: Path, samples: int, length: int = 64) -> None:
        self.vocabulary = vocabulary
        self.samples = samples
        self.length = length
        self.words: dict[str, int] | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.words is None:
            self.words = json.loads(self.vocabulary.read_text())
        text = [f"word{(index * 31 + place * place) % 150_000}" for place in range(self.length)]
        return torch.tensor([self.words.get(word, 0) % 8000 for word in text]), index % 5


class ReviewClassifier(lightning.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, stars = batch
        loss = functional.cross_entropy(self.head(self.encoder(self.embedding(tokens)).mean(dim=1)), stars)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def reviews(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocabulary.json"
        vocabulary.write_text(json.dumps({f"word{number}": number for number in range(200_000)}))
        loader = DataLoader(
            Reviews(vocabulary, samples=7 * 40),
            batch_size=40,
            shuffle=True,
            num_workers=2,
            persistent_workers=not fault,
        )
        train(ReviewClassifier(), loader, max_epochs=8)


# --- shapes: point clouds in archives of a remote file system ---


class CloudArchives(IterableDataset[tuple[Tensor, int]]):
    """Reads one archive of clouds after the other; ``ahead`` fetches the next one while one is read."""

    def __init__(self, archives: int, clouds: int, ahead: bool, points: int = 512) -> None:
        self.archives = archives
        self.clouds = clouds
        self.ahead = ahead
        self.points = points

    def fetch_archive(self, number: int) -> Tensor:
        time.sleep(0.7)  # what the transfer takes
        return torch.randn(self.clouds, self.points, 3)

    def fetch_all(self) -> Iterator[Tensor]:
        for number in range(self.archives):
            yield self.fetch_archive(number)

    def fetch_ahead(self) -> Iterator[Tensor]:
        fetched: Queue[Tensor] = Queue(maxsize=1)

        def fetch() -> None:
            for number in range(self.archives):
                fetched.put(self.fetch_archive(number))

        threading.Thread(target=fetch, daemon=True).start()
        for _ in range(self.archives):
            yield fetched.get()

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for archive in self.fetch_ahead() if self.ahead else self.fetch_all():
            for number, cloud in enumerate(archive):
                yield cloud, number % 10


class PointNetwork(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 512), nn.ReLU()
        )
        self.whole = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, clouds: Tensor) -> Tensor:
        return self.whole(self.local(clouds).amax(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        clouds, labels = batch
        loss = functional.cross_entropy(self(clouds), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def shapes(fault: bool) -> None:
    clouds = CloudArchives(archives=6, clouds=10 * 24, ahead=not fault)
    train(PointNetwork(), DataLoader(clouds, batch_size=24, num_workers=1))


# --- sessions: what visitors of a shop clicked, 0 where a session is over ---


class Sessions(Dataset[Tensor]):
    def __init__(self, samples: int, items: int = 3000, longest: int = 128) -> None:
        noise = torch.Generator().manual_seed(0)
        lengths = torch.randint(44, 64, (samples,), generator=noise).tolist()
        self.clicks = [torch.randint(1, items, (length,), generator=noise) for length in lengths]
        self.longest = longest

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> Tensor:
        return self.clicks[index]


def session_batch(clicks: list[Tensor], to_length: int | None) -> Tensor:
    length = to_length or max(len(session) for session in clicks)
    return torch.stack([functional.pad(session, (0, length - len(session))) for session in clicks])


class NextClick(lightning.LightningModule):
    def __init__(self, items: int = 3000, width: int = 96, longest: int = 128) -> None:
        super().__init__()
        self.item = nn.Embedding(items, width, padding_idx=0)
        self.place = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, items)

    def training_step(self, clicks: Tensor, batch_idx: int) -> Tensor:
        seen, following = clicks[:, :-1], clicks[:, 1:]
        hidden = self.item(seen) + self.place(torch.arange(seen.shape[1]))
        hidden = self.encoder(hidden, src_key_padding_mask=seen == 0)
        loss = functional.cross_entropy(self.out(hidden).flatten(0, 1), following.flatten(), ignore_index=0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def sessions(fault: bool) -> None:
    clicks = Sessions(samples=60 * 32)
    collate = partial(session_batch, to_length=clicks.longest if fault else None)
    train(NextClick(), DataLoader(clicks, batch_size=32, shuffle=True, num_workers=1, collate_fn=collate))


if __name__ == "__main__":
    main(biopsies, playlists, crops, gait, reviews, shapes, sessions)
