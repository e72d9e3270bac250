"""What is promised to the user's training."""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_modules

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HookTimings, HostMemory, OperatorTrace, Pulse
from recorded_rows import read_pulse
from training import Perceptron, loader, manifest, only_run, rows_of, trainer


class FailsError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (0, "training_step"), (1, "backward"), (2, "training_step"), (2, "on_train_batch_end"), (3, "backward"),
        (5, "on_train_batch_end"),
    ],
)  # fmt: skip
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

    operators = OperatorTrace(record_shapes=True, profile_memory=True, with_stack=True, with_flops=True)
    collectors = [Pulse(), HostMemory(), HookTimings(), operators]
    output = OutputOptions(summary=False, on_error="raise")
    callback = MemProfilerCallback(Schedule(wait=1, warmup=1, active=2, repeat=0), collectors, output=output)
    model = Failing()
    training = trainer(tmp_path, callback, profiler=ExtendedPyTorchProfiler())
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


def test_a_recording_that_cannot_begin_leaves_no_file_open_and_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise FailsError("ours")

    monkeypatch.setattr("lightning_memprof.integration.live_run.Session", broken)
    training = trainer(tmp_path, MemProfilerCallback(output=OutputOptions(summary=False)))
    training.fit(Perceptron(), loader(3))
    assert training.global_step == 3
    end = manifest(only_run(tmp_path))[-1]
    assert (end["kind"], end["status"], end["exception"]) == ("end", "exception", "FailsError: ours")
    assert not [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)]
