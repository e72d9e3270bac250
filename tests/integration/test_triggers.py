"""Windows that are wanted: in running trainings, by file, signal, call and anomaly; by stage; by listed steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI

from lightning_memprof import (
    Budget,
    ConfigError,
    ExtendedPyTorchProfiler,
    MemProfilerCallback,
    OutputOptions,
    Schedule,
    StageSchedules,
    Triggers,
)
from lightning_memprof.account.trace.operators import ensure_operator_tables
from lightning_memprof.artifacts.trigger import Request, read_plan, write_request
from lightning_memprof.cli.main import main
from lightning_memprof.collectors import HostMemory, OperatorTrace, Pulse
from lightning_memprof.read.run.load import load_run
from lightning_memprof.triggers import AllocatorRetries, SlowStep
from ranks import launch
from training import Perceptron, loader, only_run, rows_of, trainer
from waiting import wait_until

CONFIGS = Path(__file__).parents[2] / "configs"
NO_FIT = StageSchedules(fit=None)
OUTPUT = OutputOptions(summary=False, on_error="raise")


class At(pl.Callback):
    """Does something in the middle of certain steps."""

    def __init__(self, **steps: Any) -> None:
        self.actions = {int(name[1:]): action for name, action in steps.items()}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.actions.get(batch_idx, lambda: None)()


class Validated(Perceptron):
    def val_dataloader(self) -> Any:
        return loader(3)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(0.02)


def memprof(schedule: Any = NO_FIT, **options: Any) -> MemProfilerCallback:
    return MemProfilerCallback(schedule, [Pulse(), HostMemory()], output=OUTPUT, **options)


def windows(run: Path, rank: int = 0) -> list[list[int]]:
    return [row["steps"] for row in rows_of(run, "window", rank) if row["event"] == "close"]


def notes(run: Path, rank: int = 0) -> list[str]:
    return [row["message"] for row in rows_of(run, "note", rank)]


def test_trigger_opens_a_window_in_a_running_two_rank_fit_at_the_same_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    codes: list[int] = []
    ranks = threading.Thread(target=lambda: codes.extend(launch("trigger_ranks.py", directory, world=2)))
    ranks.start()
    try:
        wait_until(lambda: (directory / "going").exists() or not ranks.is_alive())
        assert main(["trigger", str(directory), "--active", "2", "--warmup", "1"]) == 0
        plans = [read_plan(only_run(directory))]
    finally:
        ranks.join()
    assert codes == [0, 0], (directory / "out0").read_text()
    run = only_run(directory)
    plan = plans[0]
    assert plan is not None
    # And the steps of 50 ms, of which a crowded machine has fewer.
    assert plan.seen_at + 20 <= plan.step <= plan.seen_at + 25
    steps = [plan.step + 1, plan.step + 2]
    assert windows(run, 0) == windows(run, 1)
    # The second is that of `trigger()`, called on both ranks at step 100.
    (answered, called) = windows(run, 0)
    assert answered == steps
    assert 122 <= called[0] <= 128
    assert len(called) == 4
    assert notes(run, 0) == notes(run, 1)
    printed = capsys.readouterr().out
    assert f"rank 0 is at step {plan.seen_at}: all 2 ranks will record steps {steps[0]}-{steps[1]}" in printed
    assert f"warming up from step {plan.step}" in printed
    assert main(["trigger", str(directory)]) == 1
    assert "has ended" in capsys.readouterr().err


def test_a_call_opens_a_window_at_the_next_step_and_leaves_the_schedules_alone(tmp_path: Path) -> None:
    callback = memprof(Schedule(wait=10))
    at = At(_3=callback.trigger, _4=lambda: callback.trigger(1))
    trainer(tmp_path, callback, at).fit(Perceptron(), loader(16))
    run = only_run(tmp_path)
    assert windows(run) == [[5, 6, 7], [9], [11, 12]]
    assert any("MemProfilerCallback.trigger()" in note for note in notes(run))


def test_a_call_outside_of_a_run_warns_and_one_for_no_steps_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    callback = memprof()
    callback.trigger()
    assert "trigger() has no effect: no run is being recorded" in caplog.text
    with pytest.raises(ConfigError, match=r"trigger\(active=0\): must be an integer from 1 to 10000"):
        callback.trigger(active=0)


def test_sigusr2_opens_a_window_on_this_rank_and_the_programs_own_handler_hears_it_too(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        own = signal.getsignal(signal.SIGUSR2)
        at = At(_3=lambda: os.kill(os.getpid(), signal.SIGUSR2))
        trainer(tmp_path, memprof(triggers=Triggers(signal=True)), at).fit(Perceptron(), loader(10))
        assert signal.getsignal(signal.SIGUSR2) is own
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]
    assert windows(only_run(tmp_path)) == [[5, 6, 7]]


def test_outside_windows_signals_have_the_handlers_of_a_bare_run(tmp_path: Path) -> None:
    def handlers(*callbacks: pl.Callback, **options: Any) -> dict[int, Any]:
        found: dict[int, Any] = {}
        at = At(_6=lambda: found.update({number: signal.getsignal(number) for number in signal.valid_signals()}))
        trainer(tmp_path, *callbacks, at, **options).fit(Perceptron(), loader(8))
        # Lightning's own.
        del found[signal.SIGTERM]
        return found

    assert handlers(MemProfilerCallback(output=OUTPUT), profiler="fts_extended") == handlers()


def test_a_slow_step_opens_a_window_once_and_a_validation_is_none(tmp_path: Path) -> None:
    triggers = Triggers(anomalies=[SlowStep(factor=4)], warmup=0, active=1)
    at = At(_40=lambda: time.sleep(0.2), _50=lambda: time.sleep(0.2))
    trainer(tmp_path, memprof(triggers=triggers), at, val_check_interval=30).fit(Validated(), loader(60))
    run = only_run(tmp_path)
    (steps,) = windows(run)
    # A crowded machine may have made another step slow; it was never the one with the validation.
    assert steps != [30]
    assert len(steps) == 1
    (note,) = notes(run)
    assert "SlowStep: step" in note
    assert "times the median before it" in note


def test_an_anomaly_that_cannot_be_watched_here_is_an_error_in_setup(tmp_path: Path) -> None:
    callback = memprof(triggers=Triggers(anomalies=[AllocatorRetries()]))
    with pytest.raises(ConfigError, match=r"AllocatorRetries \(no accelerator\)"):
        trainer(tmp_path, callback).fit(Perceptron(), loader(2))


def test_each_stage_has_its_schedule(tmp_path: Path) -> None:
    stages = StageSchedules(fit=None, validate=Schedule(steps=(3,)), test=Schedule(wait=0, active=1), predict=None)
    callback = memprof(stages)
    training, module = trainer(tmp_path, callback), Perceptron()
    recorded = {}
    for stage in ("fit", "validate", "test", "predict"):
        getattr(training, stage)(module, loader(8))
        assert callback.run_directory is not None
        recorded[stage] = windows(callback.run_directory)
        written = rows_of(callback.run_directory, "run")[0]["schedule"]
        assert (written is None) == (getattr(stages, stage) is None)
    assert recorded == {"fit": [], "validate": [[3, 4]], "test": [[1]], "predict": []}


def test_the_profiler_alone_takes_stages_and_opens_windows_that_are_wanted(tmp_path: Path) -> None:
    profiler = ExtendedPyTorchProfiler(schedule=StageSchedules(fit=None, test=Schedule(wait=0, warmup=0, active=1)))

    def request() -> None:
        write_request(tmp_path / "log" / "memprofiler", Request("id", "somebody"))
        time.sleep(0.06)

    training = trainer(tmp_path, At(_3=request), profiler=profiler)
    training.fit(Perceptron(), loader(8))
    training.test(Perceptron(), loader(4))
    log_dir = tmp_path / "log"
    assert windows(log_dir / "memprofiler") == [[5, 6, 7]]
    assert windows(log_dir / "test" / "memprofiler") == [[0]]
    assert len(list(log_dir.glob("*.pt.trace.json.gz"))) == 1


def test_the_operator_table_holds_windows_that_came_after_the_schedules(tmp_path: Path) -> None:
    callback = MemProfilerCallback(Schedule(wait=0, warmup=0, active=1), [OperatorTrace()], output=OUTPUT)
    trainer(tmp_path, callback, At(_4=lambda: callback.trigger(1))).fit(Perceptron(), loader(8))
    (table,) = ensure_operator_tables(load_run(only_run(tmp_path))).files("table")
    assert table.file.read_text().endswith("Windows: 2\n")


def resumed(tmp_path: Path, schedule: Schedule, until: int) -> Path:
    """Fit until a checkpoint, go on from it in a new Trainer, and give the second run."""
    keep = ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=until, save_top_k=0)
    first = trainer(tmp_path / "first", memprof(schedule), keep, max_steps=until, enable_checkpointing=True)
    first.fit(Perceptron(), loader(20))
    assert windows(only_run(tmp_path / "first"))
    second = trainer(tmp_path / "second", memprof(schedule), max_steps=16)
    second.fit(Perceptron(), loader(20), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
    return only_run(tmp_path / "second")


def test_a_window_that_was_open_at_a_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    run = resumed(tmp_path, Schedule(steps=(6, 12), active=4), 8)
    assert windows(run) == [[12, 13, 14, 15]]


def test_a_cycle_counts_the_steps_of_this_process(tmp_path: Path) -> None:
    run = resumed(tmp_path, Schedule(wait=4, active=6), 8)
    assert windows(run) == [[13, 14, 15]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_options_in_yaml(tmp_path: Path) -> None:
    from lightning_memprof.integration.callback import load_options

    path = tmp_path / "memprof.yaml"
    path.write_text(
        "schedule: {fit: {steps: [100, 2000]}, validate: null}\n"
        "triggers:\n  anomalies:\n    - class_path: SlowStep\n      init_args: {factor: 3}\n"
        "    - class_path: lightning_memprof.triggers.NearOOM\n  active: 5\n"
    )
    options = load_options(path)
    assert options["schedule"] == StageSchedules(fit=Schedule(steps=(100, 2000)), validate=None)
    triggers = options["triggers"]
    assert [type(anomaly).__name__ for anomaly in triggers.anomalies] == ["SlowStep", "NearOOM"]
    assert (triggers.anomalies[0].factor, triggers.active, options["budget"]) == (3, 5, Budget())
    path.write_text("schedule: {steps: [7]}\n")
    assert load_options(path)["schedule"] == Schedule(steps=(7,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_shipped_fragment_trains_and_lists_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("accelerator=cpu", "max_epochs=1", "logger=false", "enable_checkpointing=false", "devices=1",
               "enable_progress_bar=false", "enable_model_summary=false")  # fmt: skip
    cli = LightningCLI(
        Perceptron,
        args=[
            "--seed_everything=false",
            f"--config={CONFIGS / 'triggers.yaml'}",
            *(f"--trainer.{option}" for option in options),
        ],
        run=False,
        save_config_callback=None,
    )
    cli.trainer.fit(cli.model, loader(102))
    # A crowded machine may find a step slow, or memory short, and record more.
    assert {100, 101} <= {step for steps in windows(only_run(tmp_path)) for step in steps}
