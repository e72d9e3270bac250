"""A training one of whose DataLoader workers ends itself: by a signal, or with an exit code.

python dying_worker.py DIRECTORY CODE       a signal's number with a minus sign
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import MemProfilerCallback
from training import Perceptron, trainer

CODE = int(sys.argv[2])


class Fatal(Dataset[torch.Tensor]):
    """Its sample 40 ends the process that reads it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40 and CODE < 0:
            os.kill(os.getpid(), -CODE)
        elif index == 40:
            os._exit(CODE)
        return torch.ones(8)


if __name__ == "__main__":
    loader = DataLoader(Fatal(), batch_size=2, num_workers=2)
    trainer(Path(sys.argv[1]), MemProfilerCallback()).fit(Perceptron(), loader)
