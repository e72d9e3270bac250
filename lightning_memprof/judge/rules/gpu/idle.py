"""A device without work, in an operator trace, and what the host does meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.account.trace.idle import COMPILES
from lightning_memprof.account.trace.model import (
    IdleCause,
    Steady,
    TraceReport,
)
from lightning_memprof.judge.finding import Finding, Recovery, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    ALL_AT_ONCE,
    CALL_LESS_OFTEN,
    CALL_ONCE,
    CHECK_FEWER_GUARDS,
    COLLECT_BETWEEN_STEPS,
    COMPILE_ONCE,
    COPY_FROM_PINNED,
    FIND_SLOW_LINES,
    KEEP_PINNED,
    LARGER_CALLS,
    LARGER_STEPS,
    LAUNCH_AT_ONCE,
    LAUNCH_LESS,
    MAKE_ON_GPU,
    MERGE_ALL_TRACES,
    MOVE_OUT_OF_STEP,
    RECORD_HOST,
    RECORD_PYTHON_STACKS,
    REPLAY_GRAPHS,
    RUN_ON_GPU,
    SAVE_IN_BACKGROUND,
    Remedy,
)
from lightning_memprof.judge.rules.gpu.allocator import NOTABLE_CALLS, THRASH_NEXT, allocator_share
from lightning_memprof.judge.rules.gpu.waits import READS
from lightning_memprof.judge.rules.profiler import recording_ns
from lightning_memprof.judge.traces import (
    LAUNCHING,
    MAIN_PART,
    NOTABLE_SHARE,
    SAVED,
    IdleTime,
    after_start,
    after_waits,
    cold_start_of,
    computing,
    exposed_loading,
    has_graphs,
    idle_time,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    seen_in,
    severity_of,
    shorter_name,
    workers_in,
)
from lightning_memprof.units import format_count, format_ns, percent

# What the host is in is named by its operator, call or place.
NAMED: Final = (Part.IDLE_SYNCHRONIZATION, Part.IDLE_OPERATORS, Part.IDLE_PYTHON)
# What the device waits for may come no sooner.
SAVED_OF_QUEUE: Final = (0.0, 1.0)
BETWEEN: Final = "mostly in the short gaps between kernels that are queued"
UNSEEN: Final = "the host does unrecorded work"
# The device waits no longer than this for a kernel that is queued behind another one.
QUEUED_NS: Final = 20_000
# Nothing between two launches takes as long: the host does something else in such a gap.
LONG_GAP_NS: Final = 200_000
# Nothing in a program that launches takes as long, however slow its Python is.
LONGEST_GAP_NS: Final = 1_000_000
# Lightning's actions in a trace, and the one around a whole batch.
ACTION: Final = "[pl][profile]"
WHOLE_BATCH: Final = "run_training_batch"
NEXT: Final[Mapping[Part, tuple[Remedy, ...]]] = {
    Part.IDLE_SYNCHRONIZATION: READS,
    Part.IDLE_ALLOCATOR: THRASH_NEXT,
    Part.IDLE_GC_PAUSES: (COLLECT_BETWEEN_STEPS,),
    Part.IDLE_PYTHON: (RECORD_PYTHON_STACKS,),
    Part.IDLE_QUEUE: (MERGE_ALL_TRACES,),
}
# The optimizer's own remedy is the last one.
LAUNCH_NEXT: Final = (LAUNCH_LESS, LAUNCH_AT_ONCE, LARGER_STEPS, LARGER_CALLS, ALL_AT_ONCE)
# A call of the driver that gives the device no work.
OTHER_CALL: Final = re.compile(r"(?:cuda|hip|cu)(?!\w*(?:Launch|Memcpy|Memset|Module|Library))\w+\Z")
# By what has most of the idle time.
BY_NAME: Final = (
    (re.compile(rf"{re.escape(COMPILES)}\Z"), COMPILE_ONCE),
    (re.compile("TorchDynamo Cache Lookup"), CHECK_FEWER_GUARDS),
    (re.compile("Graph(?:Instantiate|ExecUpdate)"), REPLAY_GRAPHS),
    (re.compile("Host(?:Alloc|Register)|MallocHost"), KEEP_PINNED),
)
# Operators that make tensors.
MAKES: Final = re.compile(
    r"aten::(rand|randn|randint|randperm|empty|zeros|ones|full|arange|linspace|eye|normal|tensor)(?:_like)?\Z"
)
SAVES: Final = re.compile("checkpoint|state_dict", re.IGNORECASE)
# Ranges that are the training itself.
OF_A_STEP: Final = re.compile("forward|backward|step|optim|grad|batch|epoch", re.IGNORECASE)


def gpu_idle(trace: TraceReport) -> Finding | None:
    """Find an idle device, whether the host cannot launch fast enough, and the host's activity meanwhile.

    Recovers half to all of the idle time with the main cause; of a launch-bound program, of all launching. Of queued
    work nothing to all: the rank or stream that it waits for may not be faster. A cold start recovers nothing: the
    program pays it once.
    """
    idle = idle_time(trace)
    if idle is None:
        return None
    # Idle time that no other rule reports is this one's.
    elsewhere = [cause for cause in idle.causes if cause.cause in _reported_elsewhere(trace)]
    rest_ns = idle.total_ns - sum(cause.total_ns for cause in elsewhere)
    waits = after_waits(trace)
    own_ns = rest_ns - (waits.own_ns if waits else 0)
    cold_ns = sum(cause.total_ns for cause in elsewhere if cause.cause == Part.COLD_START)
    if own_ns <= POLICY.note * idle.span_ns or cold_ns >= MAIN_PART * idle.span_ns:
        return _cold_start(trace, idle)
    causes = [cause for cause in idle.causes if cause not in elsewhere and cause.total_ns > 0]
    main = causes[0] if causes else None
    launching_ns = sum(cause.total_ns for cause in causes if cause.cause in LAUNCHING)
    is_launching = _is_between(main) or (launching_ns >= MAIN_PART * rest_ns and _launches(trace, main))
    # Without the recording, the host is faster by its cost; other causes than the main one stay.
    own_ns -= 0 if trace.steady is not None else min(max(recording_ns(trace)), launching_ns)
    worth = _recovery(trace, own_ns, main, is_launching=is_launching)
    stake = worth.share if worth else own_ns / idle.span_ns
    bound = is_launching and not _is_between(main) and launching_ns >= MAIN_PART * idle.span_ns
    kernels = sum(kernel.count for kernel in computing(trace))
    activities = _activities(trace, main, rest_ns, is_launching=is_launching)
    return Finding(
        rule="gpu_idle",
        severity=severity_of(stake),
        title=_sentence(trace, idle, elsewhere, activities, bound=bound),
        why=_why(trace, idle, causes, kernels),
        remedies=_next_steps(trace, main, is_launching=is_launching),
        evidence=longest_in(trace, main.longest_start_ns, main.longest_ns) if main else seen_in(trace),
        numbers={
            **_numbers(idle),
            "launch_bound": bound,
            "cold_start": False,
            "main_cause": main.cause if main else None,
            "kernels": kernels,
        },
        weight=stake,
        recovers=worth,
    )


def _numbers(idle: IdleTime) -> dict[str, Any]:
    return {
        "idle_share": idle.total_ns / idle.span_ns,
        "idle_ns": idle.total_ns,
        "window_ns": idle.span_ns,
        "causes_ns": {cause.cause: cause.total_ns for cause in idle.causes},
    }


def _cold_start(trace: TraceReport, idle: IdleTime) -> Finding | None:
    """Note what the device waits for once: a program pays its start in the first steps only."""
    cold = next((cause for cause in idle.causes if cause.cause == Part.COLD_START), None)
    if cold is None or cold.total_ns <= POLICY.note * idle.span_ns:
        return None
    share, what = percent(cold.total_ns / idle.span_ns), cold_start_of(cold)
    return Finding(
        rule="gpu_idle",
        severity=Severity.INFO,
        title=_fitting(
            f"The GPU is idle {share} of the time{on_rank(trace)} in a cold start",
            iter((f": {what} ({format_ns(cold.longest_ns)})", f": {what}", "")),
        ),
        why=f"The GPU is idle for {format_ns(cold.total_ns)} of {format_ns(idle.span_ns)} in calls made once.",
        remedies=after_start(trace, cold),
        evidence=longest_in(trace, cold.longest_start_ns, cold.longest_ns),
        numbers={**_numbers(idle), "launch_bound": False, "cold_start": True, "main_cause": Part.COLD_START},
    )


def _recovery(trace: TraceReport, own_ns: int, main: IdleCause | None, *, is_launching: bool) -> Recovery | None:
    causes = LAUNCHING if is_launching and main and main.cause in LAUNCHING else (main.cause,) if main else ()
    saves = SAVED_OF_QUEUE if causes == (Part.IDLE_QUEUE,) else SAVED
    return recovered_ns(trace.device_ledger, saves, *causes, recorded_ns=own_ns)


def _reported_elsewhere(trace: TraceReport) -> tuple[Part, ...]:
    # In a steady state the run's own findings have it.
    has_other = trace.steady is not None or exposed_loading(trace) is not None
    loading: tuple[Part, ...] = (Part.COLD_START, Part.IDLE_DATA) if has_other else (Part.COLD_START,)
    return (*loading, Part.IDLE_ALLOCATOR) if allocator_share(trace) > NOTABLE_CALLS else loading


def _launches(trace: TraceReport, main: IdleCause | None) -> bool:
    """Return whether the host is launching for most of the idle time that the main cause has."""
    if main is None or main.cause not in LAUNCHING or _is_unseen(trace, main) or _is_other_call(main):
        return False
    return main.long_ns < (LONG_GAP_NS if main.mostly_in and not main.launches else LONGEST_GAP_NS)


def _activities(trace: TraceReport, main: IdleCause | None, rest_ns: int, *, is_launching: bool) -> Iterator[str]:
    """Yield what the host does meanwhile, the most precise first."""
    if main is None:
        yield ""
        return
    if _is_between(main):
        yield f", {BETWEEN}"
    elif is_launching:
        where = ", mostly in the optimizer" if _in_optimizer(trace) else ""
        yield f", while the host prepares kernels{where}"
        yield f"{where or ', while the host prepares kernels'}"
        yield ""
    name = "" if main.cause == Part.IDLE_QUEUE else shorter_name(action_name(main.mostly_in.removeprefix(ACTION)))
    name = "" if name == WHOLE_BATCH else name
    if main.longest_ns >= MAIN_PART * rest_ns:
        gap = f", mostly in one gap of {format_ns(main.longest_ns)}"
        yield from (f"{gap}: {_what(trace, main)} ({name})", f"{gap} ({name})") if name else ()
        yield f"{gap}: {_what(trace, main)}"
        yield gap
    if (
        main.cause in {Part.IDLE_SYNCHRONIZATION, Part.IDLE_OPERATORS, Part.IDLE_PYTHON}
        and name
        and not _compiles(main)
    ):
        yield f", mostly while the host {'waits' if main.cause == Part.IDLE_SYNCHRONIZATION else 'is'} in {name}"
    yield f", mostly while {_what(trace, main)}"
    yield ""


def _compiles(cause: IdleCause) -> bool:
    return cause.mostly_in.endswith(COMPILES)


def _is_unseen(trace: TraceReport, cause: IdleCause) -> bool:
    """Return whether the host ran what was not recorded: the trace has nothing of it but calls of the runtime."""
    calls = sum(call.count for call in trace.runtime_calls)
    return cause.cause in {Part.IDLE_PYTHON, *LAUNCHING[2:]} and trace.host_events == calls > 0


def _is_other_call(cause: IdleCause | None) -> bool:
    return cause is not None and cause.cause in LAUNCHING[2:] and OTHER_CALL.match(cause.mostly_in) is not None


def _what(trace: TraceReport, cause: IdleCause) -> str:
    if _is_other_call(cause):
        return f"the host is in {cause.mostly_in}"
    if _compiles(cause):
        return "torch.compile compiles"
    if cause.cause == Part.IDLE_QUEUE:
        return f"the next kernel is {cause.cause.label}"
    is_unseen = cause.cause == Part.IDLE_PYTHON and _is_unseen(trace, cause)
    return UNSEEN if is_unseen else f"the host is in {cause.cause.label}"


def _is_between(main: IdleCause | None) -> bool:
    """Return whether a device waits in the short gaps between kernels that are queued."""
    return main is not None and main.cause == Part.IDLE_QUEUE and main.total_ns <= QUEUED_NS * main.count


def _sentence(
    trace: TraceReport, whole: IdleTime, elsewhere: list[IdleCause], activities: Iterator[str], *, bound: bool
) -> str:
    """Return the title: of the host's activities the first one that fits."""
    by_cause = {cause.cause: cause.total_ns / whole.span_ns for cause in elsewhere}
    labels = {part: part.label for part in by_cause}
    if trace.steady is not None:
        labels[Part.IDLE_DATA] = "data, hooks and callbacks"
    apart = [f"{labels[part]} ({percent(taken)})" for part, taken in by_cause.items() if taken >= POLICY.note]
    begin = f"{'Launch-bound: the' if bound else 'The'} GPU is idle {{}} of the time{on_rank(trace)}"
    share = whole.total_ns / whole.span_ns
    idle = begin.format(percent(share - sum(by_cause.values()))) + (
        f" apart from {' and '.join(apart)}" if apart else ""
    )
    if len(idle) >= POLICY.title:
        idle = begin.format(percent(share))
    return _fitting(idle, activities)


def _fitting(begin: str, ends: Iterator[str]) -> str:
    """Return a title with the first end that fits."""
    return next(title for end in ends if len(title := f"{begin}{end}.") <= POLICY.title or not end)


def _in_optimizer(trace: TraceReport) -> bool:
    return trace.host_ledger is not None and trace.host_ledger.share("optimizer") >= MAIN_PART


def _why(trace: TraceReport, idle: IdleTime, causes: list[IdleCause], count: int) -> str:
    if (steady := trace.steady) is not None:
        return _why_steady(trace, steady, causes, count)
    span = f"{format_ns(idle.total_ns)} of {format_ns(idle.span_ns)}"
    named = [f"{format_ns(cause.total_ns)} while {_doing(trace, cause)}" for cause in causes[:2]]
    stacks = " Recording Python stacks slows the host." if "with_stack" in trace.recorded_with else ""
    kernels = f"it runs {format_count(count, 'kernel')}" if count else ""
    parts = "; ".join(part for part in (*named, kernels) if part)
    return f"The GPU is idle for {span}{f': {parts}' if parts else ''}.{stacks}"


def _why_steady(trace: TraceReport, steady: Steady, causes: list[IdleCause], count: int) -> str:
    steps = len(trace.steps)
    waits = [f"{format_ns(cause.total_ns / steps)} while {_doing(trace, cause)}" for cause in causes[:2]]
    if steady.others_ns >= NOTABLE_SHARE * steady.step_ns:
        waits.append(f"{format_ns(steady.others_ns)} for data, transfers, hooks and callbacks")
    kernels = f" and runs {format_count(round(count / steps), 'kernel')}" if count else ""
    return (
        f"A step outside windows takes {format_ns(steady.step_ns)}; the GPU works for {format_ns(steady.busy_ns)}"
        f"{kernels}. In the rest it waits: {', '.join(waits)} (divided as in {format_count(steps, 'recorded step')})."
    )


def _doing(trace: TraceReport, cause: IdleCause) -> str:
    """Return what the host does meanwhile, and mostly in which action, call or operator."""
    # A kernel is not what it waits for, and the action around all others names nothing.
    name = "" if cause.cause == Part.IDLE_QUEUE else action_name(cause.mostly_in.removeprefix(ACTION))
    what = _what(trace, cause)
    return what + (f" (mostly {shorter_name(name)})" if name not in {"", WHOLE_BATCH} and name not in what else "")


def _next_steps(trace: TraceReport, main: IdleCause | None, *, is_launching: bool) -> tuple[Remedy, ...]:
    named = _by_name(trace, main)
    if is_launching:
        return remedies(trace, *named, *(reversed(LAUNCH_NEXT) if _in_optimizer(trace) else LAUNCH_NEXT))
    if named:
        return named
    if main is None or _is_unseen(trace, main):
        # The causes come from launch calls, which torch records with the activity of the device.
        return (RECORD_HOST,)
    if main.cause != Part.IDLE_PYTHON:
        return remedies(trace, *NEXT.get(main.cause, LAUNCH_NEXT))
    return remedies(trace, *_elsewhere(main), *NEXT[Part.IDLE_PYTHON])


def _by_name(trace: TraceReport, main: IdleCause | None) -> tuple[Remedy, ...]:
    """Return the next step for what the host is in for most of the idle time, if it is not launching."""
    if main is None:
        return ()
    if main.cause == Part.IDLE_SYNCHRONIZATION:
        return (COPY_FROM_PINNED,) if "Memcpy" in main.mostly_in else ()
    if main.cause == Part.IDLE_DATA:
        return (workers_in(trace.device_ledger, in_one=main.longest_ns >= MAIN_PART * main.total_ns),)
    if (step := next((step for name, step in BY_NAME if name.search(main.mostly_in)), None)) is not None:
        return (step,)
    if main.cause == Part.IDLE_OPERATORS and main.mostly_in and not main.launches and main.long_ns >= LONG_GAP_NS:
        made = MAKES.match(main.mostly_in)
        operator = shorter_name(main.mostly_in)
        step, call = (MAKE_ON_GPU, f"torch.{made[1]}") if made else (RUN_ON_GPU, "")
        return (step.filled(call=call, operator=operator, device='"cuda"' if has_graphs(trace) else "device"),)
    longest = format_ns(main.longest_ns)
    return (CALL_ONCE.filled(call=main.mostly_in, longest=longest),) if _is_other_call(main) else ()


def _elsewhere(main: IdleCause) -> tuple[Remedy, ...]:
    """Return what to do with the place that has most of the idle time in Python: one with launches cannot move."""
    name = action_name(main.mostly_in.removeprefix(ACTION))
    if SAVES.search(name):
        return (SAVE_IN_BACKGROUND,)
    if main.apart_ns >= NOTABLE_SHARE * main.total_ns:
        place = action_name(main.apart.removeprefix(ACTION))
        if "): " in place:
            return (MOVE_OUT_OF_STEP.filled(place=place),)
        return () if not place or OF_A_STEP.search(place) else (CALL_LESS_OFTEN.filled(place=place),)
    return (FIND_SLOW_LINES.filled(place=name),) if "): " in name else ()
