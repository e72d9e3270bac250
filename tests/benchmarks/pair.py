"""Two trainings that take turns, step by step, on one core: what slows one step down slows its neighbour down too."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import configurations
import torch
import workload

from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.report.written import LOG_NAME, PAGE_NAME
from ports import free_port
from waiting import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

LONGEST_S = 300
PREFIX = "memprof-bench-"


@dataclass(frozen=True)
class Seat:
    """Which of the processes one is: its rank, of how many, and where the ranks meet."""

    rank: int
    ranks: int
    port: int


class Pair:
    """Two trainings, each of one process or, as ranks, of several; each fit of one goes with a fit of the other."""

    def __init__(self, ranks: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        ports = (free_port(), free_port())
        self._processes: list[SpawnProcess] = []
        self._sides: list[list[Connection[Any, Any]]] = [[], []]
        with ExitStack() as theirs:
            for rank in range(ranks):
                for side, (baton, port) in enumerate(zip(context.Pipe(), ports, strict=True)):
                    ours, orders = context.Pipe()
                    theirs.callback(orders.close)
                    theirs.callback(baton.close)
                    process = context.Process(target=work, args=(orders, baton, Seat(rank, ranks, port)))
                    process.start()
                    self._processes.append(process)
                    self._sides[side].append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def fit(self, first: workload.Job, second: workload.Job) -> tuple[workload.Fit, workload.Fit]:
        """Fit two jobs of as many steps, a turn of the first and a turn of the second one after the other.

        Raises:
            RuntimeError: a fit failed, and with it this pair; the message holds its traceback.

        """
        with ExitStack() as stack:
            created = [tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) for _ in self._sides]
            directories = [Path(stack.enter_context(each)) for each in created]
            sides = zip(self._sides, (first, second), (True, False), directories, strict=True)
            for orders, job, leads, directory in sides:
                for each in orders:
                    each.send((job, leads, directory))
            self._wait_for_all()
            found = [orders[0].recv() for orders in self._sides]
            for orders in self._sides:
                for other in orders[1:]:
                    other.recv()
            _wait_for_pages(directories, (first, second))
            fits = [replace(fit, **facts(directory)) for fit, directory in zip(found, directories, strict=True)]
        return fits[0], fits[1]

    def close(self) -> None:
        """End all processes."""
        for orders in self._sides:
            for each in orders:
                each.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _wait_for_all(self) -> None:
        waiting = [orders for side in self._sides for orders in side]
        deadline = time.monotonic() + LONGEST_S
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(f"a fit took longer than {LONGEST_S} s")
            for orders in waiting[:]:
                if orders in ready:
                    waiting.remove(orders)
                    if not self._ended_well(orders):
                        self._give_up(f"a fit failed:\n{self._said(orders)}")

    @staticmethod
    def _ended_well(orders: Connection[Any, Any]) -> bool:
        try:
            return bool(orders.recv())
        except EOFError:
            return False

    @staticmethod
    def _said(orders: Connection[Any, Any]) -> str:
        try:
            return str(orders.recv())
        except EOFError:
            return "its process died"

    def _give_up(self, why: str) -> None:
        for process in self._processes:
            process.kill()
        self.close()
        raise RuntimeError(why)


def work(orders: Connection[Any, Any], baton: Connection[Any, Any], seat: Seat) -> None:
    """Fit what is ordered until nobody is left to order."""
    _keep_to_one_core(seat.rank)
    _be_quiet()
    if seat.ranks > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(seat.port), "WORLD_SIZE": str(seat.ranks),
            "NODE_RANK": "0", "LOCAL_RANK": str(seat.rank),
        }  # fmt: skip
    known = configurations.configurations()
    watch = workload.StopWatch()

    def pause() -> None:
        baton.send_bytes(b"your turn")
        baton.recv_bytes()

    while True:
        try:
            job, leads, directory = orders.recv()
        except EOFError:
            return
        try:
            if not leads:
                baton.recv_bytes()
            fit = workload.fit(job, known[job.name].arguments, pause, directory, watch)
            if leads:
                baton.send_bytes(b"your turn")
        except BaseException:  # noqa: BLE001 whoever ordered raises it
            orders.send(False)
            orders.send(traceback.format_exc())
            return
        orders.send(True)
        orders.send(fit)


def facts(directory: Path) -> dict[str, Any]:
    """Give ``size_bytes`` and ``faults`` of a fit."""
    faults: list[str] = []
    for path in directory.rglob("memprofiler/manifest.*.jsonl"):
        errors = [row for row in decode_rows(path.read_bytes(), dict)[0] if row["kind"] == "error"]
        faults += [f"{row.get('collector')} failed: {row.get('message') or row.get('error')}" for row in errors]
    return {
        "size_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "faults": tuple(faults),
    }


def has_page(directory: Path) -> bool:
    """Say whether the page that is made after the fit is there, or why not."""
    return any(path.name in {PAGE_NAME, LOG_NAME} for path in directory.rglob("memprofiler/report.*"))


def _wait_for_pages(directories: list[Path], jobs: tuple[workload.Job, ...]) -> None:
    """Wait until no process of a fit goes on that would slow down the next."""
    known = configurations.configurations()
    for directory, job in zip(directories, jobs, strict=True):
        if known[job.name].page:
            wait_until(partial(has_page, directory))


def _keep_to_one_core(rank: int) -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0), reverse=True)
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _be_quiet() -> None:
    """Throw away what Lightning, Kineto and the summary print; it is still rendered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
