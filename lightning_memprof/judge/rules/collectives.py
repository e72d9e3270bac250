"""Communication of devices that no computation overlaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import CollectiveTotals, TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, InTrace, Rule
from lightning_memprof.judge.traces import longest_in, remedies, shorter_name, stretch
from lightning_memprof.units import format_ns, percent

SHOWN: Final = 3
UNKNOWN_COLLECTIVE: Final = "an unnamed collective"
OVERLAP: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "all_reduce": (do.OVERLAP_GRADIENTS.filled(size=50),),
    "gather_scatter": (do.PREFETCH_PARAMETERS,),
    "all_to_all": (do.EARLY_TRANSFER,),
    "point_to_point": (do.FILL_PIPELINE,),
    "other": (do.EARLY_TRANSFER,),
}
SEND_LESS: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "all_reduce": (do.ACCUMULATE, do.SEND_BFLOAT16, do.SEND_FEWER_BYTES),
    "gather_scatter": (do.SHARD_IN_NODE,),
    "all_to_all": (do.SEND_HALF, do.SEND_FEWER_BYTES),
    "point_to_point": (),
    "other": (do.SEND_FEWER_BYTES,),
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


def exposed_collectives(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the communication that no computation overlaps, without the wait for other ranks that traces show."""
    lines = tuple(line for line in ledger.communication if line.part == Part.COLLECTIVE)
    if (window := trace.window) is None or not lines:
        return None
    collectives = sorted(trace.collectives, key=lambda collective: collective.exposed_ns, reverse=True)
    worst = collectives[0] if collectives else None
    overlapped = window.communication_overlapped_ns / window.communication_ns if window.communication_ns else 0.0
    late, waited_ns = _late(collectives), ledger.communicates(Part.RANK_WAIT)
    steps, whole = stretch(trace, ledger)
    waited = f", and {format_ns(steps * waited_ns)} wait for other ranks" if waited_ns else ""
    exposed_ns = total(lines)
    hidden = min(ledger.ns(Part.COMPUTE) / exposed_ns, 1.0)
    return lines, Detail(
        fields={"mostly": ", mostly " if worst else "", "name": _plain(worst.name) if worst else ""},
        measured=(
            f"{format_ns(steps * exposed_ns)} of {whole} are exposed{waited}; {percent(overlapped)} of all "
            "communication overlaps kernels"
        ),
        remedies=_next_steps(trace, collectives, late),
        saves=(0.25, max(hidden, 0.5)),
        numbers={
            "late": late.name if late else None,
            "collectives": [
                {name: getattr(collective, name) for name in COLLECTIVE_NUMBERS} for collective in collectives[:SHOWN]
            ],
        },
        evidence=longest_in(trace, worst.longest_start_ns if worst else None, worst.max_ns if worst else 0),
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


def _plain(name: str) -> str:
    return UNKNOWN_COLLECTIVE if name == "unknown" else shorter_name(name).removeprefix("nccl:").removeprefix("gloo:")


def _kind(collective: CollectiveTotals) -> str:
    bare = collective.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, names in KINDS.items() if any(name in bare for name in names)), "other")


def _next_steps(
    trace: TraceReport, collectives: list[CollectiveTotals], late: CollectiveTotals | None
) -> tuple[Remedy, ...]:
    steps: list[Remedy] = []
    if late is not None:
        times = f"{format_ns(late.median_ns)} or {format_ns(late.max_ns)}"
        steps.append(do.FIND_LATE_RANK.filled(collective=_plain(late.name), times=times))
    kind = _kind(collectives[0]) if collectives else "other"
    if kind == "all_reduce" and trace.program.trains and not trace.program.is_ddp:
        kind = "other"
    overlap, less, window = OVERLAP[kind], SEND_LESS[kind], trace.window
    # Computation hides no more than it takes itself.
    is_most = window is not None and window.communication_ns > window.compute_ns
    return remedies(trace, *steps, *((*less, *overlap) if is_most else (*overlap, *less)))


ROWS: Final = (
    Rule(
        id="communication_exposed",
        about=(
            "Collectives run while no other kernel does, although gradients can be sent while backward still computes, "
            "and parameters fetched while another layer runs. Exposed time includes waiting for the last rank, unless "
            "the traces of the ranks are shown together."
        ),
        trade_off="Memory for parameters, or lower precision; nothing where the next kernel needs the result.",
        of=(Part.COLLECTIVE,),
        in_trace=exposed_collectives,
        says="exposed collectives take {share}{rank}{mostly}{name}.",
        bound="Communication-bound",
        # A collective sent half as often, or in half of the bytes; at most what there is computation to hide.
        saves=(0.25, 1.0),
    ),
)
