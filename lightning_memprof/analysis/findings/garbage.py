"""Pauses of Python's garbage collector: the whole process stands still in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.analysis.run.rows import series_rows, whole
from lightning_memprof.analysis.steps.pauses import pauses
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank
    from lightning_memprof.analysis.steps.pauses import Pauses

__all__ = ["garbage", "pauses_by_step"]

# As for callbacks: below this part of a step there is little to gain.
NOTABLE_SHARE: Final = 0.05
SEVERE_SHARE: Final = 0.30
# Collections of the young generations take less than this a step in every program.
MIN_COST_NS: Final = 2_000_000
# One pause in one step says nothing about how often they come.
MIN_RECORDED: Final = 2
# By themselves collections of the oldest generation come in one step of many, not in so many of them.
ASKED_FOR_SHARE: Final = 0.8
OLDEST: Final = 2
ASKED_FOR: Final = "Look for gc.collect() in the program or in a callback: it goes through all objects, every step."
FREEZE: Final = "Leave what stays for good out of every collection: gc.collect(); gc.freeze() in on_train_start."
CHOOSE: Final = "Collect at moments of your own: gc.disable(), and gc.collect() every N batches in on_train_batch_end."


@dataclass(frozen=True)
class _Cost:
    """``steady_share`` is the share of the recorded steps without the one that has the most of it."""

    rank: Rank
    steps: tuple[int, ...]
    share: float
    steady_share: float
    mean_ns: int


def garbage(facts: Facts) -> list[Finding]:
    """Say that collections of garbage take much of the recorded steps, and how to have fewer."""
    costs = [cost for rank in facts.run.ranks if (cost := _cost(facts, rank)) is not None]
    worst = max(costs, key=lambda cost: cost.steady_share, default=None)
    if worst is None or worst.steady_share <= NOTABLE_SHARE or worst.mean_ns < MIN_COST_NS:
        return []
    found = pauses(worst.rank)[0]
    if found is None:
        return []
    return [
        Finding(
            rule="garbage",
            severity=Severity.CRITICAL if worst.steady_share >= SEVERE_SHARE else Severity.WARNING,
            sentence=(
                f"Python's garbage collector takes {percent(worst.share)} of a recorded step"
                f"{facts.on_rank(worst.rank)}."
            ),
            why=_why(found, worst),
            next_steps=_next_steps(found, worst),
            evidence=facts.recorded(worst.rank, "garbage", worst.steps),
            numbers={
                "rank": worst.rank.rank,
                "garbage_share": worst.share,
                "garbage_ns": worst.mean_ns,
                "pauses": found.count,
                "longest_ns": found.max_ns,
                "generations": {str(number): list(counts) for number, counts in found.generations.items()},
                "tensor_bytes": found.tensor_bytes,
            },
            weight=worst.share,
        )
    ]


def pauses_by_step(rank: Rank) -> dict[int, int]:
    """Return by recorded step the nanoseconds of its pauses; a step without one is not there."""
    spent: Counter[int] = Counter()
    for window in rank.windows:
        path = window.series.get("garbage")
        for row in series_rows(path)[0] if path is not None else ():
            step, duration = whole(row, "step"), whole(row, "duration_ns")
            if step is not None and duration is not None and row.get("recorded") is not False:
                spent[step] += max(duration, 0)
    return dict(spent)


def _cost(facts: Facts, rank: Rank) -> _Cost | None:
    spent = pauses_by_step(rank)
    if not spent:
        return None
    recorded = {step for window in rank.windows for step in window.steps}
    durations = {row["step"]: row["duration_ns"] for row in rank.pulse if row["step"] in recorded}
    if not durations:
        durations = {event.step: event.duration_ns for event in facts.events(rank)}
    pairs = sorted((spent.get(step or 0, 0), duration) for step, duration in durations.items() if duration)
    if len(pairs) < MIN_RECORDED:
        return None
    steps = tuple(sorted(spent))
    return _Cost(rank, steps, _share(pairs), _share(pairs[:-1]), sum(ns for ns, _ in pairs) // len(pairs))


def _share(pairs: list[tuple[int, int]]) -> float:
    return sum(ns for ns, _ in pairs) / (sum(duration for _, duration in pairs) or 1)


def _why(found: Pauses, worst: _Cost) -> str:
    times = "1 pause" if found.count == 1 else f"{found.count} pauses"
    parts = [f"{times} of {format_ns(found.total_ns)} in all, the longest {format_ns(found.max_ns)}"]
    if OLDEST in found.generations:
        count, ns = found.generations[OLDEST]
        parts.append(f"{count} of them went through all objects, {format_ns(ns)}")
    if found.tensor_bytes:
        parts.append(f"tensors that only reference cycles kept alive gave back {format_bytes(found.tensor_bytes)}")
    return "; ".join(parts) + f"; {format_ns(worst.mean_ns)} of a recorded step."


def _next_steps(found: Pauses, worst: _Cost) -> tuple[str, ...]:
    steps = [FREEZE, CHOOSE]
    count, _ = found.generations.get(OLDEST, (0, 0))
    if count >= ASKED_FOR_SHARE * sum(len(window.steps) for window in worst.rank.windows):
        steps.insert(0, ASKED_FOR)
    if found.tensor_bytes:
        steps.append("Break the cycles that hold tensors: no tensor on an object that refers to itself or its owner.")
    return tuple(steps)
