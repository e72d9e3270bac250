"""Two processes that take turns, step by step, on one core: what slows one step down slows its neighbour down too."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tests.benchmarks import configurations, workload
else:
    import configurations
    import workload


class Pair:
    """Two worker processes; each fit of one goes with a fit of the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        batons = context.Pipe()
        self._orders: list[Connection[Any, Any]] = []
        with ExitStack() as theirs:
            for baton in batons:
                ours, orders = context.Pipe()
                theirs.callback(orders.close)
                theirs.callback(baton.close)
                context.Process(target=work, args=(orders, baton), daemon=True).start()
                self._orders.append(ours)

    def fit(self, first: workload.Job, second: workload.Job) -> tuple[workload.Fit, workload.Fit]:
        """Fit two jobs of as many steps, a turn of the first worker and a turn of the second one after the other.

        Raises:
            RuntimeError: a fit failed; the message holds its traceback.

        """
        for orders, job, leads in zip(self._orders, (first, second), (True, False), strict=True):
            orders.send((job, leads))
        results = [self._result(orders) for orders in self._orders]
        return results[0], results[1]

    def close(self) -> None:
        """End both processes."""
        for orders in self._orders:
            orders.close()

    def _result(self, orders: Connection[Any, Any]) -> workload.Fit:
        result = orders.recv()
        if isinstance(result, workload.Fit):
            return result
        msg = f"a fit failed:\n{result}"
        raise RuntimeError(msg)


def work(orders: Connection[Any, Any], baton: Connection[Any, Any]) -> None:
    """Fit what is ordered until nobody is left to order."""
    _keep_to_one_core()
    _be_quiet()
    known = configurations.configurations()

    def pause() -> None:
        baton.send_bytes(b"your turn")
        baton.recv_bytes()

    while True:
        try:
            job, leads = orders.recv()
        except EOFError:
            return
        try:
            if not leads:
                baton.recv_bytes()
            fit = workload.fit(job, known[job.name].arguments, pause)
            if leads:
                baton.send_bytes(b"your turn")
        except Exception:  # noqa: BLE001 whoever ordered raises it
            orders.send(traceback.format_exc())
            return
        orders.send(fit)


def _keep_to_one_core() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _be_quiet() -> None:
    """Throw away what Lightning, Kineto and the summary print; it is still rendered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
