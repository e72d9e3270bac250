"""When the batches of a training end, on the clock and in CPU time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning


class Clock(lightning.Callback):
    """Notes when each batch ends, and writes it at the end of the fit: a strategy may train in another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def on_fit_end(self, trainer: lightning.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([self.ends, self.cpu]))
