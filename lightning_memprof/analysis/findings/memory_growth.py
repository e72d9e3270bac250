"""Memory that grows from step to step."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Evidence, Finding, Severity, percent
from lightning_memprof.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.artifacts.series import PulseRow

__all__ = ["Growth", "memory_growth", "steady_growth"]

# Four quarters of at least four steps: fewer cannot tell a slope from a jump.
MIN_STEPS: Final = 16
# Caches, lazy initialisation and the allocators' first growth happen in the first tenth, at least in five steps.
WARMUP_SHARE: Final = 0.1
WARMUP_STEPS: Final = 5
# The C allocator's own drift on a steady run stays well below both.
MIN_BYTES: Final = 32 * MIB
MIN_SHARE: Final = 0.05
SEVERE_SHARE: Final = 0.5
# Between two quarters a steady slope adds a third of the whole; a jump or a cache that fills adds next to nothing once.
MIN_QUARTER: Final = 1 / 9
# Pairs grow with the square: 200 points are 20,000 pairs, a few milliseconds.
MAX_POINTS: Final = 200
COLUMNS: Final = (("rss_bytes", "Host memory", "resident size"), ("device_peak_bytes", "Device memory", "device peak"))


@dataclass(frozen=True)
class Growth:
    """A steady slope: bytes per step, and the bytes that it added over ``steps`` steps to ``start_bytes``."""

    bytes_per_step: float
    added_bytes: int
    start_bytes: int
    steps: int


def memory_growth(evidence: Evidence) -> Finding | None:
    """Say that a rank holds more memory with every step, how much, and what to look for."""
    found = [
        (growth, rank, title, source)
        for rank in evidence.run.ranks
        for column, title, source in COLUMNS
        if (growth := steady_growth(rank.pulse, column)) is not None
    ]
    if not found:
        return None
    growth, rank, title, source = max(found, key=lambda one: one[0].added_bytes)
    share = growth.added_bytes / growth.start_bytes if growth.start_bytes else 1.0
    return Finding(
        rule="memory_growth",
        severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
        sentence=f"{title} grows by {format_bytes(growth.bytes_per_step)} with every step{evidence.on_rank(rank)}.",
        evidence=(
            f"The {source} rose steadily by {format_bytes(growth.added_bytes)} ({percent(share)}) "
            f"in {growth.steps} steps: another GiB every {GIB / growth.bytes_per_step:,.0f} steps."
        ),
        next_steps=(
            (
                "Look in training_step for what outlives its step: keep loss.item() or loss.detach() instead of the "
                "loss, and empty lists of outputs in on_train_epoch_end."
            ),
            "Look for callbacks and metrics that append to a list in each batch.",
        ),
        numbers={
            "rank": rank.rank,
            "column": source,
            "bytes_per_step": round(growth.bytes_per_step),
            "added_bytes": growth.added_bytes,
            "start_bytes": growth.start_bytes,
            "steps": growth.steps,
        },
        weight=share,
    )


def steady_growth(rows: Sequence[PulseRow], column: str) -> Growth | None:
    """Return the slope of a column of bytes where it rises steadily after the warm-up, else None.

    Steps of windows are left out, and so is what a window leaves behind: recording takes memory that is not the
    training's. The slope is Theil and Sen's median over all pairs; steady means that the medians of the four quarters
    rise one after the other.
    """
    points = _outside_windows(rows, column)[max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))) :]
    if len(points) < MIN_STEPS:
        return None
    quarter = len(points) / 4
    medians = [
        statistics.median(value for _, value in points[round(index * quarter) : round((index + 1) * quarter)])
        for index in range(4)
    ]
    risen = medians[-1] - medians[0]
    least = min(after - before for before, after in itertools.pairwise(medians))
    if risen <= 0 or least < MIN_QUARTER * risen:
        return None
    slope = _median_slope(points)
    steps = points[-1][0] - points[0][0]
    start = points[0][1]
    added = round(slope * steps)
    if added < MIN_BYTES or added < MIN_SHARE * start:
        return None
    return Growth(slope, added, start, steps)


def _outside_windows(rows: Sequence[PulseRow], column: str) -> list[tuple[int, int]]:
    """Return ``(step, bytes)`` outside windows, with the difference across each window taken away."""
    points: list[tuple[int, int]] = []
    shift = 0
    after_window = False
    for row in rows:
        step, value = row["step"], row[column]
        if row["window"] is not None or step is None or value is None:
            after_window = after_window or row["window"] is not None
            continue
        if after_window and points:
            shift += value - (points[-1][1] + shift)
        after_window = False
        points.append((step, value - shift))
    return points


def _median_slope(points: Sequence[tuple[int, int]]) -> float:
    thinned = points[:: -(-len(points) // MAX_POINTS)]
    slopes = [
        (later - earlier) / (after - before)
        for index, (before, earlier) in enumerate(thinned)
        for after, later in thinned[index + 1 :]
        if after > before
    ]
    return statistics.median(slopes) if slopes else 0.0
