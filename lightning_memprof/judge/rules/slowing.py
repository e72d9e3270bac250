"""Steps that take longer and longer: something is added in each of them, and all later ones go through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_memprof.account.ledger.growth import Growth, steady_slowing
from lightning_memprof.account.ledger.holders import ENDING, who_holds
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import core_waits
from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.causes import holder_cause
from lightning_memprof.judge.fact import Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# The phases of the pulse, with their parts of the ledger.
PHASES: Final[Mapping[Part, tuple[Part, ...]]] = {
    Part.DATA_WAIT: (Part.DATA_WAIT,),
    Part.FORWARD: (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG, Part.METRIC),
    Part.BACKWARD: (Part.BACKWARD, Part.BACKWARD_HOOK),
    Part.OPTIMIZER: (Part.OPTIMIZER,),
    Part.CALLBACK: (Part.CALLBACK, Part.LOGGING, Part.CHECKPOINT, Part.VALIDATION),
    Part.UNTRACKED: (Part.UNTRACKED, Part.MODULE_HOOK, Part.LOGGING, Part.METRIC),
}
# Where the time of a longer step may be, too.
ELSEWHERE: Final = (Part.TRANSFER, Part.STALL, Part.GC_PAUSES, Part.COMPILE, Part.RANK_WAIT)
HOOKS: Final = (Part.FORWARD_HOOK, Part.BACKWARD_HOOK)


def slower_steps(facts: Facts) -> Iterator[Found]:
    """Return half of the rise of steps that take longer and longer, and the phase that adds most."""
    found = [worst for rank in facts.run.ranks if rank.rank in facts.ledgers and (worst := _of_rank(rank)) is not None]
    if not found:
        return
    rank, phases, steps = max(found, key=lambda each: each[2].added)
    grown = max(phases, key=lambda each: phases[each])
    ledger, parts = facts.ledgers[rank.rank], PHASES[grown]
    hook, name = _main(ledger, *(part for part in HOOKS if part in parts)), _main(ledger, *parts)
    holders = (row for row in who_holds(rank.read(HolderRow).rows) if row.place and row.kind not in ENDING)
    held = holder_cause(holder) if not (hook or name) and (holder := next(holders, None)) is not None else None
    # A longer graph of earlier steps has no longer forward.
    is_graph = grown == Part.BACKWARD and phases.get(Part.FORWARD, 0) < POLICY.verdict * steps.added
    kept = do.DETACH_STATE if is_graph else do.FIND_KEPT.filled(owner=name or grown.label)
    share = percent(min(phases[grown] / steps.added, 1.0))
    ends = do.RECORD_STEP.filled(steps=f"{steps.first}, {steps.first + steps.steps}")
    detail = Detail(
        fields={
            "name": f"hook {hook}" if hook else name or (f"{held.owner} grows" if held else ""),
            "start": format_ns(steps.start),
            "end": format_ns(steps.start + steps.added),
            "phase": grown.label,
        },
        measured=f"Over {steps.steps} steps, each step takes {format_ns(steps.per_step)} longer than the last",
        why=f"{share} of the added {format_ns(steps.added)} is in {grown.label}{f'; {held.why}' if held else ''}.",
        remedies=(
            *((do.REMOVE_HOOK.filled(owner=hook),) if hook else ()),
            *((held.remedy,) if held else ()),
            kept,
            ends,
        ),
        numbers={
            "phase": grown.phase,
            "per_step_ns": round(steps.per_step),
            "start_ns": steps.start,
            "added_ns": steps.added,
            "phase_added_ns": phases[grown],
            "steps": steps.steps,
        },
    )
    excess = min(steps.added / 2, ledger.step_ns - ledger.ns(Part.CORE_WAIT))
    owner = hook or name or (held.owner if held else "")
    yield Fact(source=rank, ledger=ledger, lines=(TimeLine(part=grown, name=owner, ns=excess),)), detail


def _main(ledger: TimeLedger, *parts: Part) -> str:
    """Return the name whose lines have more than half of the time of parts, empty where none has."""
    lines = ledger.of(*parts)
    names = {line.name for line in lines if line.name}
    spent = {name: total(line for line in lines if line.name == name) for name in names}
    return next((name for name, ns in spent.items() if ns > POLICY.most * ledger.ns(*parts)), "")


def _of_rank(rank: Rank) -> tuple[Rank, dict[Part, int], Growth] | None:
    """Return the rises of a rank's phases, and of its steps; None without one."""
    steps = steady_slowing(rank.pulse, "duration_ns", core_waits(rank))
    if steps is None:
        return None
    found = ((part, steady_slowing(rank.pulse, f"{part.phase}_ns")) for part in PHASES)
    phases = {part: slowing.added for part, slowing in found if slowing is not None}
    return (rank, phases, steps) if phases else None


ROWS: Final = (
    Rule(
        id="slower_steps",
        about="Steps take longer and longer: each adds to some state that all later steps iterate over.",
        when=(
            "Over at least 16 steps outside windows, the medians of the four quarters of the step time, waits for a "
            "core excluded, increase one after the other, by three times their scatter. Counts half of the rise. Not "
            "reported for a jump, for steps of varying length, and for a cache that fills."
        ),
        trade_off="None; nothing is recovered where the batches themselves get larger.",
        of=(*dict.fromkeys(part for parts in PHASES.values() for part in parts), *ELSEWHERE),
        find=slower_steps,
        says="Steps get slower, from {start} to {end}{rank}, mostly in {phase}: {name}.",
        unnamed="Steps get slower, from {start} to {end}{rank}, mostly in {phase}.",
        # Without what each step adds, the steps are as long as the first ones; some of it may have to stay.
        saves=(0.5, 1.0),
    ),
)
