"""The report's files reach loggers that take files, where the user asks."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_memprof import MemProfilerCallback, OutputOptions
from training import Package, loader, only_run


class Experiment:
    """What MLflow's client and W&B's run do with files: they copy them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[tuple[Any, ...]] = []

    def log_artifact(self, *arguments: Any, **named: Any) -> None:
        self.calls.append((*arguments, named))
        path = next(Path(argument) for argument in arguments if str(argument).endswith((".json", ".txt")))
        shutil.copy(path, self.directory)


class Quiet:
    """What the Trainer asks of every logger, without the package behind it."""

    def __init__(self, directory: Path) -> None:
        self.client = Experiment(directory)

    save_dir = name = None
    version = "v1"
    run_id = "run7"

    @property
    def experiment(self) -> Experiment:
        return self.client

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    log_metrics = log_hyperparams = log_graph = save = finalize = after_save_checkpoint = nothing


def quiet(package: Package, name: str, directory: Path) -> Any:
    """Give a logger of Lightning's whose package is not installed."""
    return type(f"Quiet{name}", (Quiet, getattr(package.loggers, name)), {})(directory)


def fit(package: Package, directory: Path, *loggers: Any, asked: bool = True) -> None:
    callback = MemProfilerCallback(output=OutputOptions(dirpath=directory / "run", summary=False, loggers=asked))
    training = package.trainer(directory, callback, logger=list(loggers), default_root_dir=str(directory))
    training.fit(package.Perceptron(), loader(6))


def tensorboard_text(logger: Any) -> list[str]:
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("memprofiler")]
    return [events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags]


def test_tensorboard_gets_the_page_as_text(tmp_path: Path, package: Package) -> None:
    logger = package.loggers.TensorBoardLogger(tmp_path, name="", version="tb")
    fit(package, tmp_path, logger)
    (text,) = tensorboard_text(logger)
    lines = text.splitlines()
    assert lines[0].startswith("    verdict ")
    assert all(line.startswith("    ") for line in lines), "Markdown keeps the columns of an indented block only"
    page = (only_run(tmp_path) / "report.txt").read_text()
    assert [line[4:] for line in lines] == page.splitlines()


def test_mlflow_and_wandb_get_both_files(tmp_path: Path, package: Package) -> None:
    mlflow, wandb = quiet(package, "MLFlowLogger", tmp_path), quiet(package, "WandbLogger", tmp_path)
    fit(package, tmp_path, mlflow, wandb)
    run = only_run(tmp_path)
    files = [run / "report.json", run / "report.txt"]
    assert mlflow.client.calls == [("run7", str(path), "memprofiler", {}) for path in files]
    assert wandb.client.calls == [
        (str(files[0]), {"name": "memprofiler-json-v1", "type": "memprofiler"}),
        (str(files[1]), {"name": "memprofiler-txt-v1", "type": "memprofiler"}),
    ]
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["run"]["status"] == "finished"
    assert document["verdict"]["title"] in " ".join((tmp_path / "report.txt").read_text().split())


def test_loggers_get_nothing_unless_the_user_asks(tmp_path: Path, package: Package) -> None:
    mlflow = quiet(package, "MLFlowLogger", tmp_path)
    fit(package, tmp_path, mlflow, asked=False)
    assert mlflow.client.calls == []
    assert not list(only_run(tmp_path).glob("report.*"))


def test_a_logger_that_takes_no_files_is_told_and_one_that_fails_stops_neither_the_others_nor_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, package: Package
) -> None:
    broken, whole = quiet(package, "MLFlowLogger", tmp_path), quiet(package, "WandbLogger", tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the tracking server is gone")

    monkeypatch.setattr(broken.client, "log_artifact", fail)
    with caplog.at_level(logging.INFO, logger="lightning_memprof"):
        fit(package, tmp_path, broken, package.loggers.CSVLogger(tmp_path, name="", version="csv"), whole)
    assert "QuietMLFlowLogger did not accept the report files" in caplog.text
    assert f"CSVLogger accepts no files; the report is in {only_run(tmp_path)}" in caplog.text
    assert len(whole.client.calls) == 2
