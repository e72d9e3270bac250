"""Batches, samples and tokens per second of a rank, their spread, and the utilization of its device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.read.run.model import Rank, Run

IN_WINDOWS: Final = "steps in windows, with the cost of recording them"
_MOST: Final = 1e30


class Rate(msgspec.Struct, frozen=True):
    """A rate per second: mean over the used steps, and the 10th and 90th percentile of their rates."""

    mean: float
    p10: float
    p90: float


class RankThroughput(msgspec.Struct, frozen=True):
    """The throughput of one rank; an unknown value is None, never 0.

    ``basis`` names the steps of the rates: those of the pulse, with the batch sizes of the windows; without a pulse
    those of the windows. ``samples`` and ``tokens`` are of a mean batch, ``flops`` of one step, forward and backward.
    ``utilization`` is the share, 0 to 1, of ``peak_flops`` (per second) in the mean step.
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


def throughputs(run: Run) -> tuple[RankThroughput, ...]:
    """Return the throughput of the ranks that counted their batches."""
    counted = (rank for rank in run.ranks if any("throughput" in window.series for window in rank.windows))
    return tuple(rate for rank in counted if (rate := rank_throughput(rank)) is not None)


def rank_throughput(rank: Rank) -> RankThroughput | None:
    """Return one rank's throughput, None where none of its steps was timed."""
    rows = rank.recorded(ThroughputRow)
    durations, basis = _durations(rank, rows)
    if not durations:
        return None
    samples, tokens = _mean([row.samples for row in rows]), _mean([row.tokens for row in rows])
    flops = next((row.flops for row in rows if row.flops), None)
    peak = next((row.peak_flops for row in rows if row.peak_flops is not None and 0 < row.peak_flops < _MOST), None)
    flops_per_s = None if flops is None else flops * len(durations) / sum(durations) * 1e9
    return RankThroughput(
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


def _durations(rank: Rank, rows: Sequence[ThroughputRow]) -> tuple[list[int], str]:
    typical = typical_steps(rank)
    if typical is not None:
        return [duration for _, duration, _ in typical.steps if duration > 0], typical.basis
    return [row.duration_ns for row in rows if row.duration_ns and row.duration_ns > 0], IN_WINDOWS


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None and value >= 0]
    return statistics.fmean(known) if known else None


def _rate(amount: float, durations: Sequence[int]) -> Rate:
    """Return ``amount`` per step as a rate; its spread is that of the steps' durations (nanoseconds)."""
    slowest_first = sorted(durations, reverse=True)
    last = len(slowest_first) - 1

    def at(part: float) -> float:
        return amount / slowest_first[min(last, math.floor(part * len(slowest_first)))] * 1e9

    return Rate(amount * len(durations) / sum(durations) * 1e9, at(0.1), at(0.9))
