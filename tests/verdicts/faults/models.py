"""Faults of the computation: a loop over time, float64, a teacher's gradients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


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


class Keystrokes(lightning.LightningModule):
    """Recurrent layers over 32 measurements of a window."""

    def __init__(self, layer: type[PlainLSTM | FusedLSTM]) -> None:
        super().__init__()
        self.recurrent = nn.Sequential(layer(24, 128), layer(128, 128))
        self.head = nn.Sequential(nn.Linear(128, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, labels = batch
        return functional.cross_entropy(self.head(self.recurrent(series)).mean(1), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def stepwise_cell(fault: bool) -> None:
    """An LSTM as a Python loop over time; healthy: `nn.LSTM`."""
    series = TensorDataset(torch.randn(24 * 50, 32, 24), torch.randint(10, (24 * 50,)))
    fit(Keystrokes(PlainLSTM if fault else FusedLSTM), DataLoader(series, batch_size=24), steps=50)


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


class Commands(lightning.LightningModule):
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

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def cosine_frontend(fault: bool) -> None:
    """Constants of numpy make the first module float64; healthy: float32."""
    sounds = TensorDataset(torch.randn(64 * 50, 6400), torch.randint(10, (64 * 50,)))
    fit(Commands(np.float64 if fault else np.float32), DataLoader(sounds, batch_size=64), steps=50)


def perceptron(width: int, depth: int) -> nn.Sequential:
    """``depth`` hidden layers between 128 inputs and 100 classes."""
    layers: list[nn.Module] = [nn.Linear(128, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 100))


class Distillation(lightning.LightningModule):
    """A student imitates a teacher, which stays as it is."""

    def __init__(self, attached: bool) -> None:
        super().__init__()
        self.attached = attached
        self.teacher = perceptron(512, 3)
        self.student = perceptron(320, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        with torch.set_grad_enabled(self.attached):
            wanted = self.teacher(samples).log_softmax(1)
        return functional.kl_div(self.student(samples).log_softmax(1), wanted, log_target=True, reduction="batchmean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-4, fused=True)


def attached_teacher(fault: bool) -> None:
    """Backward computes gradients of a teacher that no optimizer has; healthy: `no_grad` around the teacher."""
    samples = TensorDataset(torch.randn(640 * 50, 128))
    fit(Distillation(attached=fault), DataLoader(samples, batch_size=640), steps=50)


if __name__ == "__main__":
    main(stepwise_cell, cosine_frontend, attached_teacher)
