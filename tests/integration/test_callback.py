"""The callback on a real Trainer."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lightning_memprof import ConfigError, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.trace.operators import ensure_operator_tables
from lightning_memprof.artifacts import naming
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.artifacts.trace_rewriting import original_categories
from lightning_memprof.cli.main import main
from lightning_memprof.collectors import HostMemory, Pulse
from lightning_memprof.integration.attachment import Attachment
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB
from recorded_rows import read_pulse
from training import Package, Perceptron, loader, manifest, only_run, program, rows_of, trainer

if TYPE_CHECKING:
    from collections.abc import Callable


def recorder(**options: Any) -> MemProfilerCallback:
    return MemProfilerCallback(**{"output": OutputOptions(summary=False, on_error="raise"), **options})


def windows(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run, "window") if row["event"] == "close"]


def trace_events(root: Path) -> list[list[dict[str, Any]]]:
    paths = sorted(root.glob("*.pt.trace.json.gz"))
    return [json.loads(original_categories(gzip.decompress(path.read_bytes())))["traceEvents"] for path in paths]


def test_a_run_lists_its_artifacts_and_what_recording_cost_and_logs_what_a_person_watching_wants_to_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning_memprof"):
        trainer(tmp_path, recorder()).fit(Perceptron(), loader())
    root = tmp_path / "log"
    listed = {root / row["path"]: row["size_bytes"] for row in rows_of(root / "memprofiler", "artifact")}
    there = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    ignored = {root / "memprofiler/manifest.rank00000.jsonl", root / "hparams.yaml", root / "metrics.csv"}
    assert listed == {path: size for path, size in there.items() if path not in ignored}
    end = manifest(root / "memprofiler")[-1]
    assert (end["kind"], end["status"], end["steps"]) == ("end", "finished", 12)
    assert end["overhead"]["pulse_ns"] > 0
    assert end["overhead"]["collectors_ns"]["operator_trace"] > 0
    for words in ("window 0 warms up in step 1", "window 0 records steps 2–3", "saved"):
        assert words in caplog.text
    assert "is disabled" not in caplog.text


def test_the_pulse_has_every_step_and_its_phases_sum_to_the_step(tmp_path: Path) -> None:
    trainer(tmp_path, recorder(), max_epochs=2).fit(Perceptron(), loader(5))
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    assert [row["step"] for row in rows] == list(range(10))
    assert [row["global_step"] for row in rows] == list(range(10))
    assert [row["epoch"] for row in rows] == [0] * 5 + [1] * 5
    assert [row["window"] for row in rows] == [None, 0, 0, 0] + [None] * 6
    for row in rows:
        assert sum(row[f"{phase}_ns"] or 0 for phase in PHASES) == row["duration_ns"]
        assert all((row[f"{phase}_ns"] or 0) > 0 for phase in ("data_wait", "forward", "backward", "optimizer"))
        assert row["device_duration_ns"] is None
        assert row["device_peak_bytes"] is None


def test_a_window_owns_one_fetch_forward_backward_and_optimizer_step_per_step(tmp_path: Path) -> None:
    trainer(tmp_path, recorder(schedule=Schedule(wait=2, active=3))).fit(Perceptron(), loader())
    (events,) = trace_events(tmp_path / "log")
    ranges = [event for event in events if event.get("ph") == "X"]
    steps = sorted((event for event in ranges if event["name"].startswith("ProfilerStep#")), key=lambda e: e["ts"])
    assert [event["name"] for event in steps] == [f"ProfilerStep#{step}" for step in (3, 4, 5)]
    wanted = (
        "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
        "[pl][profile][Strategy]SingleDeviceStrategy.training_step",
        "[pl][profile][Strategy]SingleDeviceStrategy.backward",
        "Optimizer.step#AdamW.step",
    )
    for step in steps:
        inside = [
            event["name"]
            for event in ranges
            if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
        ]
        for name in wanted:
            assert inside.count(name) == 1, (step["name"], name)
        assert "[pl][module]torch.nn.modules.linear.Linear: net.0" in inside


def test_a_new_epoch_closes_an_epoch_anchored_window_as_truncated(tmp_path: Path) -> None:
    schedule = Schedule(wait=1, warmup=1, active=3, anchor="epoch")
    trainer(tmp_path, recorder(schedule=schedule), max_epochs=2).fit(Perceptron(), loader(4))
    closed = windows(only_run(tmp_path))
    assert [(row["steps"], row["truncated"]) for row in closed] == [([2, 3], True), ([6, 7], True)]
    assert "epoch" in closed[0]["reason"]


def test_windows_across_epochs_leave_a_process_that_ends_well(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(
        program("""
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
        output = OutputOptions(summary=False)
        callback = MemProfilerCallback(schedule=Schedule(wait=0, active=3, repeat=0), output=output)
        trainer(Path("."), callback, max_epochs=8).fit(Perceptron(), loader(5))
        """)
    )
    done = run_program("train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["steps"] for row in windows(only_run(tmp_path))] == [[n + 1, n + 2, n + 3] for n in range(0, 40, 4)]


def test_an_early_end_leaves_a_closed_saved_window_marked_truncated(tmp_path: Path) -> None:
    trainer(tmp_path, recorder(schedule=Schedule(active=50)), max_steps=6).fit(Perceptron(), loader())
    run = only_run(tmp_path)
    (closed,) = windows(run)
    assert closed["steps"] == [2, 3, 4, 5]
    assert closed["truncated"]
    assert len(trace_events(run.parent)) == 1


def test_the_command_that_shows_a_run_is_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MemProfilerCallback(
        collectors=[HostMemory()], output=OutputOptions(dirpath=tmp_path / "a b", summary=False, report=False)
    )
    with caplog.at_level("INFO", logger="lightning_memprof"):
        trainer(tmp_path, callback).fit(Perceptron(), loader(2))
        trainer(tmp_path / "a b", profiler=ExtendedPyTorchProfiler()).fit(Perceptron(), loader(2))
    shown = [line.partition("show it with: ")[2] for line in caplog.messages if "show it with" in line]
    places = (tmp_path / "a b/memprofiler", tmp_path / "a b/log/memprofiler")
    assert shown == [f"lightning-memprof show '{place}'" for place in places]


def test_a_run_resumed_in_the_middle_of_an_epoch_has_no_step_twice(tmp_path: Path, package: Package) -> None:
    saving = package.pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    package.trainer(tmp_path / "a", saving, enable_checkpointing=True, max_steps=4).fit(package.Perceptron(), loader(8))
    package.trainer(tmp_path / "b", recorder()).fit(package.Perceptron(), loader(8), ckpt_path=tmp_path / "step=3.ckpt")
    rows = read_pulse(only_run(tmp_path / "b") / "pulse.rank00000.csv")
    assert [row["step"] for row in rows] == [3, 4, 5, 6, 7]
    assert [row["global_step"] for row in rows] == [3, 4, 5, 6, 7]


def test_a_second_fit_into_the_same_log_dir_overwrites_nothing(tmp_path: Path) -> None:
    callback = recorder()
    for _ in range(2):
        trainer(tmp_path, callback).fit(Perceptron(), loader(5))
    root = tmp_path / "log"
    assert {path.name for path in root.glob("memprofiler*")} == {"memprofiler", "memprofiler-2"}
    for run, name in (("memprofiler", "profiler"), ("memprofiler-2", "profiler-2")):
        (table,) = ensure_operator_tables(load_run(root / run)).files("table")
        assert table.file == root / f"fit-fts_extended_pytorch_{name}-0.txt"
    assert len(list(root.glob("*.pt.trace.json.gz"))) == 2
    assert callback.run_directory == root / "memprofiler-2"


@pytest.mark.parametrize("profiler", [None, "simple", "advanced"])
def test_alone_it_taps_whichever_profiler_there_is_and_restores_it(
    tmp_path: Path, profiler: str | None, package: Package
) -> None:
    training = package.trainer(tmp_path, recorder(), profiler=profiler)
    before = dict(vars(training.profiler))
    training.fit(package.Perceptron(), loader())
    assert "start" not in vars(training.profiler)
    assert "stop" not in vars(training.profiler)
    assert set(before) <= set(vars(training.profiler))
    assert windows(only_run(tmp_path))[0]["steps"] == [2, 3]
    if profiler == "simple":
        recorded = training.profiler.recorded_durations
        assert len(recorded["[_TrainingEpochLoop].train_dataloader_next"]) == 12


def test_beside_lightnings_own_pytorch_profiler_the_rest_records(tmp_path: Path, package: Package) -> None:
    training = package.trainer(
        tmp_path, recorder(), profiler=package.profilers.PyTorchProfiler(dirpath=tmp_path / "theirs", filename="theirs")
    )
    training.fit(package.Perceptron(), loader())
    run = only_run(tmp_path)
    reasons = {row["collector"]: row["reason"] for row in rows_of(run, "unavailable")}
    assert "Lightning's PyTorchProfiler" in reasons["operator_trace"]
    assert (run / "window000/rank00000.hooks.jsonl").is_file()
    assert list((tmp_path / "theirs").glob("*.pt.trace.json"))


def test_two_callbacks_on_one_trainer_are_refused(tmp_path: Path, package: Package) -> None:
    with pytest.raises(ConfigError, match="more than one MemProfilerCallback"):
        package.trainer(tmp_path, recorder(), recorder()).fit(package.Perceptron(), loader())


def test_a_collector_that_was_asked_for_and_is_not_available_stops_before_training(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    from lightning_memprof.collectors import AllocatorHistory

    with pytest.raises(ConfigError, match="CUDA is not available"):
        trainer(tmp_path, recorder(collectors=[AllocatorHistory()])).fit(Perceptron(), loader())
    end = manifest(only_run(tmp_path))[-1]
    assert (end["kind"], end["status"]) == ("end", "exception")
    assert end["exception"].startswith("ConfigError: not available in this run")


def test_snapshots_and_regions_work_at_any_point_of_the_program(tmp_path: Path) -> None:
    callback = recorder()
    callback.snapshot("before")

    class Named(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            with callback.region("loss"):
                return self.loss(batch)

    trainer(tmp_path, callback).fit(Named(), loader(4))
    callback.snapshot("after")
    run = only_run(tmp_path)
    rows = [json.loads(line) for line in (run / "snapshots.rank00000.jsonl").read_text().splitlines()]
    assert [(row["name"], row["point"]) for row in rows] == [
        ("before", "snapshot"), *[("loss", "start"), ("loss", "end")] * 4, ("after", "snapshot"),
    ]  # fmt: skip
    assert [row["step"] for row in rows[1:-1]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(row["rss_bytes"] > 1_000_000 for row in rows)
    (events,) = trace_events(run.parent)
    assert sum(event.get("name") == "loss" and event.get("ph") == "X" for event in events) == 2


def test_a_training_step_that_fetches_its_own_batches_has_one_step_a_batch(tmp_path: Path) -> None:
    class Fetching(Perceptron):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    trainer(tmp_path, recorder()).fit(Fetching(), loader(6))
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    assert [row["step"] for row in rows] == list(range(6))
    assert all((row["data_wait_ns"] or 0) > 0 for row in rows)


def test_a_loader_of_unknown_length_has_one_step_a_batch(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            yield from (torch.ones(4, 8) for _ in range(5))

    stream = torch.utils.data.DataLoader(Stream(), batch_size=None)
    trainer(tmp_path, recorder(), max_epochs=2).fit(Perceptron(), stream)
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    assert [row["step"] for row in rows] == list(range(10))


@pytest.mark.parametrize(("batches", "recorded"), [(2, 0), (3, 1)])
def test_a_window_says_that_it_records_with_its_first_recorded_step(
    tmp_path: Path, batches: int, recorded: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning_memprof"):
        trainer(tmp_path, recorder(collectors=[Pulse()])).fit(Perceptron(), loader(batches))
    assert len(windows(only_run(tmp_path))[0]["steps"]) == recorded
    assert caplog.text.count("window 0 records") == recorded
    assert caplog.text.count("nothing will be recorded") == 1 - recorded


class Swelling(Perceptron):
    """Touches 256 MiB in its validation."""

    def val_dataloader(self) -> Any:
        return loader(1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        torch.ones(64 * MIB)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark cannot be reset here")
def test_the_peak_rss_of_a_run_is_the_high_water_mark_with_that_of_its_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    trainer(tmp_path, recorder(collectors=[Pulse(), HostMemory()])).fit(Swelling(), loader())
    run = only_run(tmp_path)
    sampled = max(row["rss_bytes"] or 0 for row in read_pulse(run / naming.pulse_name(0)))
    peak = manifest(run)[-1]["peak_rss_bytes"]
    assert peak > sampled + 128 * MIB
    assert main(["show", str(run), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"][0]["host"]["peak_rss_bytes"] == peak
    assert document["ledger"]["memory"]["peak_bytes"] == peak


def test_windows_do_not_keep_the_memory_of_their_events(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(
        program("""
        from torch import nn
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.collectors import OperatorTrace, Pulse

        class Deep(Perceptron):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 16), *[nn.Linear(16, 16) for _ in range(40)], nn.Linear(16, 1))

        schedule = Schedule(wait=1, active=2, repeat=0)
        quiet = OutputOptions(summary=False)
        callback = MemProfilerCallback(schedule=schedule, collectors=[Pulse(), OperatorTrace()], output=quiet)
        trainer(Path("."), callback).fit(Deep(), loader(60))
        """)
    )
    done = run_program("train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    sizes = [row["rss_bytes"] for row in rows if row["rss_bytes"] is not None and row["window"] is None]
    assert len(sizes) > 10
    # Held until the next garbage collection, a window's events took 5 MB and more.
    assert sizes[-1] - sizes[len(sizes) // 4] < 20e6


def test_ctrl_c_during_a_garbage_collection_ends_the_training(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    (tmp_path / "train.py").write_text(
        program("""
        import gc
        import signal
        from lightning_memprof import MemProfilerCallback

        class Interrupted(Perceptron):
            def training_step(self, batch, batch_idx):
                if batch_idx == 2:
                    many = [[i] for i in range(1_000_000)]
                    # The collection takes ten times as long: the signal arrives in it.
                    signal.setitimer(signal.ITIMER_REAL, 0.005)
                    gc.collect()
                return super().training_step(batch, batch_idx)

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        hook = sys.unraisablehook
        try:
            trainer(Path("."), MemProfilerCallback(), max_steps=8).fit(Interrupted(), loader(8))
        finally:
            assert sys.unraisablehook is hook
        """)
    )
    ended = run_program("train.py")
    assert "Exception ignored" not in ended.stderr
    assert ended.returncode != 0
    end = manifest(only_run(tmp_path))[-1]
    assert end["exception"].startswith("KeyboardInterrupt")
    assert end["steps"] < 8


@pytest.mark.parametrize("fails", [True, False])
def test_a_signal_handler_that_raises_while_the_last_files_are_written_costs_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    # As torch's does for a DataLoader worker that died.
    def dead_worker(*_: object) -> None:
        raise RuntimeError("worker died")

    class Failing(Perceptron):
        def on_train_start(self) -> None:
            signal.signal(signal.SIGCHLD, dead_worker)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if fails and batch_idx == 6:
                raise ValueError("of the program")
            return super().training_step(batch, batch_idx)

    stop = Attachment.stop
    arrived: list[str | None] = []

    def interrupted(attachment: Attachment, reason: str | None = None) -> None:
        if not arrived:
            arrived.append(reason)
            signal.raise_signal(signal.SIGCHLD)
        stop(attachment, reason)

    monkeypatch.setattr(Attachment, "stop", interrupted)
    earlier = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(ValueError if fails else RuntimeError, match="of the program" if fails else "worker died"):
            trainer(tmp_path, MemProfilerCallback(output=OutputOptions(summary=False))).fit(Failing(), loader(8))
    finally:
        signal.signal(signal.SIGCHLD, earlier)
    run = only_run(tmp_path)
    assert len(read_pulse(run / "pulse.rank00000.csv")) == (7 if fails else 8)
    assert manifest(run)[-1]["status"] == "exception"


@pytest.mark.parametrize("is_automatic", [True, False])
def test_the_optimizer_steps_of_the_pulse_are_those_of_the_trainer_also_after_a_resumed_fit(
    tmp_path: Path, is_automatic: bool
) -> None:
    class Counting(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = is_automatic
            self.counts: list[int] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.counts.append(self.trainer.global_step)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            if not is_automatic:
                self.manual_backward(loss)
                for _ in range(batch_idx % 3):
                    self.optimizers().step()
            return loss

    model, checkpoint = Counting(), tmp_path / "first.ckpt"
    options: dict[str, Any] = {"accumulate_grad_batches": 2} if is_automatic else {}
    for directory, resumed in ((tmp_path / "first", None), (tmp_path / "second", checkpoint)):
        callback = MemProfilerCallback(collectors=[Pulse()], output=OutputOptions(summary=False, on_error="raise"))
        made = trainer(directory, callback, max_epochs=1 if resumed is None else 2, **options)
        model.counts.clear()
        made.fit(model, loader(6), ckpt_path=resumed)
        rows = read_pulse(only_run(directory) / "pulse.rank00000.csv")
        assert [row["global_step"] for row in rows] == model.counts
        assert len(set(model.counts)) > 2
        made.save_checkpoint(checkpoint)
    assert min(model.counts) > 2
