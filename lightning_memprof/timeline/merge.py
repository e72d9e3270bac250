"""Merge sources into one trace that a viewer imports without an error, or cut steps out of a trace.

Every source is read twice, a MiB at a time: first to find overlaps, arrows without an end and the begin of time, then
to be written. A few numbers per event of one source, and the edits of all, are held in between.

The format is the JSON Trace Event Format as the Perfetto UI imports it: times are microseconds after
``baseTimeNanoseconds``, with three decimals, and stay small so that a double holds every nanosecond; process and thread
numbers are small and positive; the slices of a track nest; an arrow's id begins once.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.read.trace.events import Microseconds, decoder
from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.timeline.events import Reader, Source
from lightning_memprof.timeline.plan import Plan, make_plan
from lightning_memprof.timeline.rewrite import Numbering
from lightning_memprof.timeline.workers import PlanJob, Pool, RewriteJob, Worker
from lightning_memprof.timeline.writer import TraceWriter, part_files
from lightning_memprof.units import nanoseconds

Progress = Callable[[int, int], None]

# A time before 2001 is not a date: the trace counts from the start of a machine or of a program.
_A_DATE_NS: Final = 978_307_200_000_000_000
# Microseconds with three decimals fit into a double for 100 days.
_FARTHEST_NS: Final = 60 * 86_400_000_000_000
_MOST_WORKERS: Final = 4
_WORTH_WORKERS: Final = 4 << 20

_STEP: Final = re.compile(r"ProfilerStep#?\s*([0-9]+)")
_DIGITS: Final = 19  # a larger number is damage


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """A merged trace.

    Attributes:
        events: number of events, without metadata.
        size_bytes: size of the file.
        start_ns: Unix epoch time in ns at which its time begins; 0 where no source has its time of recording.
        end_ns: the same of the last event's end.
        notes: remarks for the reader of the trace, a sentence each.
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
        sources: in the order on screen, within one ``Source.sort``.
        out: the merged file, compressed where the name ends in ``.gz``; it appears when it is complete.
        progress: called with the bytes read and the bytes to read.
        workers: processes that read traces beside this one; None for one per processor, at most 4, if the traces are
            large enough.

    Raises:
        ArtifactError: a trace is missing, truncated, or no trace.
        ConfigError: there is no source, or `out` is one of them, a directory or a device.
    """
    if not sources:
        raise ConfigError("merge: no trace to merge; name one or more")
    if out.exists() and not out.is_file():
        # The result replaces the file of its name, and a device too where the user has the permission.
        raise ConfigError(f"{out}: is a directory or a device; name a file for the result")
    for source in sources:
        if source.trace is not None and source.trace.resolve() == out.resolve():
            raise ConfigError(f"{out}: is one of the traces to merge; give the result another name")
    reading = _Progress(sources, progress)
    # The workers end before their parts are removed, so that no part appears again.
    with part_files(out) as part_file, Pool(_workers(sources, workers)) as pool:
        plans = list(pool.map(partial(_plan, reading), [Reader(source) for source in sources]))
        times = _Times(plans)
        numbering = Numbering(plans, times.shifts)
        with TraceWriter(out, times.origin_ns, sum(plan.reader.traces for plan in plans)) as writer:
            writer.write(numbering.metadata)
            jobs = [
                RewriteJob(
                    plan=plan,
                    places=numbering.places[at],
                    ids=(at, len(plans)),
                    shift=times.shifts[at],
                    part=part_file(at),
                    compressed=out.suffix == ".gz",
                )
                for at, plan in enumerate(plans)
            ]
            for job, events in zip(jobs, pool.map(partial(_rewrite, reading), jobs), strict=True):
                writer.append(job.part, events)
    skipped: Counter[str] = Counter()
    for plan in plans:
        skipped.update(plan.skipped)
    notes = [
        *times.notes,
        *(f"skipped, because a viewer cannot draw them: {reason} ({count})" for reason, count in skipped.items()),
    ]
    return Merged(
        events=writer.events - len(numbering.metadata),
        size_bytes=out.stat().st_size,
        start_ns=times.origin_ns,
        end_ns=times.end_ns,
        notes=tuple(notes),
    )


def _workers(sources: Sequence[Source], wanted: int | None) -> int:
    """Return the number of processes: none for small traces, which are read before a process has started."""
    if wanted is not None:
        return wanted
    sizes = [size for source in sources if (size := Reader(source).size_bytes)]
    return min(len(sizes), os.cpu_count() or 1, _MOST_WORKERS) if sum(sizes) > _WORTH_WORKERS else 0


def _plan(reading: _Progress, reader: Reader, worker: Worker | None) -> Plan:
    seen = reading.reader(reader.size_bytes)
    if worker is not None and reader.source.trace is not None:
        plan: Plan = worker.call(PlanJob(reader), seen)
    else:
        plan = make_plan(reader, lambda: seen(reader.bytes_read))
    seen(reader.size_bytes)
    return plan


def _rewrite(reading: _Progress, job: RewriteJob, worker: Worker | None) -> int:
    size = job.plan.reader.size_bytes
    seen = reading.reader(size)
    events: int = job.run(seen) if worker is None or job.plan.reader.source.trace is None else worker.call(job, seen)
    seen(size)
    return events


class _Progress:
    """Progress of all reading; a file counts twice."""

    def __init__(self, sources: Sequence[Source], progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self._lock = Lock()
        self._total = 2 * sum(Reader(source).size_bytes for source in sources)

    def reader(self, size: int) -> Callable[[int], None]:
        """Return a function to call with the bytes of a file read so far in one reading."""
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
    """One time base: per source the number to add to its times to get ns after the earliest event of all."""

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
                why = "has no time of recording" if begin < _A_DATE_NS else "was recorded months after the first"
                self.notes.append(
                    f"{plan.reader.source.label or plan.reader.source.trace}: {why}; it is placed at the start"
                )
            self.shifts.append(shift)
            if plan.first_ns is not None:
                self.end_ns = max(self.end_ns, plan.last_ns + shift + self.origin_ns)


def _base(plan: Plan) -> int:
    reader = plan.reader
    base = reader.base_ns + reader.ts_offset_ns
    absolute = reader.ts_offset_ns + (plan.first_ns or 0) >= _A_DATE_NS
    # Where both the times and the base are dates, the times are right.
    return (reader.ts_offset_ns if absolute and reader.source.trace is not None else base) + reader.source.offset_ns


def step_spans(trace: Path) -> dict[int, tuple[int, int]]:
    """Return begin and end of each step in ns of the trace's own ``ts``: the earliest and the latest of all ranks.

    Source: the ranges ``ProfilerStep#N``, including those of the device, where a step's kernels run after its end.

    Raises:
        ArtifactError: the trace is missing, truncated, or no trace.
    """
    text = TraceText(trace)
    found: dict[int, tuple[int, int]] = {}
    for step, start, end in steps_of(text):
        first, last = found.get(step, (start, end))
        found[step] = (min(first, start), max(last, end))
    offset = text.ts_offset_us * 1000
    return {step: (first + offset, last + offset) for step, (first, last) in sorted(found.items())}


def steps_of(text: TraceText) -> Iterator[tuple[int, int, int]]:
    """Read a trace; yield number, begin and end of each range ``ProfilerStep#N`` in ns of the text's ``ts``."""
    for events in text.pieces(_steps):
        yield from events


def cut(trace: Path, steps: Sequence[int], out: Path) -> Merged:
    """Write the time from the first of the steps to the last into a new trace.

    Events across an edge are clipped. The trace is streamed; memory is bounded by the slice.

    Args:
        trace: a trace, merged or not, plain or gzip-compressed.
        steps: numbers of steps, as in the ranges ``ProfilerStep#N``.
        out: the new file, compressed where the name ends in ``.gz``.

    Raises:
        ArtifactError: the trace is missing, truncated, or has none of the steps.
        ConfigError: `steps` is empty.
    """
    if not steps:
        raise ConfigError("steps: no step; name one or more, such as 2-3")
    spans = step_spans(trace)
    wanted = [spans[step] for step in steps if step in spans]
    if not wanted:
        present = f"its steps are {min(spans)} to {max(spans)}" if spans else "it has none: no schedule recorded it"
        raise ArtifactError(f"{trace}: has no step {', '.join(map(str, steps))}; {present}")
    span = (min(first for first, _ in wanted), max(last for _, last in wanted))
    return merge_traces([Source(label="", trace=trace, span_ns=span)], out)


class _StepEvent(msgspec.Struct, gc=False):
    name: str = ""
    ts: Microseconds | None = None
    dur: Microseconds = 0.0


_decode: Final = decoder(_StepEvent)


def _steps(text: bytes) -> list[tuple[int, int, int]]:
    if b"ProfilerStep" not in text:
        return []
    found = []
    for event in _decode(text):
        step = _STEP.fullmatch(event.name) if event.name.startswith("ProfilerStep") else None
        if step and len(step[1]) < _DIGITS and event.ts is not None:
            start = nanoseconds(event.ts)
            found.append((int(step[1]), start, start + nanoseconds(event.dur)))
    return found
