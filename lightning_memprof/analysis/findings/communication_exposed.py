"""Collectives that the device runs with nothing beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding
from lightning_memprof.analysis.findings.trace_parts import (
    NOTABLE_SHARE,
    longest_in,
    on_rank,
    severity_of,
    shorter_name,
    times,
)
from lightning_memprof.units import MIB, format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import CollectiveTotals, TraceReport

__all__ = ["communication_exposed"]

# Below this a collective's start-up takes as long as its data on any link.
SMALL_BYTES: Final = MIB
# So many of them in a step are better sent as one.
MANY_SMALL: Final = 20
# The same data takes the same time: what takes this many times as long waits for a rank that comes late.
LATE_FACTOR: Final = 3
SHOWN: Final = 3
UNKNOWN: Final = "a collective that the trace does not name"
OVERLAP: Final = {
    "all_reduce": (
        (
            "Send gradients while the backward goes on: DDPStrategy(bucket_cap_mb=..., gradient_as_bucket_view=True, "
            "static_graph=True)."
        ),
        (
            "Send less: Trainer(accumulate_grad_batches=...), or "
            "DDPStrategy(ddp_comm_hook=torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)."
        ),
    ),
    "gather_scatter": (
        (
            "Fetch the next layer's parameters ahead: FSDPStrategy(forward_prefetch=True, limit_all_gathers=True); "
            "with fully_shard set_modules_to_forward_prefetch(...)."
        ),
        (
            'Shard within a node only: FSDPStrategy(sharding_strategy="HYBRID_SHARD"), or "SHARD_GRAD_OP" where memory '
            "allows."
        ),
    ),
    "all_to_all": (
        "Start the exchange early and wait late (async_op=True), with work of another layer or batch between.",
        "Send less: a smaller type for what is exchanged (bfloat16), or more of it on the same node.",
    ),
    "other": ("Start the transfer early and wait late: async_op=True, with work between.",),
}
KINDS: Final = {
    "all_reduce": ("allreduce",),
    "gather_scatter": ("allgather", "reducescatter"),
    "all_to_all": ("alltoall", "sendrecv"),
}


def communication_exposed(trace: TraceReport) -> list[Finding]:
    """Say which part of the time goes to collectives that no computation hides, and to which ones."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    exposed_ns = window.communication_exposed_ns
    share = exposed_ns / window.window_ns
    if share <= NOTABLE_SHARE:
        return []
    collectives = sorted(trace.collectives, key=lambda collective: collective.exposed_ns, reverse=True)
    worst = collectives[0] if collectives else None
    hidden = window.communication_overlapped_ns / window.communication_ns if window.communication_ns else 0.0
    late = _late(collectives)
    return [
        Finding(
            rule="communication_exposed",
            severity=severity_of(share),
            sentence=(
                f"Communication that no computation hides takes {percent(share)} of the time{on_rank(trace)}"
                + (f", most of it {_plain(worst.name)}." if worst else ".")
            ),
            why=(
                f"{format_ns(exposed_ns)} of {format_ns(window.window_ns)}; {percent(hidden)} of all communication "
                "runs beside kernels" + "".join(f"; {_told(collective)}" for collective in collectives[:SHOWN]) + "."
            ),
            next_steps=_next_steps(trace, collectives, late),
            evidence=longest_in(trace, worst.longest_start_ns if worst else None, worst.max_ns if worst else 0),
            numbers={
                "exposed_share": share,
                "exposed_ns": exposed_ns,
                "communication_ns": window.communication_ns,
                "overlapped_ns": window.communication_overlapped_ns,
                "overlapped_share": hidden,
                "window_ns": window.window_ns,
                "late": late.name if late else None,
                "collectives": [
                    {
                        "name": collective.name,
                        "group": collective.group,
                        "bytes_each": collective.bytes_each,
                        "count": collective.count,
                        "exposed_ns": collective.exposed_ns,
                        "median_ns": collective.median_ns,
                        "max_ns": collective.max_ns,
                    }
                    for collective in collectives[:SHOWN]
                ],
            },
            weight=share,
        )
    ]


def _late(collectives: list[CollectiveTotals]) -> CollectiveTotals | None:
    """Return the collective whose durations differ as only those do that wait for another rank."""
    waits = [
        collective
        for collective in collectives
        if collective.count > 1 and collective.max_ns >= LATE_FACTOR * max(collective.median_ns, 1)
    ]
    found = max(waits, key=lambda wait: wait.max_ns, default=None)
    return (
        found
        if found is not None and found.max_ns >= NOTABLE_SHARE * sum(collective.total_ns for collective in collectives)
        else None
    )


def _plain(name: str) -> str:
    return UNKNOWN if name == "unknown" else shorter_name(name).removeprefix("nccl:").removeprefix("gloo:")


def _told(collective: CollectiveTotals) -> str:
    size = f" of {format_bytes(collective.bytes_each)}" if collective.bytes_each is not None else ""
    each = (
        f"{format_ns(collective.median_ns)} each and {format_ns(collective.max_ns)} at most, "
        if collective.count > 1
        else ""
    )
    return (
        f"{_plain(collective.name)}{size}, {times(collective.count)}, {each}{format_ns(collective.exposed_ns)} exposed"
    )


def _kind(collective: CollectiveTotals) -> str:
    bare = collective.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, names in KINDS.items() if any(name in bare for name in names)), "other")


def _next_steps(
    trace: TraceReport, collectives: list[CollectiveTotals], late: CollectiveTotals | None
) -> tuple[str, ...]:
    steps: list[str] = []
    if late is not None:
        steps.append(
            f"Find the rank that comes late: the same {_plain(late.name)} takes {format_ns(late.median_ns)} or "
            f"{format_ns(late.max_ns)}. Record all ranks and look at them beside each other."
        )
    small = sum(
        collective.count
        for collective in collectives
        if collective.bytes_each is not None and collective.bytes_each < SMALL_BYTES
    )
    if small >= MANY_SMALL * max(len(trace.steps), 1):
        steps.append(f"Send together what is sent in {small:,} collectives of less than {format_bytes(SMALL_BYTES)}.")
    return (*steps, *OVERLAP[_kind(collectives[0]) if collectives else "other"])
