"""Trainings for a GPU, from texts, genes, fields, calls, shapes and proteins; tiny without one."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

import plain
from plain import main

GPU = torch.cuda.is_available()
STEPS = 60 if GPU else 4


def size(large: int, tiny: int) -> int:
    return large if GPU else tiny


def fit(model: lightning.LightningModule, loader: DataLoader[Any], **options: Any) -> None:
    torch.set_float32_matmul_precision("high")
    settings: dict[str, Any] = {
        "accelerator": "auto",
        "devices": 1,
        "precision": "bf16-mixed" if GPU else "32-true",
        "max_epochs": -1,
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(**settings | options).fit(model, loader)


def batches_of(data: TensorDataset, batch: int) -> DataLoader[Any]:
    """Batches in random order, each taken from the tensors with one index."""
    sampler = BatchSampler(RandomSampler(data), batch, drop_last=True)
    return DataLoader(data, batch_size=None, sampler=sampler, pin_memory=GPU)


def encoder(width: int, depth: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Trained(plain.Trained, optimizer=torch.optim.AdamW, lr=1e-4, fused=GPU):
    pass


# --- intents: what the customers of a bank ask for ---


class IntentClassifier(Trained):
    counts: Tensor

    def __init__(self, by_value: bool, intents: int = 77) -> None:
        super().__init__()
        self.by_value = by_value
        width = size(640, 32)
        self.words = nn.Embedding(8000, width)
        self.encoder = encoder(width, size(6, 1), size(10, 2))
        self.head = nn.Linear(width, intents)
        self.confusion = [[0] * intents for _ in range(intents)]
        self.register_buffer("counts", torch.zeros(intents * intents, dtype=torch.long), persistent=False)

    def count(self, guesses: Tensor, intents: Tensor) -> None:
        if self.by_value:
            for guess, intent in zip(guesses, intents, strict=True):
                self.confusion[intent.item()][guess.item()] += 1
        else:
            cells = intents * len(self.confusion) + guesses
            self.counts.scatter_add_(0, cells, torch.ones_like(cells))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, intents = batch
        logits = self.head(self.encoder(self.words(words)).mean(dim=1))
        self.count(logits.detach().argmax(dim=-1), intents)
        return functional.cross_entropy(logits, intents)


def intents(fault: bool) -> None:
    batch = size(1024, 16)
    texts = TensorDataset(torch.randint(8000, (4 * batch, 64)), torch.randint(77, (4 * batch,)))
    fit(IntentClassifier(by_value=fault), batches_of(texts, batch))


# --- expression: one small head for each gene ---


class GeneHeads(nn.ModuleList):
    def __init__(self, genes: int, width: int, hidden: int) -> None:
        super().__init__(nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(genes))

    def forward(self, cells: Tensor) -> Tensor:
        return torch.cat([head(cells) for head in self], dim=1)


class GeneBank(nn.Module):
    def __init__(self, genes: int, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.randn(genes, width, hidden) / width**0.5)
        self.shift = nn.Parameter(torch.zeros(genes, 1, hidden))
        self.reduce = nn.Parameter(torch.randn(genes, hidden, 1) / hidden**0.5)

    def forward(self, cells: Tensor) -> Tensor:
        hidden = torch.relu(torch.matmul(cells, self.expand) + self.shift)
        return torch.bmm(hidden, self.reduce.to(hidden.dtype)).squeeze(-1).T


class ExpressionModel(Trained):
    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        width = size(640, 32)
        self.markers = nn.Linear(40, width)
        self.encoder = encoder(width, size(8, 1), size(10, 2))
        bank = GeneHeads if one_by_one else GeneBank
        self.genes = bank(size(400, 8), width, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        markers, expression = batch
        cells = self.encoder(self.markers(markers)).mean(dim=1)
        return functional.mse_loss(self.genes(cells).float(), expression)


def expression(fault: bool) -> None:
    batch, genes = size(256, 8), size(400, 8)
    cells = TensorDataset(torch.randn(4 * batch, 160, 40), torch.randn(4 * batch, genes))
    fit(ExpressionModel(one_by_one=fault), batches_of(cells, batch))


# --- climate: fields of a simulation, a batch at a time from memory ---


class ClimateFields(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, batches: int, pinned: bool) -> None:
        shape = (size(64, 2), 16, size(320, 32), size(320, 32))
        self.fields = [torch.rand(shape) for _ in range(batches)]
        self.targets = [torch.rand(shape[0], 4) for _ in range(batches)]
        if pinned and GPU:
            self.fields = [fields.pin_memory() for fields in self.fields]
            self.targets = [targets.pin_memory() for targets in self.targets]

    def __len__(self) -> int:
        return len(self.fields)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.fields[index], self.targets[index]


class ClimateIndices(Trained):
    def __init__(self) -> None:
        super().__init__()
        width = size(256, 16)
        layers: list[nn.Module] = [nn.Conv2d(16, width, 4, stride=4)]
        for _ in range(size(6, 1)):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fields, indices = batch
        return functional.mse_loss(self.network(fields).float(), indices)


def climate(fault: bool) -> None:
    fit(ClimateIndices(), DataLoader(ClimateFields(batches=4, pinned=not fault), batch_size=None))


# --- calls: spectrograms of telephone calls, made while they are loaded ---


class Calls(Dataset[tuple[Tensor, int]]):
    def __init__(self, samples: int, frames: int = 400, bands: int = 80) -> None:
        self.samples = samples
        self.audio = torch.randn(32, frames * 160)
        self.window = torch.hann_window(400)
        self.filters = torch.rand(257, bands)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        audio = self.audio[index % 32]
        audio = torch.cat([audio[:1], audio[1:] - 0.97 * audio[:-1]])
        spectrum = torch.stft(audio, 512, hop_length=160, win_length=400, window=self.window, return_complex=True)
        bands = (spectrum.abs().square().T @ self.filters + 1e-6).log()
        return (bands - bands.mean(dim=0)) / bands.std(dim=0), index % 12


class CallTopics(Trained):
    def __init__(self) -> None:
        super().__init__()
        width = size(768, 32)
        self.project = nn.Linear(80, width)
        self.encoder = encoder(width, size(8, 1), size(12, 2))
        self.head = nn.Linear(width, 12)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bands, topics = batch
        return functional.cross_entropy(self.head(self.encoder(self.project(bands)).mean(dim=1)), topics)


def calls(fault: bool) -> None:
    batch = size(48, 4)
    workers = 1 if fault else size(10, 2)
    recorded = Calls(samples=STEPS * batch)
    fit(CallTopics(), DataLoader(recorded, batch_size=batch, num_workers=workers, pin_memory=GPU))


# --- stories: a language model ---


class Attention(nn.Module):
    future: Tensor

    """Causal attention: with the scores of all pairs, or in one call."""

    def __init__(self, width: int, heads: int, length: int, scores: bool) -> None:
        super().__init__()
        self.heads = heads
        self.scores = scores
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.scores:
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            weights = scores.masked_fill(self.future[:length, :length], float("-inf")).softmax(dim=-1)
            mixed = weights.to(value.dtype) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int, scores: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, length, scores)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        found: Tensor = x + self.mlp(x)
        return found


class StoryModel(Trained):
    def __init__(
        self, width: int, depth: int, heads: int, length: int, *, scores: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.token = nn.Embedding(4096, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, length, scores) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        found: Tensor = self.head(self.norm(x))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def stories_of(batch: int, length: int) -> DataLoader[Any]:
    return batches_of(TensorDataset(torch.randint(4096, (4 * batch, length + 1))), batch)


class TidyUp(lightning.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.empty_cache()


def stories(fault: bool) -> None:
    length = size(512, 16)
    model = StoryModel(size(1024, 32), size(12, 1), size(16, 2), length)
    fit(model, stories_of(size(16, 2), length), callbacks=[TidyUp()] if fault else [])


def novels(fault: bool) -> None:
    length = size(1536, 32)
    model = StoryModel(size(1280, 32), size(6, 1), size(16, 2), length, scores=fault)
    fit(model, stories_of(size(8, 2), length))


def essays(fault: bool) -> None:
    length = size(1024, 16)
    model = StoryModel(size(768, 32), size(12, 2), size(12, 2), length, recompute=not fault)
    fit(model, stories_of(size(24, 2), length))


# --- ocean: currents of the next day, from a data set of 64-bit numbers ---


class OceanCurrents(Trained):
    """The readout gets the type of the targets, which NumPy made."""

    def __init__(self, readout: torch.dtype) -> None:
        super().__init__()
        width = size(512, 32)
        self.project = nn.Linear(32, width)
        self.encoder = encoder(width, size(10, 1), size(8, 2))
        self.readout = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, 1024)).to(readout)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        patches, currents = batch
        hidden = self.encoder(self.project(patches)).to(self.readout[0].weight.dtype)
        predicted = self.readout(hidden).unflatten(-1, (-1, 8)).mean(dim=-1)
        return functional.mse_loss(predicted, currents.to(predicted.dtype).expand_as(predicted))


def ocean(fault: bool) -> None:
    batch, patches = size(36, 2), size(1024, 16)
    inputs = torch.randn(2 * batch, patches, 32)
    currents = torch.from_numpy(np.random.default_rng(0).standard_normal((2 * batch, 1, 128)))
    data = TensorDataset(inputs, currents)
    fit(OceanCurrents(torch.float64 if fault else torch.float32), batches_of(data, batch))


# --- surfaces: one code for each shape, and a network that tells the distance of a point from its surface ---


class SurfaceDecoder(lightning.LightningModule):
    def __init__(self, foreach: bool | None, shapes: int, width: int, code: int = 64) -> None:
        super().__init__()
        self.foreach = foreach
        self.codes = nn.ParameterList(nn.Parameter(0.01 * torch.randn(code)) for _ in range(shapes))
        layers: list[nn.Module] = [nn.Linear(code + 3, width), nn.ReLU()]
        for _ in range(size(7, 1)):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.decoder = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shapes, points, distances = batch
        codes = torch.stack(list(self.codes))[shapes]
        inputs = torch.cat([codes[:, None].expand(-1, points.shape[1], -1), points], dim=-1)
        return functional.l1_loss(self.decoder(inputs).squeeze(-1).float(), distances)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, foreach=self.foreach)


def surfaces(fault: bool) -> None:
    batch, points, shapes = size(64, 2), size(10_000, 32), size(1200, 12)
    data = TensorDataset(
        torch.arange(2 * batch) % shapes, torch.randn(2 * batch, points, 3), torch.randn(2 * batch, points)
    )
    model = SurfaceDecoder(False if fault else None, shapes, width=size(512, 32))
    fit(model, batches_of(data, batch))


# --- proteins: chains of very different lengths ---


class Chains(Dataset[Tensor]):
    def __init__(self, samples: int, lengths: Sequence[int]) -> None:
        self.chains = [torch.randint(4096, (lengths[number % len(lengths)] + 1,)) for number in range(samples)]

    def __len__(self) -> int:
        return len(self.chains)

    def __getitem__(self, index: int) -> Tensor:
        return self.chains[index]


class ProteinModel(StoryModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch,), batch_idx)


def proteins(fault: bool) -> None:
    batch, longest = size(12, 2), size(2400, 64)
    noise = random.Random(0)
    # A batch holds chains of one length.
    lengths = [noise.randint(longest // 10, longest) if fault else longest // 2 for _ in range(STEPS)]
    chains = Chains(STEPS * batch, [length for length in lengths for _ in range(batch)])
    model = ProteinModel(size(768, 32), size(10, 1), size(12, 2), longest)
    fit(model, DataLoader(chains, batch_size=batch, pin_memory=GPU))


if __name__ == "__main__":
    main(intents, expression, climate, calls, stories, novels, essays, ocean, surfaces, proteins)
