"""One rank for which the others wait."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.analysis.run.rows import text
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Evidence
    from lightning_memprof.analysis.ranks.report import Straggler

__all__ = ["straggler"]

# As for waiting for data: from three tenths on it decides how long the run takes.
SEVERE_SHARE: Final = 0.30
# What no other program makes slower by taking a core.
OWN: Final = frozenset({"data_wait", "callbacks"})
SHARED: Final = (
    " All ranks compute on the cores of one machine: what else runs there, or where the system puts them, makes one "
    "late as well."
)

WORDS: Final = {
    "data_wait": "its data fetch takes",
    "callbacks": "its callbacks take",
    "optimizer": "its optimizer takes",
    "other": "what lies between its hooks takes",
    "compute": "its forward and backward take",
}
NEXT: Final = {
    "data_wait": "Look at what rank {rank} reads: its share of the data, its disk, its DataLoader workers{host}.",
    "callbacks": "Do in {callback} on rank {rank} what all ranks share, or do it less often{host}.",
    "optimizer": "Compare the parameters that rank {rank} updates with those of the others{host}.",
    "other": "Open the timeline of rank {rank} beside another's between two steps{host}.",
    "compute": "Compare rank {rank} with the others: the length of its batches, its device's clock and heat{host}.",
}
UNKNOWN: Final = "Open the timeline of rank {rank} beside another's before a collective{host}."


def straggler(facts: Facts) -> list[Finding]:
    """Say which rank the others wait for, and what it does meanwhile."""
    found = facts.ranks.straggler if facts.ranks else None
    if found is None:
        return []
    at_stake = found.caused_ns if found.caused_ns is not None else (found.own_ns or 0) - (found.others_ns or 0)
    share = min(1.0, at_stake / found.step_ns) if found.step_ns else 0.0
    by_chance = found.cause not in OWN and _share_cores(facts)
    severity = Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING
    return [
        Finding(
            rule="straggler",
            severity=Severity.INFO if by_chance else severity,
            sentence=_sentence(found),
            why=_why(found, share) + (SHARED if by_chance else ""),
            next_steps=(_next(found),),
            evidence=_evidence(facts, found),
            numbers={**dataclasses.asdict(found), "share": share},
            # Its slow phase is found too, as if all ranks had it: who waits for one rank mends that rank first.
            weight=1.0 + share,
        )
    ]


def _share_cores(facts: Facts) -> bool:
    """Say whether the ranks are processes without a device on one machine."""
    device = text(facts.run.lead.facts, "device") or ""
    return device.startswith("cpu") and facts.ranks is not None and len({rank.host for rank in facts.ranks.ranks}) == 1


def _evidence(facts: Facts, found: Straggler) -> tuple[Evidence, ...]:
    """Return its steps, and the windows in which the others were seen waiting; of thousands of ranks not all are."""
    rank = next((rank for rank in facts.run.ranks if rank.rank == found.rank and rank.in_full), None)
    if rank is None:
        return ()
    return (*((facts.pulse(rank),) if rank.pulse else ()), *facts.recorded(rank, "operator_trace"))


def _sentence(found: Straggler) -> str:
    if found.cause is None or found.own_ns is None or found.others_ns is None:
        return f"Rank {found.rank} is the straggler: the others wait for it."
    named = found.cause == "callbacks" and found.callback
    words = f"its callback {found.callback} takes" if named else WORDS[found.cause]
    return (
        f"Rank {found.rank} is the straggler: {words} {format_ns(found.own_ns)} a step, "
        f"{format_ns(found.others_ns)} on the others."
    )


def _why(found: Straggler, share: float) -> str:
    if found.caused_ns is None:
        return (
            f"It recorded no collective: what its step of {format_ns(found.step_ns)} has more than the others' tells; "
            "a window with the operator trace shows who waits for whom."
        )
    host = f" on {found.host}" if found.host else ""
    return (
        f"In collectives the others wait {format_ns(found.caused_ns)} of a {format_ns(found.step_ns)} step for it "
        f"({percent(share)}), {percent(found.caused_share)} of all such waiting; it runs{host or ' there'}."
    )


def _next(found: Straggler) -> str:
    text = NEXT.get(found.cause, UNKNOWN) if found.cause else UNKNOWN
    host = f", on {found.host}" if found.host else ""
    return text.format(rank=found.rank, host=host, callback=found.callback or "its callbacks")
