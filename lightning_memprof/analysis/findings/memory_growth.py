"""Memory that grows from step to step."""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.units import GIB, MIB, format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.findings.model import Evidence
    from lightning_memprof.analysis.memory.model import Site
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.artifacts.series import PulseRow

__all__ = ["Growth", "left_by_windows", "memory_growth", "steady_growth"]

Point = tuple[int, int]

# Four quarters of at least four steps: fewer cannot tell a slope from a jump.
MIN_STEPS: Final = 16
# Caches, lazy initialisation and the allocators' first growth happen in the first tenth, at least in five steps.
WARMUP_SHARE: Final = 0.1
WARMUP_STEPS: Final = 5
# The C allocator's own drift on a steady run stays well below both.
MIN_BYTES: Final = 32 * MIB
MIN_SHARE: Final = 0.05
# In fewer steps than these the allocator's pools may still be filling: only a leak that would soon end the run counts.
SHORT_RUN_STEPS: Final = 100
SHORT_RUN_MIN_SHARE: Final = 0.1
# The first steps after a window take memory again that the window's data had displaced.
SETTLING_STEPS: Final = 5
SEVERE_SHARE: Final = 0.5
# Between two quarters a steady slope adds a third of the whole; a jump or a cache that fills adds next to nothing once.
MIN_QUARTER: Final = 1 / 9
# Pairs grow with the square: 200 points are 20,000 pairs, a few milliseconds.
MAX_POINTS: Final = 200
MAX_SEGMENTS: Final = 50
# So many steps on each side of a window say where the memory stood, whatever a single one does.
EDGE_STEPS: Final = 5
# The first step makes what the training keeps: gradients and the optimizer's state.
FIRST_STEPS: Final = 1
# Fewer than these do not show where the memory stood.
MIN_EDGE_STEPS: Final = 3
# The C allocator's own jumps stay below this.
MIN_LEFT_BYTES: Final = 8 * MIB
# Every training keeps from one step to the next what these allocate.
KEPT_ANYWAY: Final = frozenset({"backward", "optimizer"})
# What is allocated by one place and kept must be this part of what each step adds.
LEAST_PART: Final = 0.1
MAX_KEPT: Final = 5
COLUMNS: Final = (("rss_bytes", "Host memory", "resident size"), ("device_peak_bytes", "Device memory", "device peak"))
NEXT: Final = (
    (
        "Look in training_step for what outlives its step: keep loss.item() or loss.detach() instead of the loss, and "
        "empty lists of outputs in on_train_epoch_end."
    ),
    "Look for callbacks and metrics that append to a list in each batch.",
)


@dataclass(frozen=True)
class Growth:
    """A steady slope: bytes per step, and the bytes that it added over ``steps`` steps to ``start_bytes``."""

    bytes_per_step: float
    added_bytes: int
    start_bytes: int
    steps: int


def memory_growth(facts: Facts) -> list[Finding]:
    """Say that a rank holds more memory with every step, how much, and what to look for."""
    found = [
        (growth, rank, title, source)
        for rank in facts.run.ranks
        for column, title, source in COLUMNS
        if (growth := steady_growth(rank.pulse, column)) is not None
    ]
    if not found:
        return []
    growth, rank, title, source = max(found, key=lambda entry: entry[0].added_bytes)
    share = growth.added_bytes / growth.start_bytes if growth.start_bytes else 1.0
    kept = _kept_from_earlier_steps(facts, rank, growth)
    return [
        Finding(
            rule="memory_growth",
            severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
            sentence=f"{title} grows by {format_bytes(growth.bytes_per_step)} with every step{facts.on_rank(rank)}.",
            why=(
                f"The {source} rose steadily by {format_bytes(growth.added_bytes)} ({percent(share)}) "
                f"in {growth.steps} steps: another GiB every {GIB / growth.bytes_per_step:,.0f} steps."
                + (f" {_told(kept)}" if kept else "")
            ),
            next_steps=NEXT if facts.is_fit else (NEXT[-1],),
            evidence=(facts.pulse(rank), *_seen_in(kept)),
            numbers={
                "rank": rank.rank,
                "column": source,
                "bytes_per_step": round(growth.bytes_per_step),
                "added_bytes": growth.added_bytes,
                "start_bytes": growth.start_bytes,
                "steps": growth.steps,
                "kept": [_as_numbers(site, age) for site, age, _ in kept],
            },
            weight=share,
        )
    ]


def _kept_from_earlier_steps(facts: Facts, rank: Rank, growth: Growth) -> list[tuple[Site, int, Evidence]]:
    """Return who still holds at a window's peak what an earlier of its steps allocated, and how many steps ago.

    Gradients and the optimizer's state are there from step to step in every training: what backward and optimizer
    allocate does not count, nor what is too little for the slope. The largest come first.
    """
    memory = facts.memory
    mine = (
        next((rank_memory for rank_memory in memory.ranks if rank_memory.rank == rank.rank), None)
        if memory is not None
        else None
    )
    found = []
    for window in mine.allocations if mine is not None else ():
        for device in window.devices:
            for site in device.sites:
                age = 0 if site.step is None or device.peak_step is None else device.peak_step - site.step
                if age > 0 and site.phase not in KEPT_ANYWAY and site.bytes >= LEAST_PART * growth.bytes_per_step:
                    trace = os.fspath(window.trace) if window.trace is not None else ""
                    listed = next(
                        (artifact.path for artifact in facts.run.artifacts if os.fspath(artifact.file) == trace), trace
                    )
                    at = facts.pulse(rank, (site.step or 0, device.peak_step or 0))
                    found.append((site, age, replace(at, artifact=listed, window=window.window)))
    return sorted(found, key=lambda entry: -entry[0].bytes)[:MAX_KEPT]


def _seen_in(kept: Sequence[tuple[Site, int, Evidence]]) -> tuple[Evidence, ...]:
    return tuple({source.artifact: source for _, _, source in kept if source.artifact}.values())


def _told(kept: Sequence[tuple[Site, int, Evidence]]) -> str:
    site, age, _ = kept[0]
    module = f" in module {site.module}" if site.module else ""
    line = f" at {site.line}" if site.line else ""
    steps = "a step" if age == 1 else f"{age} steps"
    return f"{format_bytes(site.bytes)} that {site.operator}{module}{line} allocated are still there {steps} later."


def _as_numbers(site: Site, age: int) -> dict[str, Any]:
    return {
        "operator": site.operator,
        "module": site.module,
        "line": site.line,
        "stack": list(site.stack),
        "bytes": site.bytes,
        "blocks": site.blocks,
        "steps_later": age,
    }


def steady_growth(rows: Sequence[PulseRow], column: str) -> Growth | None:
    """Return the slope of a column of bytes where it rises steadily after the warm-up, else None.

    Steps of windows are left out, and so is what a window leaves behind: recording takes memory that is not the
    training's. The slope is Theil and Sen's median over pairs of steps with no window between them; steady means that
    the medians of the four quarters rise one after the other.
    """
    segments = _segments(rows, column, max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))))
    if sum(map(len, segments)) < MIN_STEPS:
        return None
    slope = _median_slope(segments)
    points = _joined(segments, slope)
    quarter = len(points) / 4
    medians = [
        statistics.median(value for _, value in points[round(index * quarter) : round((index + 1) * quarter)])
        for index in range(4)
    ]
    risen = medians[-1] - medians[0]
    least = min(after - before for before, after in itertools.pairwise(medians))
    steps = points[-1][0] - points[0][0]
    start = segments[0][0][1]
    added = round(slope * steps)
    min_share = MIN_SHARE if len(points) >= SHORT_RUN_STEPS else SHORT_RUN_MIN_SHARE
    if risen <= 0 or least < MIN_QUARTER * risen or added < MIN_BYTES or added < min_share * start:
        return None
    return Growth(slope, added, start, steps)


def left_by_windows(rows: Sequence[PulseRow], column: str) -> int | None:
    """Return the bytes that windows added for good, or None where no window has steps enough on both sides of it.

    Compared are the five steps before a window, or before several that are close together, and five after it has
    settled, less what the training's own slope adds meanwhile. What is not clear of their spread counts as nothing.
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
    """Return ``(step, bytes)`` after ``skip`` rows, split where a window lies, without the steps that settle after."""
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
    """Put the segments behind one another, each moved so that only the slope remains of the step across its window."""
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
    longest = sorted(segments, key=len, reverse=True)[:MAX_SEGMENTS]
    most = max(MAX_POINTS // len(longest), MIN_STEPS)
    slopes = [
        (later - earlier) / (after - before)
        for segment in longest
        for (before, earlier), (after, later) in itertools.combinations(segment[:: -(-len(segment) // most)], 2)
        if after > before
    ]
    return statistics.median(slopes) if slopes else 0.0
