"""The rank that the others wait for: one computation over rows that pulses, windows and traces have alike."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import meeting, usual_action_ns
from lightning_memprof.account.steps.statistics import Breakdown, core_waits, typical_steps
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.read.run.model import Rank

# Below this part of the step a rank that is never late would not make the run notably faster.
MIN_WAIT_SHARE: Final = 0.05
# Equal ranks that share the cores of a machine differ by some percent in forward, for a whole run.
ON_SHARED_CORES: Final = 0.10
# Clocks, schedulers and switches cause some waiting in every run.
MIN_WAIT_NS: Final = 1_000_000
# In fewer steps, one slow step decides.
FEW_STEPS: Final = 5
# Lateness lasts for some steps, so single steps are dependent samples: its scatter is that of parts of the run.
STRETCHES: Final = 8
# By chance a mean is this many standard errors above 0 in 1 of 100 runs.
ERRORS: Final = 3.0
# The others spend at least this part of a rank's lateness in passes, which hold the collectives.
WAITED: Final = 0.5
# Batches of random lengths differ by less over the recorded steps.
LARGER: Final = 1.2
MOST_STEPS: Final = 0.75

# Phases in which a rank does not wait for others; Lightning's loop, whose time is untracked, reduces a flag over ranks.
_OWN: Final = ("data_wait", "callbacks", "optimizer")
_MEETING: Final = ("forward", "backward", "other")


class Lateness(NamedTuple):
    """A row: in a step, counted from 0, the other ranks wait for one by ``ns``."""

    step: int
    rank: int
    ns: float


class LateRank(msgspec.Struct, frozen=True):
    """A rank that the others wait for: by ``caused_ns`` in the mean step, ``share`` of the lateness of all ranks."""

    rank: int
    caused_ns: float
    share: float


def late_rank(rows: Sequence[Lateness], steps: float, least_ns: float) -> LateRank | None:
    """Return the rank that the others wait for; None where ranks are late in turns, by chance, or by little.

    In each step the lateness of the other ranks is subtracted from that of the rank, and the mean must exceed its
    scatter over the parts of the run, if it has several steps: one slow step is chance, and equal ranks take turns.

    Args:
        rows: any number for a step.
        steps: how many there are, those without lateness included; a part of one where its recording ends early.
        least_ns: notable lateness in the mean step.
    """
    caused: dict[int, float] = defaultdict(float)
    for row in rows:
        caused[row.rank] += row.ns
    rank, ns = max(caused.items(), key=itemgetter(1), default=(-1, 0.0))
    if not ns or ns < least_ns * steps:
        return None
    late_ns = [0.0] * max(round(steps), 1 + max(row.step for row in rows))
    for row in rows:
        late_ns[row.step] += row.ns if row.rank == rank else -row.ns
    if not _is_steady(late_ns, least_ns):
        return None
    return LateRank(rank, ns / steps, ns / sum(caused.values()))


def _is_steady(late_ns: Sequence[float], least_ns: float) -> bool:
    """Return whether the mean lateness of one rank, less that of the others, exceeds its scatter over the run.

    A hiccup of the late rank makes the scatter large: without it, the lateness must be notable and exceed the rest's.
    In few steps the scatter is not known well: the lateness must be notable without the slowest step, too.
    """
    if len(late_ns) < 2:
        return sum(late_ns) > 0
    count = min(STRETCHES, len(late_ns))
    edges = [len(late_ns) * part // count for part in range(count + 1)]
    parts = sorted(statistics.mean(late_ns[begin:end]) for begin, end in pairwise(edges))
    rest = parts[:-1]
    if len(late_ns) < FEW_STEPS and sum(rest) < least_ns * len(parts):
        return False
    return _exceeds_chance(parts) or (statistics.mean(rest) >= least_ns and _exceeds_chance(rest))


def _exceeds_chance(parts: Sequence[float]) -> bool:
    if len(parts) < 2:
        return False
    return statistics.mean(parts) > ERRORS * statistics.stdev(parts) / math.sqrt(len(parts))


class PulseLateness(msgspec.Struct, frozen=True, kw_only=True):
    """What the pulses of all ranks tell: ``steps`` that all of them have, and the late rank, None where none is.

    ``waits_ns`` is how long each other rank waits for it in the mean step: by phase, and of ``other`` that in
    ``self.log`` and in metrics by their parts of the ledger.
    """

    steps: int
    late: LateRank | None
    waits_ns: Mapping[int, Mapping[str, int]] = msgspec.field(default_factory=dict)


def pulse_lateness(ranks: Sequence[Rank]) -> PulseLateness | None:
    """Compare the pulses of all ranks, step by step; None where they have too few steps in common on the host's clock.

    A rank is late in a step by the time by which its data wait, callbacks and optimizer exceed those of every other
    rank, who then wait in collectives, in their other phases. A longer forward, or more untracked time, counts if the
    others' backward is longer for it, or their collectives outside the passes, such as those of ``self.log``. What the
    rank waits longer for a core than the others is not counted.
    """
    typical = {rank.rank: typical_steps(rank) for rank in ranks if rank.in_full}
    if len(typical) < max(len(ranks), 2) or any(each is None or each.clock != "host" for each in typical.values()):
        return None
    found = {rank: {step: phases for step, _, phases in each.steps} for rank, each in typical.items() if each}
    common = sorted(set.intersection(*(set(steps) for steps in found.values())))
    if len(common) < FEW_STEPS:
        return None
    table = {rank: [steps[step] for step in common] for rank, steps in found.items()}
    whole = statistics.mean(duration for each in typical.values() if each for _, duration, _ in each.steps)
    least_share = ON_SHARED_CORES if share_cores(ranks) else MIN_WAIT_SHARE
    least_ns = max(MIN_WAIT_NS, least_share * whole)
    waits = {rank.rank: [core_waits(rank).get(step, 0.0) for step in common] for rank in ranks}
    late = late_rank(_rows(table, waits), len(common), max(MIN_WAIT_NS, MIN_WAIT_SHARE * whole))
    if late is not None and not _is_waited_for(late, table):
        late = None
    for phase in ("forward", "other"):
        late = late or late_rank(_rows(table, waits, phase), len(common), least_ns)
    late = late or _late_by_batches(ranks, table, waits, least_ns)
    if late is None:
        return PulseLateness(steps=len(common), late=None)
    by_number = {rank.rank: rank for rank in ranks}
    waits_ns = {rank: _waits(table, by_number[late.rank], by_number[rank], late.caused_ns) for rank in table}
    return PulseLateness(
        steps=len(common), late=late, waits_ns={rank: ns for rank, ns in waits_ns.items() if rank != late.rank}
    )


def share_cores(ranks: Sequence[Rank]) -> bool:
    """Return whether all ranks compute on the cores of one machine."""
    return all(rank.facts.is_cpu for rank in ranks) and len({rank.facts.host for rank in ranks}) == 1


def _ns(phases: Breakdown, *names: str) -> int:
    return sum(phases.get(name) or 0 for name in names)


def _rows(
    table: Mapping[int, Sequence[Breakdown]], waits: Mapping[int, Sequence[float]], phase: str | None = None
) -> list[Lateness]:
    """Return the lateness of the last rank in each step.

    Args:
        table: the phases of the steps of each rank.
        waits: how long each waits for a core in these steps.
        phase: compare this one, in which a rank may wait itself, and not those in which it does not.
    """
    rows = []
    for step, breakdowns in enumerate(zip(*table.values(), strict=True)):
        phases = dict(zip(table, breakdowns, strict=True))
        own = {rank: _ns(each, *((phase,) if phase else _OWN)) for rank, each in phases.items()}
        (rank, most), (_, second), *_ = Counter(own).most_common(2)
        late: float = most - second
        if phase:
            meets = {rank: _ns(each, *({"backward", "other"} - {phase})) for rank, each in phases.items()}
            late = min(late, min(ns for other, ns in meets.items() if other != rank) - meets[rank])
        usual = statistics.median_low(core[step] for other, core in waits.items() if other != rank)
        rows.append(Lateness(step, rank, max(late - max(waits[rank][step] - usual, 0), 0)))
    return rows


def _is_waited_for(late: LateRank, table: Mapping[int, Sequence[Breakdown]]) -> bool:
    """Return whether the passes of the others are longer, in the same step or, for a late callback, in the next one."""
    passes = {rank: sum(_ns(phases, *_MEETING) for phases in steps) for rank, steps in table.items()}
    own = passes.pop(late.rank)
    return statistics.median(passes.values()) - own >= WAITED * late.caused_ns * len(table[late.rank])


def _late_by_batches(
    ranks: Sequence[Rank], table: Mapping[int, Sequence[Breakdown]], waits: Mapping[int, list[float]], least_ns: float
) -> LateRank | None:
    """Return the rank that computes longer if its batches are larger than those of the others.

    The kernel counts a wait when it ends, perhaps in another step than the one that it lengthens: on busy cores, only
    the mean wait tells how much later a rank is for it. That alone shows ranks of equal work as late, too.
    """
    mean = {rank: [statistics.mean(own)] * len(own) for rank, own in waits.items()}
    late = late_rank(_rows(table, mean, "forward"), len(next(iter(table.values()))), least_ns)
    return late if late is not None and larger_batches(ranks, late.rank) is not None else None


def larger_batches(ranks: Sequence[Rank], late: int) -> tuple[int, int] | None:
    """Return the mean elements of the recorded batches of a rank and of the others, None if its are not larger."""
    others = {rank.rank: _elements(rank) for rank in ranks if rank.in_full}
    mine = others.pop(late, {})
    pairs = [
        (size, statistics.median_low(sizes))
        for step, size in mine.items()
        if (sizes := [elements[step] for elements in others.values() if step in elements])
    ]
    own, usual = (sum(sizes) for sizes in zip(*pairs, strict=True)) if pairs else (0, 0)
    if own <= LARGER * usual or sum(size > other for size, other in pairs) < MOST_STEPS * len(pairs):
        return None
    return own // len(pairs), usual // len(pairs)


def _elements(rank: Rank) -> dict[int, int]:
    """Return the elements of the recorded batches, by step."""
    rows = rank.recorded(ThroughputRow)
    return {row.step: row.elements for row in rows if row.step is not None and row.elements is not None}


def _waits(table: dict[int, list[Breakdown]], late: Rank, rank: Rank, caused_ns: float) -> dict[str, int]:
    """Return how long a rank waits for the late one by phase: by which the phase is longer, at most the lateness."""
    rows, steps = (table[rank.rank], table[late.rank]), len(table[rank.rank])
    more = {
        phase: sum(_ns(mine, phase) - _ns(its, phase) for mine, its in zip(*rows, strict=True)) / steps
        for phase in _MEETING
    }
    mine, its = meeting_ns(rank), meeting_ns(late)
    for part in mine:
        more[part] = max(min(mine[part] - its[part], more["other"]), 0.0)
        more["other"] -= more[part]
    longer = {phase: ns for phase, ns in more.items() if ns > 0}
    scale = min(1.0, caused_ns / sum(longer.values())) if longer else 0.0
    return {phase: round(ns * scale) for phase, ns in longer.items()}


def meeting_ns(rank: Rank) -> Counter[Part]:
    """Return the time of ``self.log`` and metrics in the mean step outside windows, in which ranks meet."""
    return usual_action_ns(rank, lambda row: meeting(row.action or "") if row.phase == "other" else None)
