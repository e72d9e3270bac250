"""What grows steadily: memory in steps, workers and validations; the time of steps."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.artifacts.series import ProcessRow, PulseRow
from lightning_memprof.units import MIB

Point = tuple[int, int]

# Four quarters of at least four steps: fewer do not tell a slope from a jump.
MIN_STEPS: Final = 16
# Caches, lazy initialization and the allocators' first growth are in the first tenth, at least five steps.
WARMUP_SHARE: Final = 0.1
WARMUP_STEPS: Final = 5
# The C allocator's drift in a steady run is well below both. Between steps, live device memory varies by a batch.
MIN_BYTES: Final = 32 * MIB
MIN_SHARE: Final = 0.05
# In fewer steps the allocator's pools may still fill: only a leak that soon ends the run counts.
SHORT_RUN_STEPS: Final = 100
SHORT_RUN_MIN_SHARE: Final = 0.1
# Some tens of steps have a trend by chance: between two windows, a leak adds more than the heap goes up and down.
SHORT_RUN_SCATTERS: Final = 3
# In the first steps after a window, memory that the window's data displaced is touched again.
SETTLING_STEPS: Final = 5
# Between two quarters a steady slope adds a third of the total; a jump or a cache that fills adds next to nothing once.
MIN_QUARTER: Final = 1 / 9
# A leak rises between almost any two steps; in a short run, memory that goes up and down has a trend by chance.
MIN_RISING: Final = 0.8
# Pairs grow with the square: 200 points are 20,000 pairs, a few milliseconds.
MAX_POINTS: Final = 200
MAX_SEGMENTS: Final = 50
# The level beside a window is the median of this many steps.
EDGE_STEPS: Final = 5
# Of worker processes; of a validation, after its first batch.
MIN_SAMPLES: Final = 3
MIN_BATCHES: Final = 8
# Of the mean rate of worker processes, between any two samples.
EVERYWHERE: Final = 0.15
# A cache of random keys that is nearly full gains entries at less than this share of its earlier rate.
FILLING: Final = 1 / 3
STEADY: Final = 0.8


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A steady rise: of the bytes of a process, device, container or function's blocks, or of the ns of steps.

    Attributes:
        owner: line whose blocks pile up; empty where it is not known.
        per_step: typical bytes or ns per step, or bytes per batch of a validation.
        added: what `steps` added.
        start: what there was before.
        steps: number of steps, or batches.
        first: the first step; 0 where it is not known.
        has_ended: whether the last eighth of the steps added nothing.
        blocks: number of blocks; 0 where they were not counted.
        peak_bytes: the part of the blocks that is live at the peak.
    """

    owner: str = ""
    per_step: float
    added: int
    start: int = 0
    steps: int
    first: int = 0
    has_ended: bool = False
    blocks: int = 0
    peak_bytes: int = 0

    @property
    def is_short(self) -> bool:
        """Whether the allocator's pools may still be filling."""
        return self.steps < SHORT_RUN_STEPS

    def is_settling(self, *, is_fatal: bool) -> bool:
        """Return whether freed memory that the C allocator keeps grows no more, or will settle before the run ends."""
        return self.has_ended or (self.is_short and not is_fatal)


def steady_growth(rows: Sequence[PulseRow], column: str) -> Growth | None:
    """Return the slope of a column of bytes if it rises steadily after the warmup, else None.

    Steps in windows are excluded, and so is memory that a window leaves behind. The slope is the Theil-Sen median over
    pairs of steps with no window between them; steady means that most of these pairs rise, and that the medians of the
    four quarters rise one after the other.
    """
    is_short = len(rows) < SHORT_RUN_STEPS
    rise = _steady_rise(rows, column, is_scarce=is_short)
    if rise is None:
        return None
    slope, points = rise
    values = [value for _, value in points]
    steps = points[-1][0] - points[0][0]
    start = round(values[0])
    added = round(slope * steps)
    if added < max(MIN_BYTES, (SHORT_RUN_MIN_SHARE if is_short else MIN_SHARE) * start):
        return None
    eighth = len(values) // 8
    return Growth(
        per_step=slope,
        added=added,
        start=start,
        steps=steps,
        has_ended=statistics.median(values[-eighth:]) <= statistics.median(values[-2 * eighth : -eighth]),
    )


def steady_slowing(
    rows: Sequence[PulseRow], column: str, without_ns: Mapping[int, float] | None = None
) -> Growth | None:
    """Return the slope of a column of ns, less a time by step, if it rises steadily after the warmup, else None.

    As :func:`steady_growth`, without a least size; the slope must stand out in a long run, too.
    """
    if without_ns:
        less = (round((row[column] or 0) - without_ns.get(row.step or 0, 0.0)) for row in rows)
        rows = [replace(row, **{column: max(ns, 0)}) for row, ns in zip(rows, less, strict=True)]
    rise = _steady_rise(rows, column, is_scarce=True)
    if rise is None:
        return None
    slope, points = rise
    first, steps = points[0][0], points[-1][0] - points[0][0]
    middle = statistics.median(value - slope * (step - first) for step, value in points)
    return Growth(per_step=slope, added=round(slope * steps), start=max(round(middle), 1), steps=steps, first=first)


def _steady_rise(
    rows: Sequence[PulseRow], column: str, *, is_scarce: bool
) -> tuple[float, list[tuple[int, float]]] | None:
    """Return the slope of a column and its points, joined across windows, if it rises steadily after the warmup."""
    segments = _segments(rows, column, max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))))
    if sum(map(len, segments)) < MIN_STEPS:
        return None
    slope = _median_slope(segments)
    points = _joined(segments, slope)
    if slope <= 0 or not _rises([value for _, value in points]) or _rising_share(segments) < MIN_RISING:
        return None
    return None if is_scarce and _is_scattered(segments, slope) else (slope, points)


def _rises(values: Sequence[float]) -> bool:
    """Return whether the medians of the four quarters rise one after the other, each by a notable part."""
    quarter = len(values) / 4
    medians = [statistics.median(values[round(index * quarter) : round((index + 1) * quarter)]) for index in range(4)]
    least = min(after - before for before, after in itertools.pairwise(medians))
    return least > 0 and least >= MIN_QUARTER * (medians[-1] - medians[0])


def worker_growth(rows: Sequence[ProcessRow]) -> Growth | None:
    """Return the slope of the memory of DataLoader workers if it rises until the end, else None.

    Of their private memory, else of what they have besides that of the main process: in their first seconds workers
    copy the pages that they write, so that private memory alone seems to grow less and less.
    """
    loaded = Counter[int]()
    for row in rows:
        loaded[row.step or 0] += row.batches or 0 if row.kind == "worker" else 0
    samples = [row for row in rows if row.kind == "workers" and row.step is not None and row.private_bytes is not None]
    private = [(row.step or 0, row.private_bytes or 0) for row in samples]
    found = _until_the_end(private, loaded)
    if found is not None or any(row.shared_bytes is None for row in samples):
        return found
    return _until_the_end(
        [(step, size + (row.shared_bytes or 0)) for (step, size), row in zip(private, samples, strict=True)], loaded
    )


def _until_the_end(samples: Sequence[Point], loaded: Mapping[int, int]) -> Growth | None:
    """Return the slope of samples if they rise until the end, else None.

    The first sample is excluded where more than three are known, else the rate must not fall: workers start, and copy
    what they touch. So does the main process in a garbage collection or a window, and its workers keep the old pages: a
    slope rises between any two samples, and without the largest rise the others still have a third of the rate. Workers
    that start anew have other samples, and those that loaded nothing since the last one have none. Rates are those of
    loaded batches, of which workers have fewer per step where an epoch ends, else of steps.
    """
    idle = {after for (before, _), (after, _) in itertools.pairwise(samples) if 0 < loaded[after] == loaded[before]}
    known = [(step, size) for step, size in samples if step not in idle]
    is_short = len(known) == MIN_SAMPLES
    known = known[not is_short :]
    if len(known) < MIN_SAMPLES or any(after < before for (_, before), (_, after) in itertools.pairwise(known)):
        return None
    (first_step, _), (last_step, _) = known[0], known[-1]
    if all(0 < loaded[before] < loaded[after] for (before, _), (after, _) in itertools.pairwise(known)):
        known = [(loaded[step], size) for step, size in known]
    (first, start), (middle, half), (last, end) = known[0], known[len(known) // 2], known[-1]
    if not first < middle < last or end - start < max(MIN_BYTES, SHORT_RUN_MIN_SHARE * start):
        return None
    # A cache that is nearly full grows more slowly.
    if (end - half) / (last - middle) < (STEADY if is_short else FILLING) * (half - start) / (middle - first):
        return None
    rises = [(after[1] - before[1], after[0] - before[0]) for before, after in itertools.pairwise(known)]
    jump, apart = max(rises)
    if (end - start - jump) * (last - first) <= FILLING * (end - start) * (last - first - apart):
        return None
    if any(rise * (last - first) < EVERYWHERE * (end - start) * apart for rise, apart in rises):
        return None
    steps = last_step - first_step
    return Growth(per_step=(end - start) / steps, added=end - start, start=start, steps=steps)


def copied_on_write(rows: Sequence[ProcessRow]) -> float:
    """Return the share of the workers' new private memory that they shared before, 0 to 1: pages copied when written.

    A page that holds a Python object is written when the object is used: its reference count changes.
    """
    known = [row for row in rows if row.kind == "workers" and row.shared_bytes is not None]
    if len(known) < MIN_SAMPLES:
        return 0.0
    first, last = known[1], known[-1]
    added = (last.private_bytes or 0) - (first.private_bytes or 0)
    less = (first.shared_bytes or 0) - (last.shared_bytes or 0)
    return min(max(less / added, 0.0), 1.0) if added > 0 else 0.0


def validation_growth(rows: Sequence[ProcessRow]) -> Growth | None:
    """Return the largest steady rise of memory over the batches of a validation, its ``steps``; None without one.

    Of the blocks that the C allocator has given out, where they are known: RSS includes free ones, which the program
    does not keep, and does not rise while these are used again. RSS must rise by half as much. The rate is that between
    the second sample and the last one, taken before their batches: all batches add as much.
    """
    found = []
    for row in rows:
        resident = row.rss_bytes[1:]
        sizes = row.heap_bytes[1:] or resident
        if row.kind != "validation" or not row.batches or len(sizes) < MIN_BATCHES or not _rises(sizes):
            continue
        added = sizes[-1] - sizes[0]
        if 2 * (resident[-1] - resident[0]) >= added >= max(MIN_BYTES, SHORT_RUN_MIN_SHARE * resident[0]):
            rate = added / (max(round(row.batches / len(row.rss_bytes)), 1) * (len(sizes) - 1))
            added = round(rate * row.batches)
            found.append(Growth(per_step=rate, added=added, start=resident[0], steps=row.batches))
    return max(found, key=lambda growth: growth.added, default=None)


def outside_peak(rows: Sequence[ProcessRow], pulse: Sequence[PulseRow]) -> tuple[str, int] | None:
    """Return the action outside the training steps that raises the peak RSS most, and by how many bytes; None without.

    Samples are before the action and after it.
    """
    in_steps = max((row["rss_bytes"] or 0 for row in pulse), default=0)
    found = [
        (row.action, row.rss_bytes[1] - max(row.rss_bytes[0], in_steps))
        for row in rows
        if row.kind == "peak" and row.action is not None and len(row.rss_bytes) == 2
    ]
    action, size = max(found, key=lambda peak: peak[1], default=("", 0))
    return (action, size) if size >= MIN_BYTES else None


def _segments(rows: Sequence[PulseRow], column: str, skip: int) -> list[list[Point]]:
    """Return ``(step, bytes)`` after ``skip`` rows, split at windows, without the steps that settle after a window."""
    segments: list[list[Point]] = [[]]
    settling = 0
    for row in rows[skip:]:
        step, value = row["step"], row[column]
        if row["window"] is not None:
            segments.append([])
            settling = SETTLING_STEPS
        elif settling:
            settling -= 1
        elif step is not None and value is not None:
            segments[-1].append((step, value))
    return [segment for segment in segments if segment]


def _joined(segments: Sequence[Sequence[Point]], slope: float) -> list[tuple[int, float]]:
    """Concatenate the segments, each shifted so that only the slope remains of the difference across its window."""
    points: list[tuple[int, float]] = []
    for segment in segments:
        shift = 0.0
        if points:
            before, after = points[-EDGE_STEPS:], segment[:EDGE_STEPS]
            gap = statistics.mean(step for step, _ in after) - statistics.mean(step for step, _ in before)
            across = statistics.median(value for _, value in after) - statistics.median(value for _, value in before)
            shift = across - slope * gap
        points += [(step, value - shift) for step, value in segment]
    return points


def _median_slope(segments: Sequence[Sequence[Point]]) -> float:
    slopes = [
        (later - earlier) / (after - before)
        for segment in _thinned(segments)
        for (before, earlier), (after, later) in itertools.combinations(segment, 2)
        if after > before
    ]
    return statistics.median(slopes) if slopes else 0.0


def _is_scattered(segments: Sequence[Sequence[Point]], slope: float) -> bool:
    """Return whether the longest segment rises by less than three times what one in ten values is off its line."""
    off: list[float] = []
    for segment in segments:
        levels = [value - slope * step for step, value in segment]
        middle = statistics.median(levels)
        off += (abs(level - middle) for level in levels)
    longest = max(segment[-1][0] - segment[0][0] for segment in segments)
    return slope * longest < SHORT_RUN_SCATTERS * sorted(off)[len(off) * 9 // 10]


def _rising_share(segments: Sequence[Sequence[Point]]) -> float:
    """Return the share of rising pairs among those half a segment or more apart, equal ones excluded."""
    rising = falling = 0
    for segment in _thinned(segments):
        values = [value for _, value in segment]
        for apart in range((len(values) + 1) // 2, len(values)):
            changes = [after - before for before, after in zip(values, values[apart:], strict=False)]
            rising += sum(change > 0 for change in changes)
            falling += sum(change < 0 for change in changes)
    return rising / (rising + falling) if rising else 0.0


def _thinned(segments: Sequence[Sequence[Point]]) -> list[Sequence[Point]]:
    """Return the longest segments, with some of their points if they have many."""
    longest = sorted(segments, key=len, reverse=True)[:MAX_SEGMENTS]
    most = max(MAX_POINTS // len(longest), MIN_STEPS)
    return [segment[:: -(-len(segment) // most)] for segment in longest]
