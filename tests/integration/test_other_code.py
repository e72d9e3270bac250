"""The program's own use of torch, of threads and of its model, inside and beside a window."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import Profiler

from lightning_memprof import (
    Collector,
    ExtendedPyTorchProfiler,
    MemProfilerCallback,
    OutputOptions,
    Schedule,
)
from lightning_memprof.capture.base import no_training_step
from lightning_memprof.capture.collectors.oom import OomWatch
from lightning_memprof.collectors import HostMemory, OperatorTrace, Pulse
from lightning_memprof.schedule import Action
from recorded_rows import read_pulse
from training import Perceptron, Raises, loader, manifest, only_run, program, rows_of, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator


def warning(**options: Any) -> MemProfilerCallback:
    """Give a callback with the policy that users have."""
    return MemProfilerCallback(**{"output": OutputOptions(summary=False), **options})


class Profiled(Perceptron):
    """Profiles one of its steps itself."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.theirs: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx != self.step:
            return self.loss(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as self.theirs:
            return self.loss(batch)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
def test_a_torch_profiler_of_the_programs_own_gets_what_it_asks_for(tmp_path: Path, step: int) -> None:
    model = Profiled(step)
    trainer(tmp_path, warning()).fit(model, loader())
    assert any(event.key == "aten::linear" for event in model.theirs.key_averages())
    run = only_run(tmp_path)
    assert manifest(run)[-1]["status"] == "finished"
    assert rows_of(run, "error") == []
    reasons = [row["reason"] for row in rows_of(run, "unavailable") if row["collector"] == "operator_trace"]
    assert len(reasons) == (1 if step in (1, 2, 3) else 0)
    assert not torch.autograd._profiler_enabled()


def test_a_scheduled_torch_profiler_of_the_programs_own_goes_on(tmp_path: Path) -> None:
    ready: list[int] = []

    class Scheduled(Perceptron):
        def on_train_start(self) -> None:
            self.theirs = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=3),
                on_trace_ready=lambda theirs: ready.append(len(theirs.events())),
            )
            self.theirs.start()

        def on_train_batch_end(self, *_: Any) -> None:
            self.theirs.step()

        def on_train_end(self) -> None:
            self.theirs.stop()

    trainer(tmp_path, warning(schedule=Schedule(repeat=0))).fit(Scheduled(), loader())
    assert len(ready) == 3
    assert min(ready) > 10


def test_two_trainings_in_two_threads_record_one_trace_at_a_time(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    (tmp_path / "two.py").write_text(
        program("""
        import threading
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule

        def fit(name):
            callback = MemProfilerCallback(schedule=Schedule(wait=0, repeat=0), output=OutputOptions(summary=False))
            trainer(Path(name), callback).fit(Perceptron(), loader(30))

        threads = [threading.Thread(target=fit, args=(name,)) for name in "ab"]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """)
    )
    done = run_python("two.py")
    assert done.returncode == 0, done.stderr[-2000:]
    for name in "ab":
        assert manifest(tmp_path / name / "log/memprofiler")[-1]["steps"] == 30


def test_ctrl_c_during_the_autopsy_of_a_failed_training_saves_the_open_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OomWatch, "ended_by", pressed)
    ours = MemProfilerCallback(schedule=Schedule(wait=1, active=20), output=OutputOptions(summary=False))
    terminate = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, ours).fit(Raises(MemoryError(), 6), loader())
    # Lightning's own stays.
    signal.signal(signal.SIGTERM, terminate)
    assert not torch.autograd._profiler_enabled()
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("memprof")}
    assert len(list(only_run(tmp_path).parent.glob("*.pt.trace.json.gz"))) == 1


def test_actions_of_other_threads_are_left_to_the_profiler(tmp_path: Path) -> None:
    class Uploading(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            def upload() -> None:
                with self.trainer.profiler.profile("upload"):
                    pass

            thread = threading.Thread(target=upload)
            thread.start()
            loss = self.loss(batch)
            thread.join()
            return loss

    trainer(tmp_path, warning(), profiler=ExtendedPyTorchProfiler()).fit(Uploading(), loader())
    run = only_run(tmp_path)
    assert rows_of(run, "error") == []
    assert len(list(run.parent.glob("*.pt.trace.json.gz"))) == 1


def test_a_lazy_model_trains(tmp_path: Path) -> None:
    class Lazy(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.LazyLinear(16), torch.nn.Linear(16, 1))

    training = trainer(tmp_path, warning())
    training.fit(Lazy(), loader())
    assert training.global_step == 12
    assert rows_of(only_run(tmp_path), "training")[0]["parameters"] is None


def late(step: int) -> Any:
    if step == 4:
        raise RuntimeError("late")
    return Action.NONE if step < 2 else Action.RECORD


def rubbish(step: int) -> Any:
    return Action.NONE if step < 4 else "rubbish"


@pytest.mark.parametrize("schedule", [late, rubbish])
def test_a_schedule_that_fails_later_ends_the_recording_and_not_the_training(tmp_path: Path, schedule: Any) -> None:
    training = trainer(tmp_path, warning(schedule=schedule))
    training.fit(Perceptron(), loader())
    assert training.global_step == 12
    run = only_run(tmp_path)
    assert [row["collector"] for row in rows_of(run, "error")] == ["session"]
    assert len(read_pulse(run / "pulse.rank00000.csv")) == 4


class Hostile(Collector):
    """Raises what is no ordinary exception, where it is told to."""

    name = "hostile"

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def unavailable(self, run: Any) -> str | None:
        self.maybe("unavailable")
        return None

    def maybe(self, where: str) -> None:
        if where == self.where:
            raise self.error

    @contextmanager
    def record(self, run: Any, window: Any) -> Iterator[Any]:
        yield lambda _: self.maybe("mark")
        self.maybe("exit")


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), MemoryError()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("where", ["mark", "exit"])
def test_whatever_a_collector_raises_is_its_own_failure(tmp_path: Path, where: str, error: BaseException) -> None:
    callback = warning(collectors=[Pulse(), HostMemory(), Hostile(where, error), OperatorTrace()])
    training = trainer(tmp_path, callback)
    training.fit(Perceptron(), loader())
    assert training.global_step == 12
    run = only_run(tmp_path)
    assert [row["collector"] for row in rows_of(run, "error")] == ["hostile"]
    assert (run / "window000/rank00000.host.jsonl").is_file()
    assert [row["event"] for row in rows_of(run, "window")] == ["open", "close"]


def test_a_collector_that_cannot_say_whether_it_is_available_is_switched_off(tmp_path: Path) -> None:
    training = trainer(tmp_path, warning(collectors=[Pulse(), Hostile("unavailable", RuntimeError("no idea"))]))
    training.fit(Perceptron(), loader())
    assert training.global_step == 12
    assert [row["collector"] for row in rows_of(only_run(tmp_path), "error")] == ["hostile"]


def test_ctrl_c_while_a_window_is_saved_leaves_every_collector_and_closes_the_window(tmp_path: Path) -> None:
    import signal

    handler = signal.getsignal(signal.SIGINT)
    callback = warning(collectors=[Pulse(), HostMemory(), Hostile("exit", KeyboardInterrupt()), OperatorTrace()])
    with pytest.raises(SystemExit):
        trainer(tmp_path, callback).fit(Perceptron(), loader())
    signal.signal(signal.SIGINT, handler)
    run = only_run(tmp_path)
    assert [row["event"] for row in rows_of(run, "window")] == ["open", "close"]
    assert {row["collector"] for row in rows_of(run, "artifact")} >= {"host", "operator_trace", "pulse"}


def test_a_fit_inside_a_fit_with_one_callback_records_both(tmp_path: Path) -> None:
    callback = warning(collectors=[Pulse(), HostMemory()])

    class Outer(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 4:
                with torch.enable_grad():
                    trainer(tmp_path / "inner", callback).fit(Perceptron(), loader(5))
            return self.loss(batch)

    trainer(tmp_path / "outer", callback).fit(Outer(), loader())
    assert manifest(only_run(tmp_path / "outer"))[-1]["steps"] == 12
    assert manifest(only_run(tmp_path / "inner"))[-1]["steps"] == 5


def test_an_exception_whose_text_fails_still_arrives(tmp_path: Path) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(SilentError):
        trainer(tmp_path, warning()).fit(Raises(SilentError(), 2), loader())
    assert manifest(only_run(tmp_path))[-1]["exception"] == "SilentError"


def test_a_batch_that_is_skipped_is_a_step_of_its_own(tmp_path: Path) -> None:
    class Skipping(Perceptron):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    trainer(tmp_path, warning(), max_epochs=3).fit(Skipping(), loader(6))
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    assert [row["step"] for row in rows] == list(range(9))


def test_a_closed_pipe_costs_the_page_and_not_the_rest_of_the_program(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(
        program("""
        import time
        from lightning_memprof import MemProfilerCallback
        trainer(Path("."), MemProfilerCallback()).fit(Perceptron(), loader())
        Path("after").touch()
        """)
    )
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    process.wait(120)
    assert (tmp_path / "after").exists()


def test_a_profiler_that_hides_its_actions_changes_nothing_for_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Hiding(Profiler):
        def start(self, action_name: str) -> None: ...

        def stop(self, action_name: str) -> None: ...

        @contextmanager
        def profile(self, action_name: str) -> Iterator[str]:
            yield action_name

    training = trainer(tmp_path, warning(), profiler=Hiding())
    with caplog.at_level(logging.WARNING, logger="lightning_memprof"):
        training.fit(Perceptron(), loader())
    assert training.global_step == 12
    assert "were recorded: Hiding" in caplog.text
    assert any("were recorded: Hiding" in row["message"] for row in rows_of(only_run(tmp_path), "note"))


def test_a_callback_that_passes_its_hooks_on_keeps_all_of_them(tmp_path: Path) -> None:
    inner = MemProfilerCallback(collectors=[Pulse()], output=OutputOptions(summary=False, on_error="raise"))

    class Forwarding(Callback):
        """Owns the callback; the Trainer knows this one only."""

        def __getattribute__(self, name: str) -> Any:
            return (
                getattr(inner, name)
                if name.startswith(("on_", "setup", "teardown"))
                else super().__getattribute__(name)
            )

    trainer(tmp_path, Forwarding(), max_steps=4).fit(Perceptron(), loader(4))
    assert [row["step"] for row in read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")] == [0, 1, 2, 3]


class OfTrainingSteps(Collector):
    """Available in a fit only."""

    name = "of_training_steps"

    def unavailable(self, run: Any) -> str | None:
        return no_training_step(run)

    @contextmanager
    def record(self, run: Any, window: Any) -> Iterator[None]:
        yield None


def test_what_was_asked_for_a_fit_does_not_stop_the_test_after_it(tmp_path: Path) -> None:
    ours = warning(schedule=Schedule(wait=0, warmup=1, active=1), collectors=[OfTrainingSteps()])
    made = trainer(tmp_path, ours)
    model = Perceptron()
    made.fit(model, loader(4))
    assert ours.run_directory is not None
    assert rows_of(ours.run_directory, "unavailable") == []
    made.test(model, loader(4), verbose=False)
    (row,) = rows_of(ours.run_directory, "unavailable")
    assert (row["collector"], row["reason"]) == ("of_training_steps", "test has no training step")
