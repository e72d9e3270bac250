"""What a device of a trace without a fault is bound by: families of operators, copies, devices that take turns."""

from __future__ import annotations

from collections import Counter
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.modules import POINTWISE, UPDATES, operator_family
from lightning_memprof.account.ledger.peaks import Achieved, achieved_by, device_peaks
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import IdleCause, TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.bound import Takes, sentence
from lightning_memprof.judge.facts import trace_rank
from lightning_memprof.judge.finding import NOTHING_FOUND, Evidence, Finding, Severity, titled
from lightning_memprof.judge.operators import ARITHMETIC
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.traces import (
    LATER,
    cold_start_of,
    computing,
    fitting,
    is_brief,
    look,
)
from lightning_memprof.read.trace.kernel_names import kernel_name
from lightning_memprof.units import format_count, format_ns, percent


def busy(trace: TraceReport) -> float:
    """Return the share of the time, 0 to 1, in which a device does anything; 1 for a trace without a device."""
    window = trace.window
    return window.busy_ns / window.window_ns if window is not None and window.window_ns else 1.0


def cold_start(trace: TraceReport) -> IdleCause | None:
    """Return the cold start that takes most of the time, if one does."""
    window_ns = trace.window.window_ns if trace.window else 0
    return next(
        (cause for cause in trace.idle if cause.cause == Part.COLD_START and 2 * cause.total_ns > window_ns), None
    )


def device_bound(trace: TraceReport) -> Finding:
    """Return the owner of most of the device's time in a trace with a device.

    Raises:
        ValueError: the trace has no device event.
    """
    window = trace.window
    if window is None:
        raise ValueError(f"{trace.file}: has no device event")
    parts = {"compute": window.compute_ns, "communication": window.communication_ns, "copies": window.memory_copy_ns}
    length = max(window.window_ns, 1)
    named = ", ".join(f"{name} {percent(ns / length)}" for name, ns in parts.items() if ns)
    steps = trace.work_window
    of_steps = f" (mean step: {format_ns(steps.mean_step_ns)})" if steps is not None else ""
    family, sentence = _device_bound(trace)
    later = LATER if is_brief(trace) or cold_start(trace) else ()
    achieved = _achieved(trace, family)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=sentence or f"The device is busy {percent(busy(trace))} of the time.",
        why=(
            f"{achieved.text + ' ' if achieved else ''}Device time in {format_ns(window.window_ns)}{of_steps}: "
            f"{named or 'none'}{_by_device(trace)}."
        ),
        remedies=(
            *((do.RECORD_ALL_EVENTS,) if trace.is_sample else fitting(trace, *later)),
            *((do.ALL_GPUS,) if _takes_turns(trace) else ()),
            *(_faster(trace, family, achieved) if family else ()),
            look(trace),
        ),
        numbers={
            "window_ns": window.window_ns,
            **(achieved.numbers if achieved else {}),
        },
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _achieved(trace: TraceReport, family: str | None) -> Achieved | None:
    ledger = trace.device_ledger
    work = [each for each in ledger.work if family == device_family(each.operator)] if ledger else []
    return achieved_by(work, device_peaks(*trace.devices), on_device=True)


def _takes_turns(trace: TraceReport) -> bool:
    """Return whether one GPU at a time computes, each for less than half of the time."""
    busy_ns, most = sum(trace.devices_busy_ns), max(trace.devices_busy_ns, default=0)
    window = trace.window
    return (
        window is not None and busy_ns <= POLICY.alike * window.busy_ns and 0 < most < POLICY.bound * window.window_ns
    )


def _by_device(trace: TraceReport) -> str:
    window = trace.window
    if not trace.devices_busy_ns or window is None or not window.window_ns:
        return ""
    return f"; by GPU: {', '.join(percent(ns / window.window_ns) for ns in trace.devices_busy_ns)}"


ELEMENTWISE: Final = "pointwise and copy operators"
# By the kind of a copy: what it is, and a next step.
OF_COPIES: Final = {
    "HtoD": ("copies to the GPU", do.COPY_FROM_PINNED),
    "DtoH": ("copies from the GPU", do.COPY_FROM_PINNED),
    "DtoD": ("copies within the GPU", do.COPY_LESS),
    "PtoP": ("copies between GPUs", do.COPY_BETWEEN_LESS),
    "Memset": ("memory fills", do.FILL_LESS),
}


def _faster(trace: TraceReport, family: str, achieved: Achieved | None) -> tuple[Remedy, ...]:
    """Return what makes the operators faster that take most of a device's time."""
    if (copies := OF_COPIES.get(_bare(family))) is not None:
        return (copies[1],)
    ledger = trace.device_ledger
    if family == UPDATES:
        has_fused = ledger is not None and any("aten::_fused_" in (line.operator or "") for line in ledger.lines)
        return fitting(trace, do.ACCUMULATE if has_fused else do.FUSED_UPDATES)
    fuses = ledger is not None and _families(ledger)[ELEMENTWISE] >= POLICY.verdict * ledger.step_ns
    fused = (do.FUSE_OPERATORS,) if fuses else ()
    if achieved is None:
        is_unknown = family in ARITHMETIC and "record_shapes" not in trace.recorded_with
        return fitting(trace, *fused, *((do.RECORD_SHAPES,) if is_unknown else ()))
    peaks = device_peaks(*trace.devices)
    has_bfloat16 = peaks is not None and "bfloat16" in peaks.flops_per_s
    lower = (do.BFLOAT16, do.SMALLER_WEIGHTS) if achieved.dtype == "float32" and has_bfloat16 else ()
    if achieved.is_tiny:
        return fitting(trace, do.VECTORIZE.filled(owner="the program"), do.FUSE_OPERATORS, do.MORE_WORK)
    if achieved.by_memory:
        return fitting(trace, do.MORE_WORK if family in ARITHMETIC else do.FUSE_OPERATORS, *lower)
    is_below = achieved.share is not None and achieved.share < POLICY.near_peak
    other_layout = (do.CHANNELS_LAST,) if is_below and family == "convolution" else ()
    return fitting(trace, *other_layout, *lower, *((do.MORE_WORK,) if is_below else fused))


def _device_bound(trace: TraceReport) -> tuple[str | None, str | None]:
    """Return the operators that take most of the device's time, and a sentence; None for what is unknown."""
    ledger = trace.device_ledger
    if ledger is None or not ledger.step_ns:
        return None, None
    if trace.is_sample:
        return (
            None,
            f"Most events are missing from the trace{trace_rank(trace)}: idle times and their causes are unknown.",
        )
    if is_brief(trace) and trace.gpu_window:
        count = format_count(sum(kernel.count for kernel in computing(trace)), "kernel")
        span = format_ns(trace.gpu_window.window_ns)
        return None, f"Too little was recorded to say how busy the GPU is: {count} in {span}."
    span = "each step" if trace.steps else "the recorded time"
    busy_ns = ledger.ns("compute", "collective", "copy")
    if busy_ns < ledger.step_ns / 2:
        idle_ns = ledger.step_ns - busy_ns
        if (cold := cold_start(trace)) is not None:
            took = f"({format_ns(cold.total_ns / ledger.steps)} of {format_ns(ledger.step_ns)})"
            return None, titled(f"A cold start takes most of {span}: {{name}} {took}.", name=cold_start_of(cold))
        share = percent(idle_ns / ledger.step_ns)
        main = max(trace.idle, key=lambda cause: cause.total_ns, default=None)
        is_most = main is not None and main.total_ns >= POLICY.most * idle_ns * ledger.steps
        mostly = f", mostly {main.cause.label}" if main is not None and is_most else ""
        took = f"({format_ns(idle_ns)} of {format_ns(ledger.step_ns)})"
        return None, f"The device is idle {share} of {span}{mostly} {took}."
    share = percent(max(trace.devices_busy_ns, default=0) / ledger.step_ns / ledger.steps)
    turns = f"{len(trace.devices)} GPUs take turns: each computes at most {share} of {span}, the others wait."
    return (None, turns) if _takes_turns(trace) else _most_work(trace, ledger, span)


def device_family(operator: str | None) -> str:
    """Return the usual name of the work of an operator or a kernel on a device; a compiler fuses what is pointwise."""
    family = operator_family(operator or "unknown")
    return ELEMENTWISE if POINTWISE.search(family) else family


def _families(ledger: TimeLedger) -> Counter[str]:
    """Return ns per step of the computation by family of operators, and of the copies by kind."""
    found: Counter[str] = Counter()
    for line in ledger.of("compute", "copy"):
        found[line.name if line.part == "copy" else device_family(line.operator)] += round(line.ns)
    return found


def _most_work(trace: TraceReport, ledger: TimeLedger, span: str) -> tuple[str | None, str | None]:
    """Return the operators or the kind of copies with most of the device's time, and a sentence."""
    by_work = _families(ledger)
    if not by_work:
        return None, None
    ((family, ns),) = by_work.most_common(1)
    copies, shown = OF_COPIES.get(_bare(family)), _named(ledger) if family == ELEMENTWISE else family
    name = copies[0] if copies else kernel_name(shown)
    compute_ns, half = ledger.ns("compute"), POLICY.bound * ledger.step_ns
    if ns < half <= compute_ns:
        takes = Takes("Compute-bound", "kernels take", compute_ns, part=name, part_ns=ns)
    else:
        achieved = _achieved(trace, family)
        by_memory = achieved.by_memory if achieved else family in {ELEMENTWISE, UPDATES}
        bound = "Copy-bound" if copies else "Memory-bound" if by_memory else "Compute-bound"
        takes = Takes(bound, f"{name} {'take' if copies or shown in {ELEMENTWISE, UPDATES} else 'takes'}", ns)
    return family, sentence(takes, ledger, span)


def _named(ledger: TimeLedger) -> str:
    """Return the name of the pointwise operators, the operator's if there is only one."""
    names = {line.operator or "" for line in ledger.of("compute") if device_family(line.operator) == ELEMENTWISE}
    return names.pop() if len(names) == 1 else ELEMENTWISE


def _bare(copies: str) -> str:
    return copies.partition(" (")[0]
