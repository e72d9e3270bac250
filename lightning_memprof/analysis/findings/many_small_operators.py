"""A step on the host that is cut into operators so short that calling them is most of the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import on_rank, seen_in, shorter_name
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import HostOperators, TraceReport

__all__ = ["many_small_operators"]

# A small model's healthy step calls 100 to 300 of them; a thousand at 3 us and more each are worth a change of code.
MANY: Final = 1_000
# From half on, arithmetic is the smaller part of the step; a transformer of four layers on a CPU has a twelfth.
NOTABLE_SHARE: Final = 0.50
# What torch's profiler takes of the host for an operator: 1.5 us, measured on a CPU with 10,000 a step.
EVENT_NS: Final = 1_500
SHOWN: Final = 3
OPTIMIZER: Final = "Optimizer.step#"
COMPILE: Final = "Let the compiler make one of many: torch.compile(model)."
VECTORISE: Final = "Do in one operator what a loop does in many: torch.stack the tensors, or torch.vmap the function."
FOREACH: Final = "Update all parameters at once: torch.optim.AdamW(..., fused=True), or foreach=True."
LARGER: Final = (
    "Give each operator more to do: DataLoader(batch_size=...) larger, rather than steps that are accumulated."
)


def many_small_operators(trace: TraceReport) -> list[Finding]:
    """Say that a step on the host is mostly the calling of very short operators, and which ones."""
    found = trace.host_operators
    if found is None or found.operators < MANY:
        return []
    recording_ns = found.events * EVENT_NS
    step_ns, calling_ns = found.step_ns - recording_ns, found.small_ns + found.between_ns - recording_ns
    share = calling_ns / step_ns if step_ns > 0 else 0.0
    if share <= NOTABLE_SHARE:
        return []
    return [
        Finding(
            rule="many_small_operators",
            # A compiler saves much of it and a rewritten loop nearly all, but not every loop can be rewritten.
            severity=Severity.WARNING,
            sentence=(
                f"Launch-bound on the host: a step{on_rank(trace)} is {found.operators:,} operators, half of which "
                f"take {format_ns(found.median_ns)} or less, and calling them takes {percent(share)} of it."
            ),
            why=_why(found),
            next_steps=_next_steps(found),
            evidence=seen_in(trace),
            numbers={
                "share": share,
                "operators": found.operators,
                "median_ns": found.median_ns,
                "small_ns": found.small_ns,
                "between_ns": found.between_ns,
                "step_ns": found.step_ns,
                "recording_ns": recording_ns,
                "steps": found.steps,
                "most_frequent": [name for name, _ in found.names],
                "most_in": [name for name, _ in found.places],
            },
            weight=share,
        )
    ]


def _why(found: HostOperators) -> str:
    text = (
        f"Of a recorded step of {format_ns(found.step_ns)}, {format_ns(found.small_ns)} pass in short operators and "
        f"{format_ns(found.between_ns)} between them; recording takes about {format_ns(found.events * EVENT_NS)}, "
        f"which does not count. Most are {_list(found.names)}"
    )
    return f"{text}, in {_list(found.places)}." if found.places else f"{text}."


def _list(counted: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{shorter_name(name)} ({count:,})" for name, count in counted[:SHOWN])


def _next_steps(found: HostOperators) -> tuple[str, ...]:
    """Return first what helps where most of them are."""
    if found.places and found.places[0][0].startswith(OPTIMIZER):
        return (FOREACH, COMPILE, LARGER)
    return (COMPILE, VECTORISE, FOREACH, LARGER)
