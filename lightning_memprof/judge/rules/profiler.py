"""What profilers cost: another one in the training, and the overhead of this one in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from lightning_memprof.account.ledger.model import scaled
from lightning_memprof.account.parts import Part
from lightning_memprof.artifacts.series import (
    LIGHTNING_PROFILER,
    PROFILERS,
    PYTHON_PROFILER,
    STARTED_PROFILER,
    TORCH_PROFILER,
    PulseRow,
)
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import PASSES, Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns

PROFILED: Final = (
    *PASSES, Part.OPTIMIZER, Part.CALLBACK, Part.MODULE_HOOK, Part.LOGGING, Part.GC_PAUSES, Part.UNTRACKED, Part.STALL,
)  # fmt: skip
OWNERS: Final = (STARTED_PROFILER, LIGHTNING_PROFILER)


def other_profilers(facts: Facts) -> Iterator[Found]:
    """Yield the time of the rank on which another profiler costs most."""
    found = [each for rank in facts.run.ranks if (each := _profiled(facts, rank)) is not None]
    yield from sorted(found, key=lambda each: each[0].share)[-1:]


def _profiled(facts: Facts, rank: Rank) -> Found | None:
    steps = [row for row in rank.pulse if row.window is None and row.duration_ns is not None]
    kinds = [row.other_profiler for row in steps if row.other_profiler]
    ledger = facts.ledgers.get(rank.rank)
    refused = any(row.rank == rank.rank and row.reason in OWNERS for row in facts.run.unavailable)
    if ledger is None or (len(kinds) < POLICY.calls and not refused):
        return None
    kind = TORCH_PROFILER if refused or TORCH_PROFILER in kinds else PYTHON_PROFILER
    excess, others = _beyond_others(steps)
    passes, pauses, work = ledger.ns(*PASSES), ledger.ns(Part.GC_PAUSES), ledger.ns(*PROFILED)
    part = ""
    if others >= POLICY.steps and len(kinds) >= POLICY.calls:
        part = f" in {len(kinds)} of {len(steps)} steps"
        least = most = min(excess, work)
        why = f"{len(kinds)} steps and those after them take {format_ns(excess)} of {ledger.length_text}"
    elif kind == TORCH_PROFILER:
        least, most = (pauses + passes * share for share in POLICY.torch_profiler)
        why = (
            f"It adds time to each operator; forward and backward take {format_ns(passes)}, GC pauses "
            f"{format_ns(pauses)} of {ledger.length_text}"
        )
    else:
        least, most = (work * share for share in POLICY.python_profiler)
        why = f"It adds time to each function call; the training itself takes {format_ns(work)}"
    return (
        Fact(source=rank, ledger=ledger, lines=scaled(ledger.of(*PROFILED), most)),
        Detail(
            fields={"profiler": PROFILERS[kind], "part": part},
            measured=why,
            saves=(least / most if most else 0.0, 1.0),
            numbers={"profiled_steps": len(kinds), "steps": len(steps), "beyond_others_ns": excess},
        ),
    )


def _beyond_others(steps: Sequence[PulseRow]) -> tuple[float, int]:
    """Return the excess of profiled steps and the next ones over the median of the others, and the number of these.

    The excess is in ns per step of the run.
    """
    others: list[int] = []
    profiled: list[int] = []
    for before, row in pairwise(steps):
        (profiled if before.other_profiler or row.other_profiler else others).append(row.duration_ns or 0)
    if not others or not profiled:
        return 0.0, len(others)
    return max(sum(profiled) - len(profiled) * median(others), 0.0) / len(steps), len(others)


def dearest_collector(_: Facts, fact: Fact) -> Detail:
    """Return the collector that takes most."""
    taken = fact.rank.overhead.collectors_ns if fact.rank.overhead else {}
    name = max(taken, key=lambda collector: taken[collector] or 0, default="")
    return Detail(why=f"The collector {name} takes the most, {format_ns(taken[name])}." if name and taken[name] else "")


ROWS: Final = (
    Rule(
        id="other_profiler",
        about="A profiler of the program, or of the Trainer, slows down every step that it records.",
        when=(
            "torch.profiler, or a Python profiler such as cProfile, was recording at the end of at least 3 steps "
            "outside windows. If it records some steps only, the remedy recovers their excess over the others; else "
            "20% to 50% of forward and backward for torch.profiler, 2% to 20% of this time for a Python profiler."
        ),
        trade_off="The other profiler's output.",
        of=PROFILED,
        find=other_profilers,
        says="Another profiler is on: {profiler} records the training{part}{rank}.",
        remedies=(do.REMOVE_PROFILER,),
        saves=(0.0, 1.0),
    ),
    Rule(
        id="profiler_overhead",
        about="Too few steps are outside windows: the figures come from steps that were recorded.",
        trade_off="Fewer recorded steps.",
        of=(Part.PROFILER,),
        says="Profiler overhead is {share} that the figures come from{rank}.",
        remedies=(do.FEWER_WINDOWS,),
        saves=(0.5, 1.0),
        note=POLICY.verdict,
        detail=dearest_collector,
    ),
)
