"""The load of the machine during a run: mean, min and max of each sampled figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.samples import SystemStretch

MAX_RANKS: Final = 64


class Figure(msgspec.Struct, frozen=True):
    """One figure over all samples, in its own unit."""

    mean: float
    min: float
    max: float


class RankSystem(msgspec.Struct, frozen=True):
    """The samples of one rank's machine; a figure that no sample has is not there."""

    rank: int
    samples: int
    figures: Mapping[str, Figure]


def systems(run: Run) -> tuple[RankSystem, ...]:
    """Return the load of the first ranks that sampled their machine."""
    sampled = (rank for rank in run.ranks if any(map(len, rank.system.stretches)))
    return tuple(map(_of_rank, islice(sampled, MAX_RANKS)))


def _of_rank(rank: Rank) -> RankSystem:
    stretches = rank.system.stretches
    names = dict.fromkeys(name for stretch in stretches for name in stretch.figures)
    return RankSystem(rank.rank, sum(map(len, stretches)), {name: _figure(stretches, name) for name in names})


def _figure(stretches: Sequence[SystemStretch], name: str) -> Figure:
    values = [value for stretch in stretches for value in stretch.figures.get(name, ()) if not math.isnan(value)]
    return Figure(mean=sum(values) / len(values), min=min(values), max=max(values))
