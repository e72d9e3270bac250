"""Small real trainings for the tests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset[torch.Tensor]):
    """Reproducible batches of noise."""

    def __init__(self, batches: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self._batches = torch.randn(batches, 4, 8, generator=generator)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batches[index]


def loader(batches: int = 12) -> DataLoader[torch.Tensor]:
    """Give one that yields ``batches`` batches."""
    return DataLoader(Noise(batches), batch_size=None)


class Steps(nn.Module):
    """A small network with every step that Lightning knows; dropout makes it use the random generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Perceptron(Steps, pl.LightningModule):
    """The network as a module of ``lightning.pytorch``."""


class Raises(Perceptron):
    """Raises an exception in the training step of a batch."""

    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at:
            raise self.error
        return super().training_step(batch, batch_idx)


class Package:
    """One of Lightning's two packages, with a network and a Trainer of its own.

    Args:
        name: ``lightning.pytorch`` or ``pytorch_lightning``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pl: Any = importlib.import_module(name)
        self.loggers: Any = importlib.import_module(f"{name}.loggers")
        self.profilers: Any = importlib.import_module(f"{name}.profilers")
        self.Perceptron: Any = type("Perceptron", (Steps, self.pl.LightningModule), {})

    def trainer(self, directory: Path, *callbacks: Any, **options: Any) -> Any:
        """Give a quiet Trainer on one CPU whose log_dir is in ``directory``."""
        quiet = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": self.loggers.CSVLogger(directory, name="", version="log"),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
        }
        return self.pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def trainer(directory: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """Give a quiet Trainer of ``lightning.pytorch`` on one CPU whose log_dir is in ``directory``."""
    made: pl.Trainer = Package("lightning.pytorch").trainer(directory, *callbacks, **options)
    return made


def only_run(directory: Path, name: str = "memprofiler") -> Path:
    """Give the run directory below ``directory``; there must be one."""
    (found,) = [path for path in directory.rglob(name) if path.is_dir()]
    return found


def manifest(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Read a manifest's rows with nothing but the json module."""
    return [json.loads(line) for line in (run / f"manifest.rank{rank:05d}.jsonl").read_text().splitlines()]


def rows_of(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """Give the manifest's rows of one kind."""
    return [row for row in manifest(run, rank) if row["kind"] == kind]


def program(text: str) -> str:
    """Give a program for a process of its own; ``sys``, ``Path`` and the small trainings are imported."""
    imports = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from training import Perceptron, loader, trainer
    """
    return dedent(imports) + dedent(text)
