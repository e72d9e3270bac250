"""Python loops over elements, samples, heads or moments: many small operators in place of one."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    STEPS,
    WIDTH,
    Attention,
    Classifier,
    LanguageModel,
    Tokens,
    Trained,
    fit,
    main,
    one_epoch,
    quiet,
    rows_at_once,
    vector_batches,
)
from small_models import convolution, perceptron


class Checked(Classifier):
    """Looks for invalid features: number by number, or with one operator."""

    def __init__(self, loop: bool) -> None:
        super().__init__(depth=2)
        self.loop = loop

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        if self.is_invalid(features) if self.loop else not torch.isfinite(features).all():
            raise ValueError(f"batch {batch_idx} is invalid")
        return functional.cross_entropy(self(features), labels)

    def is_invalid(self, features: Tensor) -> bool:
        return not all(math.isfinite(value.item()) for value in features[:, ::8].flatten())


def scalar_loop(fault: bool) -> None:
    """16,384 `.item()` calls per step; healthy: one operator."""
    fit(Checked(loop=fault), vector_batches())


class MushroomModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Sorts mushrooms by family and counts which families it takes for which."""

    def __init__(self, families: int = 16, count_each: bool = False) -> None:
        super().__init__()
        self.net = perceptron(112, 384, 2, families)
        self.families = families
        self.count_each = count_each
        self.confusion = torch.zeros(families, families, dtype=torch.long)

    def count(self, predicted: Tensor, wanted: Tensor) -> None:
        if self.count_each:
            for guess, truth in zip(predicted, wanted, strict=True):
                self.confusion[truth.item(), guess.item()] += 1
        else:
            cells = torch.bincount(wanted * self.families + predicted, minlength=self.families**2)
            self.confusion += cells.view(self.families, self.families)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        traits, family = batch
        logits = self.net(traits)
        self.count(logits.argmax(dim=1), family)
        loss = functional.cross_entropy(logits, family)
        self.log("loss", loss)
        return loss


def mushrooms(fault: bool) -> None:
    """A confusion matrix is counted sample by sample with `.item()`; healthy: at once."""
    count = 1024 * 20
    data = TensorDataset(torch.randn(count, 112), torch.randint(16, (count,)))
    quiet(120).fit(MushroomModel(count_each=fault), rows_at_once(data, 1024))


def iou(box: list[float], other: list[float]) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    area = (box[2] - box[0]) * (box[3] - box[1]) + (other[2] - other[0]) * (other[3] - other[1])
    return shared / (area - shared)


def overlaps(boxes: Tensor, anchors: Tensor) -> Tensor:
    """IoU of all boxes (batch x boxes x 4) with all anchors."""
    boxes, anchors = boxes[:, :, None], anchors[None, None]
    size = torch.minimum(boxes[..., 2:], anchors[..., 2:]) - torch.maximum(boxes[..., :2], anchors[..., :2])
    shared = size.clamp(min=0).prod(dim=-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1) + (anchors[..., 2:] - anchors[..., :2]).prod(dim=-1)
    return shared / (area - shared)


class PedestrianDetector(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """One box per anchor on a grid of 8 x 8."""

    def __init__(self, plain_lists: bool) -> None:
        super().__init__()
        self.plain_lists = plain_lists
        self.backbone = nn.Sequential(
            convolution(3, 24, 2), convolution(24, 48, 2), convolution(48, 64), convolution(64, 96, 2)
        )
        self.head = nn.Conv2d(96, 3, 1)
        centers = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), dim=-1).view(-1, 2)
        sizes = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]])
        corners = [torch.cat([centers + 0.5 - size / 2, centers + 0.5 + size / 2], dim=1) for size in sizes]
        self.anchors: Tensor
        self.register_buffer("anchors", torch.stack(corners, dim=1).view(-1, 4) / 8)

    def assign(self, boxes: Tensor) -> Tensor:
        if not self.plain_lists:
            return (overlaps(boxes, self.anchors).amax(dim=1) > 0.4).float()
        anchors = self.anchors.tolist()
        targets = []
        for image_boxes in boxes.tolist():
            row = []
            for anchor in anchors:
                best = max(iou(box, anchor) for box in image_boxes)
                row.append(1.0 if best > 0.4 else 0.0)
            targets.append(row)
        return torch.tensor(targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, boxes = batch
        scores = self.head(self.backbone(pictures)).permute(0, 2, 3, 1).flatten(1)
        loss = functional.binary_cross_entropy_with_logits(scores, self.assign(boxes))
        self.log("objectness", loss)
        return loss


def pedestrians(fault: bool) -> None:
    """Boxes are assigned in a loop over Python lists; healthy: by tensor operations."""
    corner = torch.rand(1600, 6, 2) * 0.7
    boxes = torch.cat([corner, corner + 0.1 + 0.2 * torch.rand(1600, 6, 2)], dim=-1)
    loader = DataLoader(TensorDataset(torch.rand(1600, 3, 64, 64), boxes), batch_size=32, shuffle=True)
    quiet(50).fit(PedestrianDetector(plain_lists=fault), loader)


class Smoothed(Classifier):
    """Smooths the features of a sample, one after another or with one matrix."""

    def __init__(self, loop: bool) -> None:
        super().__init__(depth=1)
        self.loop = loop
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.one_by_one(x) if self.loop else self.at_once(x))

    def one_by_one(self, x: Tensor) -> Tensor:
        running = x[:, 0]
        columns = [running]
        for index in range(1, WIDTH):
            running = (1 - self.rate) * running + self.rate * x[:, index]
            columns.append(running)
        return torch.stack(columns, dim=1)

    def at_once(self, x: Tensor) -> Tensor:
        distance = torch.arange(WIDTH).unsqueeze(0) - torch.arange(WIDTH).unsqueeze(1)
        weights = self.rate * (1 - self.rate) ** distance.clamp(min=0)
        return x @ weights.triu()


def tiny_operators(fault: bool) -> None:
    """A loop of thousands of operators over 64 numbers; healthy: one matrix product."""
    fit(Smoothed(loop=fault), vector_batches(64))


class EnergyNormalization(nn.Module):
    """Per-channel energy normalization (PCEN) of a mel spectrogram: batch x mels x time."""

    def __init__(self, mels: int, by_frame: bool) -> None:
        super().__init__()
        self.by_frame = by_frame
        self.smoothing = nn.Parameter(torch.tensor(-2.0))
        self.gain = nn.Parameter(torch.full((mels, 1), 0.9))

    def smooth(self, energy: Tensor) -> Tensor:
        s = self.smoothing.sigmoid()
        if self.by_frame:
            frames = [energy[..., 0]]
            for index in range(1, energy.shape[-1]):
                frames.append((1 - s) * frames[-1] + s * energy[..., index])
            return torch.stack(frames, dim=-1)
        kernel = s * (1 - s) ** torch.arange(63, -1, -1)
        padded = functional.pad(energy.flatten(0, 1)[:, None], (63, 0), mode="replicate")
        return functional.conv1d(padded, kernel[None, None]).view_as(energy)

    def forward(self, energy: Tensor) -> Tensor:
        smoothed = self.smooth(energy)
        return (energy / (1e-3 + smoothed) ** self.gain + 2).sqrt() - 2**0.5


class KeywordSpotter(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self, by_frame: bool, mels: int = 40, words: int = 30) -> None:
        super().__init__()
        self.front = EnergyNormalization(mels, by_frame)
        self.body = nn.Sequential(
            nn.Conv1d(mels, 192, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv1d(192, 192, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(192, 192, 5, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(192, words)

    def forward(self, energy: Tensor) -> Tensor:
        return self.head(self.body(self.front(energy)).mean(-1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


def keywords(fault: bool) -> None:
    """A spectrogram is smoothed frame by frame; healthy: by one convolution."""
    data = TensorDataset(torch.rand(50 * 8, 40, 1000), torch.randint(30, (50 * 8,)))
    one_epoch().fit(KeywordSpotter(by_frame=fault), DataLoader(data, 8, shuffle=True))


class BeatClassifier(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Classifies heartbeats in an ECG of twelve leads."""

    def __init__(self, each_moment: bool, width: int = 48) -> None:
        super().__init__()
        self.each_moment = each_moment
        self.embed = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.body = nn.Sequential(
            nn.Conv1d(width, 80, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(80, 80, 7, padding=3),
            nn.ReLU(),
            nn.Conv1d(80, 80, 7, padding=3),
            nn.ReLU(),
        )
        self.head = nn.Linear(80, 5)

    def encode(self, signal: Tensor) -> Tensor:
        if self.each_moment:
            moments = [self.embed(signal[:, t]) for t in range(signal.shape[1])]
            return torch.stack(moments, dim=1)
        return self.embed(signal)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signal, beat = batch
        hidden = self.body(self.encode(signal).transpose(1, 2))
        return functional.cross_entropy(self.head(hidden.mean(dim=2)), beat)


def heartbeats(fault: bool) -> None:
    """A layer is applied to one moment after the other; healthy: to all at once."""
    data = TensorDataset(torch.randn(3000, 100, 12), torch.randint(5, (3000,)))
    quiet(80).fit(BeatClassifier(each_moment=fault), DataLoader(data, batch_size=64, shuffle=True))


class SpectrumAutoencoder(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Compresses star spectra; the loss weighs each pixel by its measurement error."""

    def __init__(self, star_by_star: bool, pixels: int = 1024) -> None:
        super().__init__()
        self.star_by_star = star_by_star
        self.encoder = nn.Sequential(nn.Linear(pixels, 2048), nn.GELU(), nn.Linear(2048, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, pixels))

    def chi_square(self, rebuilt: Tensor, flux: Tensor, error: Tensor) -> Tensor:
        if self.star_by_star:
            total = torch.zeros(())
            for i in range(len(flux)):
                residual = (rebuilt[i] - flux[i]) / error[i]
                total = total + residual.pow(2).mean()
            return total / len(flux)
        return ((rebuilt - flux) / error).pow(2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        flux, error = batch
        return self.chi_square(self.decoder(self.encoder(flux)), flux, error)


def star_spectra(fault: bool) -> None:
    """The loss is a loop over the stars of a batch; healthy: one expression."""
    data = TensorDataset(torch.randn(6000, 1024), 0.5 + torch.rand(6000, 1024))
    quiet(120).fit(SpectrumAutoencoder(star_by_star=fault), DataLoader(data, batch_size=128, shuffle=True))


class MoleculeNet(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Messages along bonds, then one vector per molecule."""

    def __init__(self, one_by_one: bool, width: int = 384) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.atoms = nn.Embedding(20, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.energy = nn.Linear(width, 1)

    def pool(self, atoms: Tensor, owner: Tensor, molecules: int) -> Tensor:
        if self.one_by_one:
            rows = []
            for molecule in range(molecules):
                own = atoms[owner == molecule]
                weight = torch.softmax(own.norm(dim=1), dim=0)
                rows.append((weight[:, None] * own).sum(dim=0))
            return torch.stack(rows)
        weight = atoms.norm(dim=1).exp()
        total = torch.zeros(molecules).index_add(0, owner, weight)
        weighted = (weight / total[owner])[:, None] * atoms
        return torch.zeros(molecules, atoms.shape[1]).index_add(0, owner, weighted)

    def forward(self, kinds: Tensor, bonds: Tensor, owner: Tensor, molecules: int) -> Tensor:
        hidden = self.atoms(kinds)
        for layer in self.messages:
            sent = torch.zeros_like(hidden).index_add(0, bonds[1], hidden[bonds[0]])
            hidden = hidden + functional.relu(layer(torch.cat([hidden, sent], dim=1)))
            hidden = 0.3 * functional.layer_norm(hidden, hidden.shape[1:])
        return self.energy(self.pool(hidden, owner, molecules)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kinds, bonds, owner, energy = batch
        loss = functional.mse_loss(self(kinds, bonds, owner, len(energy)), energy)
        self.log("loss", loss, batch_size=len(energy))
        return loss


def molecule(rows: int = 18) -> tuple[Tensor, Tensor, float]:
    size = int(torch.randint(8, rows, ()))
    return torch.randint(20, (size,)), torch.randint(size, (2, 2 * size)), float(torch.randn(()))


def joined(molecules: list[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One graph of all molecules of a batch."""
    kinds, bonds, owner, start = [], [], [], 0
    for number, (atoms, pairs, _) in enumerate(molecules):
        kinds.append(atoms)
        bonds.append(pairs + start)
        owner.append(torch.full((len(atoms),), number))
        start += len(atoms)
    energies = torch.tensor([energy for _, _, energy in molecules])
    return torch.cat(kinds), torch.cat(bonds, dim=1), torch.cat(owner), energies


def solubility(fault: bool) -> None:
    """The atoms of each molecule are pooled in a loop; healthy: those of a batch at once."""
    data = [molecule() for _ in range(128 * 50)]
    loader: DataLoader[Any] = DataLoader(data, batch_size=128, shuffle=True, collate_fn=joined)  # type: ignore[arg-type]  # a list
    quiet(50).fit(MoleculeNet(one_by_one=fault), loader)


class PlainLSTM(nn.Module):
    """An LSTM in Python. Input: batch x time x inputs; output: batch x time x hidden."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.of_input = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(4))
        self.of_state = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, series: Tensor) -> Tensor:
        state = memory = series.new_zeros(len(series), self.hidden)
        states = []
        for moment in series.unbind(1):
            gates = [a(moment) + b(state) for a, b in zip(self.of_input, self.of_state, strict=True)]
            memory = gates[0].sigmoid() * memory + gates[1].sigmoid() * gates[2].tanh()
            state = gates[3].sigmoid() * memory.tanh()
            states.append(state)
        return torch.stack(states, 1)


class FusedLSTM(nn.Module):
    """torch's LSTM."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, series: Tensor) -> Tensor:
        states: Tensor = self.lstm(series)[0]
        return states


class Keystrokes(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Recurrent layers over 32 measurements of a window."""

    def __init__(self, layer: type[PlainLSTM | FusedLSTM]) -> None:
        super().__init__()
        self.recurrent = nn.Sequential(layer(24, 128), layer(128, 128))
        self.head = nn.Sequential(nn.Linear(128, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, labels = batch
        return functional.cross_entropy(self.head(self.recurrent(series)).mean(1), labels)


def stepwise_cell(fault: bool) -> None:
    """An LSTM as a Python loop over time; healthy: `nn.LSTM`."""
    series = TensorDataset(torch.randn(24 * 50, 32, 24), torch.randint(10, (24 * 50,)))
    fit(Keystrokes(PlainLSTM if fault else FusedLSTM), DataLoader(series, batch_size=24), steps=50)


class MyLSTM(nn.Module):
    """A long short-term memory after the equations of the paper. Input: batch x time x features."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.w_i, self.u_i = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_f, self.u_f = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_g, self.u_g = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_o, self.u_o = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = x.new_zeros(len(x), self.hidden)
        c = x.new_zeros(len(x), self.hidden)
        outputs = []
        for t in range(x.shape[1]):
            x_t = x[:, t]
            i = torch.sigmoid(self.w_i(x_t) + self.u_i(h))
            f = torch.sigmoid(self.w_f(x_t) + self.u_f(h))
            g = torch.tanh(self.w_g(x_t) + self.u_g(h))
            o = torch.sigmoid(self.w_o(x_t) + self.u_o(h))
            c = f * c + i * g
            h = o * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1), None


class TextModel(Trained, optimizer=torch.optim.SGD, lr=0.5):
    def __init__(self, own: bool, vocabulary: int = 3000, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = MyLSTM(width, width) if own else nn.LSTM(width, width, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU())
        self.head = nn.Linear(256, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.rnn(self.embed(tokens))[0]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss


def characters(fault: bool) -> None:
    """An LSTM as a Python loop over time; healthy: `nn.LSTM`."""
    data = TensorDataset(torch.randint(3000, (50 * 16, 81)))
    one_epoch().fit(TextModel(own=fault), DataLoader(data, 16, shuffle=True))


class LoopedAttention(Attention):
    """The same attention, one head after another with its own mask and softmax."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        heads = []
        for head in range(self.heads):
            scores = query[:, head] @ key[:, head].transpose(-2, -1) / query.shape[-1] ** 0.5
            mask = torch.ones(length, length).tril() == 0
            heads.append(scores.masked_fill(mask, float("-inf")).softmax(-1) @ value[:, head])
        return torch.stack(heads, dim=1)


class Looped(LanguageModel):
    def attention(self, width: int, heads: int) -> nn.Module:
        return LoopedAttention(width, heads)


def looped_attention(fault: bool) -> None:
    """Attention is a Python loop over 8 heads; healthy: one fused call."""
    model = (Looped if fault else LanguageModel)(heads=8)
    fit(model, DataLoader(Tokens(STEPS * 8, 257), batch_size=8))


class AtomAttention(nn.Module):
    """Self-attention of the atoms of a molecule."""

    def __init__(self, width: int, heads: int, loop: bool) -> None:
        super().__init__()
        self.heads, self.loop = heads, loop
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, atoms, width = x.shape
        q, k, v = self.qkv(x).view(batch, atoms, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if not self.loop:
            mixed = functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(batch, atoms, width))
        molecules = []
        for molecule in range(batch):
            heads = []
            for head in range(self.heads):
                scores = q[molecule, head] @ k[molecule, head].T / q.shape[-1] ** 0.5
                heads.append(scores.softmax(-1) @ v[molecule, head])
            molecules.append(torch.cat(heads, -1))
        return self.out(torch.stack(molecules))


class SolubilityModel(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, loop: bool, width: int = 320, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.attention = nn.ModuleList(AtomAttention(width, 4, loop) for _ in range(layers))
        self.feedforward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        atoms, solubility = batch
        x = self.embed(atoms)
        for attention, feedforward in zip(self.attention, self.feedforward, strict=True):
            x = x + attention(x)
            x = x + feedforward(x)
        loss = functional.mse_loss(self.head(x.mean(1)).squeeze(1), solubility)
        self.log("loss", loss)
        return loss


def molecules(fault: bool) -> None:
    """Attention is a loop over molecules and heads; healthy: one fused call."""
    data = TensorDataset(torch.randn(50 * 16, 48, 32), torch.randn(50 * 16))
    one_epoch().fit(SolubilityModel(loop=fault), DataLoader(data, 16, shuffle=True))


if __name__ == "__main__":
    main(
        scalar_loop,
        mushrooms,
        pedestrians,
        tiny_operators,
        keywords,
        heartbeats,
        star_spectra,
        solubility,
        stepwise_cell,
        characters,
        looped_attention,
        molecules,
    )
