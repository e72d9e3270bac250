"""Worker processes of a loader: none, too few, too many, started in each epoch, or waiting for a lock."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
import zlib
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, CLASSES, WIDTH, Classifier, Counted, Trained, Vectors, fit, main, one_epoch, quiet
from small_models import BANDS, HalvingClassifier, PictureClassifier, Regressor, SeriesModel, SoundNet, Unit


class StoredVectors(Vectors):
    """Vectors on a network disk: a read waits and takes hardly any CPU."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.0001)
        return super().__getitem__(index)


def no_workers(fault: bool) -> None:
    """Reads happen between steps; healthy: in workers, during steps."""
    workers: dict[str, Any] = {} if fault else {"num_workers": 1, "persistent_workers": True}
    fit(Classifier(), DataLoader(StoredVectors(), batch_size=BATCH, **workers))


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
    """Chips are fetched from a store between steps; healthy: by two workers, during steps."""
    chips = SatelliteChips(ObjectStore(latency=0.004), samples=60 * 16)
    one_epoch().fit(PictureClassifier(channels=4), DataLoader(chips, batch_size=16, num_workers=0 if fault else 2))


class RemoteKeywords(Dataset):
    """One-second clips that the file server of the lab delivers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.window = np.hanning(400).astype(np.float32)

    def __len__(self) -> int:
        return self.count

    def receive(self, index: int) -> np.ndarray:
        time.sleep(0.004)  # the way to the server and back
        return np.random.default_rng(index).standard_normal(8000, dtype=np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        wave = self.receive(index)
        frames = np.lib.stride_tricks.sliding_window_view(wave, 400)[::160] * self.window
        power = np.abs(np.fft.rfft(frames, axis=1))[:, :200].reshape(len(frames), BANDS, 5).mean(axis=2)
        return {
            "frames": torch.from_numpy(np.log1p(power).astype(np.float32)),
            "lengths": len(frames),
            "label": index % 20,
        }


def keyword_clips(fault: bool) -> None:
    """One worker waits for remote clips; healthy: four wait at the same time."""
    loader = DataLoader(RemoteKeywords(32 * 60), batch_size=32, num_workers=1 if fault else 4)
    quiet(60).fit(SoundNet(width=256), loader)


class ReefArchive(Dataset):
    """Photos of a reef in a remote archive, which needs a while to answer each request."""

    def __init__(self, count: int, latency: float = 0.0045) -> None:
        self.count = count
        self.latency = latency

    def __len__(self) -> int:
        return self.count

    def download(self, index: int) -> np.ndarray:
        time.sleep(self.latency)
        return np.full((3, 64, 64), index % 251, dtype=np.uint8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        photo = self.download(index)
        return torch.from_numpy(photo).float() / 255, index % 4


def coral_photos(fault: bool) -> None:
    """One worker waits for downloads; healthy: three wait at the same time."""
    workers = 1 if fault else 3
    loader = DataLoader(ReefArchive(32 * 60), batch_size=32, shuffle=True, num_workers=workers)
    quiet(60).fit(HalvingClassifier(3, (64, 128, 160), 4), loader)


class RemoteStore:
    """Answers in a millisecond, however many clients ask."""

    def get(self, key: int) -> np.ndarray:
        time.sleep(1e-3)
        return np.full((3, 16, 16), key % 10, dtype=np.float32)


class Thumbnails(Dataset[Any]):
    """Images of a store, asked for one after another."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 128 * 80

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.store.get(index), index % 10


class Patches(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """A mixer of 16 patches of 48 numbers."""

    def __init__(self, width: int = 192, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.across = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.within = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        patches = self.embed(images).flatten(2)
        for across, within in zip(self.across, self.within, strict=True):
            patches = patches + across(patches)
            patches = patches + within(patches.mT).mT
        return functional.cross_entropy(self.head(patches.mean(2)), labels)


def lone_worker(fault: bool) -> None:
    """One worker waits for a remote store longer than a step takes; healthy: four wait at the same time."""
    torch.set_num_threads(1)
    workers = 1 if fault else 4
    loader = DataLoader(Thumbnails(RemoteStore()), batch_size=128, num_workers=workers, persistent_workers=True)
    fit(Patches(), loader, steps=60)


class Compressed(Counted[tuple[Tensor, int]]):
    """Vectors that are decompressed when they are read: moderate work."""

    def __init__(self, samples: int) -> None:
        raw = np.random.default_rng(0).integers(0, 8, (256, WIDTH * 64), dtype=np.uint8)
        self.blobs = [zlib.compress(row.tobytes()) for row in raw]
        self.samples = samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.frombuffer(zlib.decompress(self.blobs[index % 256]), dtype=np.uint8)
        return torch.from_numpy(pixels.reshape(WIDTH, 64).astype(np.float32).mean(axis=1)), index % CLASSES


def many_workers(fault: bool) -> None:
    """16 workers read the whole epoch ahead and take the CPU from the training; healthy: 1 worker."""
    torch.set_num_threads(1)
    workers = 16 if fault else 1
    loader = DataLoader(Compressed(500 * BATCH), batch_size=BATCH, num_workers=workers, prefetch_factor=32)
    fit(Classifier(), loader, steps=45)


class GaitWindows(Counted[tuple[Tensor, int]]):
    """Windows of six channels, stretched in time and with noise."""

    def __init__(self, diary: Path, samples: int, length: int = 512) -> None:
        self.diary = diary
        self.entries: np.ndarray | None = None
        self.noise = np.random.default_rng(0)
        self.windows = np.random.default_rng(0).standard_normal((256, 6, length)).astype(np.float32)
        self.samples = samples

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


class GaitNetwork(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
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


def gait(fault: bool) -> None:
    """16 workers start, and each parses a file of 400,000 entries; healthy: 1 worker."""
    with tempfile.TemporaryDirectory() as folder:
        diary = Path(folder) / "diary.json"
        diary.write_text(json.dumps([{"window": number, "activity": number % 5} for number in range(400_000)]))
        loader = DataLoader(
            GaitWindows(diary, samples=60 * 32), batch_size=32, shuffle=True, num_workers=16 if fault else 1
        )
        one_epoch().fit(GaitNetwork(), loader)


class MeterWeeks(Dataset):
    """Weeks of some houses: 8 circuits, a value each quarter of an hour."""

    def __init__(self, count: int) -> None:
        self.weeks = torch.randn(count, 8, 672)
        self.kinds = torch.randint(5, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.weeks[index], self.kinds[index]


def smart_meters(fault: bool) -> None:
    """16 workers for cheap samples, on few cores; healthy: none."""
    workers = 16 if fault else 0
    loader = DataLoader(MeterWeeks(128 * 25), batch_size=128, shuffle=True, num_workers=workers)
    quiet(100).fit(SeriesModel(8, 64, 5), loader)


class Clips(Dataset):
    """Clips of recordings, which a process synthesizes before its first clip."""

    def __init__(self, clips: int) -> None:
        self.clips = clips
        self.recordings: Tensor | None = None

    def __len__(self) -> int:
        return self.clips

    def synthesize(self) -> Tensor:
        time = torch.linspace(0, 20, 160_000)
        pitches = torch.linspace(80, 400, 64)[:, None]
        return torch.sin(time * pitches) * torch.exp(-(time % 0.5)) + 0.1 * torch.randn(64, 160_000)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.recordings is None:
            self.recordings = self.synthesize()
        start = (index * 37) % 150_000
        clip = self.recordings[index % 64, start : start + 4096]
        return (clip - clip.mean()) / clip.std(), index % 64


class Speakers(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.enter = nn.Linear(128, width)
        self.units = nn.Sequential(*(Unit(width) for _ in range(3)))
        self.leave = nn.Linear(width, 64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        clips, speakers = batch
        hidden = self.units(self.enter(clips.unflatten(1, (32, 128))))
        return functional.cross_entropy(self.leave(hidden.mean(dim=1)), speakers)


def voices(fault: bool) -> None:
    """12 workers on few cores; healthy: 1 worker."""
    workers = 12 if fault else 1
    loader = DataLoader(Clips(60 * 32), batch_size=32, shuffle=True, num_workers=workers, persistent_workers=True)
    fit(Speakers(), loader, steps=55)


def restarted_workers(fault: bool) -> None:
    """Epochs of 5 batches, each with new worker processes; healthy: the workers persist."""
    torch.set_num_threads(1)
    loader = DataLoader(Vectors(5), batch_size=BATCH, num_workers=2, persistent_workers=not fault)
    fit(Classifier(depth=2), loader, steps=80)


class Reviews(Counted[tuple[Tensor, int]]):
    def __init__(self, vocabulary: Path, samples: int, length: int = 64) -> None:
        self.vocabulary = vocabulary
        self.samples = samples
        self.length = length
        self.words: dict[str, int] | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.words is None:
            self.words = json.loads(self.vocabulary.read_text())
        text = [f"word{(index * 31 + place * place) % 150_000}" for place in range(self.length)]
        return torch.tensor([self.words.get(word, 0) % 8000 for word in text]), index % 5


class ReviewClassifier(Trained, optimizer=torch.optim.SGD, lr=0.05):
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


def reviews(fault: bool) -> None:
    """Each epoch starts new workers, which parse a vocabulary again; healthy: the workers persist."""
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
        one_epoch(max_epochs=8).fit(ReviewClassifier(), loader)


class PianoRolls(Dataset):
    """Some bars of piano music each: 88 keys x 96 steps, and the composer."""

    def __init__(self, count: int) -> None:
        self.rolls = (torch.rand(count, 88, 96) < 0.05).float()
        self.composers = torch.randint(6, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.composers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rolls[index], self.composers[index]


class ComposerModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions along the time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(88, 128, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(128, 128, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(128, 6),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rolls, composers = batch
        loss = functional.cross_entropy(self.net(rolls), composers)
        self.log("loss", loss)
        return loss


def piano_rolls(fault: bool) -> None:
    """Epochs of 6 batches, each with new worker processes; healthy: the workers persist."""
    loader = DataLoader(PianoRolls(64 * 6), batch_size=64, shuffle=True, num_workers=2, persistent_workers=not fault)
    quiet(120).fit(ComposerModel(), loader)


class SalesHistory(Dataset):
    """Sales of a shop's articles in the last weeks, in memory."""

    def __init__(self, count: int, weeks: int = 256) -> None:
        self.history = np.random.default_rng(0).random((count, weeks), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.history)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32]:
        row = self.history[index]
        return (row - row.mean()) / (row.std() + 1e-6), row[-1]


def shop_sales(fault: bool) -> None:
    """Epochs of 4 batches, each with new worker processes; healthy: the workers persist."""
    loader = DataLoader(
        SalesHistory(4 * 256), batch_size=256, shuffle=True, num_workers=2, persistent_workers=not fault
    )
    quiet(64).fit(Regressor(256), loader)


class Archive:
    """Rows behind a slow disk. A handle that is shared takes one reader at a time."""

    def __init__(self, guard: Lock | None, seconds: float) -> None:
        self.rows = torch.randn(512, 400)
        self.guard = guard
        self.seconds = seconds

    def read(self, row: int) -> Tensor:
        if self.guard is None:
            return self.seek(row)
        with self.guard:
            return self.seek(row)

    def seek(self, row: int) -> Tensor:
        time.sleep(self.seconds)
        return self.rows[row % len(self.rows)]


class Spectra(Counted[Tensor]):
    """Samples from an archive."""

    def __init__(self, archive: Archive, samples: int) -> None:
        self.archive = archive
        self.samples = samples

    def __getitem__(self, index: int) -> Tensor:
        return self.archive.read(index)


class Autoencoder(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Spectra through a bottleneck and back."""

    def __init__(self, width: int = 1200) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(400, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.up = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 400))

    def training_step(self, spectra: Tensor, batch_idx: int) -> Tensor:
        loss = functional.l1_loss(self.up(self.down(spectra)), spectra)
        self.log("l1", loss)
        return loss


def locked_archive(fault: bool) -> None:
    """Three workers share a handle and its lock, so that one reads at a time; healthy: each has its own handle."""
    torch.set_num_threads(1)
    spectra = Spectra(Archive(multiprocessing.Lock() if fault else None, seconds=4e-4), 256 * 80)
    fit(Autoencoder(), DataLoader(spectra, batch_size=256, num_workers=3, persistent_workers=True), steps=60)


if __name__ == "__main__":
    main(
        no_workers,
        crops,
        keyword_clips,
        coral_photos,
        lone_worker,
        many_workers,
        gait,
        smart_meters,
        voices,
        restarted_workers,
        reviews,
        piano_rolls,
        shop_sales,
        locked_archive,
    )
