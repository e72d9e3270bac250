"""One rank of a fit on gloo whose files go to a URL: ``python remote_ranks.py DIRECTORY URL``."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from lightning.pytorch.strategies import DDPStrategy

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from training import Perceptron, loader, trainer


def main(directory: Path, url: str) -> None:
    callback = MemProfilerCallback(schedule=Schedule(repeat=2), output=OutputOptions(dirpath=url, on_error="raise"))
    world = int(os.environ["WORLD_SIZE"])
    several = {"devices": world, "strategy": DDPStrategy(process_group_backend="gloo")} if world > 1 else {}
    training = trainer(directory, callback, default_root_dir=str(directory), **several)
    random.seed(5)
    before = random.getstate()
    training.fit(Perceptron(), loader(24))
    assert random.getstate() == before
    assert training.global_step == 24 // world
    print("recorded in", callback.run_location)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
