"""Rules about one operator trace, whoever recorded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.allocator_thrash import allocator_thrash
from lightning_memprof.analysis.findings.blocking_transfers import blocking_transfers
from lightning_memprof.analysis.findings.communication_exposed import communication_exposed
from lightning_memprof.analysis.findings.gpu_idle import gpu_idle
from lightning_memprof.analysis.findings.input_bound_trace import input_bound_trace
from lightning_memprof.analysis.findings.many_small_kernels import many_small_kernels
from lightning_memprof.analysis.findings.many_small_operators import many_small_operators
from lightning_memprof.analysis.findings.recording_overhead import recording_overhead
from lightning_memprof.analysis.findings.synchronization import synchronization
from lightning_memprof.analysis.findings.tensor_cores_unused import tensor_cores_unused

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Finding
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["TRACE_RULES", "findings_of_traces"]

# Of thousands of traces a person opens a few.
MAX_EVIDENCE: Final = 16

TRACE_RULES: Final[tuple[Callable[[TraceReport], list[Finding]], ...]] = (
    input_bound_trace,
    allocator_thrash,
    communication_exposed,
    gpu_idle,
    synchronization,
    blocking_transfers,
    tensor_cores_unused,
    many_small_kernels,
    many_small_operators,
    recording_overhead,
)


def findings_of_traces(traces: Iterable[TraceReport]) -> list[Finding]:
    """Return what the rules find; what several traces show is one finding, of the worst, with the evidence of all."""
    found: dict[tuple[str, object], list[Finding]] = {}
    for trace in traces:
        for rule in TRACE_RULES:
            for finding in rule(trace):
                # A rule that looks at two directions says which one.
                found.setdefault((finding.rule, finding.numbers.get("kind")), []).append(finding)
    return [_worst(alike) for alike in found.values()]


def _worst(alike: list[Finding]) -> Finding:
    worst, *others = sorted(alike, key=lambda finding: (finding.severity, finding.weight), reverse=True)
    if not others:
        return worst
    more = "1 other trace shows it too." if len(others) == 1 else f"{len(others):,} other traces show it too."
    seen = (*worst.evidence, *(finding.evidence[0] for finding in others if finding.evidence))
    return replace(worst, why=f"{worst.why} {more}", evidence=seen[:MAX_EVIDENCE])
