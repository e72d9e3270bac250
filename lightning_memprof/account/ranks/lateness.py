"""The late rank of a run by its whole pulse: steps in which it does more than every other rank, who wait meanwhile."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.steps.events import action_name, meeting
from lightning_memprof.account.steps.statistics import Breakdown, core_waits, typical_steps
from lightning_memprof.artifacts.series import GC_PAUSE, ThroughputRow
from lightning_memprof.read.run.model import Rank

# Below this part of the step a rank that is never late would not make the run notably faster.
MIN_WAIT_SHARE: Final = 0.05
# Equal ranks that share the cores of a machine differ by some percent in forward, for a whole run.
ON_SHARED_CORES: Final = 0.10
# Clocks, schedulers and switches cause some waiting in every run.
MIN_WAIT_NS: Final = 1_000_000
# One rank is the straggler if it causes this part of all lateness; else they take turns.
MAIN_SHARE: Final = 0.5
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
# GC pauses of this part of the lateness are its cause, in whichever phase they are.
EXPLAINS: Final = 0.5

# Phases in which a rank does not wait for others; Lightning's loop, whose time is untracked, reduces a flag over ranks.
_OWN: Final = ("data_wait", "callbacks", "optimizer")
_MEETING: Final = ("forward", "backward", "other")
# A rank that is late in forward computes longer.
_CAUSE: Final[Mapping[str, Part]] = {
    **{phase: PHASE_PARTS[phase] for phase in (*_OWN, "other")},
    "forward": Part.COMPUTE,
}


class Excess(msgspec.Struct, frozen=True):
    """What takes a rank longer: its time per step, the median of the other ranks, and the callback if it is one."""

    cause: Part
    own_ns: int
    others_ns: int
    callback: str | None = None

    @property
    def ns(self) -> int:
        """The time beyond the other ranks."""
        return self.own_ns - self.others_ns


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """How late a rank is in the mean step: later than every other rank by ``caused_ns``.

    ``share`` is its part of the lateness of all ranks.
    """

    rank: int
    caused_ns: int
    share: float
    excess: Excess


class PulseLateness(msgspec.Struct, frozen=True, kw_only=True):
    """What the pulses of all ranks tell: ``steps`` that all of them have, and the late rank, None where none is.

    ``waits_ns`` is how long each other rank waits for it in the mean step: by phase, and of ``other`` that in
    ``self.log`` and in metrics by their parts of the ledger.
    """

    steps: int
    late: Lateness | None
    waits_ns: Mapping[int, Mapping[str, int]] = msgspec.field(default_factory=dict)


def pulse_lateness(ranks: Sequence[Rank]) -> PulseLateness | None:
    """Compare the pulses of all ranks, step by step; None where they have too few steps in common on the host's clock.

    A rank is late in a step by the time by which its data wait, callbacks and optimizer exceed those of every other
    rank, who then wait in collectives, in their other phases. A longer forward, or more untracked time, counts if the
    others' backward is longer for it, or their collectives outside the passes, such as those of ``self.log``. What the
    rank waits longer for a core than the others is not counted. One slow step is chance, and so are ranks that are late
    in turns: lateness of other ranks is subtracted, and the mean must exceed its scatter over the parts of the run.
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
    least = ON_SHARED_CORES if share_cores(ranks) else MIN_WAIT_SHARE
    waits = {rank.rank: [core_waits(rank).get(step, 0.0) for step in common] for rank in ranks if rank.in_full}
    late = _late(table, waits, max(MIN_WAIT_NS, MIN_WAIT_SHARE * whole))
    for phase in ("forward", "other"):
        late = late or _late(table, waits, max(MIN_WAIT_NS, least * whole), phase)
    late = late or _late_by_batches(ranks, table, waits, max(MIN_WAIT_NS, least * whole))
    if late is None:
        return PulseLateness(steps=len(common), late=None)
    rank, caused, share = late
    by_number = {each.rank: each for each in ranks}
    excess = _excess(table, rank, [by_number[each] for each in table], caused)
    if excess.cause == Part.CALLBACK:
        others = [by_number[each] for each in table if each != rank]
        excess = replace(excess, callback=_callback(by_number[rank], others))
    return PulseLateness(
        steps=len(common),
        late=Lateness(rank=rank, caused_ns=round(caused), share=share, excess=excess),
        waits_ns={each: _waits(table, by_number[rank], by_number[each], caused) for each in table if each != rank},
    )


def share_cores(ranks: Sequence[Rank]) -> bool:
    """Return whether all ranks compute on the cores of one machine."""
    return all(rank.facts.is_cpu for rank in ranks) and len({rank.facts.host for rank in ranks}) == 1


def _ns(phases: Breakdown, *names: str) -> int:
    return sum(phases.get(name) or 0 for name in names)


def _late(
    table: dict[int, list[Breakdown]], waits: dict[int, list[float]], least_ns: float, meeting: str | None = None
) -> tuple[int, float, float] | None:
    """Return the late rank, its lateness in the mean step, and its share of all ranks'; None where none is late.

    Args:
        table: the phases of the steps of each rank.
        waits: how long each waits for a core in these steps.
        least_ns: notable lateness.
        meeting: compare this phase, in which a rank may wait itself, and not those in which it does not.
    """
    steps = len(next(iter(table.values())))
    found: list[tuple[int, float]] = []
    for at in range(steps):
        own = {rank: _ns(rows[at], *((meeting,) if meeting else _OWN)) for rank, rows in table.items()}
        (rank, most), (_, second), *_ = Counter(own).most_common(2)
        late: float = most - second
        if meeting:
            meets = {each: _ns(rows[at], *({"backward", "other"} - {meeting})) for each, rows in table.items()}
            late = min(late, min(ns for each, ns in meets.items() if each != rank) - meets[rank])
        usual = statistics.median_low(own[at] for each, own in waits.items() if each != rank)
        found.append((rank, max(late - max(waits[rank][at] - usual, 0), 0)))
    caused = dict.fromkeys(table, 0.0)
    for each, late in found:
        caused[each] += late
    rank, ns = max(caused.items(), key=itemgetter(1))
    if ns < least_ns * steps or not _is_steady([late if each == rank else -late for each, late in found], least_ns):
        return None
    if not meeting:
        passes = {each: sum(_ns(phases, *_MEETING) for phases in rows) for each, rows in table.items()}
        waited = statistics.median(total for each, total in passes.items() if each != rank) - passes[rank]
        if waited < WAITED * ns:
            return None
    return rank, ns / steps, ns / sum(caused.values())


def _late_by_batches(
    ranks: Sequence[Rank], table: dict[int, list[Breakdown]], waits: dict[int, list[float]], least_ns: float
) -> tuple[int, float, float] | None:
    """Return the rank that computes longer, as ``_late`` does, if its batches are larger than those of the others.

    The kernel counts a wait when it ends, perhaps in another step than the one that it lengthens: on busy cores, only
    the mean wait tells how much later a rank is for it. That alone shows ranks of equal work as late, too.
    """
    mean = {rank: [statistics.mean(own)] * len(own) for rank, own in waits.items()}
    late = _late(table, mean, least_ns, "forward")
    return late if late is not None and larger_batches(ranks, late[0]) is not None else None


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
    rows = (row for window in rank.windows for row in window.read(ThroughputRow).recorded)
    return {row.step: row.elements for row in rows if row.step is not None and row.elements is not None}


def _is_steady(late_ns: Sequence[float], least_ns: float) -> bool:
    """Return whether the mean lateness of one rank, less that of the others, exceeds its scatter over the run.

    A hiccup of the late rank makes the scatter large: without it, the lateness must be notable and exceed the rest's.
    """
    count = min(STRETCHES, len(late_ns))
    edges = [len(late_ns) * part // count for part in range(count + 1)]
    parts = sorted(statistics.mean(late_ns[begin:end]) for begin, end in pairwise(edges))
    rest = parts[:-1]
    return _exceeds_chance(parts) or (statistics.mean(rest) >= least_ns and _exceeds_chance(rest))


def _exceeds_chance(parts: Sequence[float]) -> bool:
    return statistics.mean(parts) > ERRORS * statistics.stdev(parts) / math.sqrt(len(parts))


def _excess(table: dict[int, list[Breakdown]], rank: int, ranks: Sequence[Rank], caused_ns: float) -> Excess:
    """Return what takes the rank longer."""
    pauses = {each.rank: _garbage_ns(each) for each in ranks}
    usual = statistics.median(ns for each, ns in pauses.items() if each != rank)
    if pauses[rank] - usual >= EXPLAINS * caused_ns:
        return Excess(Part.GC_PAUSES, round(pauses[rank]), round(usual))
    found: list[tuple[float, Part, float, float]] = []
    for phase, cause in _CAUSE.items():
        means = {each: statistics.mean(_ns(phases, phase) for phases in rows) for each, rows in table.items()}
        usual = statistics.median(ns for each, ns in means.items() if each != rank)
        found.append((means[rank] - usual, cause, means[rank], usual))
    _, cause, own, usual = max(found)
    return Excess(cause, round(own), round(usual))


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
    found = Counter[Part]()
    for row in rank.actions:
        if row.action and row.phase == "other" and not row.in_window and row.steps and (part := meeting(row.action)):
            found[part] += (row.total_ns or 0) // row.steps
    return found


def _garbage_ns(rank: Rank) -> float:
    """Return the GC pauses of a rank in the mean step outside windows."""
    rows = [row for row in rank.actions if row.action == GC_PAUSE and not row.in_window and row.steps]
    return sum((row.total_ns or 0) / (row.steps or 1) for row in rows)


def _callback(rank: Rank, others: Sequence[Rank]) -> str | None:
    """Return the callback and hook that takes the rank the longest beyond the other ranks."""

    def spent(each: Rank) -> Counter[str]:
        found = Counter[str]()
        for row in each.actions:
            if row.action and row.phase == "callbacks" and not row.in_window and row.steps:
                found[action_name(row.action)] += (row.total_ns or 0) // row.steps
        return found

    return beyond_others(spent(rank), [spent(other) for other in others])


def beyond_others(mine: Mapping[str, int], others: Sequence[Mapping[str, int]]) -> str | None:
    """Return the name whose time on a rank exceeds the median of the other ranks the most, None where none does."""
    usual = {name: statistics.median_low([times.get(name, 0) for times in others]) for name in mine}
    name = max(mine, key=lambda each: mine[each] - usual[each], default=None)
    return name if name is not None and mine[name] > usual[name] else None
