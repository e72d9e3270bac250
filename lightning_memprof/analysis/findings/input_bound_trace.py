"""A trace in which the device, or the program, waits for batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import SHORT_STEP_NS, Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import (
    NOTABLE_SHARE,
    exact_percent,
    idle_ns,
    longest_in,
    on_rank,
    seen_in,
    severity_of,
)
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["input_bound_trace"]

# In a single step a loader that starts its workers, or an epoch, looks like one that is always slow.
MIN_STEPS: Final = 2
# A batch that is ready is fetched in less: no setting of the loader saves it, however short the step.
MIN_COST_NS: Final = 1_000_000
# The same where the host is the device: there Lightning's own fetch counts, and the recording slows it.
MIN_HOST_COST_NS: Final = 2_000_000
# One step that holds this part of all loading is a start of workers or of an epoch, and not the rhythm.
ONE_STEP: Final = 0.75
NEXT: Final = (
    (
        "Fetch batches in other processes, and keep those: DataLoader(num_workers=4, persistent_workers=True); where "
        "there are some, more of them, and a larger prefetch_factor."
    ),
    "Copy batches while the device works: DataLoader(pin_memory=True).",
    "Do less per sample: make __getitem__ faster, or decode and tokenise once, ahead of training.",
)


def input_bound_trace(trace: TraceReport) -> list[Finding]:
    """Say that the device idles while batches are loaded; on a host alone, that loading takes much of the steps."""
    window = trace.step_window
    steps = max(len(trace.steps), 1)
    span_ns = window.window_ns if window else sum(step.duration_ns for step in trace.steps)
    loading_ns = window.data_loading_ns if window else sum(step.data_loading_ns for step in trace.steps)
    if not span_ns or not loading_ns:
        return []
    exposed_ns = _exposed(trace, loading_ns)
    share, exposed = loading_ns / span_ns, exposed_ns / span_ns
    if exposed <= NOTABLE_SHARE or exposed_ns / steps < (MIN_COST_NS if window else MIN_HOST_COST_NS):
        return []
    if window is None and (span_ns / steps < SHORT_STEP_NS or steps < MIN_STEPS):
        return []
    most = max((step.data_loading_ns for step in trace.steps), default=0)
    in_one = steps >= MIN_STEPS and most >= ONE_STEP * loading_ns
    where = f", {exact_percent(most / loading_ns)} of it in one of {steps} steps" if in_one else ""
    longest = next((cause for cause in trace.idle if cause.cause == "data_loading"), None)
    idle = f"; the device is idle for {format_ns(exposed_ns)} of it" if window else ""
    return [
        Finding(
            rule="input_bound_trace",
            severity=min(severity_of(exposed), _most(in_one=in_one, steps=steps)),
            sentence=f"Input-bound: loading batches takes {exact_percent(share)} of the steps{on_rank(trace)}.",
            why=f"{format_ns(loading_ns)} of {format_ns(span_ns)} go to the DataLoader{where}{idle}.",
            next_steps=NEXT if window else (NEXT[0], NEXT[2]),
            evidence=longest_in(trace, longest.longest_start_ns, longest.longest_ns) if longest else seen_in(trace),
            numbers={
                "data_loading_share": share,
                "data_loading_ns": loading_ns,
                "exposed_ns": exposed_ns,
                "window_ns": span_ns,
                "steps": len(trace.steps),
                "in_one_step": in_one,
            },
            weight=exposed,
        )
    ]


def _most(*, in_one: bool, steps: int) -> Severity:
    """Return how severe it can be: one step of several that loads is the start of an epoch, a single one may be."""
    if in_one:
        return Severity.INFO
    return Severity.CRITICAL if steps >= MIN_STEPS else Severity.WARNING


def _exposed(trace: TraceReport, loading_ns: int) -> int:
    """Return how much of the loading no device hides.

    Before the first recorded device event the device may be busy with a step that was not recorded: of that loading as
    much counts as of all other.
    """
    window = trace.step_window
    if window is None:
        return loading_ns
    inside_ns = min(idle_ns(trace, "data_loading"), loading_ns)
    known_ns = window.data_loading_exposed_ns
    # What is neither busy nor loading can be no longer than the rest.
    exposed_ns = min(loading_ns, max(inside_ns, loading_ns - window.busy_ns) if known_ns is None else known_ns)
    if len(trace.steps) < MIN_STEPS:
        return exposed_ns
    outside_ns = max(exposed_ns - inside_ns, 0)
    others_ns = loading_ns - outside_ns
    return inside_ns + outside_ns * inside_ns // others_ns if others_ns else exposed_ns
