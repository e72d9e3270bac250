"""A training whose last rank hangs in step 3 until every rank has reported it, and is then killed.

python hanging.py DIRECTORY RANKS [abort]: with it, the last rank hangs, and both end themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hang_reports import is_reported
from lightning_memprof import MemProfilerCallback
from lightning_memprof.artifacts.naming import hangs_name
from lightning_memprof.collectors import Hangs, Pulse
from training import Perceptron, loader, trainer

DIRECTORY, RANKS = Path(sys.argv[1]), int(sys.argv[2])
ABORTS = sys.argv[3:] == ["abort"]


class Hanging(Perceptron):
    """Its last rank waits in its step; the others wait for it in backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.global_rank == RANKS - 1:
            self.wait()
        return super().training_step(batch, batch_idx)

    def wait(self) -> None:
        reported = threading.Event()
        # In a thread of its own: the line of this one is the same whenever a stack is taken.
        threading.Thread(target=look, args=(reported,), daemon=True).start()
        reported.wait(3600 if ABORTS else 120)
        os.kill(os.getpid(), signal.SIGKILL)


def look(reported: threading.Event) -> None:
    """Wait until every rank has reported the hang."""
    rows = [DIRECTORY / "log" / "memprofiler" / hangs_name(rank) for rank in range(RANKS)]
    while ABORTS or not all(is_reported(path, 3) for path in rows):
        time.sleep(0.05)
    reported.set()


if __name__ == "__main__":
    torch.set_num_threads(1)
    callback = MemProfilerCallback(
        collectors=[Pulse(), Hangs(max_step_seconds=3, on_hang="abort" if ABORTS else "dump")]
    )
    strategy = {"strategy": "ddp", "devices": RANKS} if RANKS > 1 else {}
    trainer(DIRECTORY, callback, max_steps=8, **strategy).fit(Hanging(), loader())
