"""Memory ran out: nothing else about the run matters as much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.oom.autopsy import autopsies

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Facts

__all__ = ["out_of_memory"]

# What the allocator's snapshot adds is on the page itself.
NO_SNAPSHOT: Final = 0


def out_of_memory(facts: Facts) -> list[Finding]:
    """Say where memory ran out; where it was caught and the run went on, how often."""
    found = autopsies(facts.run, max_bytes=NO_SNAPSHOT)
    if not found:
        return []
    fatal = [autopsy for autopsy in found if autopsy.ended_run]
    autopsy = (fatal or found)[-1 if not fatal else 0]
    what = "The host" if autopsy.is_host else autopsy.device
    rank = f" of rank {autopsy.rank}" if len(facts.run.ranks) > 1 else ""
    where = "before the first step" if autopsy.place["step"] is None else f"in step {autopsy.place['step']}"
    phase = f", in {str(autopsy.place['phase']).replace('_', ' ')}" if autopsy.place["phase"] else ""
    times = "" if fatal else f" {len(found)} time{'s' * (len(found) > 1)}, last"
    return [
        Finding(
            rule="out_of_memory",
            severity=Severity.CRITICAL if fatal else Severity.WARNING,
            sentence=f"{what}{rank} ran out of memory{times} {where}{phase}: {autopsy.cause}.",
            why=autopsy.why,
            next_steps=autopsy.next_steps,
            numbers={
                "asked_bytes": autopsy.asked_bytes,
                "cause": autopsy.cause,
                "step": autopsy.place["step"],
                "events": len(found),
            },
            weight=1.0,
        )
    ]
