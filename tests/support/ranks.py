"""Real processes that are the ranks of one training."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired

from ports import free_port
from warm_python import Popen, shared

# What could change what a rank imports or records.
_OURS = ("PYTHONPATH", "LIGHTNING_MEMPROF", "PL_TRAINER_PROFILER")


def launch(script: str, directory: Path, *options: str, world: int) -> list[int]:
    """Run ``script`` of this directory once for each rank; give the exit codes.

    Each rank is given ``directory``, which is made, and the options; it writes what it prints to ``out{R}`` in it. A
    rank that is not done after two minutes, its peer may have died, is ended.
    """
    directory.mkdir(parents=True)
    support = Path(__file__).parent
    port = str(free_port())
    common = {name: value for name, value in os.environ.items() if name not in _OURS} | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support),
    }  # fmt: skip
    with shared(common), ExitStack() as opened:
        ranks = []
        for rank in range(world):
            out = opened.enter_context((directory / f"out{rank}").open("ab"))
            ranks.append(
                Popen(
                    [sys.executable, str(support / script), str(directory), *options], cwd=directory,
                    env=common | {"LOCAL_RANK": str(rank)}, stdin=DEVNULL, stdout=out, stderr=out,
                )
            )  # fmt: skip
        deadline = time.monotonic() + 120
        return [_code(rank, deadline - time.monotonic()) for rank in ranks]


def _code(rank: Popen, seconds: float) -> int:
    try:
        return int(rank.wait(max(0.1, seconds)))
    except TimeoutExpired:
        rank.kill()
        return int(rank.wait())
