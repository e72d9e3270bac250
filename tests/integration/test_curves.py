"""Curves: what the Trainer's loggers get, and the files of ranks, read as TensorBoard reads them."""

from __future__ import annotations

import csv
import logging
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from msgspec.structs import asdict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HostMemory, Pulse, SavedTensors
from lightning_memprof.units import MIB
from recorded_rows import read_pulse
from training import Package, Perceptron, loader, manifest, only_run, rows_of, trainer

MS = 1_000_000
STEPS = 150
EVERY = 10
OF_PULSE = {
    "memprof/step_time_ms": ("duration_ns", MS), "memprof/data_wait_ms": ("data_wait_ns", MS),
    "memprof/rss_mib": ("rss_bytes", MIB),
}  # fmt: skip
Curve = list[tuple[int, float]]


class Logged(Perceptron):
    """Logs its loss, as users do."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def callback() -> MemProfilerCallback:
    light = [Pulse(), HostMemory(), SavedTensors()]
    output = OutputOptions(summary=False, curves=True, on_error="raise")
    return MemProfilerCallback(Schedule(wait=4, warmup=1, active=2, repeat=2), light, output=output)


def table(directory: Path) -> CSVLogger:
    return CSVLogger(directory, name="", version="csv")


def loggers(directory: Path) -> list[Any]:
    return [TensorBoardLogger(directory, name="", version="log", default_hp_metric=False), table(directory)]


def rows_logged(directory: Path) -> list[dict[str, str]]:
    with (directory / "csv/metrics.csv").open() as file:
        return list(csv.DictReader(file))


def events(directory: Path) -> EventAccumulator:
    read = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def pulse_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [asdict(row) for row in read_pulse(run / f"pulse.rank{rank:05d}.csv")]


def curves(directory: Path) -> dict[str, Curve]:
    read = events(directory)
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("curves")
    model = Logged()
    model.save_hyperparameters({"width": 16})
    training = trainer(directory, callback(), logger=loggers(directory), log_every_n_steps=EVERY)
    training.fit(model, loader(STEPS))
    return directory


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training whose loggers are none of TensorBoard's."""
    directory = tmp_path_factory.mktemp("filed")
    trainer(directory, callback(), logger=table(directory), log_every_n_steps=EVERY).fit(Logged(), loader(STEPS))
    return directory


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("without")
    model = Logged()
    model.save_hyperparameters({"width": 16})
    default = MemProfilerCallback(Schedule(wait=4, warmup=1, active=2), output=OutputOptions(summary=False))
    training = trainer(directory, default, logger=loggers(directory), log_every_n_steps=EVERY)
    training.fit(model, loader(STEPS))
    return directory


def rank_file(directory: Path, rank: int = 0) -> Path:
    return only_run(directory) / f"tb/rank{rank}"


def test_every_logger_and_the_file_get_the_largest_of_each_stretch_of_steps(fitted: Path, filed: Path) -> None:
    for directory, read in ((fitted, fitted / "log"), (filed, rank_file(filed))):
        pulse = pulse_of(only_run(directory))
        drawn = curves(read)
        for tag, (column, scale) in OF_PULSE.items():
            ends = [step for step, _ in drawn[tag]]
            assert 2 <= len(ends) <= STEPS // EVERY
            assert ends[-1] == STEPS - 1
            for (begin, end), (_, value) in zip(pairwise([-1, *ends]), drawn[tag], strict=True):
                inside = [row[column] for row in pulse if begin < row["global_step"] <= end and row[column] is not None]
                assert value == pytest.approx(max(inside) / scale, rel=1e-6)
        rows = rows_logged(directory)
        for tag in drawn:
            told = {int(row["step"]): float(row[tag]) for row in rows if row.get(tag)}
            assert told == pytest.approx(dict(drawn[tag]), rel=1e-6)


def test_tensorboard_shows_each_curve_of_a_rank_once(fitted: Path, filed: Path) -> None:
    for directory, expected in ((fitted, fitted / "log"), (filed, rank_file(filed))):
        runs = {path.parent for path in directory.rglob("*tfevents*")}
        assert [run for run in runs if "memprof/step_time_ms" in curves(run)] == [expected]


def test_no_point_is_drawn_twice(fitted: Path, filed: Path) -> None:
    for directory in (fitted / "log", rank_file(filed)):
        for tag, points in curves(directory).items():
            assert all(before < after for (before, _), (after, _) in pairwise(points)), tag


def test_the_user_s_own_metrics_and_hparams_are_as_without_curves(fitted: Path, without: Path) -> None:
    ours, theirs = curves(fitted / "log"), curves(without / "log")
    assert {tag: points for tag, points in ours.items() if not tag.startswith("memprof")} == theirs
    assert [step for step, _ in theirs["loss"]] == list(range(EVERY - 1, STEPS, EVERY))
    assert (fitted / "log/hparams.yaml").read_text() == (without / "log/hparams.yaml").read_text()
    with_tensors, without_tensors = (events(directory / "log").Tags()["tensors"] for directory in (fitted, without))
    assert with_tensors == without_tensors


def test_by_default_nothing_goes_to_the_loggers_of_the_program(without: Path) -> None:
    assert not [tag for tag in curves(without / "log") if tag.startswith("memprof")]
    assert not [name for name in rows_logged(without)[0] if name.startswith("memprof")]
    assert not rank_file(without).exists()


def test_one_dashboard_is_laid_out_and_each_of_its_charts_finds_a_curve(filed: Path) -> None:
    read = events(rank_file(filed))
    (content,) = read.Tensors("custom_scalars__config__")
    assert read.SummaryMetadata("custom_scalars__config__").plugin_data.plugin_name == "custom_scalars"
    (category,) = Layout.FromString(content.tensor_proto.string_val[0]).category
    assert category.title == "lightning-memprof"
    tags = curves(rank_file(filed))
    patterns = [pattern for chart in category.chart for pattern in chart.multiline.tag]
    assert {tag for tag in tags if any(re.search(pattern, tag) for pattern in patterns)} == set(tags)
    for chart in category.chart:
        assert any(re.search(pattern, tag) for pattern in chart.multiline.tag for tag in tags), chart.title


def test_the_manifest_lists_the_file(filed: Path) -> None:
    (row,) = [row for row in rows_of(only_run(filed), "artifact") if row["collector"] == "curves"]
    (file,) = rank_file(filed).iterdir()
    assert row["path"] == f"memprofiler/tb/rank0/{file.name}"
    assert row["size_bytes"] == file.stat().st_size


@pytest.mark.parametrize("has_logger", [False, True])
def test_a_training_without_a_logger_has_a_file(tmp_path: Path, has_logger: bool, package: Package) -> None:
    logger = package.loggers.logger.DummyLogger() if has_logger else False
    training = package.trainer(tmp_path, callback(), default_root_dir=tmp_path, logger=logger)
    training.fit(package.Perceptron(), loader(3))
    assert max(step for step, _ in curves(rank_file(tmp_path))["memprof/step_time_ms"]) == 2


def test_validation_alone_has_no_curves(tmp_path: Path) -> None:
    trainer(tmp_path, callback(), logger=loggers(tmp_path)).validate(Perceptron(), loader(8), verbose=False)
    assert not (only_run(tmp_path) / "tb").exists()
    assert not [tag for tag in curves(tmp_path / "log") if tag.startswith("memprof")]


def test_a_logger_that_logs_no_steps_gets_no_curves(tmp_path: Path) -> None:
    trainer(tmp_path, callback(), logger=loggers(tmp_path), log_every_n_steps=0).fit(Logged(), loader(70))
    assert not [tag for tag in curves(tmp_path / "log") if tag.startswith("memprof")]
    assert max(step for step, _ in curves(rank_file(tmp_path))["memprof/step_time_ms"]) == 69


def test_a_logger_that_fails_is_reported_once_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, package: Package
) -> None:
    class Failing(package.loggers.CSVLogger):  # type: ignore[name-defined]
        """Cannot reach its server."""

        calls = 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            if any(name.startswith("memprof") for name in metrics):
                self.calls += 1
                raise ConnectionError("no server")

        def finalize(self, status: str) -> None:
            pass

    failing = Failing(tmp_path, name="", version="failing")
    board = package.loggers.TensorBoardLogger(tmp_path, name="", version="log")
    with caplog.at_level(logging.WARNING, "lightning_memprof"):
        training = package.trainer(tmp_path, callback(), logger=[failing, board])
        training.fit(package.Perceptron(), loader(STEPS))
    assert failing.calls == 1
    assert [record.message for record in caplog.records] == ["Failing failed to log curves and gets no more of them"]
    assert failing.experiment.metrics == []
    assert len(curves(tmp_path / "log")["memprof/step_time_ms"]) > 1


class Slow(CSVLogger):
    """Asks a server that is far away."""

    seconds = 0.0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("memprof") for name in metrics):
            self.seconds += 0.3
            time.sleep(0.3)


def test_a_slow_logger_is_asked_less_often(tmp_path: Path) -> None:
    slow = Slow(tmp_path, name="", version="slow")
    only = MemProfilerCallback(collectors=[Pulse()], output=OutputOptions(summary=False, curves=True))
    trainer(tmp_path, only, logger=slow).fit(Perceptron(), loader(64 * 8))
    # The first step, later ones, and the rest at the end; the pulse is written nine times. It is asked again where the
    # steps take a minute.
    assert 3 <= round(slow.seconds / 0.3) < 9


class TwoOptimizers(Logged):
    """A generator and its critic: two optimizer steps a batch."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        self.log("loss", 1.0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 1e-3) for _ in range(2)]


@pytest.mark.parametrize(
    ("model", "options"), [(Logged, {"accumulate_grad_batches": 4}), (TwoOptimizers, {}), (Logged, {"max_epochs": 2})]
)
def test_curves_stand_over_the_same_steps_as_the_user_s_metrics(
    tmp_path: Path, model: type[Logged], options: dict[str, Any]
) -> None:
    only = MemProfilerCallback(collectors=[Pulse()], output=OutputOptions(summary=False, curves=True, on_error="raise"))
    trainer(tmp_path, only, logger=table(tmp_path), **options).fit(model(), loader(40))
    theirs = {int(row["step"]) for row in rows_logged(tmp_path) if row["loss"]}
    ours = [step for step, _ in curves(rank_file(tmp_path))["memprof/step_time_ms"]]
    assert sorted(set(ours)) == ours
    assert set(ours) - {max(ours)} <= theirs | {0}
    assert max(ours) == max(theirs)


def test_what_a_failed_training_had_drawn_is_there(tmp_path: Path) -> None:
    class Failing(Logged):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 80:
                raise ValueError("no")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no"):
        trainer(tmp_path, callback(), logger=table(tmp_path)).fit(Failing(), loader(STEPS))
    assert max(step for step, _ in curves(rank_file(tmp_path))["memprof/step_time_ms"]) == 80
    assert max(int(row["step"]) for row in rows_logged(tmp_path) if row["memprof/step_time_ms"]) == 80
    assert [row["collector"] for row in manifest(only_run(tmp_path)) if row["kind"] == "artifact"].count("curves") == 1
