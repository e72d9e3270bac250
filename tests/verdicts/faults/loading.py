"""A sample, a file or a shard takes long to read, to decode or to make."""

from __future__ import annotations

import bz2
import copy
import io
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import lightning
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, CLASSES, STEPS, WIDTH, Classifier, Counted, Trained, Vectors, fit, main, one_epoch, quiet
from small_models import BANDS, HalvingClassifier, LeafNet, PictureClassifier, SeriesModel, SoundNet, Tabular


class CompressedVectors(Counted[tuple[Tensor, int]]):
    """Vectors that are decompressed and standardized whenever they are read."""

    def __init__(self, samples: int) -> None:
        numbers = np.random.default_rng(0)
        raw = numbers.integers(0, 8, (256, WIDTH * 320), dtype=np.uint8)
        self.blobs = [zlib.compress(row.tobytes()) for row in raw]
        self.samples = samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.frombuffer(zlib.decompress(self.blobs[index % 256]), dtype=np.uint8)
        scaled = pixels.reshape(WIDTH, 320).astype(np.float32).mean(axis=1)
        standardized = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        return torch.from_numpy(standardized), index % CLASSES


def slow_decode(fault: bool) -> None:
    """Each sample is decompressed in each epoch; healthy: once, before the training."""
    dataset: Dataset = CompressedVectors(STEPS * BATCH)
    torch.set_num_threads(1)  # the other core decodes
    if not fault:
        samples = [dataset[index] for index in range(256)]
        dataset = torch.utils.data.ConcatDataset([samples] * STEPS)  # type: ignore[list-item]  # a list is a dataset
    fit(Classifier(), DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True))


class BiopsyTiles(Counted[tuple[Tensor, int]]):
    """PNG tiles of one side, given to the network with 96 pixels."""

    def __init__(self, folder: Path, side: int, samples: int, files: int = 24) -> None:
        self.paths = [folder / f"tile_{number:03}.png" for number in range(files)]
        self.samples = samples
        noise = np.random.default_rng(0)
        for path in self.paths:
            coarse = noise.integers(0, 255, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = Image.open(self.paths[index % len(self.paths)]).convert("RGB")
        if picture.size != (96, 96):
            picture = picture.resize((96, 96), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255)
        return pixels, index % 8


def biopsies(fault: bool) -> None:
    """Large PNG files are decoded and resized in each epoch; healthy: files of the size that is needed."""
    with tempfile.TemporaryDirectory() as folder:
        tiles = BiopsyTiles(Path(folder), side=640 if fault else 96, samples=50 * 8)
        one_epoch().fit(PictureClassifier(), DataLoader(tiles, batch_size=8, shuffle=True, num_workers=1))


SIDE = 256
CROP = 96


def photos(count: int) -> list[bytes]:
    """JPEG files of smooth pictures with some noise, as a phone camera writes them."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(picture, dtype=np.int16) + rng.integers(-12, 12, (SIDE, SIDE, 3)), 0, 255)
        buffer = io.BytesIO()
        Image.fromarray(noisy.astype(np.uint8)).save(buffer, format="JPEG", quality=92)
        files.append(buffer.getvalue())
    return files


def to_pixels(file: bytes) -> np.ndarray:
    picture = Image.open(io.BytesIO(file)).convert("RGB").resize((CROP, CROP), Image.Resampling.BILINEAR)
    return np.asarray(picture)


class LeafDataset(Dataset):
    """Leaves and their disease."""

    def __init__(self, count: int, ready: bool) -> None:
        self.files = photos(count)
        self.pixels = np.stack([to_pixels(file) for file in self.files]) if ready else None
        self.labels = np.random.default_rng(1).integers(0, 12, count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = to_pixels(self.files[index]) if self.pixels is None else self.pixels[index]
        picture = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)
        return picture, int(self.labels[index])


def leaf_photos(fault: bool) -> None:
    """Photos are decoded between steps; healthy: before the training."""
    loader = DataLoader(LeafDataset(512, ready=not fault), batch_size=32, shuffle=True, drop_last=True)
    quiet(48).fit(LeafNet(), loader)


def compress_plate(plate: np.ndarray) -> bytes:
    """Differences along each row, then zlib: as the survey stores its plates."""
    return zlib.compress(np.diff(plate, axis=1, prepend=np.int16(0)).astype(np.int16).tobytes(), 6)


def decode_plate(blob: bytes, side: int) -> np.ndarray:
    """Undo the compression, take the sky away and stretch the faint parts."""
    differences = np.frombuffer(zlib.decompress(blob), dtype=np.int16).reshape(side, side)
    plate = np.cumsum(differences, axis=1, dtype=np.int32).astype(np.float32)
    sky = np.median(plate)
    noise = np.median(np.abs(plate - sky)) + 1e-6
    return np.arcsinh((plate - sky) / (3 * noise)).astype(np.float32)


class GalaxyPlates(Dataset):
    """Galaxies from a survey, kept as the compressed plates of the archive."""

    def __init__(self, count: int, side: int = 128, decode_first: bool = False) -> None:
        rng = np.random.default_rng(0)
        y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
        self.side = side
        self.labels = rng.integers(0, 5, count)
        self.blobs = []
        for label in self.labels:
            stretch = 1 + 0.5 * label
            light = 4000 * np.exp(-8 * np.sqrt(x**2 + (stretch * y) ** 2))
            self.blobs.append(compress_plate((light + rng.normal(200, 12, (side, side))).astype(np.int16)))
        self.plates = [decode_plate(blob, side) for blob in self.blobs] if decode_first else None

    def __len__(self) -> int:
        return len(self.blobs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        plate = decode_plate(self.blobs[index], self.side) if self.plates is None else self.plates[index]
        return torch.from_numpy(plate)[None], int(self.labels[index])


def galaxies(fault: bool) -> None:
    """Plates are decompressed whenever they are read; healthy: once."""
    plates = GalaxyPlates(640, decode_first=not fault)
    loader = DataLoader(plates, batch_size=48, shuffle=True, drop_last=True)
    quiet(60).fit(HalvingClassifier(1, (20, 40, 56), 5), loader)


class Slides(Counted[tuple[Tensor, int]]):
    """Augmented crops of slides. Fault: slides are augmented, then cropped; healthy: crops are augmented."""

    def __init__(self, samples: int, side: int, crop: int, *, fault: bool) -> None:
        generator = np.random.default_rng(0)
        self.slides = generator.integers(256, size=(24, side, side, 3), dtype=np.uint8)
        self.labels = generator.integers(4, size=24)
        self.samples = samples
        self.crop = crop
        self.fault = fault

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = index % len(self.slides)
        image = Image.fromarray(self.slides[place])
        image = self.cropped(self.augmented(image)) if self.fault else self.augmented(self.cropped(image))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.float().div(255), int(self.labels[place])

    def augmented(self, image: Image.Image) -> Image.Image:
        blurred = image.filter(ImageFilter.GaussianBlur(float(torch.rand(())) + 0.5))
        return ImageEnhance.Color(blurred).enhance(0.8 + 0.4 * float(torch.rand(())))

    def cropped(self, image: Image.Image) -> Image.Image:
        left, top = torch.randint(image.width - self.crop, (2,)).tolist()
        return image.crop((left, top, left + self.crop, top + self.crop))


class Tissue(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """A convolutional network that tells kinds of tissue."""

    def __init__(self, width: int = 32, kinds: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, kinds),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, kinds = batch
        loss = functional.cross_entropy(self.layers(pixels), kinds)
        self.log("loss", loss)
        return loss


def blur_before_crop(fault: bool) -> None:
    """Blur and colors are changed on the whole slide, of which 4% is kept; healthy: on the crop alone."""
    slides = Slides(60 * 24, 480, 96, fault=fault)
    loader = DataLoader(slides, batch_size=24, shuffle=True, num_workers=1, persistent_workers=True)
    fit(Tissue(), loader, steps=60)


PIECES = "PNBRQKpnbrqk"
ROOK = ((0, 1), (1, 0), (0, -1), (-1, 0))
BISHOP = ((1, 1), (1, -1), (-1, 1), (-1, -1))
RAYS = {"r": ROOK, "b": BISHOP, "q": ROOK + BISHOP}


def random_position(rng: random.Random) -> str:
    """The board part of a FEN line."""
    rows = []
    for _ in range(8):
        row = ""
        empty = 0
        for _ in range(8):
            if rng.random() < 0.35:
                row += (str(empty) if empty else "") + rng.choice(PIECES)
                empty = 0
            else:
                empty += 1
        rows.append(row + (str(empty) if empty else ""))
    return "/".join(rows)


def encode_position(fen: str) -> Tensor:
    """One plane for each kind of piece, and one for the squares that each side attacks along lines."""
    board = [[""] * 8 for _ in range(8)]
    for row, line in enumerate(fen.split("/")):
        column = 0
        for sign in line:
            if sign.isdigit():
                column += int(sign)
            else:
                board[row][column] = sign
                column += 1
    planes = [[[0.0] * 8 for _ in range(8)] for _ in range(14)]
    for row in range(8):
        for column in range(8):
            piece = board[row][column]
            if not piece:
                continue
            planes[PIECES.index(piece)][row][column] = 1.0
            attacked = planes[12 if piece.isupper() else 13]
            for down, right in RAYS.get(piece.lower(), ()):
                r, c = row + down, column + right
                while 0 <= r < 8 and 0 <= c < 8:
                    attacked[r][c] += 1.0
                    if board[r][c]:
                        break
                    r, c = r + down, c + right
    return torch.tensor(planes)


class ChessPositions(Dataset):
    """Positions from games, as FEN lines, with the result."""

    def __init__(self, count: int, encode_first: bool) -> None:
        rng = random.Random(0)
        self.positions = [random_position(rng) for _ in range(count)]
        self.results = [rng.choice((-1.0, 0.0, 1.0)) for _ in range(count)]
        self.planes = [encode_position(fen) for fen in self.positions] if encode_first else None

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        planes = encode_position(self.positions[index]) if self.planes is None else self.planes[index]
        return planes, torch.tensor([self.results[index]])


class ValueNet(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions over the board and a value between -1 and 1."""

    def __init__(self, width: int = 80, depth: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(14, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 1), nn.Tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        planes, result = batch
        loss = functional.mse_loss(self.net(planes), result)
        self.log("loss", loss)
        return loss


def chess_moves(fault: bool) -> None:
    """Positions are encoded in Python whenever they are read; healthy: once."""
    loader = DataLoader(ChessPositions(128 * 12, encode_first=not fault), batch_size=128, shuffle=True)
    quiet(80).fit(ValueNet(), loader)


SYLLABLES = ("ka", "ro", "min", "ta", "le", "sou", "pe", "dri", "an", "go", "sta", "bu")
ENDINGS = ("", "s", "ed", "ing", "ly")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+")
SUFFIX = re.compile(r"(?:ing|ed|ly|es|s)$")


def write_recipe(rng: random.Random, words: int = 150) -> str:
    made = ("".join(rng.choices(SYLLABLES, k=3)) + rng.choice(ENDINGS) for _ in range(words))
    return " ".join(word.capitalize() if rng.random() < 0.1 else word for word in made)


class Tokenizer:
    """Words without their endings, as numbers."""

    def __init__(self, vocabulary: int = 2000, length: int = 128) -> None:
        stems = (a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES)
        self.numbers = {stem: number for number, stem in enumerate(stems, 1) if number < vocabulary}
        self.length = length

    def __call__(self, text: str) -> Tensor:
        numbers = []
        for word in WORD.findall(text.lower()):
            stem = SUFFIX.sub("", word)
            if stem.isdigit():
                stem = "<number>"
            numbers.append(self.numbers.get(stem, 0))
        return torch.tensor(numbers[: self.length])


class Recipes(Dataset):
    """Recipes with the kitchen that they come from."""

    def __init__(self, count: int, tokenize_once: bool) -> None:
        rng = random.Random(0)
        self.texts = [write_recipe(rng) for _ in range(count)]
        self.kitchens = [rng.randrange(12) for _ in range(count)]
        self.tokenizer = Tokenizer()
        self.tokens = [self.tokenizer(text) for text in self.texts] if tokenize_once else None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens = self.tokenizer(self.texts[index]) if self.tokens is None else self.tokens[index]
        return tokens, self.kitchens[index]


class KitchenModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 96)
        self.convolutions = nn.ModuleList(nn.Conv1d(96, 96, size, padding="same") for size in (3, 5))
        self.head = nn.Linear(192, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, kitchens = batch
        words = self.embedding(tokens).transpose(1, 2)
        features = torch.cat([convolution(words).relu().amax(dim=2) for convolution in self.convolutions], dim=1)
        loss = functional.cross_entropy(self.head(features), kitchens)
        self.log("loss", loss)
        return loss


def cookbook(fault: bool) -> None:
    """Recipes are split into tokens whenever they are read; healthy: once."""
    loader = DataLoader(Recipes(96 * 12, tokenize_once=not fault), batch_size=96, shuffle=True)
    quiet(100).fit(KitchenModel(), loader)


class Purchases:
    """A log of purchases, in the order in which they happened, and the histories of its users."""

    def __init__(self, users: int, items: int, rows: int) -> None:
        numbers = np.random.default_rng(0)
        self.users = numbers.integers(0, users, rows)
        self.items = numbers.integers(1, items, rows)

    def history(self, user: int) -> np.ndarray:
        return self.items[self.users == user]


class GroupedPurchases(Purchases):
    """The same, with the rows of each user side by side."""

    def __init__(self, users: int, items: int, rows: int) -> None:
        super().__init__(users, items, rows)
        order = np.argsort(self.users, kind="stable")
        self.grouped = self.items[order]
        self.bounds = np.searchsorted(self.users[order], np.arange(users + 1))

    def history(self, user: int) -> np.ndarray:
        return self.grouped[self.bounds[user] : self.bounds[user + 1]]


class NextPurchase(Dataset[tuple[Tensor, int]]):
    """The last 24 purchases of a user and the one that follows them."""

    def __init__(self, purchases: Purchases, users: int) -> None:
        self.purchases = purchases
        self.users = users

    def __len__(self) -> int:
        return 40 * self.users

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        recent = self.purchases.history(index % self.users)[-25:]
        row = torch.zeros(24, dtype=torch.long)
        row[: len(recent) - 1] = torch.from_numpy(recent[:-1])
        return row, int(recent[-1])


class Recommender(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """An average of items and a small network that scores all items."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.items = nn.EmbeddingBag(items, 256, padding_idx=0)
        self.user_tower = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.score = nn.Linear(512, items)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        histories, following = batch
        return functional.cross_entropy(self.score(self.user_tower(self.items(histories))), following)


def scanned_histories(fault: bool) -> None:
    """Each sample compares the whole log with its user; healthy: the rows of a user are found by their bounds."""
    users, items = 2000, 1500
    purchases = (Purchases if fault else GroupedPurchases)(users, items, 120_000)
    loader = DataLoader(NextPurchase(purchases, users), batch_size=256, shuffle=True)
    fit(Recommender(items), loader, steps=120)


class Load(Counted[tuple[Tensor, Tensor]]):
    """Windows of a server's measurements, standardized, and the values that follow.

    Fault: mean and deviation of the whole series for each window; healthy: computed once.
    """

    def __init__(self, samples: int, past: int = 96, future: int = 12, *, fault: bool) -> None:
        self.fault = fault
        self.samples = samples
        self.past = past
        self.future = future
        self.series = torch.randn(10_000, 6).cumsum(dim=0)
        self.mean, self.deviation = self.statistics()

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.series.mean(dim=0), self.series.std(dim=0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        mean, deviation = self.statistics() if self.fault else (self.mean, self.deviation)
        window = (self.series[index : index + self.past + self.future] - mean) / deviation
        return window[: self.past], window[self.past :]


class Forecast(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Predicts the next values of a series with convolutions over time."""

    def __init__(self, channels: int = 6, width: int = 64, future: int = 12) -> None:
        super().__init__()
        self.future = future
        self.layers = nn.Sequential(
            nn.Conv1d(channels, width, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=4, dilation=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, padding=8, dilation=4),
            nn.GELU(),
        )
        self.head = nn.Linear(width, future * channels)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        hidden = self.layers(past.transpose(1, 2))[:, :, -1]
        loss = functional.l1_loss(self.head(hidden).view_as(future), future)
        self.log("loss", loss)
        return loss


def statistics_each_item(fault: bool) -> None:
    """Each sample computes the mean and deviation of the whole series; healthy: ``__init__`` does, once."""
    loader = DataLoader(Load(9_800, fault=fault), batch_size=64, shuffle=True)
    fit(Forecast(), loader, steps=120)


class MilkSpectra(Dataset[tuple[Tensor, Tensor]]):
    """Spectra without their baseline, which is fitted with broad bumps over the wavelengths."""

    def __init__(self, samples: int, once: bool) -> None:
        self.wavelengths = np.linspace(900, 1700, 512)
        self.spectra = np.random.default_rng(1).normal(size=(samples, 512)).astype(np.float32)
        self.content = torch.randint(2, (samples,))
        self.baseline = self.solver() if once else None

    def solver(self) -> tuple[np.ndarray, np.ndarray]:
        centers = np.linspace(900, 1700, 16)
        bumps = np.exp(-(((self.wavelengths[:, None] - centers) / 40) ** 2)).astype(np.float32)
        return bumps, np.linalg.pinv(bumps)

    def __len__(self) -> int:
        return len(self.spectra)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        bumps, inverse = self.baseline if self.baseline is not None else self.solver()
        spectrum = self.spectra[index]
        return torch.from_numpy(spectrum - bumps @ (inverse @ spectrum))[None], self.content[index]


def milk_spectra(fault: bool) -> None:
    """Each sample computes the same pseudo-inverse again; healthy: once."""
    milk = MilkSpectra(6400, once=not fault)
    quiet(100).fit(SeriesModel(1, 192, 2, stride=2), DataLoader(milk, batch_size=64, shuffle=True))


KINDS = 16
Molecule = dict[str, Tensor]


class Molecules(Dataset[tuple[Molecule, Tensor]]):
    """Molecules with one masked atom, whose kind is to be predicted.

    Fault: a molecule is copied deeply before its atom is masked; healthy: only the atoms' kinds are copied.
    """

    def __init__(self, samples: int, atoms: int = 32, *, fault: bool) -> None:
        self.fault = fault
        self.atoms = atoms
        self.molecules = [self.molecule() for _ in range(samples)]

    def molecule(self) -> Molecule:
        bonded = (torch.rand(self.atoms, self.atoms) < 0.08).float()
        return {
            "kinds": torch.randint(KINDS, (self.atoms,)),
            "charges": torch.randn(self.atoms),
            "positions": torch.randn(self.atoms, 3),
            "bonded": bonded,
            "lengths": torch.rand(self.atoms, self.atoms),
        }

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> tuple[Molecule, Tensor]:
        if self.fault:
            molecule = copy.deepcopy(self.molecules[index])
        else:
            molecule = dict(self.molecules[index])
            molecule["kinds"] = molecule["kinds"].clone()
        kind = molecule["kinds"][0].clone()
        molecule["kinds"][0] = KINDS
        return molecule, kind


class MaskedAtoms(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Message passing between the atoms of a molecule."""

    def __init__(self, width: int = 96, rounds: int = 2) -> None:
        super().__init__()
        self.kinds = nn.Embedding(KINDS + 1, width)
        self.place = nn.Linear(4, width)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.head = nn.Linear(width, KINDS)

    def training_step(self, batch: tuple[Molecule, Tensor], batch_idx: int) -> Tensor:
        molecule, kind = batch
        place = torch.cat((molecule["positions"], molecule["charges"].unsqueeze(-1)), dim=-1)
        atoms = self.kinds(molecule["kinds"]) + self.place(place)
        strength = molecule["bonded"] * torch.exp(-molecule["lengths"])
        for message in self.messages:
            atoms = atoms + functional.relu(strength @ message(atoms))
        loss = functional.cross_entropy(self.head(atoms[:, 0]), kind)
        self.log("loss", loss)
        return loss


def copied_samples(fault: bool) -> None:
    """``copy.deepcopy`` of each molecule, to change one atom; healthy: the one changed tensor is copied."""
    loader = DataLoader(Molecules(60 * 128, fault=fault), batch_size=128, shuffle=True)
    fit(MaskedAtoms(), loader, steps=120)


class Weighted(Sampler[int]):
    """Samples by weight: one draw from all weights per sample, or all draws at once."""

    def __init__(self, samples: int, slow: bool) -> None:
        self.weights = torch.rand(20_000)
        self.samples = samples
        self.slow = slow

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        if not self.slow:
            yield from (torch.multinomial(self.weights, self.samples, replacement=True) % self.samples).tolist()
            return
        for _ in range(self.samples):
            yield int(torch.multinomial(self.weights, 1)) % self.samples


def slow_sampler(fault: bool) -> None:
    """The sampler draws each index from all weights; healthy: all indices of an epoch at once."""
    sampler = Weighted(STEPS * BATCH, slow=fault)
    fit(Tabular(), DataLoader(Vectors(), batch_size=BATCH, sampler=sampler))


Transition = tuple[Tensor, Tensor, Tensor, Tensor]


class ReplayMemory:
    """A ring of transitions of an agent. Fault: each draw permutes all of them; healthy: it draws a batch of places."""

    def __init__(self, capacity: int, state: int, actions: int, *, fault: bool) -> None:
        self.fault = fault
        self.generator = np.random.default_rng(0)
        self.states = self.generator.standard_normal((capacity + 1, state), dtype=np.float32)
        self.actions = self.generator.integers(actions, size=capacity)
        self.rewards = self.generator.standard_normal(capacity, dtype=np.float32)

    def draw(self, count: int) -> Transition:
        size = len(self.actions)
        if self.fault:
            places = np.random.choice(size, count, replace=False)  # noqa: NPY002 the fault
        else:
            places = self.generator.choice(size, count, replace=False)
        chosen = (self.states[places], self.actions[places], self.rewards[places], self.states[places + 1])
        states, actions, rewards, following = (torch.from_numpy(part) for part in chosen)
        return states, actions, rewards, following


class Experience(IterableDataset[Transition]):
    """Endless batches out of the replay memory."""

    def __init__(self, memory: ReplayMemory, batch: int) -> None:
        self.memory = memory
        self.batch = batch

    def __iter__(self) -> Iterator[Transition]:
        while True:
            yield self.memory.draw(self.batch)


class DeepQ(lightning.LightningModule):
    """Deep Q-learning with a target network."""

    def __init__(self, state: int, actions: int, width: int = 768) -> None:
        super().__init__()
        self.online = self.network(state, actions, width)
        self.target = self.network(state, actions, width).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def network(self, state: int, actions: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(state, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions)
        )

    def training_step(self, batch: Transition, batch_idx: int) -> Tensor:
        states, actions, rewards, following = batch
        values = self.online(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            best = self.target(following).amax(dim=1)
        loss = functional.smooth_l1_loss(values, rewards + 0.99 * best)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step % 50 == 0:
            self.target.load_state_dict(self.online.state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.online.parameters(), lr=1e-3)


def permuting_replay(fault: bool) -> None:
    """The replay memory shuffles a million places for each batch; healthy: it draws only as many as it needs."""
    memory = ReplayMemory(1_000_000, 24, 6, fault=fault)
    fit(DeepQ(24, 6), DataLoader(Experience(memory, 1024), batch_size=None), steps=120)


class Consistency(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Semi-supervised training on sensor readings.

    Fault: each step makes a new iterator over the unlabeled readings; healthy: one iterator serves all steps.
    """

    def __init__(self, unlabeled: DataLoader, *, fault: bool, channels: int = 16, width: int = 640) -> None:
        super().__init__()
        self.unlabeled = unlabeled
        self.fault = fault
        self.readings = iter(unlabeled)
        self.layers = nn.Sequential(
            nn.Linear(channels, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
        )

    def more(self) -> Tensor:
        if self.fault:
            (readings,) = next(iter(self.unlabeled))
        else:
            (readings,) = next(self.readings)
        found: Tensor = readings
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        readings, states = batch
        extra = self.more()
        loss = functional.cross_entropy(self.layers(readings), states)
        weak = self.layers(extra + 0.01 * torch.randn_like(extra)).softmax(dim=1).detach()
        strong = self.layers(extra + 0.1 * torch.randn_like(extra))
        loss = loss + functional.cross_entropy(strong, weak)
        self.log("loss", loss)
        return loss


def fresh_iterator(fault: bool) -> None:
    """``next(iter(loader))`` in each step shuffles all unlabeled readings; healthy: the iterator is kept."""
    unlabeled = DataLoader(TensorDataset(torch.randn(600_000, 16)), batch_size=512, shuffle=True)
    labeled = TensorDataset(torch.randn(100 * 512, 16), torch.randint(5, (100 * 512,)))
    fit(Consistency(unlabeled, fault=fault), DataLoader(labeled, batch_size=512, shuffle=True), steps=100)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Scaled windows of a demand curve and the values that follow."""

    def __init__(self, demand: NDArray[np.float32], length: int, ahead: int) -> None:
        self.pairs = []
        for start in range(len(demand) - length - ahead):
            window = demand[start : start + length + ahead]
            scaled = (window - window.mean()) / (window.std() + 1e-6)
            self.pairs.append((torch.from_numpy(scaled[:length]), torch.from_numpy(scaled[length:])))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


class Demand(lightning.LightningDataModule):
    """Windows of electricity demand. Fault: made anew for each epoch; healthy: made once, in ``setup``."""

    def __init__(self, *, fault: bool, hours: int = 9000, batch: int = 512) -> None:
        super().__init__()
        self.fault = fault
        self.hours = hours
        self.batch = batch

    def setup(self, stage: str) -> None:
        hours = np.arange(self.hours, dtype=np.float32)
        noise = np.random.default_rng(0).standard_normal(self.hours, dtype=np.float32)
        self.demand = (np.sin(hours / 24) + 0.2 * noise).astype(np.float32)
        if not self.fault:
            self.windows = Windows(self.demand, 168, 24)

    def train_dataloader(self) -> DataLoader:
        windows = Windows(self.demand, 168, 24) if self.fault else self.windows
        return DataLoader(windows, batch_size=self.batch, shuffle=True, drop_last=True)


class Forecaster(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Residual blocks that forecast a day from the last week and pass on what they do not explain, as N-BEATS does."""

    def __init__(self, blocks: int = 4, width: int = 384) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(168, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 168 + 24)
            )
            for _ in range(blocks)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rest, future = batch
        forecast = torch.zeros_like(future)
        for block in self.blocks:
            explained, part = block(rest).split((168, 24), dim=1)
            rest = rest - explained
            forecast = forecast + part
        loss = functional.mse_loss(forecast, future)
        self.log("loss", loss)
        return loss


def rebuilt_windows(fault: bool) -> None:
    """The loader is reloaded each epoch and makes the same windows anew; healthy: windows are made once."""
    quiet(102, reload_dataloaders_every_n_epochs=1 if fault else 0).fit(Forecaster(), datamodule=Demand(fault=fault))


class Weather(lightning.LightningDataModule):
    """Hourly measurements that are read from a text file of a station."""

    file = Path("station.csv")

    def prepare_data(self) -> None:
        rows = np.random.default_rng(0).normal(size=(3001, 40))
        self.file.write_text("\n".join(",".join(f"{value:.4f}" for value in row) for row in rows))

    def train_dataloader(self) -> DataLoader:
        lines = self.file.read_text().splitlines()
        rows = torch.tensor([[float(value) for value in line.split(",")] for line in lines])
        standardized = (rows - rows.mean(0)) / rows.std(0)
        return DataLoader(TensorDataset(standardized[:-1], standardized[1:]), batch_size=500, shuffle=True)


class Nowcast(Trained, optimizer=torch.optim.Adam, lr=1e-3, fused=True):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(40, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 40))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        return functional.mse_loss(self.network(before), after)


def reread_station(fault: bool) -> None:
    """`reload_dataloaders_every_n_epochs=1` parses the file anew for each epoch of 6 batches; healthy: once."""
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1 if fault else 0}
    fit(Nowcast(), Weather(), steps=150, **options)  # type: ignore[arg-type]  # a data module


SENSORS, LENGTH = 18, 160


class Recordings(Dataset[Tensor]):
    """Short recordings of sensors, from a file of each or from one for all."""

    recordings = 300

    def __init__(self, folder: Path, separate: bool) -> None:
        folder.mkdir()
        values = np.random.default_rng(2).normal(size=(self.recordings, SENSORS, LENGTH)).astype(np.float32)
        self.folder = folder
        self.separate = separate
        np.save(folder / "all.npy", values)
        for number, recording in enumerate(values if separate else ()):
            for sensor, series in enumerate(recording):
                np.save(folder / f"{number:05}-{sensor}.npy", series)
        self.all = np.load(folder / "all.npy", mmap_mode="r")

    def __len__(self) -> int:
        return 64 * 80

    def __getitem__(self, index: int) -> Tensor:
        number = index % self.recordings
        if not self.separate:
            return torch.from_numpy(self.all[number].copy())
        return torch.from_numpy(np.stack([self.part(number, sensor) for sensor in range(SENSORS)]))

    def part(self, number: int, sensor: int) -> np.ndarray:
        return np.load(self.folder / f"{number:05}-{sensor}.npy")


class Denoiser(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """A convolutional autoencoder of series."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((SENSORS, 64, 64, 64, SENSORS)):
            layers += [nn.Conv1d(before, after, 5, padding=2), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.layers(batch + 0.1 * torch.randn_like(batch)), batch)
        self.log("mse", loss)
        return loss


def scattered_files(fault: bool) -> None:
    """A worker opens and parses 18 files per sample; healthy: it reads from one memory map."""
    torch.set_num_threads(1)  # the other core reads
    recordings = Recordings(Path("recordings"), separate=fault)
    loader = DataLoader(recordings, batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    fit(Denoiser(), loader, steps=70)


class Shards(IterableDataset[tuple[Tensor, int]]):
    """Vectors in shards of 8 batches; a remote shard takes a while to open."""

    def __init__(self, remote: bool) -> None:
        self.remote = remote
        self.samples = Vectors(8)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            self.open_shard()
            for index in range(len(self.samples)):
                yield self.samples[index]

    def open_shard(self) -> None:
        if self.remote:
            time.sleep(0.4)


def slow_shard(fault: bool) -> None:
    """Each 8th batch waits for its shard; healthy: shards are in memory."""
    fit(Classifier(), DataLoader(Shards(remote=fault), batch_size=BATCH))


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


class PointNetwork(Trained, optimizer=torch.optim.Adam, lr=1e-3):
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


def shapes(fault: bool) -> None:
    """Each 10th batch waits for the next archive of a remote file system; healthy: it is fetched ahead."""
    clouds = CloudArchives(archives=6, clouds=10 * 24, ahead=not fault)
    one_epoch().fit(PointNetwork(), DataLoader(clouds, batch_size=24, num_workers=1))


class StationFiles(Dataset):
    """Traces of earthquakes in one file for each station, read in their order; keeps the file that is in use."""

    def __init__(self, folder: Path, files: int, traces: int) -> None:
        self.folder, self.files, self.traces = folder, files, traces
        self.opened = -1
        self.station = np.empty(0)

    def __len__(self) -> int:
        return self.files * self.traces

    def read(self, number: int) -> np.ndarray:
        packed = self.folder / f"station_{number}.bz2"
        if packed.exists():
            return np.frombuffer(bz2.decompress(packed.read_bytes()), dtype=np.int16).reshape(self.traces, 1, -1)
        return np.load(self.folder / f"station_{number}.npy", mmap_mode="r")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number, row = divmod(index, self.traces)
        if number != self.opened:
            self.station = self.read(number)
            self.opened = number
        return torch.from_numpy(self.station[row] / np.float32(1000)), index % 3


def record_stations(folder: Path, files: int, traces: int, samples: int, packed: bool) -> None:
    """Write the files of the stations; all of them have seen the same earthquakes."""
    swarm = np.random.default_rng(0).normal(0, 300, (traces, 1, samples)).astype(np.int16)
    first = folder / ("station_0.bz2" if packed else "station_0.npy")
    if packed:
        first.write_bytes(bz2.compress(swarm.tobytes(), 1))
    else:
        np.save(first, swarm)
    for number in range(1, files):
        shutil.copy(first, folder / f"station_{number}{first.suffix}")


def seismic_traces(fault: bool) -> None:
    """Each 20th batch waits until the file of a station is decompressed; healthy: files are not packed."""
    files, traces, samples = 6, 64 * 20, 3000
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        record_stations(folder, files, traces, samples, packed=fault)
        loader = DataLoader(StationFiles(folder, files, traces), batch_size=64)
        quiet(20 * files).fit(SeriesModel(1, 64, 3), loader)


class BirdArchive(Dataset):
    """Frames of field recordings, one archive per evening; consecutive items lie in the same archive."""

    def __init__(self, folder: Path, evenings: int, clips: int, packed: bool) -> None:
        self.clips = clips
        self.packed = packed
        self.paths = []
        rng = np.random.default_rng(5)
        frames = rng.standard_normal((clips, 100, BANDS), dtype=np.float32)
        first = folder / f"evening{'.npz' if packed else '.npy'}"
        if packed:
            np.savez_compressed(first, frames=frames, raw=rng.integers(-90, 90, (clips, 48000)).astype(np.int16))
        else:
            np.save(first, frames)
        for evening in range(evenings):
            self.paths.append(Path(shutil.copy(first, folder / f"{evening:03d}{first.suffix}")))
        self.current = -1
        self.frames: Any = None

    def __len__(self) -> int:
        return self.clips * len(self.paths)

    def open_evening(self, evening: int) -> None:
        if self.packed:
            with np.load(self.paths[evening]) as archive:
                self.frames = archive["frames"]
                self.raw = archive["raw"]
        else:
            self.frames = np.load(self.paths[evening], mmap_mode="r")
        self.current = evening

    def __getitem__(self, index: int) -> dict[str, Any]:
        evening, clip = divmod(index, self.clips)
        if evening != self.current:
            self.open_evening(evening)
        return {"frames": torch.from_numpy(self.frames[clip].copy()), "lengths": 100, "label": index % 20}


def bird_calls(fault: bool) -> None:
    """Each 10th batch waits until the archive of an evening is unpacked; healthy: archives are not packed."""
    with tempfile.TemporaryDirectory() as folder:
        data = BirdArchive(Path(folder), evenings=6, clips=10 * 32, packed=fault)
        quiet(60).fit(SoundNet(width=128), DataLoader(data, batch_size=32))


if __name__ == "__main__":
    main(
        slow_decode,
        biopsies,
        leaf_photos,
        galaxies,
        blur_before_crop,
        chess_moves,
        cookbook,
        scanned_histories,
        statistics_each_item,
        milk_spectra,
        copied_samples,
        slow_sampler,
        permuting_replay,
        fresh_iterator,
        rebuilt_windows,
        reread_station,
        scattered_files,
        slow_shard,
        shapes,
        seismic_traces,
        bird_calls,
    )
