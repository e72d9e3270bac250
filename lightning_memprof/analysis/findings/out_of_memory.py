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
    fatal = [one for one in found if one.ended_run]
    one = (fatal or found)[-1 if not fatal else 0]
    what = "The host" if one.is_host else one.device
    rank = f" of rank {one.rank}" if len(facts.run.ranks) > 1 else ""
    where = "before the first step" if one.place["step"] is None else f"in step {one.place['step']}"
    phase = f", in {str(one.place['phase']).replace('_', ' ')}" if one.place["phase"] else ""
    times = "" if fatal else f" {len(found)} time{'s' * (len(found) > 1)}, last"
    return [
        Finding(
            rule="out_of_memory",
            severity=Severity.CRITICAL if fatal else Severity.WARNING,
            sentence=f"{what}{rank} ran out of memory{times} {where}{phase}: {one.cause}.",
            why=one.why,
            next_steps=one.next_steps,
            numbers={
                "asked_bytes": one.asked_bytes,
                "cause": one.cause,
                "step": one.place["step"],
                "events": len(found),
            },
            weight=1.0,
        )
    ]
