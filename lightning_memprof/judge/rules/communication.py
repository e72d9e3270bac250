"""Differences between ranks: a straggler, uneven memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.ranks import meeting_ranks
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import WindowWaits
from lightning_memprof.account.ranks.lateness import larger_batches, late_rank
from lightning_memprof.account.ranks.report import Straggler
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import Spot, action_spot, lines, main_spot, optimizer_spot
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import ByteFact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity, ordered, severity_of, titled
from lightning_memprof.judge.operators import spot_remedies
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.traces import CAUSES, idle_ns, seen_in
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent, quoted

SHOWN: Final = 3
# Causes that a busy core does not slow down.
NOT_SHARED: Final = frozenset({Part.DATA_WAIT, Part.CALLBACK, Part.GC_PAUSES})
SHARED: Final = "All ranks share the cores of one machine: other programs there can delay a rank too."


def straggler(facts: Facts) -> Finding | None:
    """Find the rank that the others wait for, and its activity meanwhile.

    All ranks are as slow as the slowest one. Its own collectives are short: on the other ranks the communication looks
    slow.

    Recovers the time that another rank waits for this one, at most the time that this one causes.
    """
    found = facts.ranks.straggler if facts.ranks else None
    if found is None:
        return _in_traces(facts.steady_traces)
    at_stake = found.caused_ns if found.caused_ns is not None else (found.own_ns or 0) - (found.others_ns or 0)
    rank = next((rank for rank in facts.run.ranks if rank.rank == found.rank and rank.in_full), None)
    spot = _spot(rank, found) if rank is not None else None
    by_chance = found.cause not in NOT_SHARED and _may_wait_itself(facts, found)
    late = Part.FORWARD if found.cause == Part.COMPUTE else found.cause
    whole = found.callback if late == Part.CALLBACK else f"its {late.label if late is not None else ''}"
    line = f" {spot.text} has {percent(spot.share)} of {whole}{spot.at}." if spot is not None else ""
    share = min(1.0, at_stake / found.step_ns) if found.step_ns else 0.0
    others = [ledger for number, ledger in facts.ledgers.items() if number != found.rank]
    return Finding(
        rule="straggler",
        severity=min(severity_of(share), Severity.INFO if by_chance else Severity.CRITICAL),
        title=titled(f"Rank {found.rank} is the straggler: {_sentence(found)}.", owner=found.callback or ""),
        why=_why(facts, found, at_stake) + (f" {SHARED}" if by_chance else line),
        remedies=_remedies(facts, found, spot),
        # In a run of thousands of ranks not every rank is read.
        evidence=(*((facts.pulse(rank),) if rank.pulse else ()), *facts.recorded(rank, "operator_trace"))
        if rank
        else (),
        numbers={**msgspec.structs.asdict(found), "share": share},
        weight=share,
        recovers=_waits(others, at_stake),
    )


def _spot(rank: Rank, found: Straggler) -> Spot | None:
    """Return where the program spends the time of a late forward, optimizer or callback."""
    if found.cause == Part.CALLBACK and found.callback:
        return action_spot(rank, found.callback)
    if found.cause == Part.OPTIMIZER and rank.training is not None and rank.training.optimizers:
        return optimizer_spot(rank, rank.training.optimizers[0].name or "")
    is_forward = found.cause == Part.COMPUTE and rank.facts.is_cpu
    return main_spot(lines(rank, FORWARD.get(rank.facts.stage, ""))) if is_forward else None


def _waits(others: Sequence[TimeLedger], caused_ns: float) -> Recovery | None:
    """Return the shortest and the longest wait of the other ranks, each at most the time that the late one causes."""
    waits = [(min(ledger.communicates("rank_wait"), caused_ns), ledger.step_ns) for ledger in others]
    most, step_ns = max(waits, default=(0, 0))
    return Recovery(unit="ns", min=min(waits)[0], max=most, whole=step_ns) if most else None


def _remedies(facts: Facts, found: Straggler, spot: Spot | None) -> tuple[Remedy, ...]:
    """Return what to compare, or to change, on the late rank; of a forward on the host, its line."""
    several = len({rank.facts.host for rank in facts.run.ranks}) > 1
    place = {"rank": found.rank, "host": f" on {found.host}" if found.host and several else ""}
    if found.cause == Part.COMPUTE and (sizes := larger_batches(facts.run.ranks, found.rank)) is not None:
        return (do.EQUAL_BATCHES.filled(**place, own=f"{sizes[0]:,}", others=f"{sizes[1]:,}"),)
    fit = spot_remedies(spot) if spot is not None else ()
    if found.cause == Part.CALLBACK:
        owner = found.callback or "its callbacks"
        share = do.SHARE_CALLBACK.filled(**place, owner=owner, object=owner.rpartition(".")[0])
        return (*fit, share) if spot is not None and spot.waits else (share, *fit)
    if found.cause == Part.DATA_WAIT:
        ledger = facts.ledgers.get(found.rank)
        loads = [line for line in ledger.of("data_wait") if "." in line.name] if ledger else []
        owner = max(loads, key=lambda line: line.ns).name.rpartition(".")[0] if loads else ""
        return (do.EQUAL_DATA.filled(**place, owner=f", mostly {owner}" if owner else ""),)
    if found.cause == Part.GC_PAUSES:
        return (do.FREEZE_OBJECTS,)
    if found.cause == Part.COMPUTE:
        on_device = not facts.run.lead.facts.is_cpu
        what = f"{f'{spot.text} and ' if spot else ''}{COMPARED['kernels' if on_device else 'cores']}"
    elif found.cause == Part.OPTIMIZER:
        what = "the updated parameters"
    else:
        what = "the timelines"
    return (*fit, do.COMPARE_RANK.filled(**place, what=what))


def _may_wait_itself(facts: Facts, found: Straggler) -> bool:
    """Return whether a rank without a device may be late because it waits for a core that all ranks share.

    The lateness that a pulse shows is without its waits for a core, where the kernel counts them.
    """
    if not facts.run.lead.facts.is_cpu or facts.ranks is None or len({rank.host for rank in facts.ranks.ranks}) > 1:
        return False
    return found.pulse_steps is None or not any(ledger.ns("core_wait") for ledger in facts.ledgers.values())


def _sentence(found: Straggler) -> str:
    if found.cause is None or found.own_ns is None or found.others_ns is None:
        return "the other ranks wait for it"
    words = "{owner} takes" if found.cause == Part.CALLBACK and found.callback else f"its {found.cause.takes}"
    if found.cause == Part.COMPUTE and found.pulse_steps is not None:
        words = f"its {Part.FORWARD.takes}"
    return f"{words} {format_ns(found.own_ns)} per step, {format_ns(found.others_ns)} on the others"


def _why(facts: Facts, found: Straggler, at_stake: float) -> str:
    part = f"{percent(min(1.0, at_stake / (found.step_ns or 1)))} of a {format_ns(found.step_ns)} step"
    if found.pulse_steps is not None and found.caused_ns is not None:
        excluded = ", waits for a core excluded" if any(each.ns("core_wait") for each in facts.ledgers.values()) else ""
        return (
            f"Over {found.pulse_steps:,} steps, rank {found.rank} is {format_ns(found.caused_ns)} later than any other "
            f"rank ({part}{excluded}), {percent(found.caused_share)} of all lateness; the others wait in collectives."
        )
    if found.caused_ns is None:
        return (
            f"No collective was recorded: the phases of its {format_ns(found.step_ns)} step are compared with those of "
            "the other ranks; a window with the operator trace shows which rank waits for which."
        )
    return (
        f"The other ranks wait {format_ns(found.caused_ns)} per step in collectives for it ({part}), "
        f"{percent(found.caused_share)} of all such waiting{f'; it runs on {found.host}' if found.host else ''}."
    )


# What to compare, by what takes the late rank longer.
COMPARED: Final = {
    "kernels": "the batch lengths, clock rate and temperature",
    "cores": "the batch lengths, and other processes on the cores,",
    "data": "the samples, disk and workers",
}


def _in_traces(traces: Sequence[TraceReport]) -> Finding | None:
    """Return the rank that arrives last at the collectives of several ranks' traces."""
    late = [found for group in meeting_ranks(traces) if (found := _late_rank(*group)) is not None]
    return next(iter(ordered(late)), None)


def _late_rank(ranks: Mapping[int, TraceReport], waits: WindowWaits) -> Finding | None:
    span_ns = max(trace.end_ns - trace.start_ns for trace in ranks.values())
    steps = max(len(ranks[min(ranks)].steps), 1)
    if not waits.are_matched or len(waits.meetings) < POLICY.collectives:
        return None
    least_ns = max(POLICY.action_ns, POLICY.note * span_ns, waits.clock_error_ns * len(waits.meetings))
    late = late_rank(waits.late, steps, least_ns / steps)
    if late is None:
        return None
    rank = late.rank
    last = sum(meeting.last_rank == rank for meeting in waits.meetings)
    own_ns = waits.own_wait_ns[rank]
    others_ns = round(statistics.median(ns for other, ns in waits.own_wait_ns.items() if other != rank))
    ledgers = [trace.device_ledger or trace.host_ledger for other, trace in ranks.items() if other != rank]
    files = " ".join(quoted(trace.file) for trace in list(ranks.values())[:SHOWN])
    title = f"last at {last} of {len(waits.meetings)} collectives, the others wait {format_ns(others_ns)}"
    share = min(1.0, late.caused_ns * steps / span_ns)
    may_be_chance = 2 * len(ranks) < max(each.world_size or 0 for each in ranks.values())
    return Finding(
        rule="straggler",
        severity=min(severity_of(share), Severity.INFO if may_be_chance else Severity.CRITICAL),
        title=titled(f"Rank {rank} is the straggler: {title}."),
        why=(
            f"In collectives rank {rank} waits {format_ns(own_ns)} and the median of the other ranks "
            f"{format_ns(others_ns)} of {format_ns(span_ns)}. It causes {percent(late.share)} of the waiting."
        ),
        remedies=(
            *_longer(rank, ranks, late.caused_ns * steps),
            do.MERGE_TRACES.filled(files=files + (" ..." if len(ranks) > SHOWN else "")),
        ),
        evidence=tuple(evidence for each in (rank, *ranks) for evidence in seen_in(ranks[each]))[: len(ranks)],
        numbers={
            "rank": rank,
            "ranks": len(ranks),
            "collectives": len(waits.meetings),
            "own_wait_ns": own_ns,
            "span_ns": span_ns,
        },
        weight=share,
        recovers=_waits([ledger for ledger in ledgers if ledger is not None], late.caused_ns),
    )


def _longer(rank: int, ranks: Mapping[int, TraceReport], caused_ns: float) -> tuple[Remedy, ...]:
    """Return what the late rank does longer than the others, if that explains the waiting."""
    has_device = any(trace.gpu_window is not None for trace in ranks.values())
    spent = {each: (_on_device(trace) if has_device else _on_host(trace)) for each, trace in ranks.items()}
    own, others = spent[rank], [parts for each, parts in spent.items() if each != rank]
    usual = {part: statistics.median(each.get(part, 0.0) for each in others) for part in own}
    part = max(own, key=lambda part: own[part] - usual[part], default=None)
    if part is None or not all(spent.values()) or own[part] - usual[part] < POLICY.most * caused_ns:
        return ()
    times = f"{format_ns(own[part])}, {format_ns(usual[part])} on the others"
    what = f"{COMPARED.get(part, f'the work in {part}')} ({times})"
    return (do.COMPARE_RANK.filled(rank=rank, host="", what=what),)


def _on_device(trace: TraceReport) -> dict[str, float]:
    computed = trace.gpu_window.compute_ns if trace.gpu_window else 0
    host = idle_ns(trace, *(part for part in CAUSES if part not in {Part.IDLE_DATA, Part.IDLE_QUEUE}))
    return {"kernels": computed, "data": idle_ns(trace, Part.IDLE_DATA), "host": host}


def _on_host(trace: TraceReport) -> dict[str, float]:
    ledger = trace.host_ledger
    parts = {line.part for line in ledger.lines} if ledger else set()
    return {part.label: ledger.ns(part) * ledger.steps for part in parts} if ledger else {}


def fullest_rank(facts: Facts) -> Iterator[Found]:
    """Yield what a rank needs beyond the others, on its device or, without one, on the host."""
    on_device, on_host = _peaks(facts, "device_peak_bytes"), _peaks(facts, "rss_peak_bytes", "rss_bytes")
    is_device = len(on_device) > 1
    peaks = on_device if is_device else on_host
    if len(peaks) < 2:
        return
    highest = max(peaks, key=lambda rank: peaks[rank])
    others = round(statistics.median(size for rank, size in peaks.items() if rank != highest))
    rank = next(rank for rank in facts.run.ranks if rank.rank == highest)
    fact = ByteFact(
        owner=f"Rank {highest}",
        bytes=max(peaks[highest] - others, 0),
        whole=peaks[highest],
        place="its device" if is_device else "the host",
        source=rank,
        # In a run of thousands of ranks not every rank is read.
        evidence=(facts.pulse(rank),) if rank.pulse else (),
    )
    if not is_device and fact.share < POLICY.uneven_host:
        return
    detail = Detail(
        fields={"peak": format_bytes(fact.whole), "others": format_bytes(others)},
        why=(
            f"This is {fact.size} above the median of the {len(peaks) - 1} other ranks; the fullest rank limits the "
            "memory of a step on all."
        ),
        remedies=(do.FIND_HOST_MEMORY.filled(rank=highest), *((do.MAP_FILE,) if is_device else ())),
        numbers={"others_bytes": others, "ranks": len(peaks), "on_device": is_device},
    )
    yield fact, detail


def _peaks(facts: Facts, quantity: str, column: str | None = None) -> dict[int, int]:
    """Return the peak of each rank that has one: from its pulse, else from its windows and summaries.

    Those contain the system's peak of the process, which includes the process that started it.
    """
    peaks = {rank.rank: getattr(rank, quantity) or 0 for rank in (facts.ranks.ranks if facts.ranks is not None else ())}
    for rank in facts.run.ranks:
        seen = max((size for row in rank.pulse if (size := row[column or quantity]) is not None), default=0)
        peaks[rank.rank] = seen or peaks.get(rank.rank, 0)
    return {rank: size for rank, size in peaks.items() if size}


ROWS: Final = (
    Rule(
        id="memory_imbalance",
        about="One rank needs much more memory than the others, and limits the batch size of all.",
        when="On the host at least 20%: rank 0 also writes logs and checkpoints.",
        trade_off="None.",
        find=fullest_rank,
        says="{owner} peaks at {peak} on {place}, the other ranks at {others}.",
        saves=(1, 1),
        least=POLICY.bytes,
    ),
)
