"""Steps that take longer and longer: something is added in each of them, and all later ones go through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.growth import Slowing, steady_slowing
from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# Batches of other lengths, and other programs on the machine, make as much of a difference.
MIN_RISE: Final = 0.2
# The phase has as much of the rise, and a name as much of the phase.
EXPLAINS: Final = 0.5


class _Phase(NamedTuple):
    """A phase of the pulse: its parts of the ledger, and what may grow in it."""

    parts: tuple[Part, ...]
    next_step: str


PHASES: Final[Mapping[Part, _Phase]] = {
    Part.DATA_WAIT: _Phase(
        (Part.DATA_WAIT,),
        "Find what the data set keeps, or reads from its start again for each batch: a list, a file, a cache.",
    ),
    Part.FORWARD: _Phase(
        (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG, Part.METRIC),
        "Find what forward goes through and each step adds to: hooks that are not removed, a list, a cache, a metric.",
    ),
    Part.BACKWARD: _Phase(
        (Part.BACKWARD, Part.BACKWARD_HOOK),
        "Detach what one step hands to the next (hidden states, losses): backward runs through earlier steps, too.",
    ),
    Part.OPTIMIZER: _Phase(
        (Part.OPTIMIZER,),
        "Find what is added to the optimizer in each step: parameter groups (add_param_group), hooks.",
    ),
    Part.CALLBACK: _Phase(
        (Part.CALLBACK, Part.LOGGING, Part.CHECKPOINT, Part.VALIDATION),
        "Find what {name} keeps from step to step and goes through each time: a list of outputs, a file.",
    ),
    Part.UNTRACKED: _Phase(
        (Part.UNTRACKED, Part.MODULE_HOOK, Part.LOGGING, Part.METRIC),
        "Find what the training loop keeps from step to step and goes through each time.",
    ),
}
HOOK: Final = (
    "Remove the forward hook {name} after use (handle.remove()), or register it once: each one runs in all later steps."
)
RECORD: Final = (
    "Record steps at both ends and compare: MemProfilerCallback(schedule=Schedule(steps=({first}, {last}), active=1))."
)


def slower_steps(facts: Facts) -> Finding | None:
    """Find steps that take longer and longer, and the phase in which they do.

    Recovers at most the time above that of the first steps: of a steady slope half of its rise, and no more than the
    phase's lines. It recovers nothing where the batches themselves get larger. A finding that names the code in the
    same lines comes before it.
    """
    found = [worst for rank in facts.run.ranks if rank.rank in facts.ledgers and (worst := _of_rank(rank)) is not None]
    if not found:
        return None
    rank, part, steps, slowing = max(found, key=lambda each: each[3].added_ns)
    ledger, phase = facts.ledgers[rank.rank], PHASES[part]
    excess = min(steps.added_ns / 2, ledger.ns(*phase.parts))
    worth = Recovery(unit="ns", min=0, max=excess, whole=ledger.step_ns)
    hook = _main(ledger, Part.FORWARD_HOOK) if part == Part.FORWARD else ""
    name = _main(ledger, *phase.parts)
    named = f", which calls the forward hook {hook}" if hook else f" (largest part: {name})" if name else ""
    return Finding(
        rule="slower_steps",
        title=(
            f"Steps get slower: each takes {format_ns(steps.per_step_ns)} longer than the one before"
            f"{facts.on_rank(rank)}, mostly in {part.label}{named}."
        ),
        why=(
            f"Over {steps.steps} steps they rise steadily from {format_ns(steps.start_ns)} to "
            f"{format_ns(steps.start_ns + steps.added_ns)} ({percent(steps.added_ns / steps.start_ns)} more), "
            f"{part.label} by {format_ns(slowing.added_ns)}."
        ),
        remedies=(
            *((HOOK.format(name=hook),) if hook else ()),
            phase.next_step.format(name=name or "a callback"),
            RECORD.format(first=slowing.first, last=slowing.first + slowing.steps),
            "Where batches get longer from step to step, shuffle them.",
        ),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "phase": part.phase,
            "per_step_ns": round(steps.per_step_ns),
            "start_ns": steps.start_ns,
            "added_ns": steps.added_ns,
            "phase_added_ns": slowing.added_ns,
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


def _of_rank(rank: Rank) -> tuple[Rank, Part, Slowing, Slowing] | None:
    """Return the phase with most of a rank's rise, and the rise of the steps and of the phase; None without one."""
    steps = steady_slowing(rank.pulse, "duration_ns", without="core_wait_ns")
    if steps is None or steps.added_ns < MIN_RISE * steps.start_ns:
        return None
    phases = {part: found for part in PHASES if (found := steady_slowing(rank.pulse, f"{part.phase}_ns")) is not None}
    part = max(phases, key=lambda each: phases[each].added_ns, default=None)
    if part is None or phases[part].added_ns < EXPLAINS * steps.added_ns:
        return None
    return rank, part, steps, phases[part]
