"""Real processes that are the ranks of one training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["launch"]


# What could change what a rank imports or records.
_OURS = ("PYTHONPATH", "LIGHTNING_MEMPROF", "PL_TRAINER_PROFILER")


def launch(script: str, directory: Path, *options: str, world: int) -> list[int]:
    """Run ``script`` of this directory once for each rank; give the exit codes.

    Each rank is given ``directory``, which is made, and the options; it writes what it prints to ``out{R}`` in it. A
    rank that is not done after two minutes, its peer may have died, is ended.
    """
    directory.mkdir(parents=True)
    support = Path(__file__).parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {name: value for name, value in os.environ.items() if name not in _OURS} | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support),
    }  # fmt: skip
    processes = []
    for rank in range(world):
        with (directory / f"out{rank}").open("w") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(support / script), str(directory), *options],
                    env=common | {"LOCAL_RANK": str(rank)},
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + 120
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
    return [process.wait() for process in processes]
