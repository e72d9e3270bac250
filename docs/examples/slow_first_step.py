"""A finding: the first step takes a large part of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Facts, Finding, Severity
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below 20% of the run, a faster start saves little.
NOTABLE_SHARE: Final = 0.20
# A second is unnoticed.
MIN_NS: Final = 1_000_000_000


def slow_first_step(facts: Facts) -> list[Finding]:
    """Return a finding if the first step takes a large part of the run, with its usual causes."""
    findings = []
    for rank in facts.run.ranks:
        durations = [row["duration_ns"] or 0 for row in rank.pulse]
        share = _first_share(durations)
        if share < NOTABLE_SHARE or durations[0] < MIN_NS:
            continue
        findings.append(
            Finding(
                rule="slow_first_step",
                severity=Severity.INFO,
                sentence=f"The first step takes {share:.0%} of the run{facts.on_rank(rank)}.",
                why=f"Step {rank.pulse[0]['step']} takes {format_ns(durations[0])}, all {len(durations)} steps "
                f"{format_ns(sum(durations))}.",
                next_steps=("Cache compilation: torch.compile with TORCHINDUCTOR_FX_GRAPH_CACHE=1.",),
                evidence=(facts.pulse(rank, (rank.pulse[0]["step"] or 0,)),),
                numbers={"rank": rank.rank, "share": share, "first_ns": durations[0]},
                weight=share,
            )
        )
    return findings


def _first_share(durations: Sequence[int]) -> float:
    total = sum(durations)
    return durations[0] / total if total else 0.0
