"""One fit for a growth curve: ``growth_fit.py BLOCKS STEPS ROWS RECORDING [KEEP]``; prints its figures as JSON.

A process of its own for each fit: sizes that only grow, such as the largest resident size, belong to one fit. What is
paid once in a process is paid by a small fit before it. ``waiting`` fits without and with an idle recorder in turn.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any, Final

import child
import networks
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.collectors import ModuleMemory

WAIT: Final = 4
ACTIVE: Final = 2
NEVER: Final = Schedule(wait=1_000_000)
WINDOW: Final = Schedule(wait=WAIT, warmup=1, active=ACTIVE, repeat=1)
# Steps after the window that are not counted as waiting: the first saves it, and then caches are cold.
SETTLE: Final = 3


class Readings(Callback):
    """CPU time, children included, and wall at the start of each batch, ahead of every other callback."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def read(self) -> None:
        self.cpu.append(child.cpu_seconds())
        self.wall.append(time.perf_counter())

    def on_train_batch_start(self, *args: Any) -> None:
        self.read()


def arguments(recording: str, directory: Path) -> dict[str, Any]:
    """Give what a Trainer is told to record: ``bare``, ``idle``, ``window`` (the default set) or ``tracker``."""
    if recording == "bare":
        return {}
    output = OutputOptions(dirpath=directory)
    if recording == "tracker":
        return {"callbacks": [MemProfilerCallback(WINDOW, [ModuleMemory()], output=output)]}
    schedule = {"idle": NEVER, "window": WINDOW}[recording]
    return {
        "callbacks": [MemProfilerCallback(schedule, output=output)],
        "profiler": ExtendedPyTorchProfiler(dirpath=directory),
    }


def fit(blocks: int, steps: int, rows: int, recording: str, keep: Path | None = None) -> dict[str, float]:
    """Train once; give seconds, bytes and what the manifest says; what was written is moved to ``keep``."""
    torch.manual_seed(0)
    model = networks.Regression(blocks)
    loader = DataLoader(networks.Batches(steps + 1, rows), batch_size=None)
    with tempfile.TemporaryDirectory(prefix="memprof-growth-") as created:
        directory = Path(created)
        readings = Readings()
        given = arguments(recording, directory)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=False,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[readings, *given.pop("callbacks", [])],
            **given,
        )
        rss = child.resident_peak()
        readings.read()
        trainer.fit(model, loader)
        readings.read()
        found = {
            "modules": len(list(model.network.modules())),
            "rss_bytes": child.resident_peak() - rss,
            "disk_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            **times(readings),
        }
        for path in directory.glob("memprofiler/manifest.*.jsonl"):
            ends = [row for row in decode_rows(path.read_bytes(), dict)[0] if row["kind"] == "end"]
            found["pulse_us"] = ends[-1]["overhead"]["pulse_ns"] / ends[-1]["steps"] / 1000
        if keep is not None:
            shutil.copytree(directory, keep)
        return found


def times(readings: Readings) -> dict[str, float]:
    """Compare the steps of the window with those that wait in the same fit."""
    cpu, wall = spans(readings.cpu), spans(readings.wall)
    # Before the first batch stands the setup, behind the start of the last one the end of the fit.
    steps, clock = cpu[1:-1], wall[1:-1]
    opens, closes = WAIT - 1, WAIT + ACTIVE
    waiting = [index for index in range(1, len(steps)) if index < opens or index > closes + SETTLE]
    usual = median(steps[index] for index in waiting)
    return {
        "step_s": usual,
        "window_s": sum(steps[opens : closes + 1]) - (closes + 1 - opens) * usual,
        "stall_s": clock[closes] - median(clock[index] for index in waiting),
        "end_s": wall[-1],
        "fit_s": sum(cpu),
    }


def spans(readings: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(readings)]


def waiting(blocks: int, steps: int, rows: int) -> dict[str, float]:
    """Give what a step costs without and with an idle recorder, in turn, and the ratio of each turn's two fits."""
    found: dict[str, float] = {}
    ratios, steps_s, pulse_us = [], [], []
    for _ in range(3):
        bare, idle = fit(blocks, steps, rows, "bare"), fit(blocks, steps, rows, "idle")
        ratios.append(idle["step_s"] / bare["step_s"])
        steps_s.append(bare["step_s"])
        pulse_us.append(idle["pulse_us"])
        found["modules"] = bare["modules"]
    return found | {"ratio": median(ratios), "off": (max(ratios) - min(ratios)) / 2, "step_s": median(steps_s),
                    "pulse_us": median(pulse_us)}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    blocks, steps, rows = map(int, sys.argv[1:4])
    recording, *keep = sys.argv[4:]
    fit(1, 12, 1, "idle" if recording == "waiting" else recording)
    if recording == "waiting":
        found = waiting(blocks, steps, rows)
    else:
        found = fit(blocks, steps, rows, recording, *map(Path, keep))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
