"""What is promised to the user's training."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.modules import module as torch_modules

from lightning_memprof import Collector, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HookTimings, HostMemory, OperatorTrace, Pulse
from recorded_rows import read_pulse
from training import Perceptron, loader, manifest, only_run, rows_of, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof import Mark, RunContext
    from lightning_memprof.collectors import Window


def everything(**options: Any) -> MemProfilerCallback:
    trace = OperatorTrace(record_shapes=True, profile_memory=True, with_stack=True, with_flops=True)
    collectors = [Pulse(), HostMemory(), HookTimings(), trace]
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=0)
    return MemProfilerCallback(
        **{
            "schedule": schedule,
            "collectors": collectors,
            "output": OutputOptions(summary=False, on_error="raise"),
            **options,
        }
    )


class Recorded(Perceptron):
    """Keeps its losses and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.detach().clone())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.extend(parameter.grad.clone() for parameter in self.parameters())


def outcome(directory: Path, *callbacks: pl.Callback, **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(11)
    model = Recorded()
    trainer(directory, *callbacks, max_steps=20, **options).fit(model, loader(20), loader(3))
    return [*model.seen, *(value.clone() for value in model.state_dict().values())], torch.get_rng_state()


def test_losses_gradients_weights_and_random_state_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    bare, bare_state = outcome(tmp_path / "bare")
    ours, our_state = outcome(tmp_path / "ours", everything(), profiler=ExtendedPyTorchProfiler())
    assert len(bare) > 100
    assert all(torch.equal(a, b) for a, b in zip(bare, ours, strict=True))
    assert torch.equal(bare_state, our_state)
    assert len(rows_of(only_run(tmp_path / "ours"), "window")) > 6


class FailsError(RuntimeError):
    pass


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("where", ["training_step", "backward", "on_train_batch_end"])
def test_an_exception_arrives_as_the_same_object_and_what_was_seen_is_on_disk(
    tmp_path: Path, step: int, where: str
) -> None:
    error = FailsError("mine")

    class Failing(Perceptron):
        def maybe(self, place: str) -> None:
            if place == where and self.trainer.global_step == step + (place == "on_train_batch_end"):
                raise error

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.maybe("training_step")
            return self.loss(batch)

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.maybe("backward")
            loss.backward()

        def on_train_batch_end(self, *args: Any) -> None:
            self.maybe("on_train_batch_end")

    model = Failing()
    training = trainer(tmp_path, everything(), profiler=ExtendedPyTorchProfiler())
    with pytest.raises(FailsError) as caught:
        training.fit(model, loader())
    assert caught.value is error
    run = only_run(tmp_path)
    end = manifest(run)[-1]
    assert (end["kind"], end["status"], end["exception"]) == ("end", "exception", "FailsError: mine")
    assert [row["step"] for row in read_pulse(run / "pulse.rank00000.csv")] == list(range(step + 1))
    closed = [row for row in rows_of(run, "window") if row["event"] == "close"]
    if step in (2, 3):
        assert closed[0]["steps"] == [2, 3][: step - 1]
        assert closed[0]["truncated"] is (step == 2)
        (trace,) = run.parent.glob("*.pt.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert any(event.get("name") == "ProfilerStep#2" for event in events)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "start" not in vars(training.profiler)


def test_after_an_exception_the_next_fit_of_the_process_records_again(tmp_path: Path) -> None:
    class Failing(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise FailsError
            return self.loss(batch)

    callback, profiler = everything(), ExtendedPyTorchProfiler()
    with pytest.raises(FailsError):
        trainer(tmp_path, callback, profiler=profiler).fit(Failing(), loader())
    trainer(tmp_path, callback, profiler=profiler).fit(Perceptron(), loader())
    end = manifest(tmp_path / "log/memprofiler-2")[-1]
    assert (end["status"], end["steps"]) == ("finished", 12)


def test_ctrl_c_saves_what_there_is_and_ends_as_without_us(tmp_path: Path) -> None:
    class Interrupted(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise KeyboardInterrupt
            return self.loss(batch)

    import signal

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        trainer(tmp_path, everything()).fit(Interrupted(), loader())
    signal.signal(signal.SIGINT, handler)
    assert caught.value.code == 1
    run = only_run(tmp_path)
    assert manifest(run)[-1]["status"] == "exception"
    assert (run / "window000/rank00000.host.jsonl").is_file()


class Faulty(Collector):
    """Fails where it is told to."""

    name: ClassVar[str] = "faulty"

    def __init__(self, where: str) -> None:
        self.where = where
        self.released = False

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[Any]:
        if self.where == "enter":
            raise FailsError("on enter")

        def on_mark(mark: Mark) -> None:
            if self.where == "mark":
                raise FailsError("in a mark")

        try:
            yield on_mark
        finally:
            self.released = True
        if self.where == "exit":
            raise FailsError("on save")


@pytest.mark.parametrize("where", ["enter", "mark", "exit"])
def test_a_failing_collector_is_switched_off_and_nothing_else_notices(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(where)
    callback = MemProfilerCallback(
        schedule=Schedule(repeat=2),
        collectors=[Pulse(), faulty, HostMemory(), OperatorTrace()],
        output=OutputOptions(summary=False),
    )
    with caplog.at_level(logging.WARNING, logger="lightning_memprof"):
        trainer(tmp_path, callback).fit(Perceptron(), loader())
    run = only_run(tmp_path)
    (row,) = rows_of(run, "error")
    assert (row["collector"], row["where"], row["window"]) == ("faulty", where, 0)
    assert "FailsError" in row["traceback"]
    assert faulty.released is (where != "enter")
    assert len([record for record in caplog.records if "faulty" in record.getMessage()]) == 1
    for window in ("window000", "window001"):
        lines = (run / window / "rank00000.host.jsonl").read_text().splitlines()
        assert {json.loads(line)["step"] for line in lines if json.loads(line)["recorded"]}
    assert len(list(run.parent.glob("*.pt.trace.json.gz"))) == 2
    assert len(read_pulse(run / "pulse.rank00000.csv")) == 12
    assert manifest(run)[-1]["status"] == "finished"


def test_a_log_dir_that_cannot_be_written_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    callback = MemProfilerCallback(output=OutputOptions(dirpath=tmp_path / "file", summary=False))
    training = trainer(tmp_path, callback)
    with caplog.at_level(logging.WARNING, logger="lightning_memprof"):
        training.fit(Perceptron(), loader())
    assert training.global_step == 12
    assert "this run is not recorded" in caplog.text


def test_a_run_directory_that_vanishes_does_not_stop_the_training(tmp_path: Path) -> None:
    import shutil

    class Vanishing(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                shutil.rmtree(tmp_path / "log")
            return self.loss(batch)

    training = trainer(
        tmp_path, MemProfilerCallback(output=OutputOptions(summary=True)), profiler=ExtendedPyTorchProfiler()
    )
    training.fit(Vanishing(), loader())
    assert training.global_step == 12


def test_nothing_is_held_outside_of_windows(tmp_path: Path) -> None:
    held: dict[int, tuple[int, bool]] = {}
    unpatched = torch.nn.Module._call_impl

    class Watching(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self.modules())
            hooks += len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)
            patched = torch.nn.Module._call_impl is not unpatched
            held[batch_idx] = (hooks + patched, torch.autograd._profiler_enabled())
            return self.loss(batch)

    trainer(tmp_path, MemProfilerCallback(output=OutputOptions(summary=False)), profiler=ExtendedPyTorchProfiler()).fit(
        Watching(), loader()
    )
    assert {step for step, (hooks, _) in held.items() if hooks} == {1, 2, 3}
    assert {step for step, (_, running) in held.items() if running} == {2, 3}


def test_a_step_outside_of_windows_calls_few_of_our_functions(tmp_path: Path) -> None:
    steps: list[Counter[str]] = [Counter()]

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "lightning_memprof" in frame.f_code.co_filename:
            steps[-1][frame.f_code.co_name] += 1

    class Counted(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            sys.setprofile(count if 50 <= batch_idx < 150 else None)
            steps.append(Counter())
            return self.loss(batch)

    callback = MemProfilerCallback(schedule=Schedule(skip_first=1000), output=OutputOptions(summary=False))
    trainer(tmp_path, callback, max_steps=160).fit(Counted(), loader(160))
    # One of the cheapest: what the clock and the garbage collector add falls into most steps of a slow machine.
    usual = sorted(steps[51:151], key=Counter.total)[10]
    # One lookup, start and stop for each action, whether it counts or not; they cost a tenth of a microsecond.
    for name in ("profile", "__enter__", "__exit__"):
        assert 15 < usual.pop(name) < 35
    assert usual.total() < 45, usual


def test_the_model_can_be_copied_and_pickled_inside_a_window(tmp_path: Path) -> None:
    import copy
    import pickle

    class Copied(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            twin = copy.deepcopy(self.net)
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), self.net.parameters(), strict=True))
            pickle.dumps(self.net.state_dict())
            return self.loss(batch)

    trainer(tmp_path, everything()).fit(Copied(), loader(6))


def test_sigterm_saves_what_there_is_and_ends_as_without_us(tmp_path: Path, environment: dict[str, str]) -> None:
    program = tmp_path / "endless.py"
    program.write_text(
        dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from pathlib import Path
        from training import Perceptron, loader, trainer
        from lightning.pytorch.callbacks import LambdaCallback

        started = Path(sys.argv[1] + ".started")
        callbacks = [LambdaCallback(on_train_batch_end=lambda *_: started.touch())]
        if sys.argv[1] == "ours":
            from lightning_memprof import MemProfilerCallback, Schedule
            callbacks = [MemProfilerCallback(schedule=Schedule(wait=0, active=3, repeat=0))]
        trainer(Path(sys.argv[1]), *callbacks, max_epochs=-1).fit(Perceptron(), loader(5))
        """)
    )
    codes = {}
    for kind in ("bare", "ours"):
        process = subprocess.Popen(
            [sys.executable, str(program), kind], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        started = tmp_path / ("ours/log/memprofiler/window001" if kind == "ours" else "bare.started")
        deadline = time.monotonic() + 60
        while not started.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        codes[kind] = process.wait(60)
    assert codes["ours"] == codes["bare"]
    run = tmp_path / "ours/log/memprofiler"
    assert manifest(run)[-1]["exception"].startswith("SIGTERMException")
    closed = [row for row in rows_of(run, "window") if row["event"] == "close"]
    assert len(closed) >= 2
    assert all((run / f"window{row['window']:03d}/rank00000.host.jsonl").is_file() for row in closed)


def test_a_recording_that_cannot_begin_leaves_no_file_open_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise FailsError("ours")

    monkeypatch.setattr("lightning_memprof.integration.attachment.Session", broken)
    training = trainer(tmp_path, MemProfilerCallback(output=OutputOptions(summary=False)))
    training.fit(Perceptron(), loader(3))
    assert training.global_step == 3
    end = manifest(only_run(tmp_path))[-1]
    assert (end["kind"], end["status"], end["exception"]) == ("end", "exception", "FailsError: ours")
    assert not [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)]
