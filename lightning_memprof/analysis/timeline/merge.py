"""Merge sources into one trace that a viewer imports without an error.

Every source is read twice, a MiB at a time: first to see what overlaps, which arrows end nowhere and where time begins,
then to be written. What is held in between is a few numbers per event of one source, and the edits of all.

The format is the JSON Trace Event Format as the Perfetto UI imports it: times are microseconds after
``baseTimeNanoseconds``, with three decimals, and stay small so that a double holds every nanosecond; process and thread
numbers are small and positive; the slices of a track nest; an arrow's id begins once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from lightning_memprof.analysis.timeline.model import Source
from lightning_memprof.analysis.timeline.numbering import Numbering
from lightning_memprof.analysis.timeline.plan import Plan, make_plan
from lightning_memprof.analysis.timeline.rows import Reader
from lightning_memprof.analysis.timeline.workers import PlanJob, Pool, RewriteJob, Worker
from lightning_memprof.analysis.timeline.writer import Parts, TraceWriter
from lightning_memprof.errors import ConfigError

__all__ = ["Merged", "merge_traces"]

Progress = Callable[[int, int], None]

# A time before 2001 is no date: the trace counts from the start of a machine or of a program.
_A_DATE_NS: Final = 978_307_200_000_000_000
# Microseconds with three decimals fit into a double for 100 days.
_FARTHEST_NS: Final = 60 * 86_400_000_000_000
_MOST_WORKERS: Final = 4
_WORTH_WORKERS: Final = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merged trace holds.

    Attributes:
        events: events in it, without metadata.
        size_bytes: size of the file.
        start_ns: Unix epoch time in ns at which its time begins; 0 where no source says when it was recorded.
        end_ns: the same of the last event's end.
        notes: what the reader of the trace should know, a sentence each.
    """

    events: int
    size_bytes: int
    start_ns: int
    end_ns: int
    notes: tuple[str, ...] = ()


def merge_traces(
    sources: Sequence[Source], out: Path, progress: Progress | None = None, *, workers: int | None = None
) -> Merged:
    """Write all sources into one trace.

    Args:
        sources: in the order of the screen, within one ``Source.sort``.
        out: where it goes, compressed where the name ends in ``.gz``; appears when it is complete.
        progress: called with what is done and what there is to do, in bytes of the files.
        workers: processes that read traces beside this one; None: as many as there are processors, 4 at most, where the
            traces are large enough to be worth it.

    Raises:
        ArtifactError: a trace is missing, cut off, or no trace.
        ConfigError: there is no source, one of them is the result, or that is a directory or a device.
    """
    if not sources:
        raise ConfigError("merge: there is no trace to merge; name one or more")
    if out.exists() and not out.is_file():
        # The result takes the place of what has its name, and of a device too where the user may do that.
        raise ConfigError(f"{out}: is a directory or a device; name a file for the result")
    for source in sources:
        if source.trace is not None and source.trace.resolve() == out.resolve():
            raise ConfigError(f"{out}: is one of the traces to merge; give the result another name")
    told = _Told(sources, progress)
    # The workers end before their parts are removed: none comes back.
    with Parts(out) as parts, Pool(_workers(sources, workers)) as pool:
        plans = list(pool.map(partial(_plan, told), [Reader(source) for source in sources]))
        times = _Times(plans)
        numbering = Numbering(plans, times.shifts)
        with TraceWriter(out, times.origin_ns) as writer:
            writer.write(numbering.metadata())
            jobs = [
                RewriteJob(
                    plan=plan,
                    places=numbering.places(at),
                    ids=(at, len(plans)),
                    shift=times.shifts[at],
                    part=parts.place(at),
                    compressed=out.suffix == ".gz",
                )
                for at, plan in enumerate(plans)
            ]
            for job, events in zip(jobs, pool.map(partial(_rewrite, told), jobs), strict=True):
                writer.append(job.part, events)
    left_out: Counter[str] = Counter()
    for plan in plans:
        left_out.update(plan.left_out)
    notes = [*times.notes, *(f"{count} {what} cannot be drawn and were left out" for what, count in left_out.items())]
    return Merged(
        events=writer.events - len(numbering.metadata()),
        size_bytes=out.stat().st_size,
        start_ns=times.origin_ns,
        end_ns=times.end_ns,
        notes=tuple(notes),
    )


def _workers(sources: Sequence[Source], wanted: int | None) -> int:
    """How many processes read the traces: none for small ones, which are read sooner than a process has started."""
    if wanted is not None:
        return wanted
    sizes = [size for source in sources if (size := Reader(source).size_bytes)]
    return min(len(sizes), os.cpu_count() or 1, _MOST_WORKERS) if sum(sizes) > _WORTH_WORKERS else 0


def _plan(told: _Told, reader: Reader, worker: Worker | None) -> Plan:
    seen = told.reader(reader.size_bytes)
    if worker is not None and reader.source.trace is not None:
        plan: Plan = worker.call(PlanJob(reader), seen)
    else:
        plan = make_plan(reader, lambda: seen(reader.bytes_read))
    seen(reader.size_bytes)
    return plan


def _rewrite(told: _Told, job: RewriteJob, worker: Worker | None) -> int:
    size = job.plan.reader.size_bytes
    seen = told.reader(size)
    events: int = job.run(seen) if worker is None or job.plan.reader.source.trace is None else worker.call(job, seen)
    seen(size)
    return events


class _Told:
    """How much of all reading is done, a file counting twice."""

    def __init__(self, sources: Sequence[Source], progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self._lock = Lock()
        self._total = 2 * sum(Reader(source).size_bytes for source in sources)

    def reader(self, size: int) -> Callable[[int], None]:
        """Return what is to be told how far one reading of a file has come, in bytes."""
        last = 0

        def seen(at: int) -> None:
            nonlocal last
            with self._lock:
                self._done += min(at, size) - last
                last = min(at, size)
                if self._progress is not None:
                    self._progress(self._done, self._total)

        return seen


class _Times:
    """One time base: per source what is added to its times to get ns after the earliest event of all."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.notes: list[str] = []
        bases = [_base(plan) for plan in plans]
        begins = [
            None if plan.first_ns is None else plan.first_ns + base for plan, base in zip(plans, bases, strict=True)
        ]
        dated = [begin for begin in begins if begin is not None and begin >= _A_DATE_NS]
        known = [begin for begin in begins if begin is not None]
        self.origin_ns = min(dated or known, default=0)
        self.end_ns = self.origin_ns
        self.shifts: list[int] = []
        for plan, base, begin in zip(plans, bases, begins, strict=True):
            shift = base - self.origin_ns
            if begin is not None and not 0 <= begin - self.origin_ns <= _FARTHEST_NS:
                shift = -(plan.first_ns or 0)
                why = (
                    "does not say when it was recorded" if begin < _A_DATE_NS else "was recorded months after the first"
                )
                self.notes.append(
                    f"{plan.reader.source.label or plan.reader.source.trace}: {why}; it was put at the start"
                )
            self.shifts.append(shift)
            if plan.first_ns is not None:
                self.end_ns = max(self.end_ns, plan.last_ns + shift + self.origin_ns)


def _base(plan: Plan) -> int:
    reader = plan.reader
    base = reader.base_ns + reader.ts_offset_ns
    absolute = reader.ts_offset_ns + (plan.first_ns or 0) >= _A_DATE_NS
    # Where both the times and the base are dates, the times are the ones that count.
    return (reader.ts_offset_ns if absolute and reader.source.trace is not None else base) + reader.source.offset_ns
