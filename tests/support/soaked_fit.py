"""A long fit that is looked at once a window: ``python soaked_fit.py DIRECTORY STEPS EVERY ours|plain|bare``.

``plain`` is torch.profiler by hand, with the same windows. A line of JSON is printed for each window.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import psutil
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_memprof import Budget, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from training import Perceptron, loader, trainer
from waiting import wait_until

KEEP: Final = 5
_LOOKS: Final = 5


class Watch(pl.Callback):
    """Looks at the process in the middle between two windows, when their files are written."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory = directory
        self._every = every
        self._process = psutil.Process()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print a line in the middle of each stretch."""
        if trainer.global_step % self._every == self._every // 2:
            wait_until(lambda: not self._is_writing(), 10)
            gc.collect()
            files = self._sizes()
            # One for each window; the others grow by a line, of a step or of a window.
            own = [size for path, size in files.items() if "window" in path.parent.name or ".trace." in path.name]
            line = {
                "step": trainer.global_step,
                "bytes": self._process.memory_info().rss,
                "handles": self._open_handles(),
                "threads": threading.active_count(),
                "window_files": len(own),
                "window_bytes": sum(own),
                "other_bytes": sum(files.values()) - sum(own),
            }
            print(json.dumps(line), flush=True)

    def _open_handles(self) -> int:
        """Count those that stay open: the heartbeat has its file open while it writes a line."""
        counts = []
        for _ in range(_LOOKS):
            counts.append(self._process.num_fds())
            time.sleep(0.01)
        return min(counts)

    def _is_writing(self) -> bool:
        # The oldest window is removed behind the last file.
        files = self._sizes()
        windows = {path.parent for path in files if path.parent.name.startswith("window")}
        return any(".partial" in path.name for path in files) or len(windows) > KEEP

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes of all files; some are replaced or removed meanwhile."""
        sizes = {}
        # Unlike a glob, a walk bears that a directory is removed.
        for directory, _, names in os.walk(self._directory):
            for path in (Path(directory, name) for name in names):
                with suppress(FileNotFoundError):
                    sizes[path] = path.stat().st_size
        return sizes


class Plain(pl.Callback):
    """torch.profiler by hand: as many steps in as many windows, as many kept."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory = directory
        self._profiler = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=every - 3, warmup=1, active=2, repeat=0),
            on_trace_ready=self._export,
        )

    def on_train_start(self, *_: Any) -> None:
        """Wait for the first window."""
        self._profiler.start()

    def on_train_batch_end(self, *_: Any) -> None:
        """Tell the step."""
        self._profiler.step()

    def on_train_end(self, *_: Any) -> None:
        """Save what is open."""
        self._profiler.stop()

    def _export(self, profiler: profile) -> None:
        profiler.export_chrome_trace(str(self._directory / f"{profiler.step_num:06}.trace.json.gz"))
        for old in sorted(self._directory.glob("*.trace.json.gz"))[:-KEEP]:
            old.unlink()


def main(directory: Path, steps: int, every: int, how: str) -> None:
    """Fit."""
    directory.mkdir(parents=True)
    callbacks: list[pl.Callback] = []
    options: dict[str, Any] = {"log_every_n_steps": 50, "max_epochs": -1, "max_steps": steps}
    if how == "plain":
        callbacks = [Plain(directory, every)]
    if how == "ours":
        callbacks = [
            MemProfilerCallback(
                schedule=Schedule(wait=every - 3, warmup=1, active=2, repeat=0),
                budget=Budget(keep_windows=KEEP),
                output=OutputOptions(summary=False, report=False),
            )
        ]
        options["profiler"] = ExtendedPyTorchProfiler()
    watch = Watch(directory, every)
    trainer(directory, *callbacks, watch, **options).fit(Perceptron(), loader(min(steps, 1000)))


if __name__ == "__main__":
    os.environ["KINETO_LOG_LEVEL"] = "6"
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
