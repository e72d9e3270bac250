"""Processes that read traces in parallel, because an interpreter runs one thread at a time.

A worker is the program `lightning_memprof.timeline.worker`: it gets pickled jobs on stdin and answers with its
progress, ``("seen", bytes)``, and with ``("done", result)`` or ``("failed", error)``. It imports nothing of the program
that started it.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar

import msgspec

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.errors import ArtifactError
from lightning_memprof.timeline.events import Reader
from lightning_memprof.timeline.plan import Plan, make_plan
from lightning_memprof.timeline.rewrite import Places, Rewrite
from lightning_memprof.timeline.writer import PartWriter

Seen = Callable[[int], None]
_J = TypeVar("_J")
_R = TypeVar("_R")


class Job(Protocol):
    """A job of a worker."""

    def run(self, seen: Seen) -> Any:
        """Run the job; `seen` is called with the bytes of the file read so far."""


class PlanJob(msgspec.Struct, frozen=True):
    """The first reading of a trace."""

    reader: Reader

    def run(self, seen: Seen) -> Plan:
        """Return the plan."""
        return make_plan(self.reader, lambda: seen(self.reader.bytes_read))


class RewriteJob(msgspec.Struct, frozen=True, kw_only=True):
    """The second reading, into a part of the result; the fields are those of ``Rewrite`` and ``PartWriter``."""

    plan: Plan
    places: Places
    ids: tuple[int, int]
    shift: int
    part: Path
    compressed: bool

    def run(self, seen: Seen) -> int:
        """Write the part, and return its number of events.

        Raises:
            ArtifactError: it cannot be written.
        """
        rewrite = Rewrite(self.plan, self.places, self.ids, self.shift)
        try:
            part = PartWriter(self.part, compressed=self.compressed)
            for rows in self.plan.reader.batches():
                part.write(rewrite.rows(rows))
                seen(self.plan.reader.bytes_read)
            part.close()
        except OSError as error:
            raise ArtifactError(
                f"{self.part}: cannot be written ({error}); choose another place, or free space"
            ) from error
        return part.events


class Worker:
    """One process."""

    def __init__(self) -> None:
        command = own_program("lightning_memprof.timeline.worker")
        # A terminal sends Ctrl-C to all processes of its session; this one ends its workers itself.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("Popen returned no pipes")
        self._streams: tuple[IO[bytes], IO[bytes]] = (stdin, stdout)

    def call(self, job: Job, seen: Seen) -> Any:
        """Run a job in the process; its exceptions are raised here.

        Raises:
            ArtifactError: the process ended before the job.
        """
        stdin, stdout = self._streams
        try:
            pickle.dump(job, stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            while True:
                kind, value = pickle.load(stdout)  # noqa: S301 our own process wrote it  # nosec B301
                if kind == "seen":
                    seen(value)
                elif kind == "failed":
                    raise value
                else:
                    return value
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise ArtifactError("a process that read a trace was killed; free memory, and start again") from error

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in self._streams:
            with contextlib.suppress(OSError):  # the pipe's buffer still has data that a dead process did not read
                stream.close()


class Pool:
    """Some workers; with fewer than two, jobs run in this process.

    Args:
        workers: number of processes.
    """

    def __init__(self, workers: int) -> None:
        self._workers: SimpleQueue[Worker] = SimpleQueue()
        self._all = [Worker() for _ in range(workers if workers > 1 else 0)]
        for worker in self._all:
            self._workers.put(worker)

    def map(self, function: Callable[[_J, Worker | None], _R], jobs: Sequence[_J]) -> Iterator[_R]:
        """Yield the result of `function` for each job, in their order; its second argument is a free worker."""
        if not self._all:
            yield from (function(job, None) for job in jobs)
            return

        def with_worker(job: _J) -> _R:
            worker = self._workers.get()
            try:
                return function(job, worker)
            finally:
                self._workers.put(worker)

        threads = ThreadPoolExecutor(len(self._all))
        try:
            yield from threads.map(with_worker, jobs)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Pool:  # noqa: PYI034 Self needs Python 3.11, or a package more
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._all:
            worker.end()


def serve(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Run jobs until there are no more."""

    def answer(kind: str, value: Any) -> None:
        pickle.dump((kind, value), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()

    while True:
        try:
            job: Job = pickle.load(jobs)  # noqa: S301 our own process wrote it  # nosec B301
        except EOFError:
            return
        try:
            answer("done", job.run(lambda at: answer("seen", at)))
        except BrokenPipeError:
            return  # the program that wanted the result has ended
        except Exception as error:  # noqa: BLE001 it is raised in the program that sent the job
            answer("failed", error)
