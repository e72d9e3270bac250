"""Runs that Lightning's hooks do not end."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_memprof import ConfigError, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.torch_internals import _profiler_enabled
from lightning_memprof.collectors import AllocatorHistory
from training import Perceptron, loader, manifest, only_run, program, trainer

pytestmark = pytest.mark.slow


class Broken(Perceptron):
    """Raises in the middle of an open window."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 4:
            raise ValueError("of the program")
        return super().training_step(batch, batch_idx)


class Notifying(pl.Callback):
    def on_exception(self, *_: object) -> None:
        raise ConnectionError("of another callback")


class Removing(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.callbacks = [self]


class OtherStage(pl.Callback):
    """Runs another stage of the same Trainer in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._run)

    def _run(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.test(module, loader(3), verbose=False)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Lightning leaves its handlers where a hook raises in ``on_exception``."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def recorder(**options: Any) -> MemProfilerCallback:
    return MemProfilerCallback(schedule=Schedule(wait=1, active=100), output=OutputOptions(summary=False), **options)


def left_behind() -> dict[str, Any]:
    """What a live run has on in this process, and nothing else has."""
    found: dict[str, Any] = {
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("memprof")],
        "wrapped": [
            (kind.__name__, name)
            for kind in (PassThroughProfiler, SimpleProfiler, ExtendedPyTorchProfiler, Profiler, nn.Module)
            for name, value in vars(kind).items()
            if hasattr(value, "_memprof_link")
        ],
        "open": [
            name
            for link in Path("/proc/self/fd").iterdir()
            if link.exists() and ("memprofiler" in (name := str(link.readlink())) or name.endswith("/statm"))
        ],
        "profiler": _profiler_enabled(),
    }
    return {name: value for name, value in found.items() if value}


def statuses(directory: Path) -> list[str]:
    runs = sorted(directory.rglob("manifest.rank00000.jsonl"))
    return [row["status"] for run in runs for row in manifest(run.parent) if row["kind"] == "end"]


@pytest.mark.parametrize("profiler", ["fts_extended", "simple", None])
def test_a_run_ends_with_its_exception_where_another_callback_raises_in_on_exception(
    tmp_path: Path, profiler: str | None
) -> None:
    with pytest.raises(ConnectionError) as caught:
        trainer(tmp_path, Notifying(), recorder(), profiler=profiler).fit(Broken(), loader())
    assert isinstance(caught.value.__context__, ValueError)
    assert left_behind() == {}
    end = manifest(only_run(tmp_path))[-1]
    assert (end["kind"], end["status"], end["exception"]) == ("end", "exception", "ValueError: of the program")


def test_a_run_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        trainer(tmp_path, recorder(collectors=[AllocatorHistory()])).fit(Perceptron(), loader())
    assert left_behind() == {}
    assert statuses(tmp_path) == ["exception"]


def test_a_profiler_that_records_alone_ends_so_too(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        trainer(tmp_path, Notifying(), profiler="fts_extended").fit(Broken(), loader())
    assert left_behind() == {}
    assert statuses(tmp_path) == ["exception"]


@pytest.mark.parametrize(("model", "status"), [(Perceptron, "finished"), (Broken, "exception")])
def test_a_run_whose_callback_the_program_removes_ends_with_its_epoch(
    tmp_path: Path, model: type[pl.LightningModule], status: str
) -> None:
    try:
        trainer(tmp_path, Removing(), recorder(), profiler="fts_extended").fit(model(), loader())
    except ValueError:
        assert model is Broken
    assert left_behind() == {}
    assert statuses(tmp_path) == [status]


@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_run_ends_before_another_stage_of_its_trainer_begins(tmp_path: Path, hook: str, alone: bool) -> None:
    callbacks = [] if alone else [recorder()]
    trainer(tmp_path, OtherStage(hook), *callbacks, profiler="fts_extended").fit(Perceptron(), loader())
    assert left_behind() == {}
    assert statuses(tmp_path) == ["finished", "finished"]


class FailingLogger(CSVLogger):
    def finalize(self, status: str) -> None:
        raise OSError(f"finalize {status}")


class FailingStrategy(SingleDeviceStrategy):
    def teardown(self) -> None:
        raise OSError("teardown")


class FailingHook(pl.Callback):
    def __init__(self, hook: str) -> None:
        self._hook = hook
        setattr(self, hook, self._fail)

    def _fail(self, *_: object, **__: object) -> None:
        raise OSError(self._hook)


def failing(kind: str, directory: Path) -> pl.Trainer:
    if kind == "logger":
        return trainer(directory, recorder(), logger=FailingLogger(directory), profiler="fts_extended")
    if kind == "strategy":
        return trainer(directory, recorder(), strategy=FailingStrategy("cpu"), profiler="fts_extended")
    return trainer(directory, FailingHook(kind), recorder(), profiler="fts_extended")


@pytest.mark.parametrize(
    "kind", ["logger", "strategy", "setup", "on_fit_start", "on_train_end", "on_fit_end", "teardown"]
)
def test_whatever_raises_at_an_end_nothing_stays_on(tmp_path: Path, kind: str) -> None:
    for model in (Perceptron(), Broken()):
        with pytest.raises((OSError, ValueError)):
            failing(kind, tmp_path).fit(model, loader())
        assert left_behind() == {}


class NotifyingFrom(Notifying):
    """Raises in a hook that is called before a step is recorded, and in ``on_exception`` before ours."""

    def on_fit_start(self, *_: object) -> None:
        raise ValueError("of the program")


def test_a_run_without_an_action_of_its_end_is_ended_by_the_next_trainer(tmp_path: Path) -> None:
    abandoned = trainer(tmp_path, NotifyingFrom(), recorder())
    with pytest.raises(ConnectionError):
        abandoned.fit(Perceptron(), loader())
    assert statuses(tmp_path) == []
    trainer(tmp_path / "next")
    assert left_behind() == {}
    assert statuses(tmp_path) == ["exception"]


def test_a_run_without_an_action_of_its_end_is_ended_by_the_next_setup(tmp_path: Path) -> None:
    other = trainer(tmp_path / "other", recorder())
    abandoned = trainer(tmp_path / "abandoned", NotifyingFrom(), recorder())
    with pytest.raises(ConnectionError):
        abandoned.fit(Perceptron(), loader())
    other.fit(Perceptron(), loader(3))
    assert left_behind() == {}
    assert statuses(tmp_path / "abandoned") == ["exception"]
    assert statuses(tmp_path / "other") == ["finished"]


def test_a_run_whose_trainer_is_garbage_is_ended(tmp_path: Path) -> None:
    def fit() -> None:
        with pytest.raises(ConnectionError):
            trainer(tmp_path, NotifyingFrom(), recorder()).fit(Perceptron(), loader())

    fit()
    assert statuses(tmp_path) == []
    gc.collect()
    assert left_behind() == {}
    assert statuses(tmp_path) == ["exception"]


@pytest.mark.parametrize("leave", ["", "os.fork() or sys.exit(7)"])
def test_a_run_without_an_action_of_its_end_is_ended_by_the_exit_of_its_process(
    tmp_path: Path, run_python: Callable[..., Any], leave: str
) -> None:
    (tmp_path / "leaving.py").write_text(
        program(f"""
        import os
        from lightning.pytorch import Callback
        from lightning_memprof import MemProfilerCallback

        class Failing(Callback):
            def on_fit_start(self, *_):
                raise ValueError("of the program")

            def on_exception(self, *_):
                raise RuntimeError("of another callback")

        kept = trainer(Path("run"), Failing(), MemProfilerCallback())
        try:
            kept.fit(Perceptron(), loader(30))
        except RuntimeError:
            {leave or "pass"}
        if {bool(leave)}:
            os.wait()
        sys.exit(3)
        """)
    )
    assert run_python("leaving.py").returncode == 3
    assert statuses(tmp_path) == ["exception"]


def test_the_watch_for_hangs_ends_no_process_whose_run_is_over(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    (tmp_path / "waiting.py").write_text(
        program("""
        import time
        from lightning.pytorch import Callback
        from lightning_memprof import MemProfilerCallback
        from lightning_memprof.collectors import Hangs
        from lightning_memprof.integration.attachment import Attachment

        # No action shows the end of this run.
        Attachment._end_handlers = lambda self: ({}, {})

        class Notifying(Callback):
            def on_exception(self, *_):
                raise RuntimeError("of another callback")

        class Broken(Perceptron):
            def training_step(self, batch, batch_idx):
                if batch_idx == 5:
                    raise ValueError("of the program")
                return super().training_step(batch, batch_idx)

        kept = trainer(
            Path("run"), Notifying(), MemProfilerCallback(collectors=[Hangs(max_step_seconds=0.2, on_hang="abort")])
        )
        try:
            kept.fit(Broken(), loader(30))
        except RuntimeError:
            time.sleep(5)
        print("done")
        """)
    )
    done = run_python("waiting.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done"), done.stderr[-2000:]
