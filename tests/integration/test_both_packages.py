"""A training records the same with ``pytorch_lightning`` as with ``lightning.pytorch``."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.artifacts.trace_rewriting import original_categories
from training import Package, Steps, loader, rows_of

NUMBER = re.compile(r"\d{10,}")
KINDS = {"run", "training", "window", "artifact", "unavailable", "note", "error", "end"}
MEASURED = {"time_ns", "sha256", "size_bytes", "environment", "root", "overhead", "peak_rss_bytes"}
# Whether there is a row is a matter of time and chance.
BY_CHANCE = re.compile(r"\.(?:lines|action_memory|garbage)\.jsonl$")


def recorder(**options: Any) -> MemProfilerCallback:
    return MemProfilerCallback(**{"output": OutputOptions(summary=False, report=False, on_error="raise"), **options})


def program(package: Package, directory: Path, *callbacks: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Give a Trainer, a model and a data module with hooks of their own, and a callback with the name of its base."""

    class Callback(package.pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            pass

    class Net(Steps, package.pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-2

        def on_train_batch_start(self, *_: Any) -> None:
            pass

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val", self.loss(batch))  # type: ignore[operator]

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            pass

    class Data(package.pl.LightningDataModule):  # type: ignore[name-defined]
        def train_dataloader(self) -> Any:
            return loader(8)

        def val_dataloader(self) -> Any:
            return loader(2)

        test_dataloader = val_dataloader

        def on_after_batch_transfer(self, batch: Any, _: int) -> Any:
            return batch

    saving = package.pl.callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=4)
    options = {"max_epochs": 2, "val_check_interval": 4, "enable_checkpointing": True, **options}
    return package.trainer(directory, Callback(), saving, *callbacks, **options), Net(), Data()


def stages(package: Package, directory: Path, *callbacks: Any, **options: Any) -> None:
    training, model, data = program(package, directory, *callbacks, **options)
    training.fit(model, datamodule=data)
    training.validate(model, datamodule=data, verbose=False)
    training.test(model, loader(12), verbose=False)
    training.predict(model, loader(12))


def tuned(package: Package, directory: Path) -> None:
    finder = package.pl.callbacks.LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
    training, model, data = program(package, directory, finder, recorder(), profiler="fts_extended")
    training.fit(model, datamodule=data)


PROGRAMS: dict[str, Callable[[Package, Path], None]] = {
    "callback": lambda package, directory: stages(package, directory, recorder()),
    "profiler": lambda package, directory: stages(package, directory, profiler="fts_extended"),
    "both": lambda package, directory: stages(package, directory, recorder(), profiler="fts_extended"),
    "tuner": tuned,
}


def recorded(directory: Path) -> dict[str, Any]:
    """Give what does not depend on times: files, rows, and the names of actions with their phases."""
    found: dict[str, Any] = {"files": sorted(NUMBER.sub("", str(path)) for path in files(directory))}
    for path in files(directory):
        name = NUMBER.sub("", str(path))
        if path.name.startswith("manifest"):
            rows = [json.loads(line) for line in (directory / path).read_text().splitlines()]
            found[name] = {
                kept(row) for row in rows if row["kind"] in KINDS and not BY_CHANCE.search(str(row.get("path")))
            }
        elif path.name.startswith("actions"):
            rows = [json.loads(line) for line in (directory / path).read_text().splitlines()]
            totals = [row for row in rows if row["kind"] == "total" and row["action"].startswith("[")]
            found[name] = {(row["action"], row["phase"], row["in_window"]) for row in totals}
        elif path.name.endswith("hooks.jsonl"):
            rows = [json.loads(line) for line in (directory / path).read_text().splitlines()]
            found[name] = {row["action"] for row in rows}
        elif path.name.endswith(".trace.json.gz"):
            trace = json.loads(original_categories(gzip.decompress((directory / path).read_bytes())))
            found[name] = {row["name"] for row in trace["traceEvents"] if row.get("name", "").startswith("[pl]")}
    return found


def files(directory: Path) -> list[Path]:
    found = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return [path for path in found if not BY_CHANCE.search(path.name)]


def kept(row: dict[str, Any]) -> str:
    simple = {name: value for name, value in row.items() if name not in MEASURED}
    return NUMBER.sub("", json.dumps(simple, sort_keys=True))


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_rows_are_the_same(tmp_path: Path, kind: str) -> None:
    found = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        PROGRAMS[kind](Package(name), tmp_path / name)
        found.append(recorded(tmp_path / name))
    assert len(found[0]) > 4
    for name, value in found[0].items():
        assert found[1].get(name) == value, name
    assert found[0].keys() == found[1].keys()


@pytest.mark.parametrize("kind", ["callback", "profiler", "both"])
def test_torchs_profiler_is_on_in_the_window_alone(tmp_path: Path, package: Package, kind: str) -> None:
    on: list[int] = []

    class Net(package.Perceptron):  # type: ignore[name-defined]
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            on.extend([batch_idx] if torch.autograd._profiler_enabled() else [])
            return self.loss(batch)

    callbacks = [] if kind == "profiler" else [recorder(schedule=Schedule())]
    options: dict[str, Any] = {} if kind == "callback" else {"profiler": "fts_extended"}
    training = package.trainer(tmp_path, *callbacks, val_check_interval=3, **options)
    training.fit(Net(), loader(), loader(2))
    assert on == [2, 3]
    run = tmp_path / "log/memprofiler"
    assert [row for row in rows_of(run, "unavailable") if row["collector"] == "operator_trace"] == []
    assert list((tmp_path / "log").glob("*.pt.trace.json.gz"))


def test_the_version_is_that_of_the_trainers_package(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module(package.name.partition(".")[0]), "__version__", "1.2.3")
    package.trainer(tmp_path, recorder()).fit(package.Perceptron(), loader(4))
    (row,) = rows_of(tmp_path / "log/memprofiler", "run")
    assert row["environment"]["lightning"] == "1.2.3"


LOGGERS: dict[str, Callable[[Package, str], Any]] = {
    "csv": lambda package, place: package.loggers.CSVLogger(place),
    "tensorboard": lambda package, place: package.loggers.TensorBoardLogger(place),
    "derived": lambda package, place: type("Mine", (package.loggers.CSVLogger,), {})(place),
    "other": lambda package, place: type("Mine", (package.loggers.logger.DummyLogger,), {"save_dir": place})(),
    "namesake": lambda package, place: type("CSVLogger", (package.loggers.logger.DummyLogger,), {"save_dir": place})(),
    "none": lambda package, place: False,
}


@pytest.mark.parametrize("kind", LOGGERS)
def test_the_run_is_in_the_log_dir_of_the_trainer(tmp_path: Path, package: Package, kind: str) -> None:
    callback = recorder()
    logger = LOGGERS[kind](package, str(tmp_path / "logs"))
    training = package.trainer(tmp_path, callback, logger=logger, default_root_dir=tmp_path / "root")
    training.fit(package.Perceptron(), loader(4), loader(2))
    assert callback.run_directory == Path(training.log_dir) / "memprofiler"
