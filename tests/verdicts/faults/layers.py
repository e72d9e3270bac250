"""Faults of the computation: graphs that are compiled anew, a second forward pass, weights that are made anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import LanguageModel, fit, main


class Curriculum(IterableDataset[Tensor]):
    """Batches of sequences that grow by one token every two steps."""

    def __init__(self, batch: int, shortest: int, steps: int) -> None:
        self.batch = batch
        self.lengths = [shortest + step // 2 for step in range(steps)]

    def __iter__(self) -> Iterator[Tensor]:
        for length in self.lengths:
            yield torch.randint(1, 1000, (self.batch, length))


class CompiledModel(LanguageModel):
    """A language model whose layers run through ``torch.compile``, each graph for one shape or for all."""

    def __init__(self, dynamic: bool) -> None:
        super().__init__(layers=1, width=160)
        self.run_layers = torch.compile(self.all_layers, backend="eager", dynamic=dynamic)

    def all_layers(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.run_layers(self.embedding(tokens)))
        return logits


def compiled_per_length(fault: bool) -> None:
    """`torch.compile(dynamic=False)` while sequences get longer; healthy: `dynamic=True`."""
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    fit(CompiledModel(dynamic=not fault), DataLoader(Curriculum(32, 40, 60), batch_size=None), steps=60)


class Encoder(nn.Module):
    """A transformer over patches. What its layers compute is kept for backward, or computed again."""

    def __init__(self, width: int, depth: int, save_memory: bool) -> None:
        super().__init__()
        self.save_memory = save_memory
        self.patches = nn.Conv2d(1, width, (8, 10), stride=(8, 10))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.save_memory and self.training else layer(x)
        return x.mean(1)


class Spectrograms(lightning.LightningModule):
    """Keywords in spectrograms."""

    def __init__(self, gradient_checkpointing: bool = True, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(width, depth, save_memory=gradient_checkpointing)
        self.head = nn.Linear(width, 12)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spectrograms, words = batch
        loss: Tensor = self.loss(self.head(self.encoder(spectrograms)), words)
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def needless_checkpointing(fault: bool) -> None:
    """Each layer is computed again in backward, although little is kept without that; healthy: it is kept."""
    words = TensorDataset(torch.randn(64 * 60, 1, 40, 50), torch.randint(12, (64 * 60,)))
    fit(Spectrograms(gradient_checkpointing=fault), DataLoader(words, batch_size=64, shuffle=True), steps=60)


class OrthogonalRNN(nn.Module):
    """A recurrent network whose matrix stays orthogonal: it is made from its parameters when it is asked for."""

    def __init__(self, inputs: int, width: int, make_once: bool) -> None:
        super().__init__()
        self.make_once = make_once
        self.read = nn.Linear(inputs, width)
        self.turn = parametrizations.orthogonal(nn.Linear(width, width, bias=False), orthogonal_map="cayley")

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.read(x)
        state = torch.zeros_like(inputs[:, 0])
        with parametrize.cached() if self.make_once else nullcontext():
            for time in range(inputs.shape[1]):
                state = functional.leaky_relu(inputs[:, time] + self.turn(state))
        return state


class CopyTask(lightning.LightningModule):
    """Remembers what came first."""

    def __init__(self, make_once: bool) -> None:
        super().__init__()
        self.rnn = OrthogonalRNN(10, 160, make_once)
        self.decode = nn.Sequential(
            *(nn.Linear(160, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (sequences,) = batch
        loss = functional.cross_entropy(self.decode(self.rnn(sequences)), sequences[:, 0].argmax(-1))
        self.log("nll", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=1e-4)


def weight_made_each_time(fault: bool) -> None:
    """An orthogonal parametrization is evaluated in each of 24 time steps; healthy: once, by `parametrize.cached`."""
    sequences = TensorDataset(torch.randn(192 * 50, 24, 10))
    fit(CopyTask(make_once=not fault), DataLoader(sequences, batch_size=192), steps=50)


class RunningAccuracy(lightning.Callback):
    """Training accuracy, from the scores of the step or from scores of its own."""

    def __init__(self, own_scores: bool) -> None:
        self.own_scores = own_scores
        self.right = self.seen = 0

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        signals, rhythms = batch
        scores = pl_module(signals) if self.own_scores else outputs["scores"]
        self.right += int((scores.argmax(1) == rhythms).sum())
        self.seen += len(rhythms)
        pl_module.log("train/accuracy", self.right / self.seen)


class Heartbeats(lightning.LightningModule):
    """Separable convolutions over signals of a heart."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(2, 64, 7, stride=2, padding=3)]
        for _ in range(4):
            layers += [nn.Conv1d(64, 64, 9, padding=4, groups=64), nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64), nn.GELU()]
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 5))

    def forward(self, signals: Tensor) -> Tensor:
        scores: Tensor = self.network(signals)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        signals, rhythms = batch
        scores = self(signals)
        return {"loss": functional.cross_entropy(scores, rhythms), "scores": scores.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def second_forward(fault: bool) -> None:
    """A callback computes the scores of each batch once more for an accuracy; healthy: it takes those of the step."""
    signals = TensorDataset(torch.randn(32 * 60, 2, 400), torch.randint(5, (32 * 60,)))
    fit(Heartbeats(), DataLoader(signals, batch_size=32), steps=60, callbacks=[RunningAccuracy(own_scores=fault)])


if __name__ == "__main__":
    main(compiled_per_length, needless_checkpointing, weight_made_each_time, second_forward)
