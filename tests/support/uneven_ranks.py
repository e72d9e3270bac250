"""One rank of two small trainings under DDP on gloo: ``python uneven_ranks.py DIRECTORY``.

In the first all ranks hold the same; in the second rank 1 keeps 400 MiB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from faults import Samples, Steady
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HostMemory, Pulse
from training import trainer


class Hoarding(Steady):
    """Keeps some MiB more on rank 1."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.kept = torch.ones(mib, 1024, 256) if os.environ["LOCAL_RANK"] == "1" else torch.ones(0)


def main(directory: Path) -> None:
    for name, mib in (("even", 0), ("uneven", 400)):
        trainer(
            directory / name,
            MemProfilerCallback(
                schedule=Schedule(wait=2, warmup=1, active=2),
                collectors=[Pulse(), HostMemory()],
                output=OutputOptions(summary=False),
            ),
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
        ).fit(Hoarding(mib), DataLoader(Samples(16), batch_size=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
