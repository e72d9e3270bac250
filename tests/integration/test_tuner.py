"""Runs that only try something out: searches of Lightning's Tuner, and fast_dev_run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import Pulse
from recorded_rows import read_pulse
from training import Perceptron, loader, only_run, trainer

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
STEPS = 6


def recorder(**output: Any) -> MemProfilerCallback:
    options = OutputOptions(summary=False, on_error="raise", **output)
    return MemProfilerCallback(Schedule(wait=1, active=1), [Pulse()], output=options)


def tuned(package: str, directory: Path, *callbacks: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return Trainer, Tuner and model of one of Lightning's two packages."""
    pl = pytest.importorskip(package)

    class Model(import_module(f"{package}.demos.boring_classes").BoringModel):  # type: ignore[misc]
        lr, batch_size = 0.1, 1

    training = pl.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=directory, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=STEPS, limit_val_batches=1,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    return training, import_module(f"{package}.tuner").Tuner(training), Model()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size", "scale_batch_size_of_validate"])
def test_the_searches_of_a_tuner_are_not_recorded_and_the_fit_after_them_is(
    tmp_path: Path, package: str, search: str, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = recorder()
    training, tuner, model = tuned(package, tmp_path, callback)
    if search == "lr_find":
        tuner.lr_find(model, num_training=3)
    elif search == "scale_batch_size":
        tuner.scale_batch_size(model, max_trials=1)
    else:
        tuner.scale_batch_size(model, method="validate", max_trials=1)
    assert callback.run_directory is None
    assert list(tmp_path.iterdir()) == []
    assert "verdict" not in capsys.readouterr().out
    training.fit(model)
    assert callback.run_directory == tmp_path / "memprofiler"
    assert len(read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")) == STEPS


@pytest.mark.parametrize("package", PACKAGES)
def test_a_profiler_alone_leaves_the_trainer_of_a_search_as_it_was(tmp_path: Path, package: str) -> None:
    training, tuner, model = tuned(package, tmp_path, profiler=ExtendedPyTorchProfiler(schedule=Schedule(wait=1)))
    before = list(training.callbacks)
    tuner.lr_find(model, num_training=3)
    assert (list(tmp_path.iterdir()), training.callbacks) == ([], before)
    training.fit(model)
    assert training.callbacks == before
    assert len(read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")) == STEPS


@pytest.mark.parametrize("callbacks", [1, 0])
def test_fast_dev_run_leaves_nothing(
    tmp_path: Path, callbacks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    training = trainer(
        tmp_path, *[recorder() for _ in range(callbacks)], fast_dev_run=3, profiler=ExtendedPyTorchProfiler()
    )
    before = list(training.callbacks)
    with caplog.at_level("WARNING", "lightning_memprof"):
        training.fit(Perceptron(), loader())
    assert (list(tmp_path.iterdir()), training.callbacks) == ([], before)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_memprof")]
    assert "dirpath" in line


def test_fast_dev_run_is_recorded_where_a_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    callback = recorder(dirpath=tmp_path / "asked")
    trainer(tmp_path, callback, fast_dev_run=3).fit(Perceptron(), loader())
    assert len(read_pulse(tmp_path / "asked/memprofiler/pulse.rank00000.csv")) == 3
    assert list((tmp_path / "work").iterdir()) == []
