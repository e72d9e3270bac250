"""One rank of a two-rank DDP fit on gloo of which rank 1 is chosen: ``python chosen_rank.py DIRECTORY``."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.capture import budget
from training import Perceptron, loader, trainer


def main(directory: Path) -> None:
    budget._TIMEOUT_SHARE = 1e-6  # type: ignore[misc]
    callback = MemProfilerCallback(ranks=[1], output=OutputOptions(on_error="raise"))
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=100))
    trainer(directory, callback, devices=2, strategy=strategy).fit(Perceptron(), loader(16))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
