"""Pairs of ranks of which one is killed: ``python mortal_ranks.py DIRECTORY SEED COUNT``.

Every pair is forked from this process, which has imported everything, and fits under DDP on gloo with a window every
third step. One of the two is killed at a random moment after it has closed 0, 1, 2 or 3 windows. The result of each
pair is printed as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch._inductor.config  # noqa: F401 the profiler imports it late, once for each child
from lightning.pytorch.strategies import DDPStrategy

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from ports import free_port
from training import Perceptron, loader, trainer

STARTS_WITHIN = 60.0
CLOSES_WITHIN = 40.0
MOST_CLOSED = 3
ENDS_WITHIN = 30.0


def fit(directory: Path, rank: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }  # fmt: skip
    out = os.open(directory / f"out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    schedule = Schedule(wait=1, warmup=1, active=1, repeat=0)
    callback = MemProfilerCallback(schedule=schedule, output=OutputOptions(summary=False))
    trainer(
        directory, callback, devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=50,
        profiler=ExtendedPyTorchProfiler(),
    ).fit(Perceptron(), loader(40))  # fmt: skip


def fork(directory: Path, rank: int, port: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fit(directory, rank, port)
            code = 0
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int, seconds: float) -> int | None:
    """Give a child's exit status, or None where it goes on."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def closed_windows(manifest: Path) -> int:
    return manifest.read_bytes().count(b'"event":"close"') if manifest.exists() else 0


def pair(directory: Path, victim: int, closed: int, delay: float) -> dict[str, object]:
    directory.mkdir(parents=True)
    port = free_port()
    pids = [fork(directory, rank, port) for rank in range(2)]
    manifest = directory / f"log/memprofiler/manifest.rank{victim:05d}.jsonl"
    deadline = time.monotonic() + STARTS_WITHIN
    while not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    # Counted in windows, not in seconds: a slow machine closes as many before the kill.
    deadline = time.monotonic() + CLOSES_WITHIN
    while closed_windows(manifest) < closed and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(pids[victim], signal.SIGKILL)
    killed = wait_for(pids[victim], ENDS_WITHIN)
    other = wait_for(pids[1 - victim], ENDS_WITHIN)
    if other is None:
        os.kill(pids[1 - victim], signal.SIGKILL)
        wait_for(pids[1 - victim], ENDS_WITHIN)
    return {
        "directory": str(directory), "victim": victim, "closed": closed, "delay": delay, "killed": killed,
        "other": other,
    }  # fmt: skip


def main(directory: Path, seed: int, count: int) -> None:
    moments = random.Random(seed)
    for number in range(count):
        victim, closed, delay = moments.randrange(2), number % (MOST_CLOSED + 1), moments.uniform(0.0, 0.9)
        print(json.dumps(pair(directory / str(number), victim, closed, delay)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
