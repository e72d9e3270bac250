"""One rank of the demo's model under DDP on gloo: ``python straggling_ranks.py DIRECTORY [slow=R] [steps=N] [log=1]``.

Every sample of the slow rank takes as much more as its training step took, at least 50 ms: on a machine of any speed it
is the straggler. With ``log=1`` its forward does so instead, each step logs the mean loss of the ranks, and the
schedule is the default one, whose window has two steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, Schedule
from lightning_memprof.demo.train import GPTConfig, LitGPT
from training import trainer

LEAST_SECONDS = 0.05


class Bytes(Dataset[Any]):
    """Batches of random bytes, late on the slow rank; short ones, so that ranks that share cores do not hide it."""

    def __init__(self, batches: int, context: int, *, slow: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self._batches = torch.randint(0, 256, (batches, 2, context + 1), generator=generator)
        self._slow = slow
        self._handed_out: float | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._slow:
            now = time.monotonic()
            time.sleep(max(LEAST_SECONDS, now - (self._handed_out or now)))
            self._handed_out = time.monotonic()
        return self._batches[index, :, :-1], self._batches[index, :, 1:]


class Logged(LitGPT):
    """Logs a mean over the ranks in each step; the forward of the slow rank takes longer."""

    def __init__(self, config: GPTConfig, *, slow: bool) -> None:
        super().__init__(config)
        self._slow = slow

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        begun = time.monotonic()
        loss = super().training_step(batch)
        if self._slow:
            time.sleep(max(LEAST_SECONDS, time.monotonic() - begun))
        self.log("mean_loss", loss, sync_dist=True)
        return loss


def main(directory: Path, options: dict[str, str]) -> None:
    rank, steps = int(os.environ["LOCAL_RANK"]), int(options.get("steps", "13"))
    config, logs, slow = GPTConfig(), "log" in options, rank == int(options.get("slow", "-1"))
    data = Bytes(2 * steps, min(config.context, 16), slow=slow and not logs)
    trainer(
        directory,
        MemProfilerCallback() if logs else MemProfilerCallback(schedule=Schedule(wait=2, warmup=1, active=8, repeat=1)),
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        profiler=ExtendedPyTorchProfiler(),
    ).fit(Logged(config, slow=slow) if logs else LitGPT(config), DataLoader(data, batch_size=None))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict((argument + "=").split("=")[:2] for argument in sys.argv[2:]))
