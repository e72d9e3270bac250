"""Communication of devices that no computation overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import CollectiveTotals, TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    COMBINE_COLLECTIVES,
    EARLY_TRANSFER,
    FILL_PIPELINE,
    FIND_LATE_RANK,
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
from lightning_memprof.judge.rule import Detail, Fact, Found, Rule
from lightning_memprof.judge.traces import device_traces, longest_in, remedies, shorter_name, stretch
from lightning_memprof.units import MIB, format_bytes, format_ns, percent

SHOWN: Final = 3
UNKNOWN_COLLECTIVE: Final = "an unnamed collective"
# DistributedDataParallel sends a bucket as soon as it is full, by default with 25 MiB: the last one after backward.
BUCKET_BYTES: Final = 25 * MIB
OVERLAP: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "all_reduce": (OVERLAP_GRADIENTS,),
    "gather_scatter": (PREFETCH_PARAMETERS,),
    "all_to_all": (EARLY_TRANSFER,),
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
COLLECTIVE_NUMBERS: Final = (
    "name", "group", "bytes_each", "count", "exposed_ns", "median_ns", "max_ns", "bus_bytes_per_s",
)  # fmt: skip


def exposed_collectives(facts: Facts) -> Iterator[Found]:
    """Yield the communication that no computation overlaps, without the wait for other ranks that traces show."""
    for trace, ledger in device_traces(facts):
        lines = tuple(line for line in ledger.communication if line.part == Part.COLLECTIVE)
        if (window := trace.window) is None or not lines:
            continue
        collectives = sorted(trace.collectives, key=lambda collective: collective.exposed_ns, reverse=True)
        worst = collectives[0] if collectives else None
        overlapped = window.communication_overlapped_ns / window.communication_ns if window.communication_ns else 0.0
        late, waited_ns = _late(collectives), ledger.communicates(Part.RANK_WAIT)
        steps, whole = stretch(trace, ledger)
        waited = f", and {format_ns(steps * waited_ns)} wait for other ranks" if waited_ns else ""
        fact = Fact(source=trace, ledger=ledger, lines=lines)
        hidden = min(ledger.ns(Part.COMPUTE) / fact.ns, 1.0)
        yield (
            fact,
            Detail(
                fields={"mostly": ", mostly " if worst else "", "name": _plain(worst.name) if worst else ""},
                measured=(
                    f"{format_ns(steps * fact.ns)} of {whole} are exposed{waited}; {percent(overlapped)} of all "
                    f"communication overlaps kernels{''.join(f'; {_shown(found)}' for found in collectives[:SHOWN])}"
                ),
                remedies=_next_steps(trace, ledger, collectives, late),
                saves=(0.25, max(hidden, 0.5)),
                numbers={
                    "late": late.name if late else None,
                    "collectives": [
                        {name: getattr(collective, name) for name in COLLECTIVE_NUMBERS}
                        for collective in collectives[:SHOWN]
                    ],
                },
                evidence=longest_in(trace, worst.longest_start_ns if worst else None, worst.max_ns if worst else 0),
            ),
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
        and collective.max_ns >= POLICY.multiple * max(collective.median_ns, 1)
    ]
    found = max(waits, key=lambda wait: wait.max_ns, default=None)
    least = POLICY.verdict * sum(collective.total_ns for collective in collectives)
    return found if found is not None and found.max_ns >= least else None


def _fixed(
    ledger: TimeLedger, collectives: Sequence[CollectiveTotals]
) -> tuple[CollectiveTotals, CollectiveTotals] | None:
    """Return two sizes of a collective, the smaller one first, if most of the smaller one's time is waiting.

    A transfer takes a time in proportion to its bytes, from some size on. What the line through both medians has left
    at no bytes is waiting.
    """
    sizes: dict[tuple[str, str], list[CollectiveTotals]] = {}
    for each in collectives:
        if (each.bytes_each or 0) >= POLICY.small_bytes:
            sizes.setdefault((each.name, each.group), []).append(each)
    found = []
    for alike in sizes.values():
        small, large = (pick(alike, key=lambda each: each.bytes_each or 0) for pick in (min, max))
        fewer, more = small.bytes_each or 0, large.bytes_each or 0
        if more < 2 * fewer:
            continue
        fixed_ns = small.median_ns - fewer * max(large.median_ns - small.median_ns, 0) / (more - fewer)
        waited_ns = fixed_ns * sum(each.count for each in alike)
        is_notable = waited_ns > POLICY.verdict * ledger.step_ns * ledger.steps
        if is_notable and fixed_ns >= POLICY.most * small.median_ns:
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
    if collective.bus_bytes_per_s is not None and (collective.bytes_each or 0) >= POLICY.small_bytes:
        fastest = f", up to {format_bytes(collective.bus_bytes_per_s)}/s of bus bandwidth"
    return f"{_plain(collective.name)}{size} (count {collective.count:,}): {each}{exposed} exposed{fastest}"


def _kind(collective: CollectiveTotals) -> str:
    bare = collective.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, names in KINDS.items() if any(name in bare for name in names)), "other")


def _next_steps(
    trace: TraceReport, ledger: TimeLedger, collectives: list[CollectiveTotals], late: CollectiveTotals | None
) -> tuple[Remedy, ...]:
    steps: list[Remedy] = []
    if late is not None:
        times = f"{format_ns(late.median_ns)} or {format_ns(late.max_ns)}"
        steps.append(FIND_LATE_RANK.filled(collective=f"the same {_plain(late.name)}", times=times))
    elif (sizes := _fixed(ledger, collectives)) is not None:
        times = " and ".join(f"{format_ns(size.median_ns)} for {format_bytes(size.bytes_each or 0)}" for size in sizes)
        steps.append(FIND_LATE_RANK.filled(collective=_plain(sizes[0].name), times=f"{times}, mostly a wait"))
    small = sum(
        collective.count
        for collective in collectives
        if collective.bytes_each is not None and collective.bytes_each < POLICY.small_bytes
    )
    if small >= POLICY.small_collectives * max(len(trace.steps), 1):
        steps.append(COMBINE_COLLECTIVES.filled(count=f"{small:,}", size=format_bytes(POLICY.small_bytes)))
    kind = _kind(collectives[0]) if collectives else "other"
    if kind == "all_reduce" and trace.program.trains and not trace.program.is_ddp:
        kind = "other"
    overlap, less, window = OVERLAP[kind], SEND_LESS[kind], trace.window
    if kind == "all_reduce" and (cap := _smaller_cap(trace, collectives)):
        overlap = (SMALLER_BUCKETS.filled(size=cap),)
    # Computation hides no more than it takes itself.
    is_most = window is not None and window.communication_ns > window.compute_ns
    return remedies(trace, *steps, *((*less, *overlap) if is_most else (*overlap, *less)))


def _smaller_cap(trace: TraceReport, collectives: Sequence[CollectiveTotals]) -> int | None:
    """Return the size of smaller buckets in MiB, None where it is not the last bucket of a step that is exposed.

    It is where gradients are sent in one or two buckets, and where most of the time is hidden.
    """
    sent = [
        each for each in collectives if _kind(each) == "all_reduce" and (each.bytes_each or 0) >= POLICY.small_bytes
    ]
    each_step = sum((each.bytes_each or 0) * each.count for each in sent) / max(len(trace.steps), 1)
    window = trace.window
    is_hidden = window is not None and 2 * window.communication_overlapped_ns > window.communication_ns
    if not each_step or (each_step > 2 * BUCKET_BYTES and not is_hidden):
        return None
    # Eight buckets leave little of the gradients for the end of backward.
    return max(round(min(each_step, 2 * BUCKET_BYTES) / 8 / MIB), 1)


ROWS: Final = (
    Rule(
        id="communication_exposed",
        about=(
            "Collectives (NCCL, RCCL, oneCCL, HCCL, symmetric memory, custom all-reduces) run while no other kernel "
            "does. Gradients can be sent while backward still computes, and parameters can be fetched while another "
            "layer runs. A collective ends when the last rank has arrived: exposed time includes waiting for it, unless"
            " the traces of the ranks are shown together. A collective that takes 3 times its median, or nearly as "
            "long for fewer bytes, waits for a late rank."
        ),
        trade_off=(
            "Memory for parameters that stay gathered, lower precision of gradients sent as bfloat16, or larger "
            "batches; nothing is recovered where the next kernel needs the result."
        ),
        of=(Part.COLLECTIVE,),
        find=exposed_collectives,
        says="exposed collectives take {share}{rank}{mostly}{name}.",
        bound="Communication-bound",
        # A collective sent half as often, or in half of the bytes; at most what there is computation to hide.
        saves=(0.25, 1.0),
    ),
)
