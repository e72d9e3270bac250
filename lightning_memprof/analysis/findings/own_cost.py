"""What of the steps is this package's own work, so that no rule blames the program for it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.run.rows import series_rows, text, whole
from lightning_memprof.analysis.steps.phases import OWN_WORK

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.analysis.steps.statistics import PulseStatistics

__all__ = ["own_marks", "own_ns", "program_between_ns", "typical_in_windows"]

NOTHING: Final = 0


def own_marks(rank: Rank) -> dict[int, int]:
    """Return by step of the windows, warm-up included, the nanoseconds of all collectors' work at the step's marks."""
    spent: dict[int, int] = defaultdict(int)
    for window in rank.windows:
        path = window.series.get("hooks")
        for row in series_rows(path)[0] if path is not None else ():
            step, duration = whole(row, "step"), whole(row, "duration_ns")
            if step is not None and duration is not None and (text(row, "action") or "").startswith(OWN_WORK):
                spent[step] += max(duration, 0)
    return dict(spent)


def typical_in_windows(rank: Rank) -> tuple[int, ...]:
    """Return the steps in windows among those that a rank's figures rest on."""
    typical = rank.typical_steps
    in_windows = {row["step"] for row in rank.pulse if row["window"] is not None}
    return tuple(step for step, _, _ in typical.steps if step in in_windows) if typical is not None else ()


def own_ns(rank: Rank, statistics: PulseStatistics) -> int:
    """Return how much of the mean step, in nanoseconds, is our own work; it lies between the phases.

    Where no hook timings tell, it is what all windows have cost, shared among their steps: too much rather than little.
    """
    steps = typical_in_windows(rank)
    if not steps or not statistics.used:
        return NOTHING
    marks = own_marks(rank)
    if not marks:
        in_windows = sum(row["window"] is not None for row in rank.pulse)
        windows_ns = whole(rank.overhead, "windows_ns") or 0
        marks = dict.fromkeys(steps, windows_ns // max(in_windows, 1))
    return sum(marks.get(step, 0) for step in steps) // statistics.used


def program_between_ns(rank: Rank, statistics: PulseStatistics) -> int:
    """Return nanoseconds of the mean step that are in no phase, in no callback and not ours."""
    return max(statistics.between_ns - own_ns(rank, statistics), 0)
