"""How much data a rank's steps work through in a second, how steadily, and what part of its device that takes."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.run.load import Problem
from lightning_memprof.analysis.run.rows import Row, series_rows, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.run.load import Rank, Run

__all__ = ["RankThroughput", "Rate", "rank_throughput", "throughputs"]

IN_WINDOWS: Final = "steps in windows, with the cost of recording them"
# Each rank is some files to read, and its neighbours do the same work.
MAX_RANKS: Final = 64
_MOST: Final = 1e30


@dataclass(frozen=True)
class Rate:
    """Something per second: over all steps that were used, and of the steps slower and faster than nine in ten."""

    mean: float
    p10: float
    p90: float


@dataclass(frozen=True)
class RankThroughput:
    """What one rank works through. None is not known, and never 0.

    ``basis`` says which steps the rates rest on: those of the pulse, at the size of the batches that the windows saw;
    without a pulse those of the windows. ``samples`` and ``tokens`` are of a mean batch, ``flops`` of one step, forward
    and backward. ``utilization`` is the part, 0 to 1, of ``peak_flops`` (per second) that the mean step comes to.
    """

    rank: int
    basis: str
    steps: int
    samples: float | None
    tokens: float | None
    batches_per_s: Rate
    samples_per_s: Rate | None
    tokens_per_s: Rate | None
    flops: int | None
    flops_per_s: float | None
    peak_flops: float | None
    utilization: float | None


def throughputs(run: Run) -> tuple[tuple[RankThroughput, ...], tuple[Problem, ...]]:
    """Return the throughput of the first ranks that counted their batches, and what could not be read."""
    counted = (rank for rank in run.ranks if any("throughput" in window.series for window in rank.windows))
    found, problems = [], []
    for rank in islice(counted, MAX_RANKS):
        rate, damage = rank_throughput(rank)
        problems += damage
        if rate is not None:
            found.append(rate)
    return tuple(found), tuple(problems)


def rank_throughput(rank: Rank) -> tuple[RankThroughput | None, list[Problem]]:
    """Return one rank's throughput, None where no step of it was timed, and what could not be read."""
    rows, problems = _rows(rank)
    durations, basis = _durations(rank, rows)
    if not durations:
        return None, problems
    samples, tokens = _mean(rows, "samples"), _mean(rows, "tokens")
    flops = next((count for row in rows if (count := whole(row, "flops"))), None)
    peaks = (row.get("peak_flops") for row in rows)
    peak = next(
        (float(peak_value) for peak_value in peaks if isinstance(peak_value, (int, float)) and 0 < peak_value < _MOST),
        None,
    )
    flops_per_s = None if flops is None else flops * len(durations) / sum(durations) * 1e9
    found = RankThroughput(
        rank=rank.rank,
        basis=basis,
        steps=len(durations),
        samples=samples,
        tokens=tokens,
        batches_per_s=_rate(1.0, durations),
        samples_per_s=None if samples is None else _rate(samples, durations),
        tokens_per_s=None if tokens is None else _rate(tokens, durations),
        flops=flops,
        flops_per_s=flops_per_s,
        peak_flops=peak,
        utilization=None if flops_per_s is None or peak is None else flops_per_s / peak,
    )
    return found, problems


def _rows(rank: Rank) -> tuple[list[Row], list[Problem]]:
    rows: list[Row] = []
    problems = []
    for window in rank.windows:
        path = window.series.get("throughput")
        if path is not None:
            read, damage = series_rows(path)
            rows += [row for row in read if row.get("recorded") is not False]
            problems += [Problem(path.name, damage, rank.rank)] if damage else []
    return rows, problems


def _durations(rank: Rank, rows: list[Row]) -> tuple[list[int], str]:
    typical = rank.typical_steps
    if typical is not None:
        return [duration for _, duration, _ in typical.steps if duration > 0], typical.basis
    return [duration for row in rows if (duration := whole(row, "duration_ns")) and duration > 0], IN_WINDOWS


def _mean(rows: Sequence[Row], key: str) -> float | None:
    known = [value for row in rows if (value := whole(row, key)) is not None and value >= 0]
    return statistics.fmean(known) if known else None


def _rate(amount: float, durations: Sequence[int]) -> Rate:
    """Return ``amount`` a step as a rate; its spread is that of the steps' durations (nanoseconds)."""
    slowest_first = sorted(durations, reverse=True)
    last = len(slowest_first) - 1

    def at(part: float) -> float:
        return amount / slowest_first[min(last, math.floor(part * len(slowest_first)))] * 1e9

    return Rate(amount * len(durations) / sum(durations) * 1e9, at(0.1), at(0.9))
