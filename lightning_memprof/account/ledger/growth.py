"""What grows steadily: memory in steps, workers and validations, its holders, what windows leave; the time of steps."""

from __future__ import annotations

import ast
import itertools
import re
import statistics
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lightning_memprof.artifacts.series import HolderRow, ProcessRow, PulseRow


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
# The first step allocates permanent memory: gradients and optimizer state.
FIRST_STEPS: Final = 1
# Fewer steps show no level.
MIN_EDGE_STEPS: Final = 3
# Of worker processes; of a validation, after its first batch.
MIN_SAMPLES: Final = 3
MIN_BATCHES: Final = 8
# Of the mean rate of worker processes, between any two samples.
EVERYWHERE: Final = 0.15
# Shares of a slope: what explains it, and its main holder. Freed pieces between the blocks of a leak are part of RSS.
HELD: Final = 0.5
MAIN: Final = 1 / 3
MIN_MAIN: Final = 0.3
FREE: Final = "free memory"
NOTHING: Final = "nothing"
OUTSIDE: Final = frozenset({"remainder", FREE})
ENDING: Final = frozenset({"mapped file", "first touch"})
# Between the rates of a leak before and after the objects were first counted.
RATES: Final = 2
# A cache of random keys that is nearly full gains entries at less than this share of its earlier rate.
FILLING: Final = 1 / 3
STEADY: Final = 0.8
# A buffer that needs more when it is full is a fault of its own.
BUFFER_BYTES: Final = 4 * GIB
BUFFER_FACTOR: Final = 16
# Of an action with a peak: before and after it.
PEAK_SAMPLES: Final = 2
# The C allocator's jumps are smaller.
MIN_LEFT_BYTES: Final = 8 * MIB


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A steady slope: bytes per step, and the bytes that it added to ``start_bytes`` in ``steps`` steps.

    ``has_ended`` tells whether the last eighth of the steps added nothing.
    """

    bytes_per_step: float
    added_bytes: int
    start_bytes: int
    steps: int
    has_ended: bool = False

    @property
    def share(self) -> float:
        """Share of the memory at the end that the slope added, 0 to 1."""
        return self.added_bytes / (self.start_bytes + self.added_bytes)

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
    segments = _segments(rows, column, max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))))
    is_short = len(rows) < SHORT_RUN_STEPS
    rise = _steady_rise(segments, is_scarce=is_short)
    if rise is None:
        return None
    slope, points = rise
    values = [value for _, value in points]
    steps = points[-1][0] - points[0][0]
    start = segments[0][0][1]
    added = round(slope * steps)
    if added < max(MIN_BYTES, (SHORT_RUN_MIN_SHARE if is_short else MIN_SHARE) * start):
        return None
    eighth = len(values) // 8
    return Growth(
        bytes_per_step=slope,
        added_bytes=added,
        start_bytes=start,
        steps=steps,
        has_ended=statistics.median(values[-eighth:]) <= statistics.median(values[-2 * eighth : -eighth]),
    )


class Slowing(msgspec.Struct, frozen=True, kw_only=True):
    """A steady slope of a time: ns per step, and the ns that it added to ``start_ns`` in ``steps`` from ``first``."""

    per_step_ns: float
    added_ns: int
    start_ns: int
    steps: int
    first: int


def steady_slowing(
    rows: Sequence[PulseRow], column: str, without_ns: Mapping[int, float] | None = None
) -> Slowing | None:
    """Return the slope of a column of ns, less a time by step, if it rises steadily after the warmup, else None.

    As :func:`steady_growth`, without a least size; the slope must stand out in a long run, too.
    """
    if without_ns:
        less = (round((row[column] or 0) - without_ns.get(row.step or 0, 0.0)) for row in rows)
        rows = [replace(row, **{column: max(ns, 0)}) for row, ns in zip(rows, less, strict=True)]
    segments = _segments(rows, column, max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))))
    rise = _steady_rise(segments, is_scarce=True)
    if rise is None:
        return None
    slope, points = rise
    first, steps = points[0][0], points[-1][0] - points[0][0]
    middle = statistics.median(value - slope * (step - first) for step, value in points)
    return Slowing(
        per_step_ns=slope, added_ns=round(slope * steps), start_ns=max(round(middle), 1), steps=steps, first=first
    )


def _steady_rise(segments: list[list[Point]], *, is_scarce: bool) -> tuple[float, list[tuple[int, float]]] | None:
    """Return the slope of segments and their points, joined, if they rise steadily; None if not, or for few points."""
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


def who_holds(rows: Sequence[HolderRow]) -> list[HolderRow]:
    """Return the result of the last search for holders, the largest first; empty where none found anything.

    What a holder added is at most the growth of the memory: its entries may share tensors.

    A later search has the growth of a longer time, and misses what the program has released since: where the C
    allocator keeps that, as after ``on_train_epoch_end`` has cleared a list, the search before counts. So it does where
    it found freed memory, and the later one nothing.
    """
    searches = [list(found) for _, found in itertools.groupby(rows, key=lambda row: row.step)]
    if len(searches) > 1:
        before, last = ({row.kind for row in found} for found in searches[-2:])
        is_released = last == {FREE} and any(row.place for row in searches[-2])
        if is_released or (last == {NOTHING} and before == {FREE}):
            searches.pop()
    found = (row for row in (searches[-1] if searches else ()) if row.kind != NOTHING)
    return [
        replace(row, added_bytes=row.grown_bytes) if (row.added_bytes or 0) > (row.grown_bytes or sys.maxsize) else row
        for row in found
    ]


class Holders(msgspec.Struct, frozen=True):
    """The searches for holders of a rank, the last one compared with a slope."""

    searches: Sequence[HolderRow]
    growth: Growth

    @property
    def rows(self) -> list[HolderRow]:
        """The result of the last search, as :func:`who_holds` returns it."""
        return who_holds(self.searches)

    @property
    def main(self) -> HolderRow | None:
        """The holder of at least a third of the slope without freed memory, the largest; a leak fragments the heap.

        Holders that one line assigns count together, as the states of a metric do.
        """
        rows = self.rows
        named = [row for row in rows if row.place and row.kind not in ENDING and not self._fills(row)]
        free = sum(row.added_bytes or 0 for row in rows if row.kind == FREE)
        grown = max((row.grown_bytes or 0 for row in rows), default=0)
        share = MAIN * max(1 - free / grown, MIN_MAIN) if grown else MAIN
        alike = ([other for other in named if row is other or (row.line and row.line == other.line)] for row in named)
        return next((found[0] for found in alike if self._explain(found, share)), None)

    @property
    def ends(self) -> bool:
        """Whether the growth ends without a change: a container fills up, or pages of old memory are touched."""
        rows = self.rows
        return self._explain(filter(self._fills, rows)) or self._explain(row for row in rows if row.kind in ENDING)

    @property
    def outside(self) -> HolderRow | None:
        """The part that no Python object explains, if it is at least half of the slope."""
        return next((row for row in self.rows if row.kind in OUTSIDE and self._explain([row])), None)

    @property
    def is_free(self) -> bool:
        """Whether the C allocator keeps what the program has freed."""
        return self.main is None and self.outside is not None and self.outside.kind == FREE

    def _fills(self, row: HolderRow) -> bool:
        """Return whether a container has a limit that is not far, or gains fewer entries than before another search."""
        if size_when_full(row) is not None:
            return True
        first = next((each for each in self.searches if each.place == row.place), row)
        before = _rate(first.added, first.since_step, first.step)
        after = _rate((row.count or 0) - (first.count or 0), first.step, row.step)
        return before is not None and after is not None and after < FILLING * before

    def _explain(self, rows: Iterable[HolderRow], share: float = HELD) -> bool:
        found = list(rows)
        steps = max(((row.step or 0) - (row.since_step or 0) for row in found), default=0)
        return sum(row.added_bytes or 0 for row in found) >= share * self.growth.bytes_per_step * steps > 0


def _rate(added: int | None, since: int | None, step: int | None) -> float | None:
    """Return the entries that a container gained per step, None for too few steps."""
    if added is None or since is None or step is None or step - since < MIN_STEPS:
        return None
    return added / (step - since)


def held_growth(rows: Sequence[HolderRow], pulse: Sequence[PulseRow]) -> Growth | None:
    """Return the growth of a container that has gained entries at one rate since the first step, None without one.

    For runs whose pulse has too few values for :func:`steady_growth`. A cache that fills gains fewer and fewer.
    """
    start = next((row["rss_bytes"] for row in pulse if row["rss_bytes"]), None)
    for row in who_holds(rows):
        steps, before = (row.step or 0) - (row.since_step or 0), (row.count or 0) - (row.added or 0)
        added = row.added_bytes or 0
        is_large = start is not None and added >= max(MIN_BYTES, SHORT_RUN_MIN_SHARE * start)
        if row.place and start and is_large and row.added and row.since_step and steps >= MIN_STEPS:
            rate, earlier = row.added / steps, before / row.since_step
            if earlier / RATES <= rate <= earlier * RATES:
                return Growth(bytes_per_step=added / steps, added_bytes=added, start_bytes=start, steps=steps)
    return None


def size_when_full(holder: HolderRow) -> int | None:
    """Return the bytes of a container with as many entries as it is limited to, None if that is not small.

    A buffer or a cache with a limit grows until it is full.
    """
    if not holder.bound or not holder.added or holder.added_bytes is None:
        return None
    full = round(holder.added_bytes / holder.added * holder.bound)
    return full if full <= max(BUFFER_BYTES, BUFFER_FACTOR * holder.added_bytes) else None


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
    return Growth(bytes_per_step=(end - start) / steps, added_bytes=end - start, start_bytes=start, steps=steps)


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
    does not keep, and does not rise while these are used again. RSS must rise by half as much.
    """
    found = []
    for row in rows:
        resident = row.rss_bytes[1:]
        sizes = row.heap_bytes[1:] or resident
        if row.kind != "validation" or not row.batches or len(sizes) < MIN_BATCHES or not _rises(sizes):
            continue
        added = sizes[-1] - sizes[0]
        if 2 * (resident[-1] - resident[0]) >= added >= max(MIN_BYTES, SHORT_RUN_MIN_SHARE * resident[0]):
            apart = round(row.batches / len(row.rss_bytes)) * (len(sizes) - 1)
            found.append(
                Growth(bytes_per_step=added / apart, added_bytes=added, start_bytes=resident[0], steps=row.batches)
            )
    return max(found, key=lambda growth: growth.added_bytes, default=None)


class OutsidePeak(msgspec.Struct, frozen=True, kw_only=True):
    """An action outside the training steps, and the bytes by which the peak RSS is higher for it."""

    action: str
    step: int | None
    bytes: int


def outside_peak(rows: Sequence[ProcessRow], pulse: Sequence[PulseRow]) -> OutsidePeak | None:
    """Return the action outside the training steps that reaches the most beyond them, None without one."""
    in_steps = max((row["rss_bytes"] or 0 for row in pulse), default=0)
    found = [
        OutsidePeak(action=row.action, step=row.step, bytes=after - max(before, in_steps))
        for row in rows
        if row.kind == "peak" and row.action is not None and len(row.rss_bytes) == PEAK_SAMPLES
        for before, after in [row.rss_bytes]
        if after - max(before, in_steps) >= MIN_BYTES
    ]
    return max(found, key=lambda peak: peak.bytes, default=None)


def left_by_windows(rows: Sequence[PulseRow], column: str) -> int | None:
    """Return the bytes that windows added permanently, or None if no window has enough steps on both sides.

    Compares the five steps before a window, or before several that are close together, with five after it has settled,
    minus the training's own slope. A difference within their spread counts as 0.
    """
    segments = [segment for segment in _segments(rows, column, FIRST_STEPS) if len(segment) >= MIN_EDGE_STEPS]
    edges = [(before[-EDGE_STEPS:], after[:EDGE_STEPS]) for before, after in itertools.pairwise(segments)]
    if not edges:
        return None
    slope = _median_slope(segments)
    left = 0
    for before, after in edges:
        level = [value - slope * step for step, value in before], [value - slope * step for step, value in after]
        if min(level[1]) > max(level[0]) or max(level[1]) < min(level[0]):
            left += round(statistics.median(level[1]) - statistics.median(level[0]))
    return left if left >= MIN_LEFT_BYTES else 0


def _segments(rows: Sequence[PulseRow], column: str, skip: int) -> list[list[Point]]:
    """Return ``(step, bytes)`` after ``skip`` rows, split at windows, without the steps that settle after a window."""
    segments: list[list[Point]] = []
    split = True
    settling = 0
    for row in rows[skip:]:
        step, value = row["step"], row[column]
        if row["window"] is not None:
            split, settling = True, SETTLING_STEPS
        elif settling:
            settling -= 1
        elif step is not None and value is not None:
            if split:
                segments.append([])
                split = False
            segments[-1].append((step, value))
    return segments


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
        off += (abs(level - statistics.median(levels)) for level in levels)
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


def assigned_in(holder: HolderRow) -> str:
    """Return the line that assigns a holder and its statement: ``, assigned in a/train.py:14: self.history = []``."""
    statement = _statement((holder.source or "").strip(), holder.place or "")
    return f", assigned in {holder.line}{statement and f': {statement}'}" if holder.line else ""


def _statement(source: str, place: str) -> str:
    """Return the statement of a line that assigns a name of a place; empty if none of several does."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The first line of a statement that has several.
        return source
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    if len(statements) <= 1:
        return source
    names = set(re.findall(r"\w+", place))
    found = [node for node in statements if names & _targets(node)]
    return (ast.get_source_segment(source, found[0]) or "") if found else ""


def _targets(statement: ast.stmt) -> set[str]:
    """Return the variables and attributes that a statement assigns."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
    }
