"""What the training scripts share: synthetic data, a classifier, a small language model and the command line.

A script calls :func:`main` with its trainings; ``python faults/loading.py slow_decode --healthy`` runs one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

WIDTH = 512
BATCH = 256
CLASSES = 10
STEPS = 60
T_co = TypeVar("T_co", covariant=True)
RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


def main(*trainings: Callable[[bool], None]) -> None:
    """Run the training that the command line names: with its fault, or healthy."""
    by_name = {training.__name__: training for training in trainings}
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=by_name)
    parser.add_argument("--healthy", action="store_true")
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    by_name[options.name](not options.healthy)


def trainer(steps: int, **options: Any) -> lightning.Trainer:
    """Make a Trainer of so many steps that prints and saves nothing."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "max_steps": steps,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**settings | options)


def quiet(steps: int, **options: Any) -> lightning.Trainer:
    """Make a Trainer without a logger, if no option has one."""
    return trainer(steps, **{"logger": False} | options)


def one_epoch(**options: Any) -> lightning.Trainer:
    """Make a Trainer of one epoch, without a logger, if no option says otherwise."""
    return quiet(-1, **{"max_epochs": 1} | options)


def fit(
    model: lightning.LightningModule,
    training: DataLoader,
    validation: DataLoader | None = None,
    *,
    steps: int = STEPS,
    **options: Any,
) -> None:
    trainer(steps, **options).fit(model, training, validation)


def rows_at_once(table: TensorDataset, batch: int) -> DataLoader:
    """Give random batches that are taken from the tensors in one operation each."""
    return DataLoader(table, sampler=BatchSampler(RandomSampler(table), batch, drop_last=True), batch_size=None)


class Counted(Dataset[T_co]):
    """A data set of ``samples`` samples, which are made or read when they are asked for."""

    samples: int

    def __len__(self) -> int:
        return self.samples


class Vectors(Dataset[tuple[Tensor, int]]):
    """Labeled vectors of ``WIDTH`` floats, in memory."""

    def __init__(self, batches: int = STEPS, batch: int = BATCH) -> None:
        self.features = torch.randn(batches * batch, WIDTH)
        self.labels = torch.randint(CLASSES, (batches * batch,)).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.features[index], self.labels[index]


def vector_batches(batch: int = BATCH) -> DataLoader:
    return DataLoader(Vectors(STEPS, batch), batch_size=batch)


def labeled(samples: int, *shape: int, classes: int = CLASSES) -> TensorDataset:
    """Give random samples with random labels."""
    return TensorDataset(torch.randn(samples, *shape), torch.randint(classes, (samples,)))


class Trained(lightning.LightningModule):
    """A module whose class statement names its optimizer: ``class Net(Trained, optimizer=SGD, lr=0.01)``."""

    optimizer_of: ClassVar[Callable[..., torch.optim.Optimizer]]

    def __init_subclass__(cls, optimizer: type[torch.optim.Optimizer] | None = None, **options: Any) -> None:
        super().__init_subclass__()
        if optimizer is not None:
            cls.optimizer_of = staticmethod(partial(optimizer, **options))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_of(self.parameters())


class Residual(nn.Module):
    """Two linear layers and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.reduce = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.reduce(functional.gelu(self.expand(self.norm(x))))
        return x + hidden


class Classifier(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """A residual network over vectors of ``width`` floats."""

    def __init__(self, width: int = WIDTH, depth: int = 3, classes: int = CLASSES) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        loss = functional.cross_entropy(self(features), labels)
        self.log("loss", loss)
        return loss


class Tokens(Dataset[Tensor]):
    """Sequences of ``length`` token numbers."""

    def __init__(self, samples: int, length: int, vocabulary: int = 1000) -> None:
        self.tokens = torch.randint(1, vocabulary, (samples, length))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Attention(nn.Module):
    """Causal self-attention with torch's fused kernel. Input and output: batch x length x width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        mixed = self.mix(query, key, value).transpose(1, 2).reshape(batch, length, width)
        projected: Tensor = self.out(mixed)
        return projected

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention
        self.feedforward = Residual(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.feedforward(x + self.attention(self.norm(x)))
        return hidden


class LanguageModel(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Predicts the next token; token 0 is padding. A batch has the shape batch x length."""

    def __init__(self, layers: int = 2, width: int = 128, heads: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(self.attention(width, heads), width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def attention(self, width: int, heads: int) -> nn.Module:
        return Attention(width, heads)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss)
        return loss
