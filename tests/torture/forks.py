"""Forks the ranks of each cell from this process, which trains nothing itself, and judges what they left."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import fault
import judge
import life
import moments
import psutil
import registry
import torch._inductor.config  # noqa: F401 the profiler imports it late, once for each child

from ports import free_port

CELL_SECONDS = 150.0
# A worker of a DataLoader looks for its parent every 5 s.
ORPHAN_SECONDS = 30.0
# prctl(2): what a cell leaves running becomes a child of this process, and is found; a rank dies with this process.
SET_CHILD_SUBREAPER = 36
SET_PDEATHSIG = 1


def serve(directory: Path) -> None:
    """Run a cell for each line of standard input; give a line of JSON for each."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    healthy: dict[int, judge.Healthy] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = run(directory, asked, healthy)
        except Exception:  # noqa: BLE001 a cell that cannot be judged is red
            told = {"red": [traceback.format_exc(limit=-4)]}
        print(json.dumps(asked | told), flush=True)


def run(directory: Path, asked: dict[str, Any], healthy: dict[int, judge.Healthy]) -> dict[str, Any]:
    """Run one cell and its bare twin, and judge."""
    chosen = next(known for known in registry.faults() if known.name == asked["fault"])
    moment, world = moments.moment(asked["moment"]), int(asked["world"])
    if world not in healthy:
        quiet = fault.Fault(name="none", says="", place="training_step", strike=lambda cell: None)
        lived = live(directory / f"healthy{world}-{asked['number']}", quiet, moments.MOMENTS[0], world, ours=True)
        healthy[world] = judge.Healthy.of(lived)
    began = time.monotonic()
    below = directory / str(asked["number"])
    bare = live(below / "bare", chosen, moment, world, ours=False)
    ours = live(below / "ours", chosen, moment, world, ours=True)
    verdict = judge.judge(chosen, moment, bare, ours, healthy[world])
    return verdict.told() | {"seconds": round(time.monotonic() - began, 2), "directory": str(below)}


def live(directory: Path, chosen: fault.Fault, moment: moments.Moment, world: int, *, ours: bool) -> judge.Lived:
    """Fork the ranks, wait for them, and give what they left."""
    directory.mkdir(parents=True)
    port = free_port()
    cells = [fault.Cell(chosen, moment, world, rank, ours, directory) for rank in range(world)]
    pids = [fork(cell, port) for cell in cells]
    codes = wait(pids)
    chosen.tidy(directory)
    return judge.Lived(directory, codes, [life.outcome(directory, rank) for rank in range(world)], orphans(set(pids)))


def fork(cell: fault.Cell, port: int) -> int:
    """Have a rank live in a process of its own; give its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        code = life.live(cell, port)
        # As the interpreter does at its end: a thread that does not end hangs the program here.
        threading._shutdown()
    except BaseException:  # noqa: BLE001 the fork must end here, whatever happens
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> list[int | None]:
    """Give the exit codes; None for a process that hung and was ended."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + CELL_SECONDS
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        if time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def orphans(known: set[int]) -> list[str]:
    """Give what runs on after its cell, and end it; processes that are just ending are waited for."""
    left: list[str] = []
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        reap()
        running = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
        if not running or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for child in running:
        left.append(" ".join(child.cmdline())[:200] or child.name())
        child.kill()
    reap()
    return left


def reap() -> None:
    """Take leave of children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
