"""Steps that take longer and longer: something is added in each of them, and all later ones go through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.growth import Slowing, steady_slowing
from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import core_waits
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, titled
from lightning_memprof.judge.remedies import (
    DETACH_STATE,
    FIND_IN_DATA,
    FIND_IN_FORWARD,
    FIND_IN_OPTIMIZER,
    FIND_KEPT,
    RECORD_BOTH_ENDS,
    REMOVE_AFTER_USE,
    SHUFFLE,
    Remedy,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# A name with more than half of a phase stands for it.
EXPLAINS: Final = 0.5
# Without what each step adds, the steps are as long as the first ones; some of it may have to stay.
SAVED: Final = (0.5, 1.0)


class _Phase(NamedTuple):
    """A phase of the pulse: its parts of the ledger, and where to find what grows in it."""

    parts: tuple[Part, ...]
    remedy: Remedy


PHASES: Final[Mapping[Part, _Phase]] = {
    Part.DATA_WAIT: _Phase((Part.DATA_WAIT,), FIND_IN_DATA),
    Part.FORWARD: _Phase((Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG, Part.METRIC), FIND_IN_FORWARD),
    Part.BACKWARD: _Phase((Part.BACKWARD, Part.BACKWARD_HOOK), DETACH_STATE),
    Part.OPTIMIZER: _Phase((Part.OPTIMIZER,), FIND_IN_OPTIMIZER),
    Part.CALLBACK: _Phase((Part.CALLBACK, Part.LOGGING, Part.CHECKPOINT, Part.VALIDATION), FIND_KEPT),
    Part.UNTRACKED: _Phase((Part.UNTRACKED, Part.MODULE_HOOK, Part.LOGGING, Part.METRIC), FIND_KEPT),
}
HOOKS: Final = (Part.FORWARD_HOOK, Part.BACKWARD_HOOK)


def slower_steps(facts: Facts) -> Finding | None:
    """Find steps that take longer and longer, and the phase that adds most.

    Recovers half to all of the time above that of the first steps: of a steady slope half of its rise. It recovers
    nothing where the batches themselves get larger.
    """
    found = [worst for rank in facts.run.ranks if rank.rank in facts.ledgers and (worst := _of_rank(rank)) is not None]
    if not found:
        return None
    rank, grown, steps, added_ns = max(found, key=lambda each: each[2].added_ns)
    ledger, phase = facts.ledgers[rank.rank], PHASES[grown]
    excess = min(steps.added_ns / 2, ledger.step_ns - ledger.ns(Part.CORE_WAIT))
    worth = Recovery(unit="ns", min=excess * SAVED[0], max=excess * SAVED[1], whole=ledger.step_ns)
    hooks = tuple(part for part in HOOKS if part in phase.parts)
    hook, name = _main(ledger, *hooks), _main(ledger, *phase.parts)
    return Finding(
        rule="slower_steps",
        title=titled(
            "Steps get slower, {start} to {end}{rank}, most in {phase}: {owner}."
            if hook or name
            else "Steps get slower, {start} to {end}{rank}, most in {phase}.",
            start=format_ns(steps.start_ns),
            end=format_ns(steps.start_ns + steps.added_ns),
            rank=facts.on_rank(rank),
            phase=grown.label,
            owner=f"hook {hook}" if hook else name,
        ),
        why=(
            f"Over {steps.steps} steps each takes {format_ns(steps.per_step_ns)} longer than the one before. "
            f"Of the {format_ns(steps.added_ns)} that they add, {percent(min(added_ns / steps.added_ns, 1.0))} is in "
            f"{grown.label}."
        ),
        remedies=(
            *((REMOVE_AFTER_USE.filled(owner=hook),) if hook else ()),
            phase.remedy.filled(owner=name or "the training loop"),
            RECORD_BOTH_ENDS.filled(first=steps.first, last=steps.first + steps.steps),
            SHUFFLE,
        ),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "phase": grown.phase,
            "per_step_ns": round(steps.per_step_ns),
            "start_ns": steps.start_ns,
            "added_ns": steps.added_ns,
            "phase_added_ns": added_ns,
            "steps": steps.steps,
        },
        **worth.parts,
    )


def _main(ledger: TimeLedger, *parts: Part) -> str:
    """Return the name whose lines have more than half of the time of parts, empty where none has."""
    lines = ledger.of(*parts)
    names = {line.name for line in lines if line.name}
    spent = {name: total(line for line in lines if line.name == name) for name in names}
    return next((name for name, ns in spent.items() if ns > EXPLAINS * ledger.ns(*parts)), "")


def _of_rank(rank: Rank) -> tuple[Rank, Part, Slowing, int] | None:
    """Return the phase with most of a rank's rise, the rise of the steps, and of the phase; None without one."""
    steps = steady_slowing(rank.pulse, "duration_ns", core_waits(rank))
    if steps is None:
        return None
    found = ((part, steady_slowing(rank.pulse, f"{part.phase}_ns")) for part in PHASES)
    phases = {part: slowing.added_ns for part, slowing in found if slowing is not None}
    grown = max(phases, key=lambda each: phases[each], default=None)
    return (rank, grown, steps, phases[grown]) if grown is not None else None
