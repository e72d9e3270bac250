"""Faults in this package's own background writer, and processes that are started beside it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, Final, Literal

import fault
import storage

from lightning_memprof.artifacts.sink import Sink
from lightning_memprof.capture.collectors import operator_trace


def _compressing_fails(cell: fault.Cell) -> None:
    def write_trace(*_: object) -> None:
        raise RuntimeError("the writer's own fault")

    cell.notes["patches"] = [(operator_trace, "write_trace", operator_trace.write_trace)]
    cell.notes["patches"][0][0].write_trace = write_trace


def _every_job_fails(cell: fault.Cell) -> None:
    """Jobs are handed over and end with what no ``except Exception`` catches."""
    work = Sink._work

    def failing(sink: Sink, job: Callable[[], None], window: int | None) -> None:
        def raising() -> None:
            job()
            raise SystemExit("the writer's own end")

        work(sink, raising, window)

    cell.notes["patches"] = [(Sink, "_work", work)]
    cell.notes["patches"][0][0]._work = failing


def _start_a_process(method: Literal["fork", "spawn"]) -> Callable[[fault.Cell], None]:
    def strike(cell: fault.Cell) -> None:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=print, args=("a process of the program's own",))
        process.start()
        process.join()
        assert process.exitcode == 0

    return strike


FAULTS: Final = (
    fault.Fault(
        name="exception in the background writer",
        says="compressing a trace raises",
        place=fault.ANYWHERE,
        strike=_compressing_fails,
        prepare=storage.put_back,
        victims=range,
        only_ours=True,
    ),
    fault.Fault(
        name="SystemExit in the background writer",
        says="every job that the writer is handed ends with SystemExit when it is done",
        place=fault.ANYWHERE,
        strike=_every_job_fails,
        prepare=storage.put_back,
        victims=range,
        only_ours=True,
    ),
    *(
        fault.Fault(
            name=f"processes started by {method}",
            says=f"batches come from a worker that was started by {method}, and the program starts and awaits another",
            place=fault.ANYWHERE,
            strike=_start_a_process(method),
            workers=method,
            victims=range,
        )
        for method in ("fork", "spawn")
    ),
)
