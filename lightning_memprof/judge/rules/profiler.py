"""What profilers cost: another one in the training, and the overhead of this one in a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from lightning_memprof.account.ledger.run import typical_in_windows
from lightning_memprof.account.steps.statistics import PulseStatistics
from lightning_memprof.artifacts.manifest import OverheadFacts
from lightning_memprof.artifacts.series import (
    PROFILERS,
    PYTHON_PROFILER,
    TORCH_PROFILER,
    PulseRow,
)
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity, titled
from lightning_memprof.judge.measures import own_ns
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    FEWER_WINDOWS,
    RECORD_LESS,
    REMOVE_PYTHON_PROFILER,
    REMOVE_TORCH_PROFILER,
    SHORTER_WINDOWS,
    WITHOUT_PULSE,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_count, format_ns, percent

# Why the operator trace is not available: the words of capture and integration.
OTHER_PROFILER: Final = re.compile(r"its own torch profiler|owns torch\.profiler")
# Its events take host time for every operator, and are garbage to collect when it ends.
OTHER: Final = (0.2, 0.5)
# The share of calls of Python functions in the work is unknown.
PYTHON_OTHER: Final = (0.02, 0.2)
MIN_PROFILED: Final = 3
PROFILED: Final = (
    "forward", "backward", "optimizer", "callback", "module_hook", "logging", "gc_pauses", "untracked", "stall",
)  # fmt: skip
REMOVE: Final = {TORCH_PROFILER: REMOVE_TORCH_PROFILER, PYTHON_PROFILER: REMOVE_PYTHON_PROFILER}


def other_profiler(facts: Facts) -> Finding | None:
    """Find another profiler that runs in the training: torch's or a Python one.

    If it records some steps only, recovers how much longer those and the next ones, which write the trace, take than
    the median of the others. If it records all steps: of torch's profiler, 20% to 50% of forward and backward and the
    GC pauses; of a Python profiler, 2% to 20% of the work of the step.
    """
    found = [finding for rank in facts.run.ranks if (finding := _profiled(facts, rank)) is not None]
    return max(found, key=lambda finding: finding.weight) if found else None


def _profiled(facts: Facts, rank: Rank) -> Finding | None:
    refused = next(
        (row for row in facts.run.unavailable if row.rank == rank.rank and OTHER_PROFILER.search(row.reason)), None
    )
    steps = [row for row in rank.pulse if row.window is None and row.duration_ns is not None]
    kinds = [row.other_profiler for row in steps if row.other_profiler]
    ledger = facts.ledgers.get(rank.rank)
    if ledger is None or not (refused or len(kinds) >= MIN_PROFILED):
        return None
    kind = TORCH_PROFILER if refused or TORCH_PROFILER in kinds else PYTHON_PROFILER
    excess, others = _beyond_others(steps)
    part = ""
    if others >= POLICY.steps and len(kinds) >= MIN_PROFILED:
        part = f" in {len(kinds)} of {len(steps)} steps"
        least = most = min(excess, ledger.ns(*PROFILED))
        why = (
            f"{format_count(len(kinds), 'step')} and those after them take {format_ns(excess)} of {ledger.length_text}"
        )
    elif kind == TORCH_PROFILER:
        passes, pauses = ledger.ns("forward", "backward"), ledger.ns("gc_pauses")
        least, most = (pauses + passes * share for share in OTHER)
        why = (
            f"It costs time for each operator; forward and backward take {format_ns(passes)}, GC pauses "
            f"{format_ns(pauses)} of {ledger.length_text}"
        )
    else:
        work = ledger.ns(*PROFILED)
        least, most = (work * share for share in PYTHON_OTHER)
        why = f"It costs time for each call of a function; the training's own work takes {format_ns(work)}"
    worth = Recovery(unit="ns", min=least, max=most, whole=ledger.step_ns)
    return Finding(
        rule="other_profiler",
        title=titled(
            "Another profiler is on: {kind} records the training{part}{rank}.",
            kind=PROFILERS[kind],
            part=part,
            rank=facts.on_rank(rank),
        ),
        why=f"{f'{refused.reason[:1].upper()}{refused.reason[1:]}. ' if refused else ''}{why}.",
        remedies=(REMOVE[kind],),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "profiled_steps": len(kinds), "steps": len(steps), "beyond_others_ns": excess},
        **worth.parts,
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


def profiler_overhead(facts: Facts) -> list[Finding]:
    """Find profiler overhead that takes much of the steps that the figures come from, or of the whole run.

    It is a note, and a warning only where most figures come from windows: a run can have steps outside these.
    """
    found = [
        finding
        for rank in facts.run.ranks
        if (statistics := facts.statistics.get(rank.rank)) is not None and statistics.mean_ns
        for finding in (_in_figures(facts, rank, statistics) or _of_windows(facts, rank) or _of_pulse(facts, rank),)
        if finding is not None
    ]
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _in_figures(facts: Facts, rank: Rank, statistics: PulseStatistics) -> Finding | None:
    overhead_ns = own_ns(rank, statistics)
    share, steps = overhead_ns / statistics.mean_ns, typical_in_windows(rank)
    if share <= POLICY.verdict:
        return None
    return Finding(
        rule="profiler_overhead",
        severity=Severity.WARNING if share >= POLICY.severe else Severity.INFO,
        title=f"Recording takes {percent(share)} of the steps that the figures come from{facts.on_rank(rank)}.",
        why=(
            f"{len(steps)} of the {statistics.used} steps are in windows; profiler overhead is "
            f"{format_ns(overhead_ns)} of a {format_ns(statistics.mean_ns)} step, and operators are slower there too."
        ),
        remedies=(FEWER_WINDOWS, RECORD_LESS.filled(dearest=_dearest(rank))),
        evidence=(facts.pulse(rank, steps), *facts.recorded(rank, "hooks")),
        numbers={"rank": rank.rank, "own_share": share, "own_ns": overhead_ns, "steps": len(steps)},
        weight=share,
    )


def _of_windows(facts: Facts, rank: Rank) -> Finding | None:
    run_ns = sum(row["duration_ns"] or 0 for row in rank.pulse)
    windows_ns = (rank.overhead.windows_ns if rank.overhead else None) or 0
    share = windows_ns / (run_ns + windows_ns) if windows_ns else 0.0
    if share < POLICY.severe:
        return None
    return Finding(
        rule="profiler_overhead",
        severity=Severity.INFO,
        title=f"Windows take {percent(share)} of the run{facts.on_rank(rank)}; other steps have the pulse only.",
        why=(
            f"{format_count(len(rank.windows), 'window')} took {format_ns(windows_ns)}, all steps {format_ns(run_ns)}"
            f"{_dearest(rank)}."
        ),
        remedies=(SHORTER_WINDOWS,),
        evidence=facts.recorded(rank, "hooks"),
        numbers={"rank": rank.rank, "windows_ns": windows_ns, "run_ns": run_ns},
    )


def _of_pulse(facts: Facts, rank: Rank) -> Finding | None:
    """Return the cost of the pulse, of at most 20 µs per step: a notable share occurs only in very short steps."""
    run_ns = sum(row["duration_ns"] or 0 for row in rank.pulse)
    overhead = rank.overhead or OverheadFacts()
    pulse_ns = (overhead.pulse_ns if overhead.pulse_cpu_ns is None else overhead.pulse_cpu_ns) or 0
    if pulse_ns <= POLICY.note * run_ns or not run_ns:
        return None
    return Finding(
        rule="profiler_overhead",
        severity=Severity.INFO,
        title=f"The pulse takes {percent(pulse_ns / run_ns)} of step time{facts.on_rank(rank)}.",
        why=f"{format_ns(pulse_ns / len(rank.pulse))} of a {format_ns(run_ns / len(rank.pulse))} step.",
        remedies=(WITHOUT_PULSE,),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "pulse_ns": pulse_ns, "run_ns": run_ns},
        weight=pulse_ns / run_ns,
    )


def _dearest(rank: Rank) -> str:
    known = {name: ns for name, ns in rank.overhead.collectors_ns.items() if ns} if rank.overhead else {}
    if not known:
        return ""
    name = max(known, key=lambda collector: known[collector])
    return f"; {name} took the most, {format_ns(known[name])}"
