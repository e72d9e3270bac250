from __future__ import annotations

from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_memprof.integration.context import unprofiled_parts
from training import Perceptron, trainer


def made(directory: Path) -> pl.Trainer:
    loggers = [CSVLogger(directory, name=name) for name in ("a", "b")]
    trained = trainer(directory, logger=loggers)
    trained.strategy.connect(Perceptron())
    trained.strategy.optimizers = [torch.optim.SGD(Perceptron().parameters(), 0.1)]
    return trained


def test_every_part_is_a_method_that_its_owner_has(tmp_path: Path) -> None:
    parts = unprofiled_parts(made(tmp_path), "fit")
    assert all(callable(getattr(part.owner, part.method)) for part in parts)
    names = [part.action for part in parts]
    assert {
        "[Precision]Precision.backward",
        "[Strategy]SingleDeviceStrategy.save_checkpoint",
        "[CheckpointIO]TorchCheckpointIO.save_checkpoint",
        "[Optimizer]SGD.step",
        "logging",
        "run_validation",
    } <= set(names)
    assert names.count("[Logger]CSVLogger.log_metrics") == 2


def test_only_fit_has_optimizers_and_a_validation_inside(tmp_path: Path) -> None:
    names = {part.action for part in unprofiled_parts(made(tmp_path), "validate")}
    assert not names & {"run_validation", "[Optimizer]SGD.step"}
    assert "logging" in names


def test_what_waits_for_other_ranks_is_timed_where_there_are_some(tmp_path: Path) -> None:
    alone = {part.action for part in unprofiled_parts(made(tmp_path), "fit")}
    with mock.patch.object(pl.Trainer, "world_size", 2):
        parts = unprofiled_parts(made(tmp_path), "fit")
    together = {part.action for part in parts}
    assert {part.method for part in parts if part.meets and part.always} == {
        "barrier",
        "broadcast",
        "all_gather",
        "log",
    }
    assert together - alone == {
        f"[Strategy]SingleDeviceStrategy.{name}" for name in ("barrier", "broadcast", "all_gather", "broadcast_sigterm")
    }


def test_a_part_that_lightning_no_longer_has_is_left_out(tmp_path: Path) -> None:
    trained = made(tmp_path)
    with mock.patch.object(type(trained._logger_connector), "log_eval_end_metrics", None):
        assert "log_eval_end_metrics" not in {part.method for part in unprofiled_parts(trained, "fit")}
