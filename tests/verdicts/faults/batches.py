"""Batches: slow to collate or to transfer, mostly padding, or too small."""

from __future__ import annotations

import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    BATCH,
    CLASSES,
    STEPS,
    Classifier,
    Counted,
    LanguageModel,
    Trained,
    Vectors,
    fit,
    main,
    one_epoch,
    quiet,
)
from small_models import BANDS, VOCAB, Block, Corpus, HalvingClassifier, SoundNet, Tabular


def assemble(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Make a batch number by number."""
    rows = [[min(max(value, -3.0), 3.0) for value in features.tolist()] for features, _ in samples]
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def stack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Make a batch with one operation per tensor."""
    features = torch.stack([features for features, _ in samples]).clamp_(-3.0, 3.0)
    return features, torch.tensor([label for _, label in samples])


def slow_collate(fault: bool) -> None:
    """The collate function visits each number in Python; healthy: it stacks tensors."""
    fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH, collate_fn=assemble if fault else stack))


class Vocabulary:
    """Numbers of lower-case words and punctuation marks."""

    pattern = re.compile(r"[a-z]+|[^\sa-z]")

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> Tensor:
        words = (match.group() for match in self.pattern.finditer(text.lower()))
        return torch.tensor([1 + sum(map(ord, word)) % (self.size - 1) for word in words])


class Reviews(lightning.LightningDataModule):
    """Reviews of 45 to 90 words: texts until a batch is made, or numbers from the start."""

    def __init__(self, encode_first: bool) -> None:
        super().__init__()
        self.encode_first = encode_first
        self.vocabulary = Vocabulary(4000)
        self.reviews: list[Any] = []

    def setup(self, stage: str) -> None:
        numbers = np.random.default_rng(1)
        syllables = [f"{first}{second}" for first in "bdgklmnprst" for second in ("a", "en", "ir", "o", "un")]
        for _ in range(2000):
            words = numbers.choice(syllables, (int(numbers.integers(45, 90)), 3))
            text = ", ".join("".join(word).capitalize() for word in words)
            self.reviews.append(self.vocabulary.encode(text) if self.encode_first else text)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.reviews * 9, batch_size=256, collate_fn=self.together)  # type: ignore[arg-type]  # a list

    def together(self, reviews: list[Any]) -> Tensor:
        rows = reviews if self.encode_first else [self.vocabulary.encode(text) for text in reviews]
        return pad_sequence(rows, batch_first=True)


class Sentiment(Trained, optimizer=torch.optim.SGD, lr=0.02):
    """A bag of words and a deep head."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4000, 512, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(512, 1400), nn.GELU(), nn.Linear(1400, 1400), nn.GELU(), nn.Linear(1400, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.head(self.bag(batch))[:, 0]
        return functional.binary_cross_entropy_with_logits(scores, (batch[:, 0] % 2).float())


def raw_texts(fault: bool) -> None:
    """Collating a batch splits its texts into tokens; healthy: `setup` did."""
    data = Reviews(encode_first=not fault)
    fit(Sentiment(), data, steps=70)  # type: ignore[arg-type]  # a Trainer takes a data module, too


class Listens(Counted[tuple[int, int]]):
    def __init__(self, samples: int, users: int = 2000, items: int = 5000) -> None:
        noise = random.Random(0)
        self.users = users
        self.items = items
        self.history = [set(noise.sample(range(items), 80)) for _ in range(users)]
        self.pairs = [(user, noise.choice(list(self.history[user]))) for user in range(users)]
        self.samples = samples

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


class PlaylistRanker(Trained, optimizer=torch.optim.Adam, lr=1e-3):
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


def playlists(fault: bool) -> None:
    """The collate function draws negatives in a Python loop; healthy: all with one call."""
    listens = Listens(samples=60 * 512)
    collate = partial(batch_with_negatives if fault else batch_with_random_items, listens=listens, count=400)
    loader = DataLoader(listens, batch_size=512, shuffle=True, num_workers=1, collate_fn=collate)
    one_epoch().fit(PlaylistRanker(listens.users, listens.items), loader)


VOCABULARY = 800
MASK, PAD, FIRST = 1, 0, 3


class Sentences(Dataset):
    """Token numbers of sentences, all of one length."""

    def __init__(self, count: int, length: int) -> None:
        self.rows = [[random.randrange(FIRST, VOCABULARY) for _ in range(length)] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


class MaskingCollator:
    """BERT's masking: 15% of the tokens are targets; of them 80% become [MASK], 10% another token."""

    def __init__(self, probability: float = 0.15) -> None:
        self.probability = probability

    def __call__(self, rows: list[list[int]]) -> dict[str, Tensor]:
        inputs, labels, weights = [], [], []
        for row in rows:
            tokens, targets, kept = [], [], []
            for position, token in enumerate(row):
                token_id = torch.tensor(token)
                target, weight = torch.tensor(-100), torch.tensor(1.0)
                if random.random() < self.probability:
                    target = token_id.clone()
                    draw = random.random()
                    if draw < 0.8:
                        token_id = torch.tensor(MASK)
                    elif draw < 0.9:
                        token_id = torch.tensor(random.randrange(FIRST, VOCABULARY))
                    weight = torch.tensor(1.0 / (1 + position))
                tokens.append(token_id)
                targets.append(target)
                kept.append(weight)
            inputs.append(torch.stack(tokens))
            labels.append(torch.stack(targets))
            weights.append(torch.stack(kept))
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels), "weights": torch.stack(weights)}


class BatchedMaskingCollator(MaskingCollator):
    """The same on whole tensors."""

    def __call__(self, rows: list[list[int]]) -> dict[str, Tensor]:
        inputs = torch.tensor(rows)
        chosen = torch.rand(inputs.shape) < self.probability
        labels = inputs.masked_fill(~chosen, -100)
        draws = torch.rand(inputs.shape)
        others = torch.randint(FIRST, VOCABULARY, inputs.shape)
        inputs = torch.where(chosen & (draws < 0.8), MASK, inputs)
        inputs = torch.where(chosen & (draws >= 0.8) & (draws < 0.9), others, inputs)
        weights = torch.where(chosen, 1.0 / (1 + torch.arange(inputs.shape[1])), 1.0)
        return {"inputs": inputs, "labels": labels, "weights": weights}


class MaskedLanguageModel(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    def __init__(self, width: int = 112, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.encoder(self.embedding(batch["inputs"])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("mlm", loss)
        return loss


def masked_sentences(fault: bool) -> None:
    """The collate function masks token by token; healthy: the batch at once."""
    collator = MaskingCollator() if fault else BatchedMaskingCollator()
    loader = DataLoader(Sentences(1600, 64), batch_size=32, shuffle=True, collate_fn=collator)
    quiet(50).fit(MaskedLanguageModel(), loader)


SIGNS = ("pulse", "pressure", "oxygen", "breath", "warmth", "sugar")


class Stays(Dataset):
    """One list of hourly measurements for each stay, and whether the patient came back."""

    def __init__(self, count: int, hours: int = 48) -> None:
        rng = np.random.default_rng(0)
        self.stays = []
        for values in rng.normal(size=(count, hours, len(SIGNS))).astype(np.float32):
            self.stays.append({"hours": values, "returned": float(rng.random() < 0.2)})

    def __len__(self) -> int:
        return len(self.stays)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.stays[index]


def collate_by_hour(stays: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Put the measurements into a tensor, hour by hour."""
    hours = len(stays[0]["hours"])
    signs = torch.zeros(len(stays), hours, len(SIGNS))
    returned = torch.zeros(len(stays))
    for row, stay in enumerate(stays):
        returned[row] = stay["returned"]
        for hour, values in enumerate(stay["hours"]):
            signs[row, hour] = torch.tensor([float(value) for value in values])
    return signs, returned


def collate_by_stay(stays: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    signs = torch.from_numpy(np.stack([stay["hours"] for stay in stays]))
    return signs, torch.tensor([stay["returned"] for stay in stays])


class ReturnModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Convolutions along the hours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(len(SIGNS), 224, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(224, 224, 5, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(224, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signs, returned = batch
        logits = self.net(signs.transpose(1, 2)).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, returned)
        self.log("loss", loss)
        return loss


def icu_stays(fault: bool) -> None:
    """The collate function makes a batch hour by hour; healthy: stay by stay."""
    collate = collate_by_hour if fault else collate_by_stay
    quiet(80).fit(ReturnModel(), DataLoader(Stays(64 * 20), batch_size=64, shuffle=True, collate_fn=collate))


class Churn(Trained, optimizer=torch.optim.Adam, lr=1e-3, fused=True):
    """Categories and numbers of a customer through a network."""

    def __init__(self) -> None:
        super().__init__()
        self.category = nn.Embedding(50, 8)
        self.network = nn.Sequential(
            *(nn.Linear(24 + 4 * 8, 288), nn.SiLU(), nn.Linear(288, 288), nn.SiLU()),
            *(nn.Linear(288, 288), nn.SiLU(), nn.Linear(288, 1)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, categories, churned = batch
        features = torch.cat([numbers, self.category(categories).flatten(1)], dim=1)
        loss = functional.binary_cross_entropy_with_logits(self.network(features)[:, 0], churned)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class Customers(lightning.LightningDataModule):
    """A table that fits into memory, in large batches."""

    def __init__(self, batch_size: int, whole_batches: bool) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.whole_batches = whole_batches

    def setup(self, stage: str) -> None:
        rows = 60_000
        self.table = TensorDataset(
            torch.randn(rows, 24), torch.randint(50, (rows, 4)), torch.randint(2, (rows,)).float()
        )

    def train_dataloader(self) -> DataLoader:
        if self.whole_batches:
            sampler = BatchSampler(RandomSampler(self.table), self.batch_size, drop_last=True)
            return DataLoader(self.table, sampler=sampler, batch_size=None)
        return DataLoader(self.table, batch_size=self.batch_size, shuffle=True, drop_last=True)


def single_rows_of_table(fault: bool) -> None:
    """4096 rows of a table are taken one by one and stacked; healthy: a batch is taken at once."""
    fit(Churn(), Customers(4096, whole_batches=not fault), steps=60)  # type: ignore[arg-type]  # a data module


class Scenes(Counted[tuple[Tensor, Any]]):
    """Images with outlines of their objects, as an annotation file has them."""

    def __init__(self, samples: int) -> None:
        numbers = np.random.default_rng(0)
        self.images = torch.randn(64, 3, 32, 32)
        self.targets: list[Any] = [
            {
                "image_id": index,
                "boxes": numbers.random((6, 4)).tolist(),
                "outlines": numbers.random((6, 24)).tolist(),
                "labels": numbers.integers(0, 8, 6).tolist(),
            }
            for index in range(256)
        ]
        self.samples = samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.images[index % 64], self.targets[index % 256]


class TensorScenes(Scenes):
    """The same, with tensors."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.targets = [{key: torch.tensor(value) for key, value in target.items()} for target in self.targets]


def scenes_together(samples: list[tuple[Tensor, Any]]) -> tuple[Tensor, list[Any]]:
    """As detectors want it: images in a tensor, targets in a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class Detector(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """Finds the boxes and what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.boxes = nn.Linear(512, 6 * 4)
        self.labels = nn.Linear(512, 6 * 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        features = self.backbone(images)
        boxes = torch.stack([torch.as_tensor(target["boxes"]) for target in targets])
        labels = torch.stack([torch.as_tensor(target["labels"]) for target in targets])
        box_loss = functional.smooth_l1_loss(self.boxes(features).view(-1, 6, 4), boxes)
        label_loss = functional.cross_entropy(self.labels(features).view(-1, 8, 6), labels)
        self.log_dict({"loss/box": box_loss, "loss/label": label_loss}, batch_size=len(images))
        return box_loss + label_loss


def nested_targets(fault: bool) -> None:
    """Targets are lists of numbers, and the transfer to the device visits each of them; healthy: they are tensors."""
    scenes = (Scenes if fault else TensorScenes)(64 * 90)
    fit(Detector(), DataLoader(scenes, batch_size=64, collate_fn=scenes_together), steps=90)


class RandomView(nn.Module):
    """Turns, scales and shifts images, each differently."""

    def matrices(self, count: int) -> Tensor:
        angle, scale, shift = torch.randn(count) * 0.3, 1 + torch.rand(count) * 0.2, torch.randn(count, 2) * 0.1
        cosine, sine = scale * angle.cos(), scale * angle.sin()
        rows = torch.stack([cosine, -sine, shift[:, 0], sine, cosine, shift[:, 1]], dim=1)
        return rows.view(count, 2, 3)

    def forward(self, images: Tensor) -> Tensor:
        grid = functional.affine_grid(self.matrices(len(images)), list(images.shape), align_corners=False)
        view = functional.grid_sample(images, grid, align_corners=False)
        brightness = 1 + 0.2 * torch.randn(len(images), 1, 1, 1)
        return (view * brightness).clamp(-3, 3)


class SelfSupervised(Trained):
    """Base class: two random views of each image, made after the transfer, one image after the other or all at once."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.random_view = RandomView()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        (images,) = batch
        return self.augment(images), self.augment(images)

    @torch.no_grad()
    def augment(self, images: Tensor) -> Tensor:
        if self.one_by_one:
            return torch.cat([self.random_view(image[None]) for image in images])
        view: Tensor = self.random_view(images)
        return view


class SimCLR(SelfSupervised, optimizer=torch.optim.AdamW, lr=3e-4, fused=True):
    """Two views of an image are closer to each other than to those of other images."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__(one_by_one)
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = torch.cat(batch)
        codes = functional.normalize(self.projector(self.encoder(views)), dim=1)
        similarity = (codes @ codes.T / 0.2).fill_diagonal_(-1e4)
        loss = functional.cross_entropy(similarity, torch.arange(len(views)).roll(len(views) // 2))
        self.log("info_nce", loss)
        return loss


def views_one_by_one(fault: bool) -> None:
    """`on_after_batch_transfer` augments image by image; healthy: the batch at once."""
    images = TensorDataset(torch.randn(64 * 60, 3, 32, 32))
    fit(SimCLR(one_by_one=fault), DataLoader(images, batch_size=64, drop_last=True), steps=60)


def equalize(picture: np.ndarray) -> np.ndarray:
    """Spread the histogram of each color over the full range."""
    equal = np.empty_like(picture)
    for channel, values in enumerate(picture):
        histogram, edges = np.histogram(values, bins=64, range=(0, 1))
        cumulated = histogram.cumsum() / values.size
        equal[channel] = np.interp(values.ravel(), edges[:-1], cumulated).reshape(values.shape)
    return equal


def equalize_all(pictures: Tensor) -> Tensor:
    return torch.stack([torch.from_numpy(equalize(picture)) for picture in pictures.numpy()])


class SignClassifier(HalvingClassifier):
    """Recognizes signs in pictures of equal contrast."""

    def __init__(self, equalize_batches: bool) -> None:
        super().__init__(3, (80, 112, 144), 43)
        self.equalize_batches = equalize_batches

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        pictures, labels = batch
        if self.equalize_batches:
            pictures = equalize_all(pictures)
        return [pictures, labels]


def traffic_signs(fault: bool) -> None:
    """`on_after_batch_transfer` equalizes pictures in each epoch; healthy: once, before the training."""
    pictures = torch.rand(128 * 16, 3, 32, 32) * torch.rand(128 * 16, 1, 1, 1)
    labels = torch.randint(43, (len(pictures),))
    if not fault:
        pictures = equalize_all(pictures)
    loader = DataLoader(TensorDataset(pictures, labels), batch_size=128, shuffle=True)
    quiet(70).fit(SignClassifier(equalize_batches=fault), loader)


def padding(fault: bool) -> None:
    """Each sequence is padded to 96 tokens, most have less than 50; healthy: padded to the longest of its batch."""
    numbers = np.random.default_rng(0)
    lengths = np.sort(np.clip(numbers.exponential(40, STEPS * 32), 8, 96).astype(int))
    batches = numbers.permutation(STEPS)
    texts = [torch.randint(1, 1000, (int(length),)) for length in lengths]

    def pad(samples: list[Tensor]) -> Tensor:
        longest = 96 if fault else max(map(len, samples))
        return torch.stack([torch.nn.functional.pad(text, (0, longest - len(text))) for text in samples])

    sampler = [list(range(32 * int(batch), 32 * int(batch) + 32)) for batch in batches]
    fit(LanguageModel(), DataLoader(texts, batch_sampler=sampler, collate_fn=pad))  # type: ignore[arg-type]  # a list


class Recurrent(Trained, optimizer=torch.optim.Adam, lr=1e-3, fused=True):
    """A regression on series of 24 values per position."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(24, 160, num_layers=2, batch_first=True)
        self.out = nn.Linear(160, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, target = batch
        loss = functional.mse_loss(self.out(self.rnn(series)[0][:, -1])[:, 0], target)
        self.log("loss", loss)
        return loss


def padded_series(fault: bool) -> None:
    """Batches of random series of 4 to 120 positions, padded with zeros; healthy: of series of similar lengths."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.gamma(2, 12, 32 * STEPS).astype(int), 4, 120)
    lengths = lengths if fault else np.sort(lengths)
    series = [torch.randn(int(length), 24) for length in lengths]
    batches = [list(range(32 * at, 32 * at + 32)) for at in numbers.permutation(STEPS).tolist()]

    def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad_sequence(samples, batch_first=True), torch.ones(len(samples))

    fit(Recurrent(), DataLoader(series, batch_sampler=batches, collate_fn=collate))  # type: ignore[arg-type]  # a list


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


class NextClick(Trained, optimizer=torch.optim.SGD, lr=0.05):
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


def sessions(fault: bool) -> None:
    """Each session is padded to the longest of all; healthy: to the longest of its batch."""
    clicks = Sessions(samples=60 * 32)
    collate = partial(session_batch, to_length=clicks.longest if fault else None)
    one_epoch().fit(NextClick(), DataLoader(clicks, batch_size=32, shuffle=True, num_workers=1, collate_fn=collate))


class Haiku(Dataset):
    """Haiku as numbers of letters; 0 is no letter. Some have 60 letters, some 66."""

    def __init__(self, count: int) -> None:
        self.poems = [torch.randint(1, 40, (length,)) for length in torch.randint(60, 67, (count,)).tolist()]

    def __len__(self) -> int:
        return len(self.poems)

    def __getitem__(self, index: int) -> Tensor:
        return self.poems[index]


def pad_to_context(poems: list[Tensor]) -> Tensor:
    """Fill each poem up to the context of the model."""
    batch = torch.zeros(len(poems), Poet.CONTEXT, dtype=torch.long)
    for row, poem in enumerate(poems):
        batch[row, : len(poem)] = poem
    return batch


def pad_to_longest(poems: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(poems, batch_first=True)


class Poet(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    """A small causal transformer over letters."""

    CONTEXT = 128

    def __init__(self, width: int = 96, letters: int = 40) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width, padding_idx=0)
        self.place = nn.Embedding(self.CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def training_step(self, poems: Tensor, batch_idx: int) -> Tensor:
        given, wanted = poems[:, :-1], poems[:, 1:]
        length = given.shape[1]
        hidden = self.letter(given) + self.place(torch.arange(length))
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.encoder(hidden, mask=ahead, src_key_padding_mask=given == 0)
        loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten(), ignore_index=0)
        self.log("loss", loss)
        return loss


def haiku(fault: bool) -> None:
    """Each haiku is padded to the longest possible; healthy: to the longest of its batch."""
    collate = pad_to_context if fault else pad_to_longest
    loader = DataLoader(Haiku(32 * 30), batch_size=32, shuffle=True, collate_fn=collate)
    quiet(90).fit(Poet(), loader)


class Utterances(Dataset):
    """Utterances of very different lengths: most are short, a few are long."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(3)
        lengths = np.clip(rng.lognormal(4.2, 0.2, count), 20, 160).astype(int)
        lengths[:: count // 3] = 240
        self.lengths = lengths
        self.frames = [torch.randn(int(length), BANDS) for length in lengths]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.frames[index], index % 20


class PadCollator:
    """Pads utterances to a common number of frames: a given one, or that of the batch."""

    def __init__(self, frames: int | None) -> None:
        self.frames = frames

    def __call__(self, rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(frames) for frames, _ in rows])
        size = self.frames or int(lengths.max())
        padded = torch.zeros(len(rows), size, BANDS)
        for row, (frames, _) in zip(padded, rows, strict=True):
            row[: len(frames)] = frames
        return {"frames": padded, "lengths": lengths, "label": torch.tensor([label for _, label in rows])}


def utterances(fault: bool) -> None:
    """Each batch is padded to the longest utterance of all; healthy: to the longest of the batch."""
    data = Utterances(16 * 60)
    collate = PadCollator(int(data.lengths.max()) if fault else None)
    quiet(60).fit(SoundNet(width=160), DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate))


def small_batch(fault: bool) -> None:
    """Two samples per batch, so that a step is mostly overhead; healthy: 256."""
    batch = 2 if fault else BATCH
    steps = 240 if fault else 80
    fit(Deep(), DataLoader(Vectors(steps, batch), batch_size=batch), steps=steps)


class Deep(Classifier):
    """Many narrow layers."""

    def __init__(self) -> None:
        super().__init__(width=128, depth=40)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :128])


def single_rows(fault: bool) -> None:
    """One row per batch of a table; healthy: 128."""
    batch = 1 if fault else 128
    model = Tabular(width=64, depth=12)
    rows = TensorDataset(torch.randn(200 * batch, 64), torch.randint(CLASSES, (200 * batch,)))
    fit(model, DataLoader(rows, batch_size=batch), steps=200)


class Tagger(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Names the parts of speech."""

    def __init__(self, dim: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.tags = nn.Linear(dim, 17)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        tags = self.tags(self.blocks(self.embed(batch[:, :-1])))
        return functional.cross_entropy(tags.flatten(0, 1), batch[:, 1:].flatten() % 17)


def parts_of_speech(fault: bool) -> None:
    """Batches of one sentence, 16 of them per update; healthy: one batch of 16."""
    at_once, parts = (1, 16) if fault else (16, 1)
    loader = DataLoader(Corpus(1024, 24), batch_size=at_once, shuffle=True)
    fit(Tagger(), loader, steps=40 if fault else 60, accumulate_grad_batches=parts)


class WineTransformer(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Rates wines from eleven lab values, one token for each value."""

    def __init__(self, values: int = 11, width: int = 160, depth: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(values, width))
        self.shift = nn.Parameter(torch.zeros(values, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        values, rating = batch
        tokens = values.unsqueeze(-1) * self.scale + self.shift
        return functional.mse_loss(self.head(self.encoder(tokens).mean(dim=1)).squeeze(1), rating)


def wine_quality(fault: bool) -> None:
    """8 samples per batch, so that a step is mostly overhead; healthy: 128."""
    data = TensorDataset(torch.randn(20_000, 11), torch.randn(20_000))
    loader = DataLoader(data, batch_size=8 if fault else 128, shuffle=True)
    quiet(300 if fault else 60).fit(WineTransformer(), loader)


if __name__ == "__main__":
    main(
        slow_collate,
        raw_texts,
        playlists,
        masked_sentences,
        icu_stays,
        single_rows_of_table,
        nested_targets,
        views_one_by_one,
        traffic_signs,
        padding,
        padded_series,
        sessions,
        haiku,
        utterances,
        small_batch,
        single_rows,
        parts_of_speech,
        wine_quality,
    )
