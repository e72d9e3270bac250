"""No rule applies: what dominates, and how to look further."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Evidence, Finding, Severity, percent, shown_path
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from lightning_memprof.analysis.run import Run

__all__ = ["nothing_found"]

# With fewer steps the first ones, which are never typical, are most of what was seen.
FEW_STEPS: Final = 5
MAX_MESSAGE: Final = 120
DOING: Final = {
    "data_wait": "waiting for data",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "callbacks": "callbacks",
    "other": "what lies between the phases",
}


def nothing_found(evidence: Evidence) -> Finding:
    """Say what dominates the step, and name the command that shows more."""
    run = evidence.run
    statistics = evidence.statistics.get(run.lead.rank) or next(iter(evidence.statistics.values()), None)
    next_steps = (_look_further(run),)
    if statistics is None:
        return Finding(
            rule="nothing_found",
            severity=Severity.NONE,
            sentence="No step was measured.",
            evidence="The run has no pulse: it ended before its first step was over, or the pulse is switched off.",
            next_steps=("Train for some steps with MemProfilerCallback() in Trainer(callbacks=[...]).",),
        )
    first, second = sorted(DOING, key=lambda phase: statistics.breakdown_ns[phase] or 0, reverse=True)[:2]
    few = f" Only {statistics.steps} steps were seen: too few to judge." if statistics.steps < FEW_STEPS else ""
    failed = next((rank.exception for rank in run.ranks if rank.exception), None)
    return Finding(
        rule="nothing_found",
        severity=Severity.NONE,
        sentence=f"No bottleneck found: {DOING[first]} takes {percent(statistics.share(first))} of a step.",
        evidence=(
            (f"The run ended early with {failed[:MAX_MESSAGE]}. " if failed else "")
            + f"A step takes {format_ns(statistics.median_ns)}; next comes {DOING[second]} with "
            f"{percent(statistics.share(second))}.{few}"
        ),
        next_steps=next_steps,
        numbers={"dominant": first, "share": statistics.share(first), "duration_ns": statistics.mean_ns},
    )


def _look_further(run: Run) -> str:
    """Name the command for the most telling artifact that is there."""
    traces = [one for one in run.artifacts if one.type == "trace" and one.state == "present"]
    if traces:
        folder = shlex.quote(shown_path(traces[0].file.parent))
        return f"See every operator on a time line: tensorboard --logdir {folder}"
    return 'Record the operators of some steps too: Trainer(..., profiler="fts_extended")'
