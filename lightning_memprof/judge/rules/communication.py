"""Differences between ranks: a straggler, uneven memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.ranks import meeting_ranks
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import WindowWaits
from lightning_memprof.account.ranks.lateness import larger_batches
from lightning_memprof.account.ranks.report import Straggler
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity
from lightning_memprof.judge.traces import (
    CAUSES,
    idle_ns,
    seen_in,
    severity_of,
)
from lightning_memprof.read.trace.model import TraceReport
from lightning_memprof.units import MIB, format_bytes, format_ns, percent, quoted

SHOWN: Final = 3
# As for data: from 30% on the wait decides how long the run takes.
SEVERE_WAIT: Final = 0.30
# Causes that a busy core does not slow down.
NOT_SHARED: Final = frozenset({Part.DATA_WAIT, Part.CALLBACK, Part.GC_PAUSES})
SHARED: Final = " All ranks share the cores of one machine: other programs there can delay a rank too."
NEXT: Final[Mapping[Part | None, str]] = {
    Part.DATA_WAIT: "Check the data of rank {rank}{host}{loads}: its share of samples, disk, and DataLoader workers.",
    Part.CALLBACK: "Share the work of {callback} on rank {rank}{host} among all ranks, or do it less often.",
    Part.GC_PAUSES: "Collect garbage on all ranks in the same step: gc.disable(), gc.collect() every 100 batches.",
    Part.OPTIMIZER: "Compare the parameters that rank {rank}{host} updates with those of the other ranks.",
    Part.UNTRACKED: "Compare the timeline of rank {rank}{host} between two steps with that of another rank.",
    Part.COMPUTE: "Compare rank {rank}{host} with the others: its batch lengths, its device clock and temperature.",
}
LONGER: Final = (
    "Give all ranks batches of equal size: sort samples by length, and deal them out to the ranks in turn. Rank {rank} "
    "gets {own:,} elements per batch, the others {others:,}."
)
UNKNOWN: Final = "Compare the timeline of rank {rank}{host} before a collective with that of another rank."


def straggler(facts: Facts) -> Finding | None:
    """Find the rank that the others wait for, and its activity meanwhile.

    Recovers what it causes, at most the waits of the other ranks: of the shortest one to the longest one.
    """
    found = facts.ranks.straggler if facts.ranks else None
    if found is None:
        return None
    ledger = facts.ledgers.get(found.rank)
    at_stake = found.caused_ns if found.caused_ns is not None else (found.own_ns or 0) - (found.others_ns or 0)
    share = min(1.0, at_stake / found.step_ns) if found.step_ns else 0.0
    by_chance = found.cause not in NOT_SHARED and _may_wait_itself(facts, found)
    severity = Severity.CRITICAL if share >= SEVERE_WAIT else Severity.WARNING
    next_step = (found.cause == Part.COMPUTE and _longer(facts, found.rank)) or NEXT.get(found.cause, UNKNOWN)
    loading = [line for line in ledger.of("data_wait") if "." in line.name] if ledger else []
    loads = f", mostly {max(loading, key=lambda line: line.ns).name.rpartition('.')[0]}" if loading else ""
    several = len({rank.facts.host for rank in facts.run.ranks}) > 1
    host = f" on {found.host}" if found.host and several else ""
    return Finding(
        rule="straggler",
        severity=Severity.INFO if by_chance else severity,
        title=_sentence(found),
        why=_why(found, at_stake) + (SHARED if by_chance else ""),
        remedies=(
            next_step.format(rank=found.rank, host=host, loads=loads, callback=found.callback or "its callbacks"),
        ),
        evidence=_evidence(facts, found),
        numbers={**msgspec.structs.asdict(found), "share": share},
        # Its slow phase is found too, as if all ranks had it: fixing the straggler comes first.
        weight=1.0 + share,
        recovers=_recovery(at_stake, [ledger for rank, ledger in facts.ledgers.items() if rank != found.rank]),
    )


def _longer(facts: Facts, late: int) -> str | None:
    """Return the remedy of a rank whose batches have more elements than those of the other ranks."""
    found = larger_batches(facts.run.ranks, late)
    return LONGER.format(rank=late, own=found[0], others=found[1]) if found else None


def _recovery(caused_ns: float, others: Sequence[TimeLedger]) -> Recovery | None:
    """Return what the ranks regain that wait in each step for the late one."""
    waits = [(min(ledger.communicates("rank_wait"), caused_ns), ledger.step_ns) for ledger in others]
    most, step_ns = max(waits, default=(0, 0))
    return Recovery(unit="ns", min=min(waits)[0], max=most, whole=step_ns) if most else None


def _may_wait_itself(facts: Facts, found: Straggler) -> bool:
    """Return whether a rank without a device may be late because it waits for a core that all ranks share.

    The lateness that a pulse shows is without its waits for a core, where the kernel counts them.
    """
    device = facts.run.lead.facts.device or ""
    if not device.startswith("cpu") or facts.ranks is None or len({rank.host for rank in facts.ranks.ranks}) > 1:
        return False
    return found.pulse_steps is None or not any(ledger.ns("core_wait") for ledger in facts.ledgers.values())


def _evidence(facts: Facts, found: Straggler) -> tuple[Evidence, ...]:
    """Return its steps and its windows; in a run of thousands of ranks not every rank is read."""
    rank = next((rank for rank in facts.run.ranks if rank.rank == found.rank and rank.in_full), None)
    if rank is None:
        return ()
    return (*((facts.pulse(rank),) if rank.pulse else ()), *facts.recorded(rank, "operator_trace"))


def _sentence(found: Straggler) -> str:
    if found.cause is None or found.own_ns is None or found.others_ns is None:
        return f"Rank {found.rank} is the straggler: the other ranks wait for it."
    named = found.cause == Part.CALLBACK and found.callback
    words = f"its callback {found.callback} takes" if named else f"its {found.cause.takes}"
    if found.cause == Part.COMPUTE and found.pulse_steps is not None:
        words = f"its {Part.FORWARD.takes}"
    own, others = format_ns(found.own_ns), format_ns(found.others_ns)
    return f"Rank {found.rank} is the straggler: {words} {own} per step, {others} on the other ranks."


def _why(found: Straggler, at_stake: float) -> str:
    part = f"{percent(min(1.0, at_stake / (found.step_ns or 1)))} of a {format_ns(found.step_ns)} step"
    if found.pulse_steps is not None and found.caused_ns is not None:
        return (
            f"Over {found.pulse_steps:,} steps, rank {found.rank} is {format_ns(found.caused_ns)} later than any other "
            f"rank ({part}), {percent(found.caused_share)} of all lateness; the others wait in collectives."
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


# One rank is the straggler of several traces if it causes this part of all waiting; else ranks take turns.
MAIN_SHARE: Final = 0.5
LEAST_WAIT_SHARE: Final = 0.05
MIN_WAIT_NS: Final = 1_000_000
FEW_COLLECTIVES: Final = 4
# Of fewer steps, the longest wait is most of the waiting.
FEW_STEPS: Final = 3
EXPLAINS: Final = 0.3
# Differences of the late rank that explain its lateness, by the time in which they show.
LATE_BY: Final = {
    "kernels": (
        "Rank {rank} computes for {own}, the others for {others}: compare its batches, clock rate and temperature."
    ),
    "data": "Rank {rank} waits for data for {own}, the others for {others}: check its samples, disk and workers.",
    "host": (
        "The GPU of rank {rank} waits for its host for {own}, the others for {others}: compare what that host runs."
    ),
}


def straggler_trace(traces: Sequence[TraceReport]) -> list[Finding]:
    """Find the rank that arrives last at the collectives of several ranks' traces.

    Recovers what it causes, at most the waits of the other ranks: of the shortest one to the longest one.
    """
    found = [finding for group in meeting_ranks(traces) if (finding := _late_rank(*group)) is not None]
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _late_rank(ranks: Mapping[int, TraceReport], waits: WindowWaits) -> Finding | None:
    span_ns = max(trace.end_ns - trace.start_ns for trace in ranks.values())
    steps = max(len(ranks[min(ranks)].steps), 1)
    if not waits.waited_ns or not waits.are_matched or len(waits.meetings) < FEW_COLLECTIVES:
        return None
    (rank, caused_ns), (_, next_ns), *_ = (*waits.caused_ns.most_common(2), (-1, 0))
    # Equal ranks take turns, and one hiccup is chance.
    hiccup_ns = waits.largest_ns.get(rank, 0) if steps >= FEW_STEPS else 0
    steady_ns = caused_ns - next_ns
    share = steady_ns / span_ns
    least_ns = max(MIN_WAIT_NS, LEAST_WAIT_SHARE * span_ns, waits.clock_error_ns * len(waits.meetings))
    if caused_ns < MAIN_SHARE * waits.waited_ns or steady_ns - hiccup_ns < least_ns:
        return None
    last = sum(meeting.last_rank == rank for meeting in waits.meetings)
    behind = sum(meeting.cause == rank != meeting.last_rank for meeting in waits.meetings)
    passed_on = f", and another because of it at {behind}" if behind else ""
    own_ns = waits.own_wait_ns[rank]
    others_ns = round(statistics.median(ns for other, ns in waits.own_wait_ns.items() if other != rank))
    ledgers = [trace.device_ledger or trace.host_ledger for other, trace in ranks.items() if other != rank]
    files = " ".join(quoted(trace.file) for trace in list(ranks.values())[:SHOWN])
    return Finding(
        rule="straggler_trace",
        # Where most ranks were not recorded, one of them may be later still.
        severity=Severity.INFO
        if 2 * len(ranks) < max(each.world_size or 0 for each in ranks.values())
        else severity_of(share),
        title=(
            f"Rank {rank} is the straggler: last at {last} of {len(waits.meetings)} collectives{passed_on}, the "
            f"others wait {format_ns(others_ns)}."
        ),
        why=(
            f"In collectives rank {rank} waits {format_ns(own_ns)} and the median of the other ranks "
            f"{format_ns(others_ns)} of {format_ns(span_ns)}; it causes {percent(caused_ns / waits.waited_ns)} of the "
            f"waiting{_transfers(ledgers)}."
        ),
        remedies=(
            *_lateness(rank, ranks, caused_ns),
            (
                f"See all ranks on one timeline: lightning-memprof merge -o merged.json.gz {files}"
                f"{' ...' if len(ranks) > SHOWN else ''}."
            ),
        ),
        evidence=tuple(evidence for each in (rank, *ranks) for evidence in seen_in(ranks[each]))[: len(ranks)],
        numbers={
            "rank": rank,
            "ranks": len(ranks),
            "collectives": len(waits.meetings),
            "last_count": last,
            "caused_ns": caused_ns,
            "own_wait_ns": own_ns,
            "others_wait_ns": others_ns,
            "span_ns": span_ns,
        },
        # Its collectives are found too, as if all ranks had to change them: fixing the straggler comes first.
        weight=1.0 + share,
        recovers=_recovery(steady_ns / steps, [ledger for ledger in ledgers if ledger is not None]),
    )


def _transfers(ledgers: Sequence[TimeLedger | None]) -> str:
    """Return the time of the transfers themselves on the waiting ranks, where it is known."""
    known = [ledger for ledger in ledgers if ledger is not None and ledger.communicates("rank_wait")]
    found = [ledger.communicates("collective") for ledger in known]
    return f"; the transfers themselves take {format_ns(statistics.median(found))} per step" if found else ""


def _lateness(rank: int, ranks: Mapping[int, TraceReport], caused_ns: int) -> tuple[str, ...]:
    """Return what the late rank does longer than the others, if that explains the waiting."""

    def spent(trace: TraceReport) -> dict[str, int]:
        computed = trace.gpu_window.compute_ns if trace.gpu_window else 0
        host = idle_ns(trace, *(part for part in CAUSES if part not in {Part.IDLE_DATA, Part.IDLE_QUEUE}))
        return {"kernels": computed, "data": idle_ns(trace, Part.IDLE_DATA), "host": host}

    if all(trace.gpu_window is None for trace in ranks.values()):
        return _longer_on_host(rank, ranks, caused_ns)
    own, others = spent(ranks[rank]), [spent(trace) for other, trace in ranks.items() if other != rank]
    usual = {name: round(statistics.median(each[name] for each in others)) for name in own}
    name = max(own, key=lambda name: own[name] - usual[name])
    if own[name] - usual[name] < EXPLAINS * caused_ns:
        return ()
    return (LATE_BY[name].format(rank=rank, own=format_ns(own[name]), others=format_ns(usual[name])),)


def _longer_on_host(rank: int, ranks: Mapping[int, TraceReport], caused_ns: int) -> tuple[str, ...]:
    """Return the part of its step that takes a late rank without a device longer than the others."""
    ledgers = {each: trace.host_ledger for each, trace in ranks.items() if trace.host_ledger is not None}
    if rank not in ledgers or len(ledgers) < len(ranks):
        return ()
    mine = ledgers.pop(rank)
    parts = {line.part for line in mine.lines}
    usual = {part: statistics.median(ledger.ns(part) for ledger in ledgers.values()) for part in parts}
    part = max(parts, key=lambda part: mine.ns(part) - usual[part])
    own, others = mine.ns(part), usual[part]
    if (own - others) * mine.steps < EXPLAINS * caused_ns:
        return ()
    words = part.replace("_", " ")
    return (f"Compare rank {rank} with the others: its {words} takes {format_ns(own)}, theirs {format_ns(others)}.",)


# Ranks of one kind differ by the lengths of their batches and by rank 0's extra work: by less than this on a device.
DEVICE_SHARE: Final = 0.15
# On the host, rank 0 also writes logs and checkpoints, and touched memory stays resident.
HOST_SHARE: Final = 0.25
MIN_BYTES: Final = 256 * MIB
# From twice the other ranks' memory on, half of theirs is unused.
SEVERE_SHARE: Final = 1.0
NEXT_DEVICE: Final = (
    "Find device tensors of rank {rank} only: rank_zero_only code, longer batches, more layers.",
    "Load checkpoints to the host: torch.load(path, map_location='cpu'), so that not all ranks load to one device.",
)
NEXT_HOST: Final = (
    "Find host memory of rank {rank} only: gathered outputs of all ranks, rank_zero_only caches, more workers.",
)


def memory_imbalance(facts: Facts) -> list[Finding]:
    """Find a rank with a much higher peak than the others, on its device or, without one, on the host."""
    on_device, on_host = _peaks(facts, "device_peak_bytes"), _peaks(facts, "rss_peak_bytes", "rss_bytes")
    if len(on_device) > 1:
        return _imbalance(facts, on_device, is_device=True)
    return _imbalance(facts, on_host, is_device=False) if len(on_host) > 1 else []


def _peaks(facts: Facts, quantity: str, column: str | None = None) -> dict[int, int]:
    """Return the peak of each rank that has one: from its pulse, else from its windows and summaries.

    Those contain the system's peak of the process, which includes the process that started it.
    """
    peaks = {rank.rank: getattr(rank, quantity) or 0 for rank in (facts.ranks.ranks if facts.ranks is not None else ())}
    for rank in facts.run.ranks:
        seen = max((size for row in rank.pulse if (size := row[column or quantity]) is not None), default=0)
        peaks[rank.rank] = seen or peaks.get(rank.rank, 0)
    return {rank: size for rank, size in peaks.items() if size}


def _imbalance(facts: Facts, peaks: Mapping[int, int], *, is_device: bool) -> list[Finding]:
    highest = max(peaks, key=lambda rank: peaks[rank])
    peak, others = peaks[highest], round(statistics.median(size for rank, size in peaks.items() if rank != highest))
    share = (peak - others) / others if others else 0.0
    if peak - others < MIN_BYTES or share < (DEVICE_SHARE if is_device else HOST_SHARE):
        return []
    place = "its device" if is_device else "the host"
    next_steps = NEXT_DEVICE if is_device else NEXT_HOST
    return [
        Finding(
            rule="memory_imbalance",
            severity=Severity.CRITICAL if is_device and share >= SEVERE_SHARE else Severity.WARNING,
            title=f"Rank {highest} peaks at {format_bytes(peak)} on {place}, the other ranks at "
            f"{format_bytes(others)}.",
            why=(
                f"That is {format_bytes(peak - others)} above the median of the {len(peaks) - 1} other ranks; the "
                "fullest rank limits the memory of a step on all."
            ),
            remedies=tuple(template.format(rank=highest) for template in next_steps),
            # In a run of thousands of ranks not every rank is read.
            evidence=tuple(facts.pulse(rank) for rank in facts.run.ranks if rank.rank == highest and rank.pulse),
            numbers={
                "rank": highest,
                "peak_bytes": peak,
                "others_bytes": others,
                "ranks": len(peaks),
                "on_device": is_device,
            },
            weight=min(share, 1.0),
        )
    ]
