"""What a model computes needlessly: twice, anew, in double precision, or by hand in place of a fused operator."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    BATCH,
    WIDTH,
    Classifier,
    LanguageModel,
    Tokens,
    Trained,
    Vectors,
    fit,
    main,
    one_epoch,
    quiet,
    rows_at_once,
)
from small_models import Corpus, MiniGPT, Spectra, StoredPositionalEncoding, perceptron, sinusoids, spectrograms


class Mixer(nn.Module):
    """Mixes all samples of a batch: three products of large matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, width)
        self.between = nn.Linear(width, width)
        self.out = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.out(functional.relu(self.between(functional.relu(self.into(x)))))
        return x + mixed


class Mixed(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__(depth=3)
        self.mixer = Mixer(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mixer(x))


def dominant_module(fault: bool) -> None:
    """One module takes most of the step; healthy: it takes as long as each of its neighbors."""
    fit(Mixed(width=2560 if fault else 1024), DataLoader(Vectors(), batch_size=BATCH))


class MoveAttention(nn.Module):
    """Causal self-attention over the moves of a game."""

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.heads = heads
        self.by_hand = by_hand
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.by_hand:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            future = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
            scores = scores.masked_fill(future, float("-inf"))
            mixed = torch.softmax(scores, dim=-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class ChessModel(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Predicts the next move."""

    def __init__(self, by_hand: bool, moves: int = 1000, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(moves, width)
        self.attentions = nn.ModuleList(MoveAttention(width, 4, by_hand) for _ in range(depth))
        self.feedforwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, moves)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (games,) = batch
        x = self.embedding(games[:, :-1])
        for norm, attention, feedforward in zip(self.norms, self.attentions, self.feedforwards, strict=True):
            x = x + attention(norm(x))
            x = x + feedforward(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), games[:, 1:].flatten())


def chess_games(fault: bool) -> None:
    """Attention by hand, with its matrix of scores; healthy: the fused operator."""
    data = TensorDataset(torch.randint(1000, (800, 401)))
    quiet(60).fit(ChessModel(by_hand=fault), DataLoader(data, batch_size=8, shuffle=True))


class SpeechBlock(nn.Module):
    """Attention between the frames of a recording. Fault: it returns its weights; healthy: it does not."""

    def __init__(self, width: int, heads: int, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, frames: Tensor) -> Tensor:
        normed = self.norm(frames)
        mixed, _ = self.attention(normed, normed, normed, need_weights=self.fault)
        frames = frames + mixed
        found: Tensor = frames + self.feedforward(frames)
        return found


class Speech(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    """Recognizes commands in the frames of a recording."""

    def __init__(self, *, fault: bool, width: int = 128, commands: int = 30) -> None:
        super().__init__()
        self.project = nn.Linear(80, width)
        self.blocks = nn.Sequential(*(SpeechBlock(width, 4, fault=fault) for _ in range(2)))
        self.head = nn.Linear(width, commands)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, commands = batch
        hidden = self.blocks(self.project(frames))
        loss = functional.cross_entropy(self.head(hidden.mean(dim=1)), commands)
        self.log("loss", loss)
        return loss


def unread_weights(fault: bool) -> None:
    """``MultiheadAttention`` returns weights that nobody reads; healthy: ``need_weights=False``."""
    recordings = TensorDataset(torch.randn(60 * 4, 480, 80), torch.randint(30, (60 * 4,)))
    fit(Speech(fault=fault), DataLoader(recordings, batch_size=4, shuffle=True), steps=60)


class PaperLayerNorm(nn.Module):
    """Layer normalization as in the paper."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.gain * (x - mean) / (std + self.eps) + self.bias


class TrafficMixer(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Forecasts the flow at road sensors; every block mixes features."""

    def __init__(self, norm: type[nn.Module], width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(24, width)
        self.norms = nn.ModuleList(norm(width) for _ in range(depth))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        x = self.embed(past)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return functional.l1_loss(self.head(x), future)


def traffic_flow(fault: bool) -> None:
    """A layer norm of elementwise operators; healthy: `nn.LayerNorm`."""
    data = TensorDataset(torch.randn(1000, 200, 24), torch.randn(1000, 200, 12))
    model = TrafficMixer(PaperLayerNorm if fault else nn.LayerNorm)
    quiet(80).fit(model, DataLoader(data, batch_size=32, shuffle=True))


class NewGELU(nn.Module):
    """The activation of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class LayerNorm(nn.Module):
    """Normalizes over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(variance + self.eps) + self.shift


class CharacterBlock(nn.Module):
    """Mixes the characters with a causal convolution, then each by itself."""

    def __init__(self, width: int, own: bool) -> None:
        super().__init__()
        self.norm_mix = LayerNorm(width) if own else nn.LayerNorm(width)
        self.norm_feed = LayerNorm(width) if own else nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.act = NewGELU() if own else nn.GELU(approximate="tanh")
        self.reduce = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_mix(x)
        before = functional.pad(normed, (0, 0, 1, 0))[:, :-1]
        x = x + self.mix(torch.cat([before, normed], dim=-1))
        return x + self.reduce(self.act(self.expand(self.norm_feed(x))))


class CharacterModel(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    def __init__(self, own: bool, width: int = 80, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.Sequential(*(CharacterBlock(width, own) for _ in range(layers)))
        self.head = nn.Linear(width, 96)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.embedding(batch[:, :-1])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss


def novel_characters(fault: bool) -> None:
    """GELU and layer norm are written out; healthy: those of torch."""
    text = torch.randint(96, (32 * 50, 97))
    quiet(50).fit(CharacterModel(own=fault), DataLoader(text, batch_size=32, shuffle=True))  # type: ignore[arg-type]  # rows of a tensor


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


class Heartbeats(Trained, optimizer=torch.optim.Adam, lr=1e-3):
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


def second_forward(fault: bool) -> None:
    """A callback computes the scores of each batch once more for an accuracy; healthy: it takes those of the step."""
    signals = TensorDataset(torch.randn(32 * 60, 2, 400), torch.randint(5, (32 * 60,)))
    fit(Heartbeats(), DataLoader(signals, batch_size=32), steps=60, callbacks=[RunningAccuracy(own_scores=fault)])


class Keywords(Spectra):
    def __init__(self) -> None:
        super().__init__(width=320, depth=4)

    def loss(self, spectra: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self(spectra), labels, label_smoothing=0.1)

    def accuracy(self, spectra: Tensor, labels: Tensor) -> Tensor:
        return (self(spectra).argmax(dim=1) == labels).float().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        spectra, labels = batch
        loss = self.loss(spectra, labels)
        self.log_dict({"loss": loss, "accuracy": self.accuracy(spectra, labels)})
        return loss


class KeywordsShared(Keywords):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        spectra, labels = batch
        logits = self(spectra)
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(dim=1) == labels).float().mean()})
        return loss


def wake_words(fault: bool) -> None:
    """The batch passes through the network for the loss and again for the accuracy; healthy: once."""
    module = Keywords() if fault else KeywordsShared()
    fit(module, DataLoader(spectrograms(1024), batch_size=24, shuffle=True), steps=60)


class PositionalEncoding(nn.Module):
    def __init__(self, dim: int, max_len: int = 8192) -> None:
        super().__init__()
        self.dim = dim
        self.max_len = max_len

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pe = sinusoids(self.max_len, self.dim).to(x)
        return x + pe[: x.size(1)]


def letters(fault: bool) -> None:
    """A table of 8192 positions is made in each forward; healthy: it is a buffer."""
    kind = PositionalEncoding if fault else StoredPositionalEncoding
    loader = DataLoader(Corpus(512, 32), batch_size=4, shuffle=True)
    fit(MiniGPT(kind(512, 8192), dim=512, depth=1), loader, steps=60)


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


class CopyTask(Trained, optimizer=torch.optim.RMSprop, lr=1e-4):
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


def weight_made_each_time(fault: bool) -> None:
    """An orthogonal parametrization is evaluated in each of 24 time steps; healthy: once, by `parametrize.cached`."""
    sequences = TensorDataset(torch.randn(192 * 50, 24, 10))
    fit(CopyTask(make_once=not fault), DataLoader(sequences, batch_size=192), steps=50)


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


class Spectrograms(Trained, optimizer=torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True):
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


def needless_checkpointing(fault: bool) -> None:
    """Each layer is computed again in backward, although little is kept without that; healthy: it is kept."""
    words = TensorDataset(torch.randn(64 * 60, 1, 40, 50), torch.randint(12, (64 * 60,)))
    fit(Spectrograms(gradient_checkpointing=fault), DataLoader(words, batch_size=64, shuffle=True), steps=60)


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


class Watch(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Recognizes activities from the sensors of a watch; a batch has the shape batch x time x sensors.

    Fault: the LSTM takes the batch for the time, without an error; healthy: ``batch_first=True``.
    """

    def __init__(self, *, fault: bool, sensors: int = 24, width: int = 48, activities: int = 12) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(sensors, 96), nn.ReLU(), nn.Linear(96, width), nn.ReLU())
        self.recurrent = nn.LSTM(width, width, batch_first=not fault)
        self.head = nn.Linear(width, activities)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        readings, activities = batch
        hidden, _ = self.recurrent(self.filters(readings))
        loss = functional.cross_entropy(self.head(hidden[:, -1]), activities)
        self.log("loss", loss)
        return loss


def batch_as_time(fault: bool) -> None:
    """An LSTM without ``batch_first`` steps through 1024 samples; healthy: through 8 steps of time."""
    readings = TensorDataset(torch.randn(20 * 1024, 8, 24), torch.randint(12, (20 * 1024,)))
    fit(Watch(fault=fault), rows_at_once(readings, 1024), steps=80)


class Baskets(Trained, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9):
    """Predicts the next item out of the items of a basket.

    Fault: items are looked up by a product of one-hot vectors and the table; healthy: by ``embedding``.
    """

    def __init__(self, *, fault: bool, items: int = 1400, width: int = 96) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(0.02 * torch.randn(items, width))
        self.mix = nn.Sequential(
            nn.Linear(16 * width, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, width)
        )

    def lookup(self, items: Tensor) -> Tensor:
        if self.fault:
            return functional.one_hot(items, len(self.table)).float() @ self.table
        return functional.embedding(items, self.table)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        items, following = batch
        wanted = self.mix(self.lookup(items).flatten(1))
        loss = functional.cross_entropy(wanted @ self.table.T, following)
        self.log("loss", loss)
        return loss


def one_hot_lookup(fault: bool) -> None:
    """One-hot vectors of 1400 items times the embedding table; healthy: rows of the table are looked up."""
    baskets = TensorDataset(torch.randint(1400, (80 * 256, 16)), torch.randint(1400, (80 * 256,)))
    fit(Baskets(fault=fault), DataLoader(baskets, batch_size=256, shuffle=True), steps=80)


class Roads(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """States of a network of roads: its crossings, its connections and the traffic to predict."""

    def __init__(self, samples: int, nodes: int = 1500, edges: int = 9000, width: int = 64) -> None:
        self.states = torch.randn(samples, nodes, width)
        self.edges = torch.randint(nodes, (2, edges))
        self.traffic = torch.randn(samples, nodes)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.states[index], self.edges, self.traffic[index]


class Neighbors(nn.Module):
    """Sums messages of neighbors. Fault: a message is computed per edge; healthy: per node, and then gathered."""

    def __init__(self, width: int, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.message = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = self.message(nodes[source]) if self.fault else self.message(nodes)[source]
        received = torch.zeros_like(nodes).index_add(0, target, messages)
        updated: Tensor = nodes + self.update(torch.cat((nodes, received), dim=1))
        return updated


class Traffic(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Predicts traffic at crossings with a graph network."""

    def __init__(self, width: int = 64, *, fault: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Neighbors(width, fault=fault) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        nodes, edges, traffic = batch
        for layer in self.layers:
            nodes = layer(nodes, edges)
        loss = functional.l1_loss(self.head(nodes).squeeze(1), traffic)
        self.log("loss", loss)
        return loss


def message_per_edge(fault: bool) -> None:
    """A network runs on 9000 copies of 1500 nodes, one per edge; healthy: on the nodes, before the copies."""
    fit(Traffic(fault=fault), DataLoader(Roads(60), batch_size=None, shuffle=True), steps=60)


class Fields(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """Marks crops on pictures of fields.

    Fault: all channels are enlarged and then classified; healthy: classified, and then the classes are enlarged.
    """

    def __init__(self, *, fault: bool, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.fault = fault
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.classify = nn.Conv2d(width, classes, 1)

    def enlarge(self, features: Tensor) -> Tensor:
        return functional.interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, crops = batch
        features = self.encoder(pictures)
        scores = self.classify(self.enlarge(features)) if self.fault else self.enlarge(self.classify(features))
        loss = functional.cross_entropy(scores, crops)
        self.log("loss", loss)
        return loss


def enlarged_channels(fault: bool) -> None:
    """32 channels are enlarged to full size before a 1 x 1 convolution; healthy: its 4 classes, after it."""
    pictures = TensorDataset(torch.rand(40, 3, 128, 128), torch.randint(4, (40, 128, 128)))
    fit(Fields(fault=fault), DataLoader(pictures, batch_size=8, shuffle=True), steps=40)


IGNORED = -100


class MaskedTokens(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    """A masked language model over a large vocabulary.

    Fault: the head scores every position and the loss ignores 85% of them; healthy: it scores the masked ones.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 4000, width: int = 192) -> None:
        super().__init__()
        self.fault = fault
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        masked = torch.rand(batch.shape) < 0.15
        hidden = self.encoder(self.embedding(batch.masked_fill(masked, self.vocabulary)))
        if self.fault:
            labels = batch.masked_fill(~masked, IGNORED)
            loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        else:
            loss = functional.cross_entropy(self.head(hidden[masked]), batch[masked])
        self.log("loss", loss)
        return loss


def scored_unmasked(fault: bool) -> None:
    """Logits of 4000 words at all positions, of which 15% count; healthy: logits at the masked positions."""
    loader = DataLoader(Tokens(60 * 8, 96, 4000), batch_size=8, shuffle=True)
    fit(MaskedTokens(fault=fault), loader, steps=60)


class Prices(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Estimates the prices of houses from a table.

    Fault: the loss compares a column with a row, all prices with all; healthy: the column is squeezed.
    """

    def __init__(self, *, fault: bool, columns: int = 40, width: int = 256) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(
            nn.Linear(columns, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        houses, prices = batch
        estimates = self.layers(houses)
        loss = functional.mse_loss(estimates if self.fault else estimates.squeeze(1), prices)
        self.log("loss", loss)
        return loss


def column_and_row(fault: bool) -> None:
    """``mse_loss`` of shapes (n, 1) and (n,) makes n x n differences; healthy: both have the shape (n,)."""
    houses = TensorDataset(torch.randn(10 * 2048, 40), torch.randn(10 * 2048))
    fit(Prices(fault=fault), rows_at_once(houses, 2048), steps=100)


class PointCloud(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Moves points of one cloud to those of another: the loss is the Chamfer distance."""

    def __init__(self, broadcast: bool) -> None:
        super().__init__()
        self.broadcast = broadcast
        self.network = nn.Sequential(
            *(nn.Linear(16, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU()),
            *(nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 16)),
        )

    def distances(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if self.broadcast:
            return (ours[:, :, None] - theirs[:, None]).pow(2).sum(-1)
        return torch.cdist(ours, theirs).square()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        distances = self.distances(self.network(before), after)
        loss = distances.min(1).values.mean() + distances.min(2).values.mean()
        self.log("chamfer", loss)
        return loss


def broadcast_distances(fault: bool) -> None:
    """Distances of all pairs of points from a tensor of all differences; healthy: `torch.cdist`."""
    clouds = TensorDataset(torch.randn(4 * 40, 320, 16), torch.randn(4 * 40, 320, 16))
    fit(PointCloud(broadcast=fault), DataLoader(clouds, batch_size=4), steps=50)


class Digits(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """A variational autoencoder of small pictures.

    Fault: the code's distribution has a covariance matrix, which is diagonal; healthy: independent normals.
    """

    def __init__(self, *, fault: bool, pixels: int = 784, width: int = 512, code: int = 32) -> None:
        super().__init__()
        self.fault = fault
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, pixels))

    def normal(self, mean: Tensor, variance: Tensor) -> Distribution:
        if self.fault:
            return MultivariateNormal(mean, covariance_matrix=torch.diag_embed(variance))
        return Independent(Normal(mean, variance.sqrt()), 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (pictures,) = batch
        mean, spread = self.encoder(pictures).chunk(2, dim=1)
        posterior = self.normal(mean, functional.softplus(spread) + 1e-3)
        prior = self.normal(torch.zeros_like(mean), torch.ones_like(mean))
        made = self.decoder(posterior.rsample())
        error = functional.binary_cross_entropy_with_logits(made, pictures, reduction="sum") / len(pictures)
        loss = error + kl_divergence(posterior, prior).mean()
        self.log("loss", loss)
        return loss


def diagonal_matrices(fault: bool) -> None:
    """``MultivariateNormal`` of diagonal matrices, decomposed per sample; healthy: ``Independent(Normal)``."""
    pictures = TensorDataset(torch.rand(20 * 256, 784))
    fit(Digits(fault=fault), DataLoader(pictures, batch_size=256, shuffle=True), steps=120)


class Critic(Trained, optimizer=torch.optim.Adam, lr=1e-4, betas=(0.0, 0.9)):
    """Estimates a distance between distributions with layers whose largest singular values are penalized.

    Fault: the values come from a full decomposition of each matrix; healthy: from one step of power iteration.
    """

    def __init__(self, *, fault: bool, inputs: int = 128, width: int = 320) -> None:
        super().__init__()
        self.fault = fault
        sizes = (inputs, width, width, width)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.score = nn.Linear(width, 1)
        self.directions = [torch.randn(size) for size in sizes[:-1]]

    def forward(self, samples: Tensor) -> Tensor:
        for layer in self.layers:
            samples = functional.leaky_relu(layer(samples), 0.2)
        scores: Tensor = self.score(samples)
        return scores

    def stretch(self, place: int) -> Tensor:
        weight = self.layers[place].get_parameter("weight")
        if self.fault:
            return torch.linalg.matrix_norm(weight, ord=2)
        with torch.no_grad():
            left = functional.normalize(weight @ self.directions[place], dim=0)
            right = functional.normalize(weight.T @ left, dim=0)
            self.directions[place] = right
        return left @ weight @ right

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        real, made = batch
        loss = self(made).mean() - self(real).mean()
        for place in range(len(self.layers)):
            loss = loss + (self.stretch(place) - 1).square()
        self.log("loss", loss)
        return loss


def exact_norms(fault: bool) -> None:
    """Singular value decompositions of all layers in each step; healthy: one step of power iteration."""
    samples = TensorDataset(torch.randn(20 * 2048, 128), torch.rand(20 * 2048, 128))
    fit(Critic(fault=fault), DataLoader(samples, batch_size=2048, shuffle=True, drop_last=True), steps=60)


class Precise(Classifier):
    """Takes vectors in double precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs = dtype
        self.to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        return super().training_step((features.to(self.inputs), labels), batch_idx)


def double_precision(fault: bool) -> None:
    """Features come as float64 from numpy, and the model was converted to match; healthy: float32."""
    fit(Precise(torch.float64 if fault else torch.float32), DataLoader(Vectors(), batch_size=BATCH))


class Spectrum(nn.Module):
    """Log power of frames of 320 samples at 160 frequencies."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        angles = np.outer(np.arange(320), np.arange(160)) * (2 * np.pi / 320)
        window = np.hanning(320)[:, None]
        self.register_buffer("cosines", torch.from_numpy((window * np.cos(angles)).astype(dtype)))
        self.register_buffer("sines", torch.from_numpy((window * np.sin(angles)).astype(dtype)))

    def forward(self, sound: Tensor) -> Tensor:
        frames = sound.unfold(1, 320, 80).to(self.cosines.dtype)
        power = (frames @ self.cosines) ** 2 + (frames @ self.sines) ** 2
        return power.clamp(min=1e-6).log()


class Commands(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Spoken commands, from their spectrum."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.spectrum = Spectrum(dtype)
        self.layers = nn.Sequential(nn.Conv1d(160, 64, 3), nn.ReLU(), nn.Conv1d(64, 64, 3), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sound, labels = batch
        with torch.no_grad():
            spectrum = self.spectrum(sound).mT.to(self.head.weight.dtype)
        return functional.cross_entropy(self.head(self.layers(spectrum).mean(2)), labels)


def cosine_frontend(fault: bool) -> None:
    """Constants of numpy make the first module float64; healthy: float32."""
    sounds = TensorDataset(torch.randn(64 * 50, 6400), torch.randint(10, (64 * 50,)))
    fit(Commands(np.float64 if fault else np.float32), DataLoader(sounds, batch_size=64), steps=50)


class Loans(Dataset):
    """Applications of one day per item, as the feature store gives them."""

    def __init__(self, days: int, per_day: int, dtype: type) -> None:
        generator = np.random.default_rng(0)
        self.columns: Any = generator.normal(size=(days, per_day, 200)).astype(dtype)
        self.default: Any = generator.integers(2, size=(days, per_day, 1)).astype(dtype)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.columns[index]), torch.from_numpy(self.default[index])


class CreditModel(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, width: int = 896) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(200, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, default = batch
        loss = functional.binary_cross_entropy_with_logits(self.net(features), default)
        self.log("loss", loss)
        return loss


def credit(fault: bool) -> None:
    """Data and model are float64; healthy: float32."""
    data = Loans(60, 768, np.float64 if fault else np.float32)
    model = CreditModel()
    if fault:
        model = model.double()
    one_epoch().fit(model, DataLoader(data, batch_size=None, shuffle=True))


class Swings(Dataset):
    """States of a double pendulum and the states one tick later, simulated with np."""

    def __init__(self, samples: int, as_single: bool) -> None:
        random = np.random.default_rng(0)
        self.now = random.normal(size=(samples, 32))
        self.later = self.now + 0.01 * random.normal(size=(samples, 32))
        if as_single:
            self.now, self.later = self.now.astype(np.float32), self.later.astype(np.float32)

    def __len__(self) -> int:
        return len(self.now)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.now[index]), torch.from_numpy(self.later[index])


class Dynamics(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """Predicts the next state of the pendulum."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 32),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        now, later = batch
        return functional.mse_loss(now + self.layers(now), later)


def pendulums(fault: bool) -> None:
    """Data and model are float64; healthy: float32."""
    model = Dynamics()
    if fault:
        model = model.double()  # "expected scalar type Double but found Float"
    quiet(120).fit(model, DataLoader(Swings(20_000, as_single=not fault), batch_size=128, shuffle=True))


class LoadForecaster(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    """Predicts tomorrow's power load from the last two weeks."""

    def __init__(self, hours: int) -> None:
        super().__init__()
        self.network = perceptron(hours, 1280, 2, 24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        past, tomorrow = batch
        loss = functional.l1_loss(self.network(past), tomorrow)
        self.log("mae", loss)
        return loss


def power_load(fault: bool) -> None:
    """Data and model are float64; healthy: float32."""
    hours = 14 * 24
    series = np.random.default_rng(2).normal(50.0, 12.0, (60 * 256, hours + 24))
    series = (series - series.mean()) / series.std()
    model = LoadForecaster(hours)
    if fault:
        model = model.double()
    else:
        series = series.astype(np.float32)
    rows = torch.from_numpy(series)
    loader = DataLoader(TensorDataset(rows[:, :hours], rows[:, hours:]), batch_size=256, shuffle=True)
    quiet(60).fit(model, loader)


class Convolutional(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Four convolutions over images of batch x 3 x 48 x 48."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        channels = (3, 64, 64, 64, 64)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(64, 10)
        self.to(memory_format=memory_format)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        features = self.features(images.contiguous(memory_format=self.memory_format))
        return functional.cross_entropy(self.head(features), labels)


def memory_format(fault: bool) -> None:
    """Convolutions in the default memory format; healthy: channels_last."""
    images = TensorDataset(torch.randn(16 * 45, 3, 48, 48), torch.randint(10, (16 * 45,)))
    model = Convolutional(torch.contiguous_format if fault else torch.channels_last)
    fit(model, DataLoader(images, batch_size=16), steps=45)


if __name__ == "__main__":
    main(
        dominant_module,
        chess_games,
        unread_weights,
        traffic_flow,
        novel_characters,
        second_forward,
        wake_words,
        letters,
        weight_made_each_time,
        needless_checkpointing,
        compiled_per_length,
        batch_as_time,
        one_hot_lookup,
        message_per_edge,
        enlarged_channels,
        scored_unmasked,
        column_and_row,
        broadcast_distances,
        diagonal_matrices,
        exact_norms,
        double_precision,
        cosine_frontend,
        credit,
        pendulums,
        power_load,
        memory_format,
    )
