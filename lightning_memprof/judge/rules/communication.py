"""Differences between ranks: a straggler, uneven memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.ranks import meeting_ranks
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import WindowWaits
from lightning_memprof.account.ranks.lateness import larger_batches
from lightning_memprof.account.ranks.report import Straggler
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import Spot, lines, spots
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge.byte_rule import ByteDetail, ByteRule, FoundBytes, RankBytes
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity, ordered, severity_of, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    CHOOSE_COLLECTIONS,
    COMPARE_BATCHES,
    COMPARE_DEVICES,
    COMPARE_LINE,
    COMPARE_PARAMETERS,
    COMPARE_PART,
    COMPARE_TIMELINES,
    EQUAL_BATCHES,
    EQUAL_DATA,
    FIND_HOST_MEMORY,
    FIND_TENSORS,
    LOAD_TO_HOST,
    MERGE_TRACES,
    SHARE_CALLBACK,
    Remedy,
)
from lightning_memprof.judge.traces import CAUSES, idle_ns, seen_in
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent, quoted

SHOWN: Final = 3
# Causes that a busy core does not slow down.
NOT_SHARED: Final = frozenset({Part.DATA_WAIT, Part.CALLBACK, Part.GC_PAUSES})
SHARED: Final = "All ranks share the cores of one machine: other programs there can delay a rank too."


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that the others wait for, in a run or in the traces of several ranks.

    Attributes:
        rank: its number.
        caused_ns: by how much a step would be shorter without the wait.
        step_ns: the length of a step.
        others: the ledgers of the other ranks.
        title: the sentence after its name, with the field ``owner``.
        owner: what takes it longer.
        may_be_chance: whether another program may have delayed it, or one may be later that was not recorded.
    """

    rank: int
    caused_ns: float
    step_ns: float
    others: Sequence[TimeLedger]
    title: str
    owner: str = ""
    why: str
    remedies: tuple[Remedy, ...]
    evidence: tuple[Evidence, ...]
    numbers: Mapping[str, Any]
    may_be_chance: bool

    @property
    def finding(self) -> Finding:
        """The finding; it recovers what the rank causes, at most the waits: of the shortest one to the longest one."""
        share = min(1.0, self.caused_ns / self.step_ns) if self.step_ns else 0.0
        waits = [(min(ledger.communicates("rank_wait"), self.caused_ns), ledger.step_ns) for ledger in self.others]
        most, step_ns = max(waits, default=(0, 0))
        return Finding(
            rule="straggler",
            severity=min(severity_of(share), Severity.INFO if self.may_be_chance else Severity.CRITICAL),
            title=titled(f"Rank {self.rank} is the straggler: {self.title}.", owner=self.owner),
            why=self.why,
            remedies=self.remedies,
            evidence=self.evidence,
            numbers=self.numbers,
            weight=share,
            recovers=Recovery(unit="ns", min=min(waits)[0], max=most, whole=step_ns) if most else None,
        )


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
    spot = _forward_of(rank) if found.cause == Part.COMPUTE and rank is not None and rank.facts.is_cpu else None
    by_chance = found.cause not in NOT_SHARED and _may_wait_itself(facts, found)
    line = f" {spot.text} has {percent(spot.share)} of its forward{spot.at}." if spot is not None else ""
    return Late(
        rank=found.rank,
        caused_ns=at_stake,
        step_ns=found.step_ns,
        others=[ledger for number, ledger in facts.ledgers.items() if number != found.rank],
        title=_sentence(found),
        owner=found.callback or "",
        why=_why(facts, found, at_stake) + (f" {SHARED}" if by_chance else line),
        remedies=_remedies(facts, found, spot),
        evidence=_evidence(facts, rank),
        numbers={
            **msgspec.structs.asdict(found),
            "share": min(1.0, at_stake / found.step_ns) if found.step_ns else 0.0,
        },
        may_be_chance=by_chance,
    ).finding


def _remedies(facts: Facts, found: Straggler, spot: Spot | None) -> tuple[Remedy, ...]:
    """Return what to compare, or to change, on the late rank; of a forward on the host, its line."""
    several = len({rank.facts.host for rank in facts.run.ranks}) > 1
    place = {"rank": found.rank, "host": f" on {found.host}" if found.host and several else ""}
    if found.cause == Part.COMPUTE and (sizes := larger_batches(facts.run.ranks, found.rank)) is not None:
        return (EQUAL_BATCHES.filled(**place, own=f"{sizes[0]:,}", others=f"{sizes[1]:,}"),)
    if spot is not None:
        return COMPARE_LINE.filled(**place, owner=spot.text), COMPARE_BATCHES.filled(**place)
    if found.cause == Part.CALLBACK:
        owner = found.callback or "its callbacks"
        return (SHARE_CALLBACK.filled(**place, owner=owner, object=owner.rpartition(".")[0]),)
    if found.cause == Part.DATA_WAIT:
        ledger = facts.ledgers.get(found.rank)
        loads = [line for line in ledger.of("data_wait") if "." in line.name] if ledger else []
        owner = max(loads, key=lambda line: line.ns).name.rpartition(".")[0] if loads else ""
        return (EQUAL_DATA.filled(**place, owner=f", mostly {owner}" if owner else ""),)
    simple: Mapping[Part | None, Remedy] = {
        Part.GC_PAUSES: CHOOSE_COLLECTIONS,
        Part.OPTIMIZER: COMPARE_PARAMETERS,
        Part.COMPUTE: COMPARE_BATCHES if facts.run.lead.facts.is_cpu else COMPARE_DEVICES,
    }
    moment = "between two steps" if found.cause == Part.UNTRACKED else "before a collective"
    return (simple.get(found.cause, COMPARE_TIMELINES).filled(**place, moment=moment),)


def _forward_of(rank: Rank) -> Spot | None:
    """Return the function with most of the time of a rank's forward, where lines were recorded."""
    return next(iter(spots(lines(rank, FORWARD.get(rank.facts.stage, "")))), None)


def _may_wait_itself(facts: Facts, found: Straggler) -> bool:
    """Return whether a rank without a device may be late because it waits for a core that all ranks share.

    The lateness that a pulse shows is without its waits for a core, where the kernel counts them.
    """
    if not facts.run.lead.facts.is_cpu or facts.ranks is None or len({rank.host for rank in facts.ranks.ranks}) > 1:
        return False
    return found.pulse_steps is None or not any(ledger.ns("core_wait") for ledger in facts.ledgers.values())


def _evidence(facts: Facts, rank: Rank | None) -> tuple[Evidence, ...]:
    """Return its steps and its windows; in a run of thousands of ranks not every rank is read."""
    if rank is None:
        return ()
    return (*((facts.pulse(rank),) if rank.pulse else ()), *facts.recorded(rank, "operator_trace"))


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


# What takes the late rank longer on its device, and what to compare.
LATE_BY: Final = {
    "kernels": ("computation", "the batches, clock rate and temperature"),
    "data": ("wait for data", "the samples, disk and workers"),
    "host": ("GPU's wait for the host", "the work of the host"),
}


def _in_traces(traces: Sequence[TraceReport]) -> Finding | None:
    """Return the rank that arrives last at the collectives of several ranks' traces."""
    late = [found for group in meeting_ranks(traces) if (found := _late_rank(*group)) is not None]
    return next(iter(ordered(rank.finding for rank in late)), None)


def _late_rank(ranks: Mapping[int, TraceReport], waits: WindowWaits) -> Late | None:
    span_ns = max(trace.end_ns - trace.start_ns for trace in ranks.values())
    steps = max(len(ranks[min(ranks)].steps), 1)
    if not waits.waited_ns or not waits.are_matched or len(waits.meetings) < POLICY.collectives:
        return None
    (rank, caused_ns), (_, next_ns), *_ = (*waits.caused_ns.most_common(2), (-1, 0))
    # Equal ranks take turns, and one hiccup is chance.
    hiccup_ns = waits.largest_ns.get(rank, 0) if steps > POLICY.calls else 0
    steady_ns = caused_ns - next_ns
    least_ns = max(POLICY.action_ns, POLICY.note * span_ns, waits.clock_error_ns * len(waits.meetings))
    if caused_ns < POLICY.most * waits.waited_ns or steady_ns - hiccup_ns < least_ns:
        return None
    last = sum(meeting.last_rank == rank for meeting in waits.meetings)
    behind = sum(meeting.cause == rank != meeting.last_rank for meeting in waits.meetings)
    passed_on = f"; another rank is last because of it at {behind}" if behind else ""
    own_ns = waits.own_wait_ns[rank]
    others_ns = round(statistics.median(ns for other, ns in waits.own_wait_ns.items() if other != rank))
    ledgers = [trace.device_ledger or trace.host_ledger for other, trace in ranks.items() if other != rank]
    files = " ".join(quoted(trace.file) for trace in list(ranks.values())[:SHOWN])
    return Late(
        rank=rank,
        caused_ns=steady_ns / steps,
        step_ns=span_ns / steps,
        others=[ledger for ledger in ledgers if ledger is not None],
        title=f"last at {last} of {len(waits.meetings)} collectives, the others wait {format_ns(others_ns)}",
        why=(
            f"In collectives rank {rank} waits {format_ns(own_ns)} and the median of the other ranks "
            f"{format_ns(others_ns)} of {format_ns(span_ns)}{passed_on}. It causes "
            f"{percent(caused_ns / waits.waited_ns)} of the waiting{_transfers(ledgers)}."
        ),
        remedies=(
            *_longer(rank, ranks, caused_ns),
            MERGE_TRACES.filled(files=files + (" ..." if len(ranks) > SHOWN else "")),
        ),
        evidence=tuple(evidence for each in (rank, *ranks) for evidence in seen_in(ranks[each]))[: len(ranks)],
        numbers={
            "rank": rank,
            "ranks": len(ranks),
            "collectives": len(waits.meetings),
            "own_wait_ns": own_ns,
            "span_ns": span_ns,
        },
        may_be_chance=2 * len(ranks) < max(each.world_size or 0 for each in ranks.values()),
    )


def _transfers(ledgers: Sequence[TimeLedger | None]) -> str:
    """Return the time of the transfers themselves on the waiting ranks, where it is known."""
    known = [ledger for ledger in ledgers if ledger is not None and ledger.communicates("rank_wait")]
    found = [ledger.communicates("collective") for ledger in known]
    return f"; the transfers themselves take {format_ns(statistics.median(found))} per step" if found else ""


def _longer(rank: int, ranks: Mapping[int, TraceReport], caused_ns: int) -> tuple[Remedy, ...]:
    """Return what the late rank does longer than the others, if that explains the waiting."""
    has_device = any(trace.gpu_window is not None for trace in ranks.values())
    spent = {each: (_on_device(trace) if has_device else _on_host(trace)) for each, trace in ranks.items()}
    own, others = spent[rank], [parts for each, parts in spent.items() if each != rank]
    usual = {part: statistics.median(each.get(part, 0.0) for each in others) for part in own}
    part = max(own, key=lambda part: own[part] - usual[part], default=None)
    if part is None or not all(spent.values()) or own[part] - usual[part] < POLICY.most * caused_ns:
        return ()
    words, check = LATE_BY.get(part, (part, "the work"))
    times = {"own": format_ns(own[part]), "others": format_ns(usual[part])}
    return (COMPARE_PART.filled(rank=rank, part=words, check=check, **times),)


def _on_device(trace: TraceReport) -> dict[str, float]:
    computed = trace.gpu_window.compute_ns if trace.gpu_window else 0
    host = idle_ns(trace, *(part for part in CAUSES if part not in {Part.IDLE_DATA, Part.IDLE_QUEUE}))
    return {"kernels": computed, "data": idle_ns(trace, Part.IDLE_DATA), "host": host}


def _on_host(trace: TraceReport) -> dict[str, float]:
    ledger = trace.host_ledger
    parts = {line.part for line in ledger.lines} if ledger else set()
    return {part.label: ledger.ns(part) * ledger.steps for part in parts} if ledger else {}


def fullest_rank(facts: Facts) -> FoundBytes | None:
    """Return what a rank needs beyond the others, on its device or, without one, on the host."""
    on_device, on_host = _peaks(facts, "device_peak_bytes"), _peaks(facts, "rss_peak_bytes", "rss_bytes")
    is_device = len(on_device) > 1
    peaks = on_device if is_device else on_host
    if len(peaks) < 2:
        return None
    highest = max(peaks, key=lambda rank: peaks[rank])
    others = round(statistics.median(size for rank, size in peaks.items() if rank != highest))
    rank = next(rank for rank in facts.run.ranks if rank.rank == highest)
    fact = RankBytes(
        owner=f"Rank {highest}",
        bytes=max(peaks[highest] - others, 0),
        whole=peaks[highest],
        place="its device" if is_device else "the host",
        rank=rank,
        # In a run of thousands of ranks not every rank is read.
        evidence=(facts.pulse(rank),) if rank.pulse else (),
    )
    if not is_device and fact.share < POLICY.uneven_host:
        return None
    return fact, ByteDetail(
        fields={"peak": format_bytes(fact.whole), "others": format_bytes(others)},
        why=(
            f"This is {fact.size} above the median of the {len(peaks) - 1} other ranks; the fullest rank limits the "
            "memory of a step on all."
        ),
        remedies=(FIND_TENSORS.filled(rank=highest), LOAD_TO_HOST)
        if is_device
        else (FIND_HOST_MEMORY.filled(rank=highest),),
        numbers={"others_bytes": others, "ranks": len(peaks), "on_device": is_device},
    )


def _peaks(facts: Facts, quantity: str, column: str | None = None) -> dict[int, int]:
    """Return the peak of each rank that has one: from its pulse, else from its windows and summaries.

    Those contain the system's peak of the process, which includes the process that started it.
    """
    peaks = {rank.rank: getattr(rank, quantity) or 0 for rank in (facts.ranks.ranks if facts.ranks is not None else ())}
    for rank in facts.run.ranks:
        seen = max((size for row in rank.pulse if (size := row[column or quantity]) is not None), default=0)
        peaks[rank.rank] = seen or peaks.get(rank.rank, 0)
    return {rank: size for rank, size in peaks.items() if size}


BYTE_ROWS: Final = (
    ByteRule(
        id="memory_imbalance",
        about=(
            "One rank needs much more memory than the others, on its device or, without one, on the host. The fullest "
            "rank limits the batch size of all; the others' memory is unused."
        ),
        when="On the host at least 20%: rank 0 also writes logs and checkpoints.",
        trade_off="None.",
        find=fullest_rank,
        says="{owner} peaks at {peak} on {place}, the other ranks at {others}.",
        saves=(1, 1),
        least=POLICY.bytes,
        at_most=Severity.CRITICAL,
    ),
)
