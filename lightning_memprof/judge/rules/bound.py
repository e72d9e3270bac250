"""What a run is bound by where no fault is worth more: a module, a Python loop, a busy device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.modules import (
    ACCUMULATE,
    ROOT,
    Heaviest,
    forwards_per_step,
    heaviest_module,
    in_compiled,
    operator_family,
)
from lightning_memprof.account.ledger.peaks import Achieved, achieved_by, device_peaks
from lightning_memprof.account.ledger.work import all_pairs
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.hangs import first_exception
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.steps.lines import Spot, action_spot, forward_lines, main_spot
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import NOTHING_FOUND, Evidence, Finding, Severity, titled
from lightning_memprof.judge.operators import faster, faster_by
from lightning_memprof.judge.operators import fitting as fitting_line
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    ALL_AT_ONCE,
    BATCH_OPERATORS,
    COLLECT_BETWEEN_STEPS,
    COMPILE,
    COMPILE_ALL,
    FORWARD_ONCE,
    LAZY_PENALTY,
    MORE_STEPS,
    MORE_WORK,
    MOVE_OUT_OF_STEP,
    NO_PAIRS,
    RECORD_DEVICE,
    RECORD_OPERATORS,
    RECORD_PYTHON_STACKS,
    RECORD_RANKS,
    RECORD_RUN,
    SAVE_IN_BACKGROUND,
    VIEW_TRACE,
    Remedy,
)
from lightning_memprof.judge.rules.gpu.busy import busy, look, of_device
from lightning_memprof.judge.rules.gpu.holders import nothing_in_snapshot
from lightning_memprof.judge.traces import (
    LATER,
    fitting,
    times,
)
from lightning_memprof.read.run.locate import shown_place
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.trace.intervals import length, union
from lightning_memprof.units import format_count, format_ns, percent, quoted

# The required steps, the first step, and the steps of two windows.
ENOUGH_STEPS: Final = 20
MAX_MESSAGE: Final = 120
# Also a late rank that the program did not cause decides what the others do.
MEETING: Final = (Part.RANK_WAIT, Part.COLLECTIVE)
# A Trainer that has reached max_epochs ends a second fit at once.
SECOND_FIT: Final = "; if the Trainer has reached max_epochs, increase max_epochs"


def nothing_found(facts: Facts) -> Finding:
    """Return the dominant phase of the step, and the command that shows more."""
    run = facts.run
    rank = next((rank for rank in (run.lead, *run.ranks) if rank.rank in facts.statistics), run.lead)
    statistics = facts.statistics.get(rank.rank)
    failed = first_exception(run.ranks)
    early = f"The run ended early with {failed[:MAX_MESSAGE]}. " if failed else ""
    again = "Train for" if facts.is_fit else "Run"
    if statistics is None:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.NONE,
            title="No step was measured.",
            why=f"{early}The run has no pulse: it ended before its first step did, or the pulse is disabled.",
            remedies=(MORE_STEPS.filled(text=f"{again} some steps{SECOND_FIT if facts.is_fit else ''}."),),
        )
    if statistics.used < POLICY.steps:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.INFO,
            title="Too few steps to judge.",
            why=f"{early}Step times come from {statistics.basis}; a verdict needs {POLICY.steps}.",
            remedies=(MORE_STEPS.filled(text=f"{again} at least {ENOUGH_STEPS} steps."), _look_further(run)),
            numbers={"duration_ns": statistics.mean_ns},
        )
    if (bound := _bound(facts, rank, early)) is not None:
        return bound
    ledger = facts.ledgers[rank.rank]
    (doing, most), (next_doing, next_most), *_ = _parts(ledger)
    dominant = f"{doing.takes} {percent(most)} of each step"
    is_bound, around = most >= POLICY.bound, _around(ledger)
    title = f"{dominant[0].upper()}{dominant[1:]}." if is_bound else f"No bottleneck: {dominant}, the largest part."
    runner_up = f"{next_doing.takes} {percent(next_most)}"
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE if around is None else Severity.INFO,
        title=around or title,
        why=(
            f"{early}The mean step takes {format_ns(ledger.step_ns)}; "
            f"{f'the second largest part: {runner_up}' if around is None else f'{dominant}, {runner_up}'}."
        ),
        remedies=(*(() if around is None else (MORE_WORK,)), _look_further(run)),
        numbers={"dominant": doing, "share": most, "duration_ns": ledger.step_ns},
    )


def _parts(ledger: TimeLedger) -> list[tuple[Part, float]]:
    """Return the parts of a step with their shares, the largest first; a wait inside another part is one of its own."""
    shares = {line.part: ledger.share(line.part) for line in ledger.lines}
    leading = max(shares, key=lambda part: shares[part])
    for part in MEETING:
        inside = ledger.communicates(part) / ledger.step_ns - shares.get(part, 0.0)
        if inside > shares[leading] / 2:
            shares |= {part: shares.get(part, 0.0) + inside, leading: shares[leading] - inside}
    return [*sorted(shares.items(), key=lambda item: -item[1]), (Part.UNTRACKED, 0.0)]


def _bound(facts: Facts, rank: Rank, early: str) -> Finding | None:
    """Return the module that bounds forward and backward, None where another part takes more than these together."""
    ledger = facts.ledgers[rank.rank]
    passes_ns = total(_own_passes(ledger))
    # The excess of stalls is that of the passes of a few steps; other programs take the cores.
    apart = {Part.FORWARD, Part.BACKWARD, Part.STALL, Part.CORE_WAIT}
    others = (share for part, share in _parts(ledger) if part not in apart)
    if passes_ns < max(others) * ledger.step_ns or _around(ledger) is not None:
        return None
    trace = _of_device_on(facts, rank)
    device = trace.device_ledger if trace is not None and trace.steady is not None else None
    # A device that mostly waits is not what bounds the step.
    owner = ledger if device is None or device.ns("compute") < POLICY.bound * device.step_ns else device
    passes = owner.passes or _own_passes(owner)
    heaviest, forwards = heaviest_module(passes), forwards_per_step(rank)
    recorded = facts.host_ledger(rank)
    module, again = (recorded.forwards if recorded else None) or ("", 1)
    if heaviest is not None and f"{heaviest.module}.".startswith(f"{module}."):
        forwards = max(forwards, again)
    seen = _Seen(facts=facts, rank=rank, ledger=ledger, owner=owner, heaviest=heaviest)
    often = f" in {forwards} forwards per step" if forwards > 1 else ""
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=_bound_title(seen, total(passes), often),
        why=_bound_why(seen, early),
        remedies=(*((FORWARD_ONCE,) if often else ()), *_next_for(seen), _look_further(facts.run)),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "module": heaviest.module if heaviest else None,
            "module_ns": heaviest.ns if heaviest else None,
            "operators": heaviest.family if heaviest else None,
            "forwards": forwards,
            "passes_ns": passes_ns,
            "duration_ns": ledger.step_ns,
            **(seen.achieved.numbers if seen.achieved else {}),
        },
    )


class _Seen(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What bounds forward and backward of a rank: its step, that of the bound device or the host, and its module."""

    facts: Facts
    rank: Rank
    ledger: TimeLedger
    owner: TimeLedger
    heaviest: Heaviest | None

    @cached_property
    def achieved(self) -> Achieved | None:
        """What the operators of the module reach."""
        return _of_module(self.facts, self.rank, self.heaviest) if self.heaviest is not None else None

    @cached_property
    def line(self) -> tuple[Spot | None, str]:
        """The program's longest line, and its pass; None on a device."""
        is_host = self.owner is self.ledger and self.rank.facts.is_cpu
        return _longest_line(self.rank, self.ledger) if is_host else (None, "")

    @property
    def is_double(self) -> bool:
        """Whether most of forward and backward is for gradients of gradients."""
        return self.ledger.double_backward_ns >= POLICY.bound * self.ledger.ns("forward", "backward")


def _bound_title(seen: _Seen, passes_ns: float, often: str) -> str:
    """Return the module, or what else, with half of the step, else forward and backward with the module's share."""
    owner, heaviest = seen.owner, seen.heaviest
    subject, ns, verb = "forward and backward", passes_ns, "take"
    if seen.is_double:
        subject, ns, verb = "double backward", seen.ledger.double_backward_ns, "takes"
    elif heaviest is not None:
        compiled = " (compiled)" if in_compiled(heaviest.module, seen.rank) else ""
        subject, ns, verb = f"{heaviest.module}{compiled}", heaviest.ns, "takes"
    size = f"{format_ns(ns)} of {format_ns(owner.step_ns)}"
    rank = seen.facts.on_rank(seen.rank)
    if ns >= POLICY.bound * owner.step_ns:
        says = f"Compute-bound: {{subject}} {verb} {owner.share_text(ns)}{often} ({size}){rank}."
        return titled(says, subject=subject)
    bound = "Compute-bound" if passes_ns >= POLICY.bound * owner.step_ns else "No bottleneck"
    passes = f"forward and backward take {owner.share_text(passes_ns)}{often}"
    if ns == passes_ns:
        return f"{bound}: {passes}{rank}."
    return titled(f"{bound}: {passes}, {{subject}} {percent(ns / owner.step_ns)}{rank}.", subject=subject)


def _bound_why(seen: _Seen, early: str) -> str:
    """Return the work of the module with its longest line or submodule, and how the run ended, else what it reaches."""
    ledger, heaviest, achieved = seen.ledger, seen.heaviest, seen.achieved
    passes = f"Forward takes {format_ns(ledger.ns('forward'))}, backward {format_ns(ledger.ns('backward'))} per step."
    if heaviest is None:
        return f"{early}{passes}"
    at, place = seen.line
    leads = f"; {heaviest.leader} has {percent(heaviest.leader_ns / heaviest.ns)} of it" if heaviest.leader else ""
    work = f"{percent(heaviest.family_ns / heaviest.ns)} of {heaviest.module} is {heaviest.family}"
    on = achieved.on if achieved else ""
    work = f"{work}{on}{at.share_text(place) if at else leads}."
    return f"{early}{work}" if early else f"{work} {achieved.text if achieved else passes}"


def _next_for(seen: _Seen) -> tuple[Remedy, ...]:
    """Return what makes the module faster, the best first."""
    heaviest, achieved = seen.heaviest, seen.achieved
    if heaviest is None:
        return ()
    batch = (NO_PAIRS,) if achieved and achieved.pairs else (BATCH_OPERATORS,) if achieved and achieved.is_tiny else ()
    # torch.compile has no gradients of gradients.
    able = tuple(
        step for step in faster(heaviest, seen.rank) if not (seen.ledger.double_backward_ns and step.id == COMPILE.id)
    )
    return (*((LAZY_PENALTY,) if seen.is_double else ()), *batch, *fitting_line(heaviest.family, seen.line[0]), *able)


def _longest_line(rank: Rank, ledger: TimeLedger) -> tuple[Spot | None, str]:
    """Return the program's longest line, and its pass: backward if it is longer and has lines, else forward."""
    at = action_spot(rank, ".backward") if ledger.ns("backward") > ledger.ns("forward") else None
    return (at, "the backward") if at is not None else (main_spot(forward_lines(rank)), "the forward")


def _own_passes(ledger: TimeLedger) -> tuple[TimeLine, ...]:
    """Return the lines of forward and backward, without the one of backward that waits for the collectives of DDP."""
    # Waits that are lines of their own are not in the passes.
    met = sum(ledger.communicates(part) for part in MEETING) - ledger.ns("rank_wait")
    return tuple(
        line
        for line in ledger.of("forward", "backward")
        if line.module or line.operator or line.part == "forward" or line.ns / 2 > met
    )


def _of_device_on(facts: Facts, rank: Rank) -> TraceReport | None:
    return next(
        (trace for trace in facts.steady_traces if trace.rank in {rank.rank, None} and trace.device_ledger), None
    )


def _of_module(facts: Facts, rank: Rank, heaviest: Heaviest) -> Achieved | None:
    """Return what the operators that take most of a module's time reach, on its device where that was recorded."""
    trace = _of_device_on(facts, rank)
    ledger = trace.device_ledger if trace is not None and trace.device_ledger else facts.ledgers[rank.rank]
    inside = "" if heaviest.module == ROOT else f"{heaviest.module}."
    within = [each for each in ledger.work if f"{each.module}.".startswith(inside)]
    work = [each for each in within if operator_family(each.operator) == heaviest.family]
    pairs = all_pairs(within, sum(each.ns for each in within) / 2)
    if not work and not pairs:
        return None
    peaks = device_peaks(trace.devices[0]) if trace is not None and trace.devices else None
    achieved = achieved_by(work or within, peaks, on_device=trace is not None)
    return replace(achieved, on=f", on all pairs of {pairs}", pairs=pairs) if achieved and pairs else achieved


def _around(ledger: TimeLedger) -> str | None:
    """Return a sentence if callbacks, hooks and untracked time are more of a step than forward and backward."""
    around = ledger.ns("callback", "module_hook", "untracked", "logging", "transfer")
    if around <= ledger.ns("forward", "backward", "rank_wait", "stall"):
        return None
    length = "very short" if ledger.step_ns < POLICY.short_step_ns else "short"
    return f"The steps are {length}: callbacks and untracked time take {ledger.share_text(around)}."


def _look_further(run: Run) -> Remedy:
    """Return the command for the most detailed artifact of the run."""
    if any(artifact.type == "trace" and artifact.state == "present" for artifact in run.artifacts):
        place = quoted(shown_place(run.directory, run.root, run.url))
        return VIEW_TRACE.filled(command=f"lightning-memprof view {place}")
    return RECORD_OPERATORS


def nothing_in_files(traces: Sequence[TraceReport], snapshots: Sequence[SnapshotReport]) -> Finding:
    """Return how busy the device was, or the peak memory, and the command that shows more."""
    on_device = [trace for trace in traces if trace.gpu_window is not None]
    if on_device:
        return of_device(min(on_device, key=lambda trace: (trace.is_sample, busy(trace))))
    used = [snapshot for snapshot in snapshots if snapshot.devices]
    if used:
        return nothing_in_snapshot(
            max(used, key=lambda snapshot: max(device.peak_requested_bytes for device in snapshot.devices))
        )
    if traces:
        return _of_host(traces[0], is_alone=len(traces) == 1)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title="Nothing was recorded.",
        why="The snapshot has no device: its process allocated no device memory."
        if snapshots
        else "No trace and no snapshot is readable.",
        remedies=(RECORD_RUN,),
    )


COLLECTIVE: Final = "c10d::"
IN_PYTHON: Final[Mapping[Part, str]] = {
    Part.FORWARD: "Python takes",
    Part.GC_PAUSES: Part.GC_PAUSES.takes,
    Part.CHECKPOINT: Part.CHECKPOINT.takes,
}


def _of_host(trace: TraceReport, *, is_alone: bool) -> Finding:
    """Return the owner of most of the host's time in a trace without device events."""
    ledger = trace.host_ledger
    span_ns = max(trace.end_ns - trace.start_ns, 1)
    communicates_ns = _communicates_ns(trace)
    heaviest = heaviest_module(ledger.of("forward", "backward")) if ledger is not None else None
    span = "each step" if trace.steps else "the recorded time"
    events = format_count(trace.host_events, "event")
    why = f"In {format_ns(span_ns)} the trace has {events} on the host."
    next_steps: tuple[Remedy, ...] = (look(trace),)
    whole_ns = ledger.step_ns if ledger is not None and trace.steps else span_ns
    if trace.device_use:
        sentence = f"Device activity was not recorded: the host {trace.device_use}."
        why = f"{why} No kernel is in the trace."
        next_steps = (RECORD_DEVICE, *next_steps)
    elif communicates_ns >= POLICY.bound * span_ns or (heaviest and heaviest.family.startswith(COLLECTIVE)):
        most = max(trace.collectives, key=lambda found: found.total_ns, default=None)
        name = most.name if most else heaviest.family if heaviest else "a collective"
        bound = "Communication-bound: " if communicates_ns >= POLICY.bound * span_ns else ""
        sentence = titled(f"{bound}{{name}} runs for {percent(communicates_ns / span_ns)} of the time.", name=name)
        why = _of_collectives(trace, name) or why
        next_steps = (*((RECORD_RANKS,) if is_alone and (trace.world_size or 1) > 1 else ()), *next_steps)
    elif ledger is None or heaviest is None:
        sentence = "No device activity in this trace."
    elif span_ns < POLICY.brief_ns:
        sentence = f"Too little was recorded for a verdict: {events} in {format_ns(span_ns)}."
        why = f"{heaviest.module} takes {format_ns(heaviest.ns)} ({percent(heaviest.ns / whole_ns)}) of {span}."
        next_steps = (*fitting(trace, *LATER), *next_steps)
    elif (optimizer := ledger.ns("optimizer")) > heaviest.ns:
        bound = "Optimizer-bound on the host: the" if optimizer >= POLICY.bound * whole_ns else "The"
        sentence = f"{bound} optimizer takes {percent(optimizer / whole_ns)} of {span}."
        why = f"{format_ns(optimizer)} of {format_ns(whole_ns)}; no device was recorded. {why}"
        next_steps = (*fitting(trace, ALL_AT_ONCE), *next_steps)
    elif (python := _in_python(ledger, heaviest)) is not None:
        part, ns, place = python
        share, mostly = percent(ns / whole_ns), ", mostly {place}" if place else ""
        sentence = titled(f"Host-bound: {IN_PYTHON[part]} {share} of {span}{mostly}.", place=place)
        next_steps = (*_less_python(trace, part, place), *next_steps)
        if part == "forward" and trace.program.trains and not _has_backward(ledger):
            sentence = f"Backward was not recorded: {share} of {span} is outside operators: in backward or in Python."
            next_steps = (RECORD_DEVICE, look(trace))
    else:
        sentence = titled(
            f"{'Compute-bound on the host: ' if heaviest.ns >= POLICY.bound * whole_ns else ''}{{module}} takes "
            f"{percent(heaviest.ns / whole_ns)} of {span}, {percent(heaviest.family_ns / heaviest.ns)} in {{family}}.",
            module=heaviest.module,
            family=heaviest.family,
        )
        why = f"{format_ns(heaviest.ns)} of {format_ns(whole_ns)}; no device was recorded. {why}"
        able = faster_by(heaviest, (), () if trace.program.is_compiled else (COMPILE_ALL,), is_cpu=True)
        next_steps = (*fitting_line(heaviest.family, None), *able, *next_steps)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=f"{sentence[0].upper()}{sentence[1:]}" if sentence.startswith(ROOT) else sentence,
        why=f"{why[0].upper()}{why[1:]}",
        remedies=next_steps,
        numbers={"span_ns": span_ns, "collectives_ns": communicates_ns},
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _communicates_ns(trace: TraceReport) -> int:
    """Return the time in which at least one collective runs, in nanoseconds."""
    starts = np.array([call.start_ns for call in trace.arrivals], np.int64)
    ends = np.array([call.start_ns + call.duration_ns for call in trace.arrivals], np.int64)
    return length(union(starts, ends))


def _in_python(ledger: TimeLedger, heaviest: Heaviest) -> tuple[Part, float, str] | None:
    """Return the part, ns per step and place of Python if it takes more than the operators of the heaviest module."""
    parts: dict[Part, float] = {
        Part.GC_PAUSES: ledger.ns(Part.GC_PAUSES),
        Part.CHECKPOINT: ledger.ns(Part.CHECKPOINT),
        Part.FORWARD: heaviest.family_ns if heaviest.family == "Python" else 0.0,
    }
    part = max(parts, key=lambda each: parts[each])
    if heaviest.family != "Python" and parts[part] <= heaviest.ns:
        return None
    places = Counter[str]()
    for line in ledger.of(part):
        places[line.name] += 0 if line.operator else line.ns  # type: ignore[assignment]  # counts may be floats
    place, ns = next(iter(places.most_common(1)), ("", 0.0))
    return part, parts[part], place if 2 * ns >= parts[part] else ""


def _has_backward(ledger: TimeLedger) -> bool:
    # The backward of a device runs in threads of its own; gradients are added up in that of the training.
    return any(line.operator and line.operator != ACCUMULATE for line in ledger.of("backward"))


def _less_python(trace: TraceReport, part: Part, place: str) -> tuple[Remedy, ...]:
    if part == Part.FORWARD:
        return (MOVE_OUT_OF_STEP.filled(place=place),) if place else fitting(trace, RECORD_PYTHON_STACKS)
    return (COLLECT_BETWEEN_STEPS,) if part == Part.GC_PAUSES else (SAVE_IN_BACKGROUND,)


def _of_collectives(trace: TraceReport, name: str) -> str:
    """Return what the collectives of a host take of a step, and how often and how long the one of a name runs."""
    ledger, took = trace.host_ledger, [call.duration_ns for call in trace.arrivals if call.name == name]
    found = []
    if ledger is not None and ledger.communication:
        waiting, transfer = (ledger.communicates(part) for part in MEETING)
        wait = f"{format_ns(waiting)} of it waiting for other ranks" if waiting else "any wait for other ranks included"
        found.append(f"Collectives take {format_ns(waiting + transfer)} per step while no operator runs, {wait}.")
    if took:
        ranks = f" over {trace.world_size} ranks" if trace.world_size else ""
        each = f"{format_ns(min(took))} to {format_ns(max(took))} each" if len(took) > 1 else format_ns(took[0])
        found.append(f"{name} runs {times(len(took))}{ranks}, {each}.")
    return " ".join(found)
