"""A device that has nothing to do, because the host launches too little or too late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import (
    NOTABLE_SHARE,
    idle_ns,
    is_short,
    longest_in,
    on_rank,
    seen_in,
    severity_of,
    shorter_name,
)
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Cause, IdleCause, TraceReport

__all__ = ["gpu_idle"]

# Other rules say what these cost.
TOLD_ELSEWHERE: Final[tuple[Cause, ...]] = ("data_loading", "allocator")
LAUNCHING: Final[tuple[Cause, ...]] = ("python", "operators", "launch")
# Below this a launch takes as long as the kernel itself, so that a device can wait for each of them.
SHORT_KERNEL_NS: Final = 20_000
# A cause that holds this part of the idle time explains it.
MAIN_PART: Final = 0.5
DOING: Final[dict[Cause, str]] = {
    "data_loading": "the host loads batches",
    "synchronization": "the host waits for the device",
    "allocator": "the host asks the driver for memory or gives it back",
    "garbage": "the host collects garbage",
    "python": "the host runs Python outside of any operator",
    "operators": "the host is inside operators",
    "launch": "the host launches kernels",
    "queue": "the next kernel is queued and does not start",
}
NEXT: Final[dict[Cause, tuple[str, ...]]] = {
    "synchronization": (
        (
            "Do not read values of the device in a step (.item(), .cpu(), print, if tensor): "
            "Trainer(log_every_n_steps=...), self.log(name, tensor)."
        ),
    ),
    "garbage": ("Collect garbage between steps: gc.freeze() after setup, gc.disable(), gc.collect() every N steps.",),
    "python": (
        (
            "See what the program does there: record it with ExtendedPyTorchProfiler(with_stack=True); move it out of "
            "the step, or into DataLoader workers."
        ),
    ),
    "queue": (
        (
            "See on the timeline what queued kernels wait for: another stream, a copy, or a collective that another "
            "rank joins late; merge the traces of all ranks to see which."
        ),
    ),
}
LAUNCH_NEXT: Final = (
    (
        "Launch fewer and longer kernels: torch.compile(model), or with CUDA graphs "
        'torch.compile(model, mode="reduce-overhead").'
    ),
    "Give each step more work: a larger batch, rather than several that are accumulated.",
    "Update all parameters in one kernel: torch.optim.AdamW(..., fused=True).",
)
# The causes come from the calls that launch, and torch records these with the device's activity.
UNKNOWN_NEXT: Final = (
    "Record what the host does meanwhile: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
)


def gpu_idle(trace: TraceReport) -> list[Finding]:
    """Say that the device idles, whether the host cannot launch fast enough, and what it does meanwhile."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    told_ns = idle_ns(trace, *TOLD_ELSEWHERE)
    rest_ns = window.idle_ns - told_ns
    share = rest_ns / window.window_ns
    if share <= NOTABLE_SHARE:
        return []
    causes = [cause for cause in trace.idle if cause.cause not in TOLD_ELSEWHERE and cause.total_ns > 0]
    main = max(causes, key=lambda cause: cause.total_ns, default=None)
    launching_ns = idle_ns(trace, *LAUNCHING)
    kernels, mean_ns = _kernels(trace)
    launch_bound = launching_ns >= MAIN_PART * rest_ns and bool(kernels) and mean_ns <= SHORT_KERNEL_NS
    short = is_short(trace)
    severity = Severity.INFO if short else severity_of(share)
    return [
        Finding(
            rule="gpu_idle",
            severity=severity,
            sentence=_sentence(trace, share, main, launch_bound=launch_bound),
            why=_why(trace, window.idle_ns, causes, kernels, mean_ns) + (" The trace is a short one." if short else ""),
            next_steps=_next_steps(main, launch_bound=launch_bound),
            evidence=longest_in(trace, main.longest_start_ns, main.longest_ns) if main else seen_in(trace),
            numbers={
                "idle_share": window.idle_ns / window.window_ns,
                "idle_ns": window.idle_ns,
                "window_ns": window.window_ns,
                "launch_bound": launch_bound,
                "causes_ns": {cause.cause: cause.total_ns for cause in trace.idle},
                "main_cause": main.cause if main else None,
                "kernels": kernels,
                "mean_kernel_ns": mean_ns,
            },
            weight=share,
        )
    ]


def _kernels(trace: TraceReport) -> tuple[int, int]:
    """Return how many kernels computed something, and their mean duration in ns."""
    computing = [kernel for kernel in trace.kernels if kernel.kind == "compute"]
    count = sum(kernel.count for kernel in computing)
    return count, round(sum(kernel.total_ns for kernel in computing) / count) if count else 0


def _sentence(trace: TraceReport, share: float, main: IdleCause | None, *, launch_bound: bool) -> str:
    apart = ", apart from the loading of batches" if idle_ns(trace, "data_loading") else ""
    idle = f"The GPU is idle {percent(share)} of the time{on_rank(trace)}{apart}"
    if launch_bound:
        return f"Launch-bound: {idle[0].lower()}{idle[1:]}, while the host prepares its next kernels."
    return f"{idle}, most of it while {DOING[main.cause]}." if main is not None else f"{idle}."


def _why(trace: TraceReport, idle: int, causes: list[IdleCause], kernels: int, mean_ns: int) -> str:
    window = trace.gpu_window
    whole = format_ns(window.window_ns) if window else ""
    parts = [f"{format_ns(idle)} of {whole} pass with nothing on the device"]
    named = [
        f"{format_ns(cause.total_ns)} while {DOING[cause.cause]}"
        + (f" (most in {shorter_name(cause.example)})" if cause.example else "")
        for cause in sorted(causes, key=lambda cause: cause.total_ns, reverse=True)[:2]
    ]
    parts += named
    if kernels:
        parts.append(f"the {kernels:,} kernels take {format_ns(mean_ns)} each")
    text = "; ".join(parts) + "."
    if "with_stack" in trace.recorded_with:
        text += " Python's stacks were recorded, which slows the host itself."
    return text


def _next_steps(main: IdleCause | None, *, launch_bound: bool) -> tuple[str, ...]:
    if launch_bound:
        return LAUNCH_NEXT
    if main is None:
        return UNKNOWN_NEXT
    special = NEXT.get(main.cause, ())
    if main.cause == "queue":
        return special
    return (*special, LAUNCH_NEXT[0]) if special else LAUNCH_NEXT
