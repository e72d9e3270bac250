"""A device without work, in an operator trace, and what the host does meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, scaled, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.account.trace.cold import COMPILES
from lightning_memprof.account.trace.model import IdleCause, TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, InTrace, Rule
from lightning_memprof.judge.traces import (
    CAUSES,
    LATER,
    LAUNCHING,
    cold_start_of,
    computing,
    has_graphs,
    is_brief,
    longest_in,
    profiler_of,
    recording_ns,
    remedies,
    seen_in,
    shorter_name,
    stretch,
    waits_ns,
)
from lightning_memprof.units import format_count, format_ns

WAITS: Final = (
    Part.IDLE_SYNCHRONIZATION, Part.IDLE_GC_PAUSES, Part.IDLE_PYTHON, Part.IDLE_OPERATORS, Part.IDLE_LAUNCH,
    Part.IDLE_GRAPH, Part.IDLE_LOADING, Part.IDLE_QUEUE, Part.IDLE_UNKNOWN,
)  # fmt: skip
# What the host is in is named by its operator, call or place.
NAMED: Final = (Part.IDLE_SYNCHRONIZATION, Part.IDLE_OPERATORS, Part.IDLE_PYTHON)
# Calls of the driver that launch work are parts too; others are in the way.
DRIVER: Final = (Part.IDLE_LAUNCH, Part.IDLE_GRAPH, Part.IDLE_LOADING)
# Some of the work before launches and in calls stays.
SAVED: Final = (0.5, 1.0)
# What the device waits for may come no sooner.
UNSURE: Final[Mapping[Part, tuple[float, float]]] = dict.fromkeys((Part.IDLE_QUEUE, Part.IDLE_UNKNOWN), (0.0, 1.0))
# Lightning's actions in a trace, and the one around a whole batch.
ACTION: Final = "[pl][profile]"
WHOLE_BATCH: Final = "run_training_batch"
NEXT: Final[Mapping[Part, tuple[Remedy, ...]]] = {
    Part.IDLE_SYNCHRONIZATION: (do.KEEP_ON_DEVICE,),
    Part.IDLE_GC_PAUSES: (do.FREEZE_OBJECTS,),
    Part.IDLE_QUEUE: (do.MERGE_TRACES.filled(files="TRACES"),),
}
# The optimizer's own remedy is the last one.
LAUNCH_NEXT: Final = (do.LAUNCH_LESS, do.MORE_WORK, do.FUSED_OPTIMIZER)
# A call of the driver that gives the device no work.
OTHER_CALL: Final = re.compile(r"(?:cuda|hip|cu)(?!\w*(?:Launch|Memcpy|Memset|Module|Library))\w+\Z")
# By what has most of the idle time.
BY_NAME: Final = (
    (re.compile(rf"{re.escape(COMPILES)}\Z"), do.DYNAMIC_SHAPES),
    (re.compile("Graph(?:Instantiate|ExecUpdate)"), do.FEW_SHAPES),
)
SAVES: Final = re.compile("checkpoint|state_dict", re.IGNORECASE)
# Ranges that are the training itself.
OF_A_STEP: Final = re.compile("forward|backward|step|optim|grad|batch|epoch", re.IGNORECASE)


def idle_devices(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the idle time of the main cause; of a host that cannot launch fast enough, that of all launching.

    Without the waits of the host for the device, and without the recording, that much of it is not there.
    """
    main, parts = _main(trace, ledger)
    if not (lines := ledger.of(*parts)):
        return None
    cause, idle_ns = _cause(trace, main), total(lines)
    is_between = main == Part.IDLE_QUEUE and cause.total_ns <= POLICY.queued_ns * cause.count
    is_launching = is_between or parts == LAUNCHING
    rest_ns = ledger.ns(*WAITS) - waits_ns(trace, ledger)
    rest_ns -= 0 if trace.is_steady else max(recording_ns(trace)) / ledger.steps
    left, saves = max(min(idle_ns, rest_ns), 0.0) / idle_ns, UNSURE.get(main, SAVED)
    is_bound = parts == LAUNCHING and idle_ns >= POLICY.bound * ledger.step_ns
    name = _place(cause) if main in NAMED or _is_other_call(cause) else ""
    doing = _doing(trace, cause, "{name}" if name else main.label)
    if is_launching:
        launches = "the optimizer's launches" if _in_optimizer(trace) else "kernel launches"
        doing = "in the short gaps between queued kernels" if is_between else f"between {launches}"
    return lines, Detail(
        says=f"{'Launch-bound: the' if is_bound else 'The'} GPU is idle {{share}}{{rank}} {doing}.",
        fields={"name": shorter_name(name)},
        measured=_measured(trace, ledger),
        why=_note(trace),
        remedies=_next_steps(trace, cause, is_launching=is_launching),
        saves=(left * saves[0], left * saves[1]),
        numbers={
            "causes_ns": {cause.cause: cause.total_ns for cause in trace.idle},
            "launch_bound": is_bound,
            "main_cause": main,
        },
        evidence=longest_in(trace, cause.longest_start_ns, cause.longest_ns),
    )


def _main(trace: TraceReport, ledger: TimeLedger) -> tuple[Part, tuple[Part, ...]]:
    """Return the main cause of idle time, and the parts that its remedy is for: of launching all of its parts."""
    first = max(LAUNCHING, key=ledger.ns)
    parts: dict[Part, tuple[Part, ...]] = {part: (part,) for part in WAITS}
    if _launches(trace, _cause(trace, first)):
        parts[first] = LAUNCHING
    main = max(parts, key=lambda part: ledger.ns(*parts[part]))
    return main, parts[main]


def _cause(trace: TraceReport, part: Part) -> IdleCause:
    """Return the gaps of a cause; where the causes are unknown, none."""
    nothing = IdleCause(cause=part, total_ns=0, count=0, longest_ns=0, example="")
    return next((cause for cause in trace.idle if cause.cause == part), nothing)


def _launches(trace: TraceReport, cause: IdleCause) -> bool:
    """Return whether the host launches in most of the idle time of a cause."""
    is_launching = cause.cause in LAUNCHING and not _is_unseen(trace, cause) and not _is_other_call(cause)
    is_apart = cause.mostly_in and not cause.launches
    # The program's own function without launches stays in the way of however many kernels are fused.
    longest = 0 if cause.cause == Part.IDLE_PYTHON else POLICY.call_gap_ns
    return is_launching and cause.long_ns < (longest if is_apart else POLICY.launch_gap_ns)


def _place(cause: IdleCause) -> str:
    """Return the operator, call or action that the host is mostly in; the action around all others names nothing."""
    name = "" if cause.cause == Part.IDLE_QUEUE else action_name(cause.mostly_in.removeprefix(ACTION))
    return "" if name == WHOLE_BATCH else name


def _is_unseen(trace: TraceReport, cause: IdleCause) -> bool:
    """Return whether the host ran what was not recorded: the trace has nothing of it but calls of the runtime."""
    calls = sum(call.count for call in trace.runtime_calls)
    return cause.cause in {Part.IDLE_PYTHON, *DRIVER} and trace.host_events == calls > 0


def _is_other_call(cause: IdleCause) -> bool:
    return cause.cause in DRIVER and OTHER_CALL.match(cause.mostly_in) is not None


def _doing(trace: TraceReport, cause: IdleCause, place: str) -> str:
    """Return what the host does meanwhile, as a clause."""
    if cause.cause == Part.IDLE_UNKNOWN:
        return "for unknown reasons"
    if cause.mostly_in.endswith(COMPILES):
        return "while torch.compile compiles"
    if cause.cause == Part.IDLE_QUEUE:
        return f"while the next kernel is {cause.cause.label}"
    if cause.cause == Part.IDLE_PYTHON and _is_unseen(trace, cause):
        return "while the host does unrecorded work"
    return f"while the host {'waits' if cause.cause == Part.IDLE_SYNCHRONIZATION else 'is'} in {place}"


def _in_optimizer(trace: TraceReport) -> bool:
    return trace.host_ledger is not None and trace.host_ledger.share(Part.OPTIMIZER) >= POLICY.most


def _measured(trace: TraceReport, ledger: TimeLedger) -> str:
    """Return the idle time, its largest causes and those of other rules, and the number of kernels."""
    largest = sorted((part for part in WAITS if ledger.ns(part)), key=ledger.ns, reverse=True)[:2]
    largest += [part for part in CAUSES if part not in WAITS and ledger.share(part) >= POLICY.note]
    steps, whole = stretch(trace, ledger)
    parts = [f"{format_ns(steps * ledger.ns(part))} {_mostly(trace, _cause(trace, part))}" for part in largest]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    count = round(sum(kernel.count for kernel in computing(trace)) * steps / ledger.steps)
    runs = f"; it runs {format_count(count, 'kernel')}" if count else ""
    idle_ns = total(line for line in ledger.lines if line.part.group == "device idle")
    return f"The GPU is idle for {format_ns(steps * idle_ns)} of {whole}, including {listed}{runs}"


def _mostly(trace: TraceReport, cause: IdleCause) -> str:
    doing, name = _doing(trace, cause, cause.cause.label), _place(cause)
    return f"{doing} (mostly {shorter_name(name)})" if name and name not in doing else doing


def _note(trace: TraceReport) -> str:
    if trace.is_steady:
        recorded = format_count(len(trace.steps), "recorded step")
        return f"The step is one outside windows, its causes are those of {recorded}."
    return "Recording Python stacks slows the host." if "with_stack" in trace.recorded_with else ""


def _next_steps(trace: TraceReport, cause: IdleCause, *, is_launching: bool) -> tuple[Remedy, ...]:
    named = _by_name(trace, cause)
    if is_launching:
        return remedies(trace, *named, *(reversed(LAUNCH_NEXT) if _in_optimizer(trace) else LAUNCH_NEXT))
    if named:
        return named
    if cause.cause == Part.IDLE_UNKNOWN or _is_unseen(trace, cause):
        # The causes come from launch calls, which torch records with the activity of the device.
        return (do.RECORD_DEVICE,)
    if cause.cause == Part.IDLE_PYTHON:
        return remedies(trace, *_elsewhere(cause), do.RECORD_PYTHON_STACKS)
    return remedies(trace, *NEXT.get(cause.cause, LAUNCH_NEXT))


def _by_name(trace: TraceReport, cause: IdleCause) -> tuple[Remedy, ...]:
    """Return the next step for what the host is in for most of the idle time, if it is not launching."""
    if cause.cause == Part.IDLE_SYNCHRONIZATION:
        return (do.COPY_FROM_PINNED,) if "Memcpy" in cause.mostly_in else ()
    if (step := next((step for name, step in BY_NAME if name.search(cause.mostly_in)), None)) is not None:
        return (step,)
    is_operator = cause.cause == Part.IDLE_OPERATORS and cause.mostly_in and not cause.launches
    if is_operator and cause.long_ns >= POLICY.call_gap_ns:
        device = '"cuda"' if has_graphs(trace) else "device"
        return (do.RUN_ON_GPU.filled(operator=shorter_name(cause.mostly_in), device=device),)
    return (do.MOVE_OUT_OF_STEP.filled(place=cause.mostly_in),) if _is_other_call(cause) else ()


def _elsewhere(cause: IdleCause) -> tuple[Remedy, ...]:
    """Return what to do with the place that has most of the idle time in Python: one with launches cannot move."""
    name = action_name(cause.mostly_in.removeprefix(ACTION))
    if SAVES.search(name):
        return (do.SAVE_ASYNC,)
    if cause.apart_ns >= POLICY.verdict * cause.total_ns:
        place = action_name(cause.apart.removeprefix(ACTION))
        is_line = "): " in place
        return (do.MOVE_OUT_OF_STEP.filled(place=place),) if is_line or (place and not OF_A_STEP.search(place)) else ()
    return (do.WORK_LESS.filled(owner=name),) if "): " in name else ()


def cold_starts(facts: Facts) -> Iterator[Found]:
    """Yield the idle time in calls that are made once: a program pays it in the first steps only."""
    for trace in facts.steady_traces:
        ledger, cause = trace.device_ledger, _cause(trace, Part.COLD_START)
        if ledger is not None and not is_brief(trace) and (lines := ledger.of(Part.COLD_START)):
            detail = Detail(
                fields={"what": cold_start_of(cause)},
                remedies=remedies(trace, *LATER),
                is_note=True,
                evidence=longest_in(trace, cause.longest_start_ns, cause.longest_ns),
            )
            yield Fact(source=trace, ledger=ledger, lines=lines), detail


# They cost the most host time per event.
OPTIONS: Final = ("with_stack", "profile_memory", "record_shapes")


def recordings(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the idle time in which the device may wait for the profiler; none of it is in a steady state."""
    if trace.is_steady:
        return None
    less = ", ".join(f"{name}=False" for name in OPTIONS if name in trace.recorded_with)
    choices = (do.RECORD_LESS.filled(profiler=profiler_of(trace), less=less),) if less else ()
    return scaled(ledger.of(*LAUNCHING), max(recording_ns(trace)) / ledger.steps), Detail(
        measured=f"{trace.host_events:,} host events, about {POLICY.event_ns / 1000:g} µs of host time each",
        remedies=remedies(trace, *choices),
        is_note=True,
        evidence=seen_in(trace),
    )


ROWS: Final = (
    Rule(
        id="gpu_idle",
        about=(
            "The device is idle: its queue is empty and it waits for the host, or the queued work waits for another "
            "stream or rank. Each gap belongs to what the thread that launches the next work does until then. In a run "
            "the figure is the idle time of a step outside windows, in the recorded proportion of the causes."
        ),
        when=(
            "The time is that of the main cause; where the host prepares kernels, that of Python, operators and "
            "launches, launch-bound from half of the step on. In a trace alone, the recovered time excludes the cost "
            f"of recording. Device events of less than {POLICY.brief_ns / 1e6:g} ms, or mostly in a cold start, do not "
            "count."
        ),
        trade_off="Compile time, once; for queued work the remedy recovers nothing to all of this time.",
        of=WAITS,
        in_trace=idle_devices,
        says="The GPU is idle {share}{rank}.",
        saves=SAVED,
    ),
    Rule(
        id="cold_start",
        about="The device is idle during calls that a program makes once: first launches, allocations, compilations.",
        trade_off="None.",
        of=(Part.COLD_START,),
        find=cold_starts,
        says="Cold start: the GPU is idle {share}{rank}; {what}.",
        saves=None,
    ),
    Rule(
        id="recording_overhead",
        about="The device waits for the profiler: recorded idle times are too long, most of all with Python stacks.",
        when="At most the time in which the host runs Python, operators or launches.",
        trade_off="Stacks, shapes or memory events.",
        of=LAUNCHING,
        in_trace=recordings,
        says="The profiler leaves the GPU idle for up to {share}{rank}.",
        saves=None,
    ),
)
