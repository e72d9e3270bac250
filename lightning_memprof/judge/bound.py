"""What a run, or the host of a trace, is bound by where no rule found more: the largest part of its ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

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
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.hangs import first_exception
from lightning_memprof.account.steps.lines import Spot, action_spot, forward_lines, main_spot
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import PASSES
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import NOTHING_FOUND, Evidence, Finding, Severity, titled
from lightning_memprof.judge.operators import faster, faster_by
from lightning_memprof.judge.operators import fitting as fitting_line
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.traces import LATER, fitting, graph_made, look, span
from lightning_memprof.read.run.locate import shown_place
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.units import format_count, format_ns, percent, quoted

MAX_MESSAGE: Final = 120
# Also a late rank that the program did not cause decides what the others do.
MEETING: Final = (Part.RANK_WAIT, Part.COLLECTIVE)
COLLECTIVE: Final = "c10d::"
# Families outside operators, and outside recorded calls.
PYTHON: Final = "Python"
UNPROFILED: Final = "unprofiled"
EACH_STEP: Final = "each step"
AROUND: Final = (Part.CALLBACK, Part.MODULE_HOOK, Part.LOGGING, Part.TRANSFER, Part.UNTRACKED)
# The excess of stalls is that of the passes of a few steps; other programs take the cores.
APART: Final = (Part.STALL, Part.CORE_WAIT)
COMPUTE: Final = "Compute-bound"
HOST: Final = "Host-bound"
BOUND: Final[Mapping[str, str]] = {
    "input": "Input-bound", "model": COMPUTE, "optimizer": "Optimizer-bound", "ranks": "Communication-bound",
}  # fmt: skip
# On the host of a trace.
LESS: Final[Mapping[Part, tuple[Remedy, ...]]] = {
    Part.OPTIMIZER: (do.FUSED_OPTIMIZER,),
    Part.GC_PAUSES: (do.FREEZE_OBJECTS,),
    Part.CHECKPOINT: (do.SAVE_ASYNC,),
}


def nothing_found(facts: Facts) -> Finding:
    """Return the largest part of the step, and the command that shows more."""
    run = facts.run
    rank = next((rank for rank in (run.lead, *run.ranks) if rank.rank in facts.statistics), run.lead)
    statistics = facts.statistics.get(rank.rank)
    failed = first_exception(run.ranks)
    early = f"The run ended early with {failed[:MAX_MESSAGE]}. " if failed else ""
    # The required steps, the first step, and the steps of two windows.
    more = do.MORE_STEPS.filled(steps=2 * POLICY.steps)
    if statistics is None:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.NONE,
            title="No step was measured.",
            why=f"{early}The run has no pulse: it ended before its first step did, or the pulse is disabled.",
            remedies=(more,),
        )
    if statistics.used < POLICY.steps:
        return Finding(
            rule=NOTHING_FOUND,
            severity=Severity.INFO,
            title="Too few steps to judge.",
            why=f"{early}Step times come from {statistics.basis}; a verdict needs {POLICY.steps}.",
            remedies=(more, _look_further(run)),
            numbers={"duration_ns": statistics.mean_ns},
        )
    ledger = facts.ledgers[rank.rank]
    (parts, ns), (others, next_ns), *_ = _by_size(ledger)
    if parts == PASSES:
        return _bound(facts, rank, early)
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.INFO if parts == AROUND else Severity.NONE,
        title=sentence(_part(parts, ns), ledger, EACH_STEP, facts.on_rank(rank)),
        why=(
            f"{early}The mean step takes {format_ns(ledger.step_ns)}; the next largest: "
            f"{_taken_by(others)} {percent(next_ns / ledger.step_ns)}."
        ),
        remedies=(*((do.MORE_WORK,) if parts == AROUND else ()), _look_further(run)),
        numbers={"dominant": parts[0], "share": ns / ledger.step_ns, "duration_ns": ledger.step_ns},
    )


def _by_size(ledger: TimeLedger) -> list[tuple[tuple[Part, ...], float]]:
    """Return the passes, what runs around them, and every other part with ns per step, the largest first.

    A wait inside another part is one of its own.
    """
    spent: dict[Part, float] = dict.fromkeys((*PASSES, *AROUND), 0.0)
    for line in ledger.lines:
        spent[line.part] = spent.get(line.part, 0.0) + line.ns
    most = max(spent.values())
    spent |= {part: met for part in MEETING if (met := ledger.communicates(part)) > most / 2}
    groups = (PASSES, AROUND, *((part,) for part in spent if part not in {*PASSES, *AROUND, *APART}))
    sums = [(parts, sum(spent[part] for part in parts)) for parts in groups]
    inside = sum(ledger.communicates(part) for part in MEETING) - ledger.ns(*MEETING)
    sums[0] = (PASSES, min(total(_own_passes(ledger)), ledger.ns(*PASSES) - max(inside, 0)))
    return sorted(sums, key=lambda group: -group[1])


def _own_passes(ledger: TimeLedger) -> tuple[TimeLine, ...]:
    """Return the lines of forward and backward, without collectives and the backward that waits for those of DDP."""
    # Waits that are lines of their own are not in the passes.
    met = sum(ledger.communicates(part) for part in MEETING) - ledger.ns(Part.RANK_WAIT)
    lines = [line for line in ledger.of(*PASSES) if not (line.operator or "").startswith(COLLECTIVE)]
    return tuple(
        line for line in lines if line.module or line.operator or line.part == Part.FORWARD or line.ns / 2 > met
    )


def _taken_by(parts: tuple[Part, ...]) -> str:
    named = {PASSES: "forward and backward take", AROUND: "callbacks, hooks and untracked time take"}
    return named.get(parts) or parts[0].takes


class Takes(NamedTuple):
    """What takes most of a step: the word for it, the subject with its verb, its ns per step.

    ``place`` is where; ``part`` takes ``part_ns`` of it.
    """

    bound: str
    subject: str
    ns: float
    place: str = ""
    part: str = ""
    part_ns: float = 0.0


def _part(parts: tuple[Part, ...], ns: float, place: str = "") -> Takes:
    return Takes(BOUND.get(parts[0].group, HOST), _taken_by(parts), ns, place)


def sentence(takes: Takes, ledger: TimeLedger, of: str, more: str = "") -> str:
    """Return a title: what takes most of a step, with its size where it is half of it or more.

    Args:
        takes: what takes most.
        ledger: of the step.
        of: what the share is of: ``each step``.
        more: after the size.
    """
    is_bound = takes.ns >= POLICY.bound * ledger.step_ns
    is_whole = not (takes.place or takes.part)
    size = f" ({format_ns(takes.ns)} of {format_ns(ledger.step_ns)})" if is_bound and is_whole else ""
    place = ", mostly {place}" if takes.place else f", {{part}} {percent(takes.part_ns / ledger.step_ns)}"
    share = percent(takes.ns / ledger.step_ns)
    title = f"{takes.bound if is_bound else 'No bottleneck'}: {{subject}} {share} of {of}{{size}}{more}"
    title += "." if is_whole else f"{place}."
    names = {"subject": takes.subject, "place": takes.place, "part": takes.part}
    # A name says more than a size: the size goes where the title would be too long with both.
    whole = title.format(size=size, **names)
    return titled(title.replace("{size}", size if len(whole) <= POLICY.title else ""), **names)


def _computes(heaviest: Heaviest, ledger: TimeLedger, passes_ns: float) -> Takes:
    """Return what takes most of forward and backward."""
    half = POLICY.bound * ledger.step_ns
    if heaviest.family == PYTHON and heaviest.family_ns >= half:
        place = _place(ledger, Part.FORWARD, heaviest.family_ns)
        return Takes(HOST, "Python takes", heaviest.family_ns, place=place)
    if heaviest.module == ROOT and heaviest.family_ns >= half and heaviest.family != UNPROFILED:
        return Takes(COMPUTE, f"{heaviest.family} takes", heaviest.family_ns)
    if heaviest.ns >= half and heaviest.family == PYTHON:
        return Takes(HOST, f"{heaviest.module} takes", heaviest.ns, part=PYTHON, part_ns=heaviest.family_ns)
    if heaviest.ns >= half:
        return Takes(COMPUTE, f"{heaviest.module} takes", heaviest.ns)
    return Takes(COMPUTE, _taken_by(PASSES), passes_ns, part=heaviest.module, part_ns=heaviest.ns)


def _place(ledger: TimeLedger, part: Part, ns: float) -> str:
    """Return where Python spends at least half of a time, empty where no place has as much."""
    places = Counter[str]()
    for line in ledger.of(part):
        places[line.name] += 0 if line.operator else line.ns  # type: ignore[assignment]  # counts may be floats
    place, most = next(iter(places.most_common(1)), ("", 0.0))
    return place if most >= ns / 2 else ""


def _work(heaviest: Heaviest, more: str = "") -> str:
    """Return the operators that take most of a module."""
    leads = f"; {percent(heaviest.leader_ns / heaviest.ns)} is in {heaviest.leader}" if heaviest.leader else ""
    part = percent(heaviest.family_ns / heaviest.ns)
    return f"{part} of the time in {heaviest.module} is {heaviest.family}{more or leads}."


def _bound(facts: Facts, rank: Rank, early: str) -> Finding:
    """Return the module that bounds forward and backward of a run."""
    ledger, trace = facts.ledgers[rank.rank], _device_trace(facts, rank)
    device = trace.device_ledger if trace is not None and trace.is_steady else None
    # A device that mostly waits is not what bounds the step.
    owner = ledger if device is None or device.ns(Part.COMPUTE) < POLICY.bound * device.step_ns else device
    passes = owner.passes or _own_passes(owner)
    heaviest, forwards = heaviest_module(passes), forwards_per_step(rank)
    module, again = ((recorded := facts.host_ledger(rank)) and recorded.forwards) or ("", 1)
    if heaviest is not None and f"{heaviest.module}.".startswith(f"{module}."):
        forwards = max(forwards, again)
    achieved = _achieved(facts, rank, trace, heaviest) if heaviest is not None else None
    at, place = _longest_line(rank, ledger) if owner is ledger and rank.facts.is_cpu else (None, "")
    is_double = ledger.double_backward_ns >= POLICY.bound * ledger.ns(*PASSES)
    takes = Takes(COMPUTE, _taken_by(PASSES), total(passes))
    if is_double:
        takes = Takes(COMPUTE, "double backward takes", ledger.double_backward_ns)
    elif heaviest is not None:
        compiled = " (compiled)" if in_compiled(heaviest.module, rank) else ""
        named = replace(heaviest, module=f"{heaviest.module}{compiled}") if compiled else heaviest
        takes = _computes(named, owner, total(passes))
    often = f" in {forwards} forwards per step" if forwards > 1 else ""
    passes_text = (
        f"Forward takes {format_ns(ledger.ns(Part.FORWARD))}, backward {format_ns(ledger.ns(Part.BACKWARD))} per step."
    )
    more = f"{achieved.on if achieved else ''}{at.share_text(place) if at else ''}"
    why = [_work(heaviest, more)] if heaviest is not None else []
    why += [] if early and why else [achieved.text if achieved else passes_text]
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=sentence(takes, owner, f"{EACH_STEP}{often}", facts.on_rank(rank)),
        why=f"{early}{' '.join(why)}",
        remedies=(
            *((do.LAZY_PENALTY,) if ledger.double_backward_ns >= POLICY.verdict * ledger.step_ns else ()),
            *((do.FORWARD_ONCE,) if often else ()),
            *(_faster(heaviest, achieved, at, rank, ledger) if heaviest is not None else ()),
            _look_further(facts.run),
        ),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "module": heaviest.module if heaviest else None,
            "operators": heaviest.family if heaviest else None,
            "forwards": forwards,
            "duration_ns": ledger.step_ns,
            **(achieved.numbers if achieved else {}),
        },
    )


def _faster(
    heaviest: Heaviest, achieved: Achieved | None, spot: Spot | None, rank: Rank, ledger: TimeLedger
) -> tuple[Remedy, ...]:
    """Return what makes the module faster, the best first; torch.compile has no gradients of gradients."""
    tiny = (do.VECTORIZE.filled(owner=heaviest.module),) if achieved and achieved.is_tiny else ()
    able = (step for step in faster(heaviest, rank) if not (ledger.double_backward_ns and step.id == do.COMPILE.id))
    return (*tiny, *fitting_line(heaviest.family, spot), *able)


def _longest_line(rank: Rank, ledger: TimeLedger) -> tuple[Spot | None, str]:
    """Return the program's longest line, and its pass: backward if it is longer and has lines, else forward.

    It waits only where operators leave the time for it: inside one, the thread sleeps until the other threads are done.
    """
    at = action_spot(rank, ".backward") if ledger.ns(Part.BACKWARD) > ledger.ns(Part.FORWARD) else None
    part = Part.FORWARD if at is None else Part.BACKWARD
    at = at or main_spot(forward_lines(rank))
    if at is not None and at.waits:
        outside_operators = total(line for line in ledger.of(part) if not line.operator)
        at = replace(at, waits=at.share * ledger.ns(part) <= outside_operators)
    return at, f"the {part}"


def _device_trace(facts: Facts, rank: Rank) -> TraceReport | None:
    return next(
        (trace for trace in facts.steady_traces if trace.rank in {rank.rank, None} and trace.device_ledger), None
    )


def _achieved(facts: Facts, rank: Rank, trace: TraceReport | None, heaviest: Heaviest) -> Achieved | None:
    """Return what the operators that take most of a module's time reach, on its device where that was recorded."""
    ledger = trace.device_ledger if trace is not None and trace.device_ledger else facts.ledgers[rank.rank]
    inside = "" if heaviest.module == ROOT else f"{heaviest.module}."
    within = [each for each in ledger.work if f"{each.module}.".startswith(inside)]
    work = [each for each in within if operator_family(each.operator) == heaviest.family]
    if not work:
        return None
    peaks = device_peaks(*trace.devices) if trace is not None else None
    return achieved_by(work, peaks, on_device=trace is not None)


def _look_further(run: Run) -> Remedy:
    """Return the command for the most detailed artifact of the run."""
    if any(artifact.type == "trace" and artifact.state == "present" for artifact in run.artifacts):
        place = quoted(shown_place(run.directory, run.root, run.url))
        return do.VIEW_TRACE.filled(command=f"lightning-memprof view {place}")
    return do.RECORD_RUN


def nothing_on_host(trace: TraceReport, *, is_alone: bool) -> Finding:
    """Return the largest part of the host's time in a trace without device events."""
    span_ns = max(trace.end_ns - trace.start_ns, 1)
    why = f"The trace has {format_count(trace.host_events, 'host event')} in {format_ns(span_ns)}."
    remedies: tuple[Remedy, ...] = ()
    if made := graph_made(trace):
        title, why = f"No kernel was recorded: {made}.", f"{why} Its kernels run in replays."
        remedies = fitting(trace, *LATER)
    elif trace.device_use:
        title = f"Device activity was not recorded: the host {trace.device_use}."
        why, remedies = f"{why} No kernel is in the trace.", (do.RECORD_DEVICE,)
    elif trace.host_ledger is None:
        title = "No device activity in this trace."
    elif span_ns < POLICY.brief_ns:
        events = format_count(trace.host_events, "event")
        title = f"Too little was recorded for a verdict: {events} in {format_ns(span_ns)}."
        remedies = fitting(trace, *LATER)
    else:
        ledger = trace.host_ledger
        ledger = ledger if trace.steps else replace(ledger, step_ns=max(span_ns, ledger.step_ns))
        title, known, remedies = _host(trace, ledger, is_alone=is_alone)
        why = f"{known} {why}".lstrip()
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=title,
        why=f"{why[0].upper()}{why[1:]}",
        remedies=(*remedies, look(trace)),
        numbers={"span_ns": span_ns},
        evidence=(Evidence(artifact=str(trace.file), rank=trace.rank),),
    )


def _host(trace: TraceReport, ledger: TimeLedger, *, is_alone: bool) -> tuple[str, str, tuple[Remedy, ...]]:
    """Return a title, a sentence and the remedies for what takes most of the host's time."""
    (parts, ns), *_ = _by_size(ledger)
    heaviest = heaviest_module(_own_passes(ledger)) if parts == PASSES else None
    if heaviest is None:
        name, why = _collectives(trace) if parts[0] in MEETING else (_place(ledger, parts[0], ns), "")
        takes = _part(parts, ns, name)
        others = (do.RECORD_RANKS,) if is_alone and (trace.world_size or 1) > 1 else ()
        remedies = others if parts[0] in MEETING else LESS.get(parts[0], ())
    elif (takes := _computes(heaviest, ledger, ns)).bound == COMPUTE:
        able = faster_by(heaviest, (), () if trace.program.is_compiled else (do.FUSE_OPERATORS,), is_cpu=True)
        why, remedies = _work(heaviest), (*fitting_line(heaviest.family, None), *able)
    elif trace.program.trains and not _has_backward(ledger):
        outside = f"{percent(heaviest.family_ns / ledger.step_ns)} of {span(trace)} is outside operators"
        return f"Backward was not recorded: {outside}, in backward or in Python.", "", (do.RECORD_DEVICE,)
    else:
        why = ""
        remedies = (do.MOVE_OUT_OF_STEP.filled(place=takes.place) if takes.place else do.RECORD_PYTHON_STACKS,)
    where = "" if takes.bound == HOST else " on the host"
    return sentence(takes._replace(bound=f"{takes.bound}{where}"), ledger, span(trace)), why, fitting(trace, *remedies)


def _collectives(trace: TraceReport) -> tuple[str, str]:
    """Return the collective that takes most, and how often and how long it runs."""
    most = max(trace.collectives, key=lambda found: found.total_ns, default=None)
    if most is None:
        return "", ""
    count = sum(found.count for found in trace.collectives if found.name == most.name)
    longest = f"the longest takes {format_ns(most.max_ns)}, waits for other ranks included"
    return most.name, f"The trace has {format_count(count, 'call')} of {most.name}; {longest}."


def _has_backward(ledger: TimeLedger) -> bool:
    # The backward of a device runs in threads of its own; gradients are added up in that of the training.
    return any(line.operator and line.operator != ACCUMULATE for line in ledger.of(Part.BACKWARD))
