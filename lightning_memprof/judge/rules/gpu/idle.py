"""A device without work, in an operator trace, and what the host does meanwhile."""

from __future__ import annotations

import re
from typing import Final

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.judge.finding import Finding, Recovery, Severity
from lightning_memprof.judge.rules.gpu.allocator import NOTABLE_CALLS, THRASH_NEXT, allocator_share
from lightning_memprof.judge.rules.gpu.waits import COPY, READS
from lightning_memprof.judge.rules.profiler import recording_ns
from lightning_memprof.judge.traces import (
    LATER,
    LAUNCHING,
    MAIN_PART,
    NOTABLE_SHARE,
    OPTIMIZER,
    PROFILER,
    SAVED,
    IdleTime,
    Remedy,
    after_waits,
    blocking_call,
    computing,
    exposed_loading,
    idle_ns,
    idle_time,
    is_short,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    remedy,
    seen_in,
    severity_of,
    shorter_name,
    total_ns,
    workers_in,
)
from lightning_memprof.read.trace.idle import COMPILES
from lightning_memprof.read.trace.model import (
    IdleCause,
    Steady,
    TraceReport,
)
from lightning_memprof.units import format_count, format_ns, percent

# A launch takes as long as a kernel below this, so that a device can wait for each launch.
SHORT_KERNEL_NS: Final = 20_000
# What the device waits for may come no sooner.
SAVED_OF_QUEUE: Final = (0.0, 1.0)
BETWEEN: Final = "mostly in the short gaps between kernels that are queued"
UNSEEN: Final = "the host does unrecorded work"
# Fewer gaps than one for so many kernels are not from launches: those come before nearly each kernel.
KERNELS_PER_GAP: Final = 20
# The Python around a launch takes less.
LONG_GAP_NS: Final = 200_000
# Lightning's actions in a trace, and the one around a whole batch.
ACTION: Final = "[pl][profile]"
WHOLE_BATCH: Final = "run_training_batch"
COMPILE: Final = (
    remedy('Launch fewer and longer kernels: torch.compile(model, mode="reduce-overhead").', "eager", "no graphs"),
    remedy('Launch each compiled part at once: torch.compile(model, mode="reduce-overhead").', "compiled", "no graphs"),
)
NEXT: Final[dict[Part, tuple[Remedy | str, ...]]] = {
    Part.IDLE_SYNCHRONIZATION: READS,
    Part.IDLE_ALLOCATOR: THRASH_NEXT,
    Part.IDLE_GC_PAUSES: (
        remedy("Collect garbage between steps: gc.freeze() after setup, gc.disable(), gc.collect() every 100 steps."),
    ),
    Part.IDLE_PYTHON: (
        remedy(
            f"Record the Python stacks with {PROFILER}(with_stack=True), then move that code out of the step.",
            "no stacks",
        ),
    ),
    Part.IDLE_QUEUE: (
        remedy(
            "Merge the traces of all ranks and see which stream, copy or late rank the queued kernels wait for: "
            "lightning-memprof merge.",
            "ranks",
        ),
    ),
}
LAUNCH_NEXT: Final = (
    *COMPILE,
    remedy("Give each step more work: a larger batch.", "training"),
    remedy("Give each call more work: a larger batch.", "inference"),
    remedy(f"Update all parameters at once: {OPTIMIZER}.", "training", "optimizer loop"),
)
# A call of the driver that gives the device no work.
OTHER_CALL: Final = re.compile(r"(?:cuda|hip|cu)(?!\w*(?:Launch|Memcpy|Memset|Module|Library))\w+\Z")
# By what has most of the idle time.
BY_NAME: Final = (
    (
        re.compile(rf"{re.escape(COMPILES)}\Z"),
        (
            "Compile once, not in each step: TORCH_LOGS=recompiles prints why torch.compile starts again; for varying "
            "sizes torch.compile(dynamic=True), for a number that changes a tensor."
        ),
    ),
    (
        re.compile("TorchDynamo Cache Lookup"),
        (
            "Check fewer guards: compile fewer and larger parts (TORCH_LOGS=graph_breaks), and after the first steps "
            "torch.compiler.set_stance(skip_guard_eval_unsafe=True)."
        ),
    ),
    (
        re.compile("Graph(?:Instantiate|ExecUpdate)"),
        "Record each graph of kernels once and replay it: pad batches to a few shapes.",
    ),
    (
        re.compile("Host(?:Alloc|Register)|MallocHost"),
        "Keep pinned memory from step to step: make the tensor once with pin_memory=True, and copy into it.",
    ),
)
# The causes come from launch calls, which torch records with the activity of the device.
UNKNOWN_NEXT: Final = ("Record the host too: activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",)


MOVE: Final = "Move this code out of the step: {place}."
SAVE: Final = ("Save checkpoints less often, or in the background: torch.distributed.checkpoint.async_save.",)
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
    elsewhere = _reported_elsewhere(trace)
    rest_ns = idle.certain_ns - sum(cause.total_ns for cause in idle.causes if cause.cause in elsewhere)
    waits = after_waits(trace)
    own_ns = rest_ns - (waits.own_ns if waits else 0)
    share = rest_ns / idle.span_ns
    if own_ns <= NOTABLE_SHARE * idle.span_ns:
        return None
    causes = [cause for cause in idle.causes if cause.cause not in elsewhere and cause.total_ns > 0]
    causes.sort(key=lambda cause: cause.total_ns, reverse=True)
    main = causes[0] if causes else None
    kernels = sum(kernel.count for kernel in computing(trace))
    mean_ns = round(total_ns(computing(trace)) / kernels) if kernels else 0
    cold = _cold_start(trace, main, rest_ns)
    launching_ns = sum(cause.total_ns for cause in causes if cause.cause in LAUNCHING)
    is_launching = main is not None and launching_ns >= MAIN_PART * rest_ns > main.longest_ns and cold is None
    is_short_work = 0 < mean_ns <= SHORT_KERNEL_NS and not _in_long_gaps(main, kernels)
    launch_bound = is_launching and is_short_work and not _is_other_call(main)
    # Without the recording, the host is faster by its cost; other causes than the main one stay.
    of_recording = 0 if trace.steady is not None else min(max(recording_ns(trace)[:2]), launching_ns)
    is_sample = is_short(trace) or cold is not None
    worth = None if cold else _recovery(trace, own_ns, main, launch_bound=launch_bound)
    activity = "launches" if launch_bound else cold or _activity(trace, main, rest_ns, kernels, mean_ns)
    stake = min((own_ns - of_recording) / idle.span_ns, worth.max / worth.whole if worth else 1.0)
    return Finding(
        rule="gpu_idle",
        severity=Severity.INFO if is_sample else severity_of(stake),
        title=_sentence(trace, idle, share, activity),
        why=_why(trace, idle, causes, kernels, mean_ns),
        remedies=(
            remedies(trace, *LATER)
            if is_sample
            else _next_steps(trace, main, kernels, is_launching=launch_bound or _is_between(main, kernels, mean_ns))
        ),
        evidence=longest_in(trace, main.longest_start_ns, main.longest_ns) if main else seen_in(trace),
        numbers={
            "idle_share": idle.certain_ns / idle.span_ns,
            "idle_ns": idle.certain_ns,
            "window_ns": idle.span_ns,
            "launch_bound": launch_bound,
            "cold_start": cold is not None,
            "causes_ns": {cause.cause: cause.total_ns for cause in idle.causes},
            "main_cause": main.cause if main else None,
            "kernels": kernels,
            "mean_kernel_ns": mean_ns,
        },
        weight=stake,
        recovers=worth,
    )


def _recovery(trace: TraceReport, own_ns: int, main: IdleCause | None, *, launch_bound: bool) -> Recovery | None:
    causes = LAUNCHING if launch_bound else (main.cause,) if main else ()
    saves = SAVED_OF_QUEUE if causes == (Part.IDLE_QUEUE,) else SAVED
    return recovered_ns(trace.device_ledger, saves, *causes, recorded_ns=own_ns)


def _reported_elsewhere(trace: TraceReport) -> tuple[Part, ...]:
    # In a steady state the run's own findings have it.
    has_other = trace.steady is not None or exposed_loading(trace) is not None
    loading: tuple[Part, ...] = (Part.IDLE_DATA,) if has_other else ()
    return (*loading, Part.IDLE_ALLOCATOR) if allocator_share(trace) > NOTABLE_CALLS else loading


def _cold_start(trace: TraceReport, main: IdleCause | None, rest_ns: int) -> str | None:
    """Return what the device waited for while something was loaded or recorded once, if that explains the idle time."""
    if main is not None and main.longest_ns >= MAIN_PART * rest_ns:
        begin = main.longest_start_ns or 0
        for call in trace.runtime_calls:
            if "GraphInstantiate" in call.name and 0 <= (call.longest_start_ns or 0) - begin <= main.longest_ns:
                return (
                    f"mostly in one gap of {format_ns(main.longest_ns)}, in which the host records a graph of kernels"
                )
    ledger = trace.device_ledger
    lines = ledger.of("cold_start") if ledger is not None else ()
    if ledger is None or not lines or ledger.ns("cold_start") * ledger.steps < MAIN_PART * rest_ns:
        return None
    name = lines[0].name or lines[0].operator or "a call"
    took = "torch.compile took" if name.endswith(COMPILES) else f"{shorter_name(name)} took"
    return f"mostly in a cold start: {took} {format_ns(lines[0].longest_ns or 0)}"


def _activity(trace: TraceReport, main: IdleCause | None, rest_ns: int, kernels: int, mean_ns: int) -> str | None:
    if main is None:
        return None
    if main.longest_ns >= MAIN_PART * rest_ns:
        named = blocking_call(trace, main) if main.cause == Part.IDLE_QUEUE else main.mostly_in
        where = f" ({shorter_name(named)})" if named else ""
        return f"mostly in one gap of {format_ns(main.longest_ns)}: {_what(trace, main)}{where}"
    if _is_between(main, kernels, mean_ns):
        return BETWEEN
    if main.cause == Part.IDLE_SYNCHRONIZATION and main.mostly_in:
        return f"mostly while the host waits in {shorter_name(main.mostly_in)}"
    if main.cause in {Part.IDLE_PYTHON, Part.IDLE_OPERATORS} and _in_long_gaps(main, kernels):
        return f"mostly while {_doing(trace, main)}, half of it in gaps of {format_ns(main.long_ns)} or more"
    return f"mostly while {_what(trace, main)}"


def _in_long_gaps(main: IdleCause | None, kernels: int) -> bool:
    """Return whether half of the time is in few gaps: a host that launches too slowly makes the device wait often."""
    return main is not None and main.long_ns >= LONG_GAP_NS and main.long_count * KERNELS_PER_GAP <= kernels


def _is_unseen(trace: TraceReport, cause: IdleCause) -> bool:
    """Return whether the host ran what was not recorded: the trace has nothing of it but calls of the runtime."""
    calls = sum(call.count for call in trace.runtime_calls)
    return cause.cause == Part.IDLE_PYTHON and trace.host_events == calls > 0


def _is_other_call(cause: IdleCause | None) -> bool:
    return cause is not None and cause.cause == Part.IDLE_LAUNCH and OTHER_CALL.match(cause.mostly_in) is not None


def _what(trace: TraceReport, cause: IdleCause) -> str:
    if _is_other_call(cause):
        return f"the host is in {cause.mostly_in}"
    if cause.mostly_in.endswith(COMPILES):
        return "torch.compile compiles"
    if cause.cause == Part.IDLE_QUEUE:
        return f"the next kernel is {cause.cause.label}"
    return UNSEEN if _is_unseen(trace, cause) else f"the host is in {cause.cause.label}"


def _is_between(main: IdleCause | None, kernels: int, mean_ns: int) -> bool:
    """Return whether a device waits in the short gaps between short kernels, which are queued."""
    return (
        main is not None
        and main.cause == Part.IDLE_QUEUE
        and kernels > 0
        and max(mean_ns, main.total_ns / main.count) <= SHORT_KERNEL_NS
    )


def _sentence(trace: TraceReport, whole: IdleTime, share: float, activity: str | None) -> str:
    loading = idle_ns(trace, Part.IDLE_DATA) / whole.span_ns
    more = f"; another {percent(loading)} for data, transfers, hooks and callbacks"
    end = f"{more if trace.steady is not None and loading >= NOTABLE_SHARE else ''}."
    least = "at least " if whole.is_least else ""
    idle = f"the GPU is idle {least}{percent(share)} of the time{on_rank(trace)}"
    if trace.steady is None and exposed_loading(trace) is not None:
        idle = f"apart from data loading ({percent(loading)}), {idle}"
    if activity == "launches":
        where = ", mostly in the optimizer" if _in_optimizer(trace) else ""
        return f"Launch-bound: {idle}, while the host prepares kernels{where}{end}"
    idle = idle[0].upper() + idle[1:]
    return f"{idle}, {activity}{end}" if activity else f"{idle}{end}"


def _in_optimizer(trace: TraceReport) -> bool:
    return trace.host_ledger is not None and trace.host_ledger.share("optimizer") >= MAIN_PART


def _why(trace: TraceReport, idle: IdleTime, causes: list[IdleCause], count: int, mean_ns: int) -> str:
    if (steady := trace.steady) is not None:
        return _why_steady(trace, steady, causes, count, mean_ns)
    kernels = f"; {format_count(count, 'kernel')}, {format_ns(mean_ns)} on average" if count else ""
    span = f"{format_ns(idle.total_ns)} of {format_ns(idle.span_ns)}"
    unsure = format_ns(idle.total_ns - idle.certain_ns)
    before = f" Up to {unsure} before the first kernel may belong to the previous step." if idle.is_least else ""
    named = [f"; {format_ns(cause.total_ns)} while {_doing(trace, cause)}" for cause in causes[:2]]
    stacks = " Recording Python stacks slows the host." if "with_stack" in trace.recorded_with else ""
    short = " The trace is short." if is_short(trace) else ""
    return f"The GPU is idle for {span}{''.join(named)}{kernels}.{before}{stacks}{short}"


def _why_steady(trace: TraceReport, steady: Steady, causes: list[IdleCause], count: int, mean_ns: int) -> str:
    steps = len(trace.steps)
    waits = [f"{format_ns(cause.total_ns / steps)} while {_doing(trace, cause)}" for cause in causes[:2]]
    if steady.others_ns >= NOTABLE_SHARE * steady.step_ns:
        waits.append(f"{format_ns(steady.others_ns)} for data, transfers, hooks and callbacks")
    kernels = f" It runs {format_count(round(count / steps), 'kernel')} per step, {format_ns(mean_ns)} each."
    return (
        f"A step outside windows takes {format_ns(steady.step_ns)}; the GPU works for {format_ns(steady.busy_ns)}. In "
        f"the rest it waits: {', '.join(waits)} (divided as in {format_count(steps, 'recorded step')})."
        f"{kernels if count else ''}"
    )


def _doing(trace: TraceReport, cause: IdleCause) -> str:
    """Return what the host does meanwhile, and mostly in which action, call or operator."""
    name = action_name(cause.mostly_in.removeprefix(ACTION))
    what = _what(trace, cause)
    # The action around all others names nothing.
    return what + (f" (mostly {shorter_name(name)})" if name not in {"", WHOLE_BATCH} and name not in what else "")


def _next_steps(trace: TraceReport, main: IdleCause | None, kernels: int, *, is_launching: bool) -> tuple[str, ...]:
    named = _by_name(trace, main, kernels)
    if is_launching:
        # The optimizer's own remedy is the last one.
        return remedies(trace, *named, *(reversed(LAUNCH_NEXT) if _in_optimizer(trace) else LAUNCH_NEXT))
    if named:
        return named
    if main is None or _is_unseen(trace, main):
        return UNKNOWN_NEXT
    lines = trace.device_ledger.of("idle_python") if trace.device_ledger is not None else ()
    place = next((line.name for line in lines if "): " in line.name), None)
    if main.cause == Part.IDLE_PYTHON and place:
        return (MOVE.format(place=place),)
    choices: tuple[Remedy | str, ...] = NEXT.get(main.cause, LAUNCH_NEXT)
    if main.cause != Part.IDLE_PYTHON:
        return remedies(trace, *choices)
    is_long = _in_long_gaps(main, kernels)
    choices = (*_elsewhere(main), *choices) if is_long else choices
    # Many short gaps are the calls of operators and modules; code that can move is one gap per step.
    is_scattered = bool(trace.steps) and main.longest_ns * len(trace.steps) < MAIN_PART * main.total_ns
    before = LAUNCH_NEXT if is_scattered and not is_long else ()
    return remedies(trace, *before, *choices, *(() if is_long else COMPILE))


def _by_name(trace: TraceReport, main: IdleCause | None, kernels: int) -> tuple[str, ...]:
    """Return the next step for what the host is in for most of the idle time, if it is not launching."""
    if main is None:
        return ()
    if main.cause == Part.IDLE_SYNCHRONIZATION:
        return (COPY,) if "Memcpy" in main.mostly_in else ()
    if main.cause == Part.IDLE_DATA:
        return (workers_in(trace.device_ledger, in_one=main.longest_ns >= MAIN_PART * main.total_ns).text,)
    if (step := next((step for name, step in BY_NAME if name.search(main.mostly_in)), None)) is not None:
        return (step,)
    takes = f"it takes up to {format_ns(main.longest_ns)} on the host"
    if main.cause == Part.IDLE_OPERATORS and main.mostly_in and _in_long_gaps(main, kernels):
        return (f"Call {main.mostly_in} less often, or on tensors on the GPU: {takes}.",)
    return (f"Call {main.mostly_in} once, before the steps: {takes}.",) if _is_other_call(main) else ()


def _elsewhere(main: IdleCause) -> tuple[str, ...]:
    """Return what to do with a range that has most of the idle time, without parts of the training itself."""
    name = action_name(main.mostly_in.removeprefix(ACTION))
    if SAVES.search(name):
        return SAVE
    return () if not name or OF_A_STEP.search(name) else (f"Call it less often, or elsewhere: {name}.",)
