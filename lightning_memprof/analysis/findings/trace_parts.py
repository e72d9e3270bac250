"""What the rules about one trace share: where it is seen, and which part of the device's time is at stake."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Evidence, Severity

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Cause, TraceReport

__all__ = [
    "NOTABLE_SHARE",
    "SEVERE_SHARE",
    "exact_percent",
    "idle_ns",
    "is_short",
    "longest_in",
    "on_rank",
    "seen_in",
    "severity_of",
    "shorter_name",
    "times",
]

# Below a tenth even work that costs nothing would make the program less than 1.12 times as fast.
NOTABLE_SHARE: Final = 0.10
# From three tenths on it decides how long the run takes: without it the program is 1.4 times as fast and more.
SEVERE_SHARE: Final = 0.30
# What is recorded in less than this is a try or a sample: the first launch alone takes milliseconds.
SHORT_WINDOW_NS: Final = 1_000_000
FEW_KERNELS: Final = 20
LONGEST_NAME: Final = 60
CALL: Final = re.compile(r"\(.*\)\Z")
# What torch and CUTLASS give to their general kernels.
SPECIAL: Final = re.compile(
    r"cutlass_\w+|\b(?!gpu_kernel)(?:\w*(?:Functor|Ops|_kernel_impl|_kernel_cuda)\w*|\w+_kernel\w*)"
)
# Names of templates within templates are long; what they are is said at their beginning.
LONGEST_READ: Final = 1_000


def seen_in(trace: TraceReport, start_ns: int | None = None, duration_ns: int = 0) -> tuple[Evidence, ...]:
    """Return the trace as evidence: all of it, or the stretch from ``start_ns`` on and the steps that it touches."""
    begin = trace.start_ns if start_ns is None else start_ns
    end = trace.end_ns if start_ns is None else start_ns + duration_ns
    touched = [
        step.number for step in trace.steps if step.start_ns <= end and begin <= step.start_ns + step.duration_ns
    ]
    return (
        Evidence(
            artifact=os.fspath(trace.file),
            rank=trace.rank,
            steps=(min(touched), max(touched)) if touched else None,
            start_ns=begin,
            end_ns=end,
        ),
    )


def longest_in(trace: TraceReport, start_ns: int | None, duration_ns: int) -> tuple[Evidence, ...]:
    """Return the trace as evidence and, where its moment is known, the longest single stretch."""
    return seen_in(trace) if start_ns is None else (*seen_in(trace), *seen_in(trace, start_ns, duration_ns))


def idle_ns(trace: TraceReport, *causes: Cause) -> int:
    """Return how long the devices were idle for any of these causes."""
    return sum(cause.total_ns for cause in trace.idle if cause.cause in causes)


def severity_of(share: float) -> Severity:
    """Grade the part of the time that is at stake, once it is above what is worth saying."""
    if share >= SEVERE_SHARE:
        return Severity.CRITICAL
    return Severity.WARNING if share >= NOTABLE_SHARE else Severity.INFO


def is_short(trace: TraceReport) -> bool:
    """Say whether the trace shows too little of a program to conclude much from it."""
    window = trace.gpu_window
    kernels = sum(kernel.count for kernel in trace.kernels if kernel.kind != "memory_copy")
    return window is None or window.window_ns < SHORT_WINDOW_NS or kernels < FEW_KERNELS


def exact_percent(share: float) -> str:
    """Write a share of 1 with one decimal: ``"39.6%"``."""
    return f"{share * 100:.1f}%"


def on_rank(trace: TraceReport) -> str:
    """Return ``" on rank 3"`` where the trace is of one of several ranks, else nothing."""
    several = trace.rank is not None and (trace.rank > 0 or (trace.world_size or 1) > 1)
    return f" on rank {trace.rank}" if several else ""


def times(count: int) -> str:
    """Write how often: ``"once"``, ``"12 times"``."""
    return "once" if count == 1 else f"{count:,} times"


def shorter_name(name: str) -> str:
    """Return a name that fits a sentence: of a kernel the function, and of a general one what it was made for."""
    plain = name[:LONGEST_READ].removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    head, _, arguments = CALL.sub("", plain).strip().partition("<")
    if not arguments or "kernel" not in head.lower():
        known = head or name
    else:
        made_for = SPECIAL.search(arguments)
        known = f"{head}<{made_for[0]}>" if made_for else head
    return known if len(known) <= LONGEST_NAME else f"{known[: LONGEST_NAME - 3]}..."
