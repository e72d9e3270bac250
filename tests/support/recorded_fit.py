"""A fit whose every file operation is photographed: ``python recorded_fit.py DIRECTORY OUT WINDOWS``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from file_operations import Recorder
from lightning_memprof import Budget, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import (
    FunctionMemory,
    HookTimings,
    HostMemory,
    ModuleMemory,
    OperatorTrace,
    Pulse,
    SavedTensors,
    SystemStats,
)
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.opened import OpenOptions, opened
from lightning_memprof.report.written import PAGE_NAME, write_page
from training import Perceptron, loader, only_run, trainer


def fit(directory: Path, windows: int) -> None:
    """Train with every collector that writes a file on a CPU, the oldest windows being removed on the way."""
    callback = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=1, repeat=windows),
        collectors=[
            Pulse(), HostMemory(), HookTimings(), FunctionMemory(), SavedTensors(), OperatorTrace(),
            ModuleMemory(), SystemStats(always=True, interval=0.1),
        ],
        budget=Budget(keep_windows=max(1, windows - 1)),
        output=OutputOptions(summary=False, report=False),
    )  # fmt: skip
    training = trainer(directory, callback, profiler=ExtendedPyTorchProfiler())
    callback.snapshot("before the fit")
    training.fit(Perceptron(), loader(3 * windows))


def main(directory: Path, out: Path, windows: int) -> None:
    """Record one fit, and the making of its page."""
    directory.mkdir(parents=True)
    recorder = Recorder(directory)
    recorder.start()
    fit(directory, windows)
    run = only_run(directory)
    assert load_run(run).status == "finished"
    with opened([str(run)], OpenOptions()) as view:
        write_page(view, run / PAGE_NAME)
    out.write_bytes(pickle.dumps(recorder.finish()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
