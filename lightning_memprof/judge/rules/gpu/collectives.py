"""Communication of devices that no computation overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_memprof.judge.finding import Finding, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    COMBINE_COLLECTIVES,
    EARLY_ALL_TO_ALL,
    EARLY_TRANSFER,
    FILL_PIPELINE,
    FIND_LATE_RANK,
    FIND_WAITING_RANK,
    GATHER_ONCE,
    OVERLAP_GRADIENTS,
    PREFETCH_PARAMETERS,
    SEND_BFLOAT16,
    SEND_FEWER_BYTES,
    SEND_HALF,
    SEND_LESS_OFTEN,
    SEND_LESS_PER_TOKEN,
    SHARD_IN_NODE,
    SMALLER_BUCKETS,
    STAY_IN_NODE,
    Remedy,
)
from lightning_memprof.judge.traces import (
    NOTABLE_SHARE,
    longest_in,
    on_rank,
    recovered_ns,
    remedies,
    severity_of,
    shorter_name,
    times,
)
from lightning_memprof.read.trace.model import CollectiveTotals, TraceReport
from lightning_memprof.units import MIB, format_bytes, format_ns, percent

# Below this size the start-up of a collective takes as long as its data on any link.
SMALL_BYTES: Final = MIB
# This many of them in a step are better sent as one.
MANY_SMALL: Final = 20
# The same data takes the same time: a collective that takes this many times as long waits for a late rank.
LATE_FACTOR: Final = 3
# Of the smaller of two sizes, the part of its time that does not grow with the bytes; and how much larger the other is.
FIXED_SHARE: Final = 0.5
LARGER: Final = 2
SHOWN: Final = 3
UNKNOWN_COLLECTIVE: Final = "an unnamed collective"
# DistributedDataParallel sends a bucket as soon as it is full, by default with 25 MiB: the last one after backward.
BUCKET_BYTES: Final = 25 * MIB
FEW_BUCKETS: Final = 2
# So many buckets leave little of the gradients for the end of backward.
BUCKETS: Final = 8
OVERLAP: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "all_reduce": (OVERLAP_GRADIENTS,),
    "gather_scatter": (PREFETCH_PARAMETERS,),
    "all_to_all": (EARLY_ALL_TO_ALL,),
    "point_to_point": (FILL_PIPELINE,),
    "other": (EARLY_TRANSFER,),
}
SEND_LESS: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "all_reduce": (
        SEND_LESS_OFTEN,
        SEND_BFLOAT16,
        SEND_LESS_PER_TOKEN,
    ),
    "gather_scatter": (SHARD_IN_NODE, GATHER_ONCE),
    "all_to_all": (SEND_HALF, STAY_IN_NODE),
    "point_to_point": (),
    "other": (SEND_FEWER_BYTES,),
}
KINDS: Final = {
    "all_reduce": ("allreduce",),
    "gather_scatter": ("allgather", "reducescatter"),
    "all_to_all": ("alltoall", "sendrecv"),
    "point_to_point": ("send", "recv"),
}
OVERLAPPED: Final = (0.0, 1.0)
COLLECTIVE_NUMBERS: Final = (
    "name", "group", "bytes_each", "count", "exposed_ns", "median_ns", "max_ns", "bus_bytes_per_s",
)  # fmt: skip


def communication_exposed(trace: TraceReport) -> Finding | None:
    """Find communication that no computation overlaps, and its collectives.

    Excludes the wait for other ranks where their traces show it. Recovers at most the exposed collectives, as far as
    there is computation to hide them; nothing where it depends on their result.
    """
    window, ledger = trace.window, trace.device_ledger
    if window is None or not window.window_ns:
        return None
    waited_ns = round(ledger.communicates("rank_wait") * ledger.steps) if ledger is not None else 0
    exposed_ns = max(window.communication_exposed_ns - waited_ns, 0)
    share = exposed_ns / window.window_ns
    if share <= NOTABLE_SHARE:
        return None
    collectives = sorted(trace.collectives, key=lambda collective: collective.exposed_ns, reverse=True)
    worst = collectives[0] if collectives else None
    overlapped = window.communication_overlapped_ns / window.communication_ns if window.communication_ns else 0.0
    late = _late(collectives)
    mostly = ", mostly {name}" if worst else ""
    waited = f", and {format_ns(waited_ns)} wait for other ranks" if waited_ns else ""
    return Finding(
        rule="communication_exposed",
        severity=severity_of(share),
        title=titled(
            f"{'Communication-bound: exposed' if share >= POLICY.bound else 'Exposed'} collectives take "
            f"{percent(share)} of the time{on_rank(trace)}{mostly}.",
            name=_plain(worst.name) if worst else "",
        ),
        why=(
            f"{format_ns(exposed_ns)} of {format_ns(window.window_ns)} are exposed{waited}; {percent(overlapped)} "
            "of all communication overlaps kernels"
            f"{''.join(f'; {_shown(found)}' for found in collectives[:SHOWN])}."
        ),
        remedies=_next_steps(trace, collectives, late),
        evidence=longest_in(trace, worst.longest_start_ns if worst else None, worst.max_ns if worst else 0),
        numbers={
            "exposed_share": share,
            "exposed_ns": exposed_ns,
            "waited_ns": waited_ns,
            "communication_ns": window.communication_ns,
            "overlapped_ns": window.communication_overlapped_ns,
            "overlapped_share": overlapped,
            "window_ns": window.window_ns,
            "late": late.name if late else None,
            "collectives": [
                {name: getattr(collective, name) for name in COLLECTIVE_NUMBERS} for collective in collectives[:SHOWN]
            ],
        },
        weight=share,
        recovers=recovered_ns(ledger, OVERLAPPED, "collective", recorded_ns=min(exposed_ns, window.compute_ns)),
    )


def _late(collectives: list[CollectiveTotals]) -> CollectiveTotals | None:
    """Return the collective whose durations vary as if it waits for another rank.

    What a stage of a pipeline receives is late by the schedule.
    """
    waits = [
        collective
        for collective in collectives
        if collective.count > 1
        and _kind(collective) != "point_to_point"
        and collective.max_ns >= LATE_FACTOR * max(collective.median_ns, 1)
    ]
    found = max(waits, key=lambda wait: wait.max_ns, default=None)
    least = NOTABLE_SHARE * sum(collective.total_ns for collective in collectives)
    return found if found is not None and found.max_ns >= least else None


def _fixed(
    trace: TraceReport, collectives: Sequence[CollectiveTotals]
) -> tuple[CollectiveTotals, CollectiveTotals] | None:
    """Return two sizes of a collective, the smaller one first, if most of the smaller one's time is waiting.

    A transfer takes a time in proportion to its bytes, from some size on. What the line through both medians has left
    at no bytes is waiting.
    """
    sizes: dict[tuple[str, str], list[CollectiveTotals]] = {}
    for each in collectives:
        if (each.bytes_each or 0) >= SMALL_BYTES:
            sizes.setdefault((each.name, each.group), []).append(each)
    found = []
    for alike in sizes.values():
        small, large = (pick(alike, key=lambda each: each.bytes_each or 0) for pick in (min, max))
        fewer, more = small.bytes_each or 0, large.bytes_each or 0
        if more < LARGER * fewer:
            continue
        fixed_ns = small.median_ns - fewer * max(large.median_ns - small.median_ns, 0) / (more - fewer)
        waited_ns = fixed_ns * sum(each.count for each in alike)
        is_notable = trace.window is not None and waited_ns > NOTABLE_SHARE * trace.window.window_ns
        if is_notable and fixed_ns >= FIXED_SHARE * small.median_ns:
            found.append((waited_ns, small, large))
    return max(found, key=lambda pair: pair[0])[1:] if found else None


def _plain(name: str) -> str:
    return UNKNOWN_COLLECTIVE if name == "unknown" else shorter_name(name).removeprefix("nccl:").removeprefix("gloo:")


def _shown(collective: CollectiveTotals) -> str:
    size = f" of {format_bytes(collective.bytes_each)}" if collective.bytes_each is not None else ""
    each = ""
    if collective.count > 1:
        each = f"median {format_ns(collective.median_ns)}, max {format_ns(collective.max_ns)}, "
    exposed = format_ns(collective.exposed_ns)
    fastest = ""
    # A small one takes as long as its start-up.
    if collective.bus_bytes_per_s is not None and (collective.bytes_each or 0) >= SMALL_BYTES:
        fastest = f", up to {format_bytes(collective.bus_bytes_per_s)}/s of bus bandwidth"
    return f"{_plain(collective.name)}{size}, {times(collective.count)}, {each}{exposed} exposed{fastest}"


def _kind(collective: CollectiveTotals) -> str:
    bare = collective.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, names in KINDS.items() if any(name in bare for name in names)), "other")


def _next_steps(
    trace: TraceReport, collectives: list[CollectiveTotals], late: CollectiveTotals | None
) -> tuple[Remedy, ...]:
    steps: list[Remedy] = []
    if late is not None:
        steps.append(
            FIND_LATE_RANK.filled(
                collective=_plain(late.name), median=format_ns(late.median_ns), longest=format_ns(late.max_ns)
            )
        )
    elif (sizes := _fixed(trace, collectives)) is not None:
        fewer, more = (f"{format_ns(size.median_ns)} for {format_bytes(size.bytes_each or 0)}" for size in sizes)
        steps.append(FIND_WAITING_RANK.filled(collective=_plain(sizes[0].name), fewer=fewer, more=more))
    small = sum(
        collective.count
        for collective in collectives
        if collective.bytes_each is not None and collective.bytes_each < SMALL_BYTES
    )
    if small >= MANY_SMALL * max(len(trace.steps), 1):
        steps.append(COMBINE_COLLECTIVES.filled(count=f"{small:,}", size=format_bytes(SMALL_BYTES)))
    kind = _kind(collectives[0]) if collectives else "other"
    if kind == "all_reduce" and trace.program.trains and not trace.program.is_ddp:
        kind = "other"
    overlap, less, window = OVERLAP[kind], SEND_LESS[kind], trace.window
    if kind == "all_reduce" and (cap := _smaller_cap(trace, collectives)):
        overlap = tuple(choice.filled(size=cap) for choice in (SMALLER_BUCKETS,))
    # Computation hides no more than it takes itself.
    is_most = window is not None and window.communication_ns > window.compute_ns
    return remedies(trace, *steps, *((*less, *overlap) if is_most else (*overlap, *less)))


def _smaller_cap(trace: TraceReport, collectives: Sequence[CollectiveTotals]) -> int | None:
    """Return the size of smaller buckets in MiB, None where it is not the last bucket of a step that is exposed.

    It is where gradients are sent in one or two buckets, and where most of the time is hidden.
    """
    sent = [each for each in collectives if _kind(each) == "all_reduce" and (each.bytes_each or 0) >= SMALL_BYTES]
    each_step = sum((each.bytes_each or 0) * each.count for each in sent) / max(len(trace.steps), 1)
    window = trace.window
    is_hidden = window is not None and 2 * window.communication_overlapped_ns > window.communication_ns
    if not each_step or (each_step > FEW_BUCKETS * BUCKET_BYTES and not is_hidden):
        return None
    return max(round(min(each_step, FEW_BUCKETS * BUCKET_BYTES) / BUCKETS / MIB), 1)
