"""Steps that take longer and longer: something is added in each of them, and all later ones go through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.growth import Slowing, steady_slowing
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import core_waits
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import DETACH_STATE, FIND_KEPT, RECORD_BOTH_ENDS, REMOVE_HOOK, SHUFFLE, Remedy
from lightning_memprof.judge.rule import Detail, Fact, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent


class _Phase(NamedTuple):
    """A phase of the pulse: its parts of the ledger, and where to find what grows in it."""

    parts: tuple[Part, ...]
    remedy: Remedy


PHASES: Final[Mapping[Part, _Phase]] = {
    Part.DATA_WAIT: _Phase((Part.DATA_WAIT,), FIND_KEPT.filled(owner="the data set", kept="a list, a file, a cache")),
    Part.FORWARD: _Phase(
        (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG, Part.METRIC),
        FIND_KEPT.filled(owner="forward", kept="hooks that are not removed, a list, a cache, a metric"),
    ),
    Part.BACKWARD: _Phase((Part.BACKWARD, Part.BACKWARD_HOOK), DETACH_STATE),
    Part.OPTIMIZER: _Phase(
        (Part.OPTIMIZER,), FIND_KEPT.filled(owner="the optimizer", kept="parameter groups (add_param_group), hooks")
    ),
    Part.CALLBACK: _Phase((Part.CALLBACK, Part.LOGGING, Part.CHECKPOINT, Part.VALIDATION), FIND_KEPT),
    Part.UNTRACKED: _Phase((Part.UNTRACKED, Part.MODULE_HOOK, Part.LOGGING, Part.METRIC), FIND_KEPT),
}
# Where the time of a longer step may be, too.
ELSEWHERE: Final = (Part.TRANSFER, Part.STALL, Part.GC_PAUSES, Part.COMPILE, Part.RANK_WAIT)
HOOKS: Final = (Part.FORWARD_HOOK, Part.BACKWARD_HOOK)


def slower_steps(facts: Facts) -> Iterator[Found]:
    """Return half of the rise of steps that take longer and longer, and the phase that adds most."""
    found = [worst for rank in facts.run.ranks if rank.rank in facts.ledgers and (worst := _of_rank(rank)) is not None]
    if not found:
        return
    rank, grown, steps, added_ns = max(found, key=lambda each: each[2].added_ns)
    ledger, phase = facts.ledgers[rank.rank], PHASES[grown]
    hooks = tuple(part for part in HOOKS if part in phase.parts)
    hook, name = _main(ledger, *hooks), _main(ledger, *phase.parts)
    end = RECORD_BOTH_ENDS.filled(first=steps.first, last=steps.first + steps.steps)
    detail = Detail(
        fields={
            "name": f"hook {hook}" if hook else name,
            "start": format_ns(steps.start_ns),
            "end": format_ns(steps.start_ns + steps.added_ns),
            "phase": grown.label,
        },
        measured=f"Over {steps.steps} steps, each step takes {format_ns(steps.per_step_ns)} longer than the last",
        why=(
            f"{percent(min(added_ns / steps.added_ns, 1.0))} of the added {format_ns(steps.added_ns)} is in "
            f"{grown.label}."
        ),
        remedies=(
            *((REMOVE_HOOK.filled(owner=hook),) if hook else ()),
            *(phase.remedy.filled(owner=name or "the training loop", kept="a list of outputs, a file"), end, SHUFFLE),
        ),
        numbers={
            "phase": grown.phase,
            "per_step_ns": round(steps.per_step_ns),
            "start_ns": steps.start_ns,
            "added_ns": steps.added_ns,
            "phase_added_ns": added_ns,
            "steps": steps.steps,
        },
    )
    excess = min(steps.added_ns / 2, ledger.step_ns - ledger.ns(Part.CORE_WAIT))
    yield Fact(source=rank, ledger=ledger, lines=(TimeLine(part=grown, name=hook or name, ns=excess),)), detail


def _main(ledger: TimeLedger, *parts: Part) -> str:
    """Return the name whose lines have more than half of the time of parts, empty where none has."""
    lines = ledger.of(*parts)
    names = {line.name for line in lines if line.name}
    spent = {name: total(line for line in lines if line.name == name) for name in names}
    return next((name for name, ns in spent.items() if ns > POLICY.most * ledger.ns(*parts)), "")


def _of_rank(rank: Rank) -> tuple[Rank, Part, Slowing, int] | None:
    """Return the phase with most of a rank's rise, the rise of the steps, and of the phase; None without one."""
    steps = steady_slowing(rank.pulse, "duration_ns", core_waits(rank))
    if steps is None:
        return None
    found = ((part, steady_slowing(rank.pulse, f"{part.phase}_ns")) for part in PHASES)
    phases = {part: slowing.added_ns for part, slowing in found if slowing is not None}
    grown = max(phases, key=lambda each: phases[each], default=None)
    return (rank, grown, steps, phases[grown]) if grown is not None else None


ROWS: Final = (
    Rule(
        id="slower_steps",
        about=(
            "Steps take longer and longer: each step adds to some state, and all later steps iterate over it. A "
            "run of ten times as many steps takes up to a hundred times as long."
        ),
        when=(
            "At least 16 steps are needed, without the first tenth of the run and those in windows. The step "
            "time without the wait for a core rises steadily: the medians of the four quarters increase one "
            "after the other, and the rise is three times its scatter. The finding has the phase that adds most, "
            "and the owner of more than half of that phase, if one exists. Counts the mean excess over the first "
            "steps, half of the rise. Not reported for a jump, for steps of varying length, and for a cache that "
            "fills."
        ),
        trade_off="None; nothing is recovered where the batches themselves get larger.",
        of=(*dict.fromkeys(part for phase in PHASES.values() for part in phase.parts), *ELSEWHERE),
        find=slower_steps,
        says="Steps get slower, from {start} to {end}{rank}, mostly in {phase}: {name}.",
        unnamed="Steps get slower, from {start} to {end}{rank}, mostly in {phase}.",
        # Without what each step adds, the steps are as long as the first ones; some of it may have to stay.
        saves=(0.5, 1.0),
    ),
)
