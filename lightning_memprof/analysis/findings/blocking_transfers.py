"""Copies between the host's ordinary memory and the device, which neither side can do anything beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding
from lightning_memprof.analysis.findings.trace_parts import (
    exact_percent,
    longest_in,
    on_rank,
    severity_of,
    times,
)
from lightning_memprof.units import format_bytes, format_ns

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Copies, TraceReport

__all__ = ["blocking_transfers"]

# Below a hundredth pinned memory, which takes time to get and cannot be swapped, is not worth it.
NOTABLE_SHARE: Final = 0.01
NEXT: Final = {
    "HtoD": (
        "Let the DataLoader pin its batches: DataLoader(pin_memory=True); Lightning then copies them without waiting.",
        "Copy what the program makes itself from pinned memory too: tensor.pin_memory().to(device, non_blocking=True).",
    ),
    "DtoH": (
        "Move results to the host less often, or at the end: .cpu() every N steps, self.log instead of a list.",
        "Copy them into pinned memory without waiting: torch.empty(..., pin_memory=True).copy_(x, non_blocking=True).",
    ),
}
WORDS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}


def blocking_transfers(trace: TraceReport) -> list[Finding]:
    """Say that copies from or to pageable memory take time in which the device computes nothing, by direction."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    return [
        finding
        for kind in WORDS
        for copies in trace.copies
        if copies.kind == kind and copies.is_pageable
        for finding in _of_copies(trace, copies, window.window_ns)
    ]


def _of_copies(trace: TraceReport, copies: Copies, window_ns: int) -> list[Finding]:
    # A copy from pageable memory blocks the host for as long as it takes, so without the overlap all of it counts.
    cost_ns = copies.total_ns if copies.exposed_ns is None else copies.exposed_ns
    share = cost_ns / window_ns
    if share <= NOTABLE_SHARE:
        return []
    size = f"{format_bytes(copies.bytes)} in " if copies.bytes is not None else ""
    rate = f", {format_bytes(copies.bytes * 1e9 / copies.total_ns)}/s" if copies.bytes and copies.total_ns else ""
    return [
        Finding(
            rule="blocking_transfers",
            severity=severity_of(share),
            sentence=(
                f"Copies {WORDS[copies.kind]} use pageable memory{on_rank(trace)} and take {exact_percent(share)} "
                "of the time, in which nothing is computed."
            ),
            why=(
                f"{times(copies.count).capitalize()}, {size}{format_ns(copies.total_ns)}{rate}: the driver copies such "
                "memory twice, and the call returns only then."
            ),
            next_steps=NEXT[copies.kind],
            evidence=longest_in(trace, copies.longest_start_ns, copies.total_ns // max(copies.count, 1)),
            numbers={
                "kind": copies.kind,
                "share": share,
                "exposed_ns": copies.exposed_ns,
                "total_ns": copies.total_ns,
                "count": copies.count,
                "bytes": copies.bytes,
                "window_ns": window_ns,
            },
            weight=share,
        )
    ]
