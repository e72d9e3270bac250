"""One rank of a two-rank DDP fit on gloo of which one has the callback: ``python lone_rank.py DIRECTORY RANK``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy

from lightning_memprof import MemProfilerCallback
from lightning_memprof.integration import place
from training import Perceptron, loader, trainer


def main(directory: Path, rank: str) -> None:
    place._PATIENCE = timedelta(seconds=2)  # type: ignore[misc]
    callbacks = [MemProfilerCallback()] if os.environ["LOCAL_RANK"] == rank else []
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=100))
    trainer(directory, *callbacks, devices=2, strategy=strategy).fit(Perceptron(), loader(16))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
