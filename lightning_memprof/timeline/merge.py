"""Merge sources into one trace that a viewer imports without an error.

Every source is read twice, a MiB at a time: first to find overlaps, arrows without an end and the begin of time, then
to be written. A few numbers per event of one source, and the edits of all, are held in between.

The format is the JSON Trace Event Format as the Perfetto UI imports it: times are microseconds after
``baseTimeNanoseconds``, with three decimals, and stay small so that a double holds every nanosecond; process and thread
numbers are small and positive; the slices of a track nest; an arrow's id begins once.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.timeline.events import A_DATE_NS, Reader, Seen, Source
from lightning_memprof.timeline.plan import Plan
from lightning_memprof.timeline.rewrite import Numbering, Rewriting
from lightning_memprof.timeline.writer import join_parts, trace_head

Progress = Callable[[int, int], None]
_J = TypeVar("_J")
_R = TypeVar("_R")

# Microseconds with three decimals fit into a double for 100 days.
_FARTHEST_NS: Final = 60 * 86_400_000_000_000
_MOST_WORKERS: Final = 4
_WORTH_WORKERS: Final = 4 << 20


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """A merged trace.

    Attributes:
        events: number of events, without metadata.
        size_bytes: size of the file.
        notes: remarks for the reader of the trace, a sentence each.
    """

    events: int
    size_bytes: int
    notes: tuple[str, ...] = ()


def merge_traces(sources: Sequence[Source], out: Path, progress: Progress | None = None) -> Merged:
    """Write all sources into one trace.

    Args:
        sources: in the order on screen, within one ``Source.sort``.
        out: the merged file, compressed where the name ends in ``.gz``; it appears when it is complete.
        progress: called with the bytes read and the bytes to read.

    Raises:
        ArtifactError: a trace is missing, truncated, or no trace.
        ConfigError: there is no source, or `out` is one of them, a directory or a device.
    """
    _check(sources, out)
    readers = [Reader(source) for source in sources]
    # A file is read twice.
    total, done = 2 * sum(reader.size_bytes for reader in readers), 0

    def seen(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    parts = [own_temporary(out.with_name(f"{out.name}.{at}")) for at in range(len(sources))]
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.unlink, missing_ok=True)
        # The workers end before their parts are removed, so that no part appears again.
        pool = stack.enter_context(_pool(_workers(readers)))
        plans = list(_each(pool, Plan.read, list(map(Plan, readers)), readers, seen))
        origin_ns, shifts, notes = _time_base(plans)
        numbering = Numbering(plans)
        jobs = [
            Rewriting(
                plan=plan,
                places=numbering.places[at],
                ids=(at, len(plans)),
                shift=shifts[at],
                part=parts[at],
                compressed=out.suffix == ".gz",
            )
            for at, plan in enumerate(plans)
        ]
        head = trace_head(origin_ns, sum(plan.reader.traces for plan in plans), numbering.metadata)
        events = join_parts(out, head, zip(parts, _each(pool, Rewriting.write, jobs, readers, seen), strict=True))
    skipped = sum((plan.skipped for plan in plans), Counter[str]())
    notes += [f"skipped, because a viewer cannot draw them: {reason} ({count})" for reason, count in skipped.items()]
    return Merged(events=events, size_bytes=out.stat().st_size, notes=tuple(notes))


def _check(sources: Sequence[Source], out: Path) -> None:
    if not sources:
        raise ConfigError("merge: no trace to merge; name one or more")
    if out.exists() and not out.is_file():
        # The result replaces the file of its name, and a device too where the user has the permission.
        raise ConfigError(f"{out}: is a directory or a device; name a file for the result")
    for source in sources:
        if source.trace is not None and source.trace.resolve() == out.resolve():
            raise ConfigError(f"{out}: is one of the traces to merge; give the result another name")


def _workers(readers: Sequence[Reader]) -> int:
    """Return the number of processes: none for small traces, which are read before a process has started."""
    sizes = [size for reader in readers if (size := reader.size_bytes)]
    return min(len(sizes), os.cpu_count() or 1, _MOST_WORKERS) if sum(sizes) > _WORTH_WORKERS else 0


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Provide processes, because an interpreter runs one thread at a time; None for fewer than two."""
    if workers < 2:
        yield None
        return
    # Ctrl-C ends them at once, without a traceback of each.
    context, default = get_context("spawn"), (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=default) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _each(
    pool: ProcessPoolExecutor | None,
    function: Callable[[_J, Seen], _R],
    jobs: Sequence[_J],
    readers: Sequence[Reader],
    seen: Seen,
) -> Iterator[_R]:
    """Yield the result for each job, in order; ready events are read in this process.

    Raises:
        ArtifactError: a process has ended before its job.
    """
    waiting = [
        None if pool is None or reader.source.trace is None else pool.submit(function, job, _unseen)
        for job, reader in zip(jobs, readers, strict=True)
    ]
    try:
        for job, reader, future in zip(jobs, readers, waiting, strict=True):
            if future is None:
                yield function(job, seen)
            else:
                yield future.result()
                seen(reader.size_bytes)
    except BrokenProcessPool as error:
        raise ArtifactError("a process that read a trace was killed; free memory, and start again") from error


def _unseen(size: int) -> None:
    """Ignore the progress of another process: it is counted when the job is done."""


def _time_base(plans: Sequence[Plan]) -> tuple[int, list[int], list[str]]:
    """Return the Unix time in ns of the earliest event, and the shift of each source to ns after it; and notes."""
    bases = [_base(plan) for plan in plans]
    begins = [None if plan.first_ns is None else plan.first_ns + base for plan, base in zip(plans, bases, strict=True)]
    known = [begin for begin in begins if begin is not None]
    origin_ns = min([begin for begin in known if begin >= A_DATE_NS] or known, default=0)
    shifts, notes = [], []
    for plan, base, begin in zip(plans, bases, begins, strict=True):
        shift = base - origin_ns
        if begin is not None and not 0 <= begin - origin_ns <= _FARTHEST_NS:
            shift = -(plan.first_ns or 0)
            why = "has no time of recording" if begin < A_DATE_NS else "was recorded months after the first"
            notes.append(f"{plan.reader.source.label or plan.reader.source.trace}: {why}; it is placed at the start")
        shifts.append(shift)
    return origin_ns, shifts, notes


def _base(plan: Plan) -> int:
    reader = plan.reader
    base = reader.base_ns + reader.ts_offset_ns
    absolute = reader.ts_offset_ns + (plan.first_ns or 0) >= A_DATE_NS
    # Where both the times and the base are dates, the times are right.
    return (reader.ts_offset_ns if absolute and reader.source.trace is not None else base) + reader.source.offset_ns
