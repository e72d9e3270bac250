"""Faults of the machine that a training runs on, and of how it uses the cores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, Classifier, Vectors, fit, main

BUSY = "while True: pass"
ASLEEP = "import time\nwhile True: time.sleep(0.001)"


@contextlib.contextmanager
def neighbors(program: str) -> Iterator[None]:
    """Run another process for each core that this one may use, two of them on each."""
    cores = sorted(os.sched_getaffinity(0)) * 2
    with contextlib.ExitStack() as running:
        for core in cores:
            other = running.enter_context(subprocess.Popen([sys.executable, "-c", program]))
            running.callback(other.kill)
            os.sched_setaffinity(other.pid, {core})
        yield


def shared_cores(fault: bool) -> None:
    """Two busy processes on each core of the training; healthy: as many processes that sleep."""
    with neighbors(BUSY if fault else ASLEEP):
        fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH))


def one_thread(fault: bool) -> None:
    """Operators use one of the cores; healthy: all of them, as by default."""
    if fault:
        torch.set_num_threads(1)
    fit(Classifier(depth=4), DataLoader(Vectors(), batch_size=BATCH))


if __name__ == "__main__":
    main(shared_cores, one_thread)
