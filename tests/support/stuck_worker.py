"""A training whose data set hangs until that is reported, and then kills the training.

python stuck_worker.py DIRECTORY WORKERS: the data of a validation with a minus sign
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from hang_reports import is_reported
from lightning_memprof import MemProfilerCallback
from lightning_memprof.artifacts.naming import hangs_name
from lightning_memprof.collectors import Hangs, Pulse
from training import Noise, Perceptron, trainer

DIRECTORY, WORKERS = Path(sys.argv[1]), int(sys.argv[2])
TRAINING = os.getpid()


class Stuck(Dataset[torch.Tensor]):
    """Its sample 41 does not come."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        report, until = DIRECTORY / "log" / "memprofiler" / hangs_name(0), time.monotonic() + 120
        while index == 41 and time.monotonic() < until:
            if is_reported(report, 20 if WORKERS >= 0 else 7):
                os.kill(TRAINING, signal.SIGKILL)
                break
            time.sleep(0.05)  # waits
        return torch.ones(8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    stuck = DataLoader(Stuck(), batch_size=2, num_workers=abs(WORKERS))
    callback = MemProfilerCallback(collectors=[Pulse(), Hangs(max_step_seconds=2 if WORKERS >= 0 else 0.3)])
    data = (stuck, None) if WORKERS >= 0 else (DataLoader(Noise(8), batch_size=1), stuck)
    trainer(DIRECTORY, callback, num_sanity_val_steps=0).fit(Perceptron(), *data)
