"""The profiler on a real Trainer, with and without the callback."""

from __future__ import annotations

import gzip
import json
import pickle
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_memprof import ConfigError, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.trace.operators import ensure_operator_tables
from lightning_memprof.collectors import OperatorTrace
from lightning_memprof.read.run.load import load_run
from training import Package, Perceptron, loader, only_run, rows_of, trainer

if TYPE_CHECKING:
    from pathlib import Path


def traces(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.pt.trace.json.gz"))


def names_in(trace: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


def test_it_is_lightnings_profiler_and_takes_all_its_arguments(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(
        dirpath=tmp_path / "traces", filename="mine", group_by_input_shapes=True, export_to_chrome=True, row_limit=7,
        sort_by_key="self_cpu_time_total", record_module_names=False, table_kwargs={"max_src_column_width": 40},
        record_shapes=True, profile_memory=True,
    )  # fmt: skip
    assert isinstance(profiler, PyTorchProfiler)
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    (trace,) = traces(tmp_path / "traces")
    assert trace.name.startswith("fit-mine-0[Strategy]SingleDeviceStrategy.training_step.")
    assert not any(name.startswith("[pl][module]") for name in names_in(trace))
    table = (tmp_path / "traces/fit-mine-0.txt").read_text()
    assert "Input Shapes" in table
    assert "CPU Mem" in table
    assert profiler.summary().endswith(table)


def test_the_operator_table_is_made_with_the_profilers_options_by_whoever_asks_first(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(sort_by_key="count", row_limit=3)
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    table = tmp_path / "log/fit-fts_extended_pytorch_profiler-0.txt"
    assert not table.exists()
    (shown,) = ensure_operator_tables(load_run(only_run(tmp_path))).files("table")
    assert shown.file == table
    by_show = table.read_text()
    table.unlink()
    assert profiler.table_path == table
    assert table.read_text() == by_show
    rows = by_show.splitlines()[3:-3]
    assert len(rows) == 3
    counts = [int(row.split()[-1]) for row in rows]
    assert counts == sorted(counts, reverse=True)


def test_without_its_traces_a_run_has_no_operator_table(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler()
    assert profiler.table_path is None
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    for trace in traces(tmp_path / "log"):
        trace.unlink()
    assert profiler.table_path is None


def test_a_path_of_ones_own_kind_is_taken_for_what_it_says(tmp_path: Path) -> None:
    class Elsewhere:
        def __fspath__(self) -> str:
            return str(tmp_path / "elsewhere")

    place: Any = Elsewhere()
    profiler = ExtendedPyTorchProfiler(dirpath=place)
    trainer(tmp_path, MemProfilerCallback(output=OutputOptions(dirpath=place)), profiler=profiler).fit(
        Perceptron(), loader()
    )
    assert traces(tmp_path / "elsewhere")
    assert only_run(tmp_path / "elsewhere").is_dir()


def test_a_logger_whose_directory_is_no_path_stops_nothing(tmp_path: Path, package: Package) -> None:
    class Said:
        def __str__(self) -> str:
            return str(tmp_path / "said")

    class Mine(package.loggers.logger.DummyLogger):  # type: ignore[name-defined]
        @property
        def save_dir(self) -> Any:
            return Said()

    package.trainer(tmp_path, MemProfilerCallback(), logger=Mine()).fit(package.Perceptron(), loader())
    assert only_run(tmp_path / "said").is_dir()


def test_a_strategy_that_spawns_its_ranks_can_hand_it_to_them(tmp_path: Path, package: Package) -> None:
    fitted = package.trainer(tmp_path, MemProfilerCallback(), profiler=ExtendedPyTorchProfiler())
    copied = pickle.loads(pickle.dumps(fitted))  # noqa: S301 as multiprocessing does
    copied.fit(package.Perceptron(), loader())
    assert len(rows_of(only_run(tmp_path), "window")) > 0


def test_every_stage_has_its_own_window_and_directory(tmp_path: Path, package: Package) -> None:
    training = package.trainer(tmp_path, profiler="fts_extended", num_sanity_val_steps=2)
    model = package.Perceptron()
    training.fit(model, loader(), loader(4))
    training.validate(model, loader(), verbose=False)
    training.test(model, loader(), verbose=False)
    training.predict(model, loader())
    root = tmp_path / "log"
    for stage, directory, function in (
        ("fit", root, "training_step"), ("validate", root / "validate", "validation_step"),
        ("test", root / "test", "test_step"), ("predict", root / "predict", "predict_step"),
    ):  # fmt: skip
        (trace,) = traces(directory)
        assert trace.name.startswith(
            f"{stage}-fts_extended_pytorch_profiler-0[Strategy]SingleDeviceStrategy.{function}."
        )
        assert sum(name.startswith("ProfilerStep#") for name in names_in(trace)) == 2
        (table,) = ensure_operator_tables(load_run(directory / "memprofiler")).files("table")
        assert table.file == directory / f"{stage}-fts_extended_pytorch_profiler-0.txt"
        (closed,) = [row for row in rows_of(directory / "memprofiler", "window") if row["event"] == "close"]
        assert closed["steps"] == [2, 3]


def test_schedule_cfg_is_another_name_of_schedule(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(schedule_cfg={"wait": 3, "active": 1})
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    (closed,) = [row for row in rows_of(only_run(tmp_path), "window") if row["event"] == "close"]
    assert closed["steps"] == [4]


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"schedule": {"waits": 1}}, ConfigError, "waits"),
        ({"schedule": 3}, ConfigError, "schedule=3"),
        ({"schedule": lambda step: step}, ConfigError, "ProfilerAction"),
        ({"schedule": Schedule(wait=3), "schedule_cfg": {"wait": 2}}, ConfigError, "two names"),
        ({"ranks": [-1]}, ConfigError, "-1"),
        ({"activities": ["gpu"]}, ConfigError, "'gpu'"),
        ({"sort_by_key": "beauty"}, MisconfigurationException, "beauty"),
        ({"table_kwargs": {"sort_by": "count"}}, KeyError, "sort_by"),
    ],
)
def test_a_wrong_value_is_refused_by_name(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ExtendedPyTorchProfiler(**arguments)


def test_with_the_callback_there_is_one_run_with_the_callbacks_schedule_and_the_profilers_options(
    tmp_path: Path,
) -> None:
    profiler = ExtendedPyTorchProfiler(schedule=Schedule(wait=5), record_shapes=True, filename="both", row_limit=3)
    callback = MemProfilerCallback(
        schedule=Schedule(wait=2, active=1), output=OutputOptions(summary=False, on_error="raise")
    )
    trainer(tmp_path, callback, profiler=profiler).fit(Perceptron(), loader())
    run = only_run(tmp_path)
    (closed,) = [row for row in rows_of(run, "window") if row["event"] == "close"]
    assert closed["steps"] == [3]
    (trace,) = traces(run.parent)
    assert trace.name.startswith("fit-both-0")
    document = json.loads(gzip.decompress(trace.read_bytes()))
    assert any("Input Dims" in event.get("args", {}) for event in document["traceEvents"])
    # Without stacks, for the tab's view of modules: what it then shows is asked in test_profiler_tab.py.
    assert document["Framework"] == "pytorch-lightning"


def test_a_collector_named_by_the_callback_wins_over_the_profilers(tmp_path: Path) -> None:
    callback = MemProfilerCallback(
        collectors=[OperatorTrace(filename="named")], output=OutputOptions(summary=False, on_error="raise")
    )
    trainer(tmp_path, callback, profiler="fts_extended").fit(Perceptron(), loader())
    (trace,) = traces(tmp_path / "log")
    assert trace.name.startswith("fit-named-0")


def test_an_action_of_the_users_own_is_named_in_the_trace(tmp_path: Path) -> None:
    class Named(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            with self.trainer.profiler.profile('my "own" part'):
                return self.loss(batch)

    trainer(tmp_path, profiler=ExtendedPyTorchProfiler()).fit(Named(), loader())
    assert names_in(traces(tmp_path / "log")[0]).count('[pl][profile]my "own" part') == 2


def test_folded_stacks_are_written_where_asked(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(export_to_flame_graph=True)
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    (artifact,) = [row for row in rows_of(only_run(tmp_path), "artifact") if row["path"].endswith(".stacks")]
    assert artifact["type"] == "blob"


def test_outside_of_a_trainer_it_records_from_the_first_action_until_it_is_described(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(
        dirpath=tmp_path, filename="mine", activities=["cpu"], table_kwargs={"header": "H"}
    )
    with profiler.profile("outer") as name:
        assert name == "outer"
        with profiler.profile("inner"):
            torch.zeros(42)
    profiler.describe()
    assert profiler.function_events is not None
    names = {event.name for event in profiler.function_events}
    assert names >= {"[pl][profile]outer", "[pl][profile]inner", "aten::zeros"}
    assert not any(name.startswith("ProfilerStep") for name in names)
    report = (tmp_path / "mine.txt").read_text()
    assert report == profiler.summary()
    assert report.startswith("Profiler Report\nProfile stats for: records\n")
    assert "[pl][profile]inner" in report
    assert "\nH\n" in report
    assert [path.name.startswith("mine.") for path in tmp_path.glob("*.pt.trace.json")] == [True]
    assert not torch.autograd._profiler_enabled()
    deepcopy(profiler)


def test_outside_of_a_trainer_every_method_works_without_a_recording(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(dirpath=tmp_path)
    profiler.setup("fit", log_dir=str(tmp_path))
    profiler.stop("never started")
    assert profiler.summary() == ""
    profiler.describe()
    profiler.teardown("fit")
    assert profiler.function_events is None
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_trainer_a_schedule_counts_the_step_actions_and_repeats(tmp_path: Path) -> None:
    windows: list[int] = []
    profiler = ExtendedPyTorchProfiler(
        schedule=Schedule(wait=0, warmup=1, active=1, repeat=2),
        on_trace_ready=lambda made: windows.append(made.step_num),
    )
    for _ in range(8):
        with profiler.profile("training_step"):
            torch.zeros(42)
    profiler.describe()
    assert windows == [2, 4]


def test_outside_of_a_trainer_folded_stacks_are_written(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(dirpath=tmp_path, filename="mine", export_to_flame_graph=True)
    with profiler.profile("training_step"):
        torch.zeros(42)
    profiler.describe()
    assert (tmp_path / "mine.stack").exists()


def test_outside_of_a_trainer_the_trace_is_in_dirpath_whatever_its_name_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = ExtendedPyTorchProfiler(dirpath="a\\\nb", filename="mine")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    with profiler.profile("training_step"):
        torch.zeros(42)
    profiler.describe()
    (trace,) = (tmp_path / "a\\\nb").glob("*.json")
    assert json.loads(trace.read_bytes())["traceEvents"]


def test_outside_of_a_trainer_it_leaves_a_profiler_of_the_program_alone() -> None:
    profiler = ExtendedPyTorchProfiler()
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as users,
        pytest.warns(UserWarning, match="'mine' is not recorded: another torch profiler is running"),
        profiler.profile("mine"),
    ):
        torch.zeros(42)
    assert "aten::zeros" in {event.name for event in users.events()}
    assert profiler.summary() == ""


def test_a_run_inside_an_action_of_the_program_is_recorded_as_any_other(tmp_path: Path, package: Package) -> None:
    profiler = ExtendedPyTorchProfiler()
    with profiler.profile("everything"):
        package.trainer(tmp_path, profiler=profiler).fit(package.Perceptron(), loader())
    assert len(traces(tmp_path / "log")) == 1
    with profiler.profile("afterwards"):
        torch.zeros(42)
    profiler.describe()
    assert profiler.function_events is not None
    assert "[pl][profile]afterwards" in {event.name for event in profiler.function_events}
    assert not torch.autograd._profiler_enabled()


def test_actions_of_a_trainer_outside_of_its_run_start_nothing(tmp_path: Path, package: Package) -> None:
    class Failing(package.Perceptron):  # type: ignore[name-defined]
        def configure_callbacks(self) -> list[Any]:
            assert not torch.autograd._profiler_enabled()
            return [Watching()]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("mine")

    class Watching(package.pl.Callback):  # type: ignore[name-defined]
        def on_exception(self, *_: Any) -> None:
            assert not torch.autograd._profiler_enabled()

    profiler = ExtendedPyTorchProfiler()
    with pytest.raises(RuntimeError, match="mine"):
        package.trainer(tmp_path, profiler=profiler).fit(Failing(), loader())
    assert profiler.profiler is None
    training = package.trainer(tmp_path / "saved", profiler=profiler)
    training.fit(package.Perceptron(), loader(1))
    training.save_checkpoint(tmp_path / "saved.ckpt")
    assert profiler.profiler is None


def test_a_file_that_cannot_be_written_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: Any) -> None:
        raise OSError("disk full")

    (tmp_path / "fit-mine.txt").mkdir()
    profiler = ExtendedPyTorchProfiler(dirpath=tmp_path, filename="mine", on_trace_ready=failing)
    profiler.start("outside")
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    assert "the recording before this run cannot be saved (OSError: disk full)" in caplog.text
    assert "fit-mine.txt cannot be written (IsADirectoryError" in caplog.text
    assert "aten::" in profiler.summary()


def test_with_the_callback_the_profiler_has_the_table_too(tmp_path: Path, package: Package) -> None:
    profiler = ExtendedPyTorchProfiler(row_limit=-1)
    callback = MemProfilerCallback(output=OutputOptions(summary=False, on_error="raise"))
    package.trainer(tmp_path, callback, profiler=profiler).fit(package.Perceptron(), loader())
    assert "aten::addmm" in profiler.summary()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_too_short_for_the_default_schedule_records_every_step(
    tmp_path: Path, steps: int, caplog: pytest.LogCaptureFixture, package: Package
) -> None:
    profiler = ExtendedPyTorchProfiler()
    package.trainer(tmp_path, profiler=profiler).fit(package.Perceptron(), loader(steps), loader(1))
    (closed,) = [row for row in rows_of(only_run(tmp_path), "window") if row["event"] == "close"]
    assert closed["steps"] == list(range(steps))
    assert f"every step is recorded: fit has {steps} step" in caplog.text
    assert "[pl][profile][Strategy]SingleDeviceStrategy.validation_step" in names_in(traces(tmp_path / "log")[0])


def test_a_stage_too_short_for_the_default_schedule_records_every_step(tmp_path: Path, package: Package) -> None:
    profiler = ExtendedPyTorchProfiler(dirpath=tmp_path / "mine", filename="mine")
    package.trainer(tmp_path, profiler=profiler).validate(package.Perceptron(), loader(2), verbose=False)
    assert profiler.summary().startswith("VALIDATE Profiler Report")
    names = names_in(traces(tmp_path / "mine")[0])
    assert names.count("[pl][profile][Strategy]SingleDeviceStrategy.validation_step") == 2


def test_a_run_too_short_for_a_schedule_of_the_program_records_nothing(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(schedule=Schedule(wait=2))
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader(2))
    assert traces(tmp_path / "log") == []
    assert profiler.summary() == ""


def test_without_traces_one_line_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = ExtendedPyTorchProfiler(export_to_chrome=False)
    trainer(tmp_path, profiler=profiler).fit(Perceptron(), loader())
    assert "without traces there is no operator table" in caplog.text
