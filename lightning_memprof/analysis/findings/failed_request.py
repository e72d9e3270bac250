"""A request for device memory that failed, as a snapshot's ring has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import alloc_conf, device_name, in_snapshot, shown_line
from lightning_memprof.analysis.snapshot.report import held_lines
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, FailedRequest, HeldLine, SnapshotReport

__all__ = ["failed_request"]

Why = Literal["too large", "fragmented", "full"]

EXPANDABLE: Final = "expandable_segments:True"
LESS: Final = (
    "Use a smaller batch and Trainer(accumulate_grad_batches=...): what is kept for backward shrinks with the batch.",
    "Train in half precision: Trainer(precision='bf16-mixed').",
)


def failed_request(snapshot: SnapshotReport) -> list[Finding]:
    """Say what could not be had, why, and who held the most at that moment."""
    failed = snapshot.oom
    device = next(
        (device for device in snapshot.devices if failed is not None and device.device == failed.device), None
    )
    if failed is None or device is None:
        return []
    at = _moment(device)
    went_on = any(event.action == "alloc" for event in device.replay.snapshot.events[at + 1 :])
    top = next((line for line in held_lines(device.replay.holders_at(at)) if line.site), None)
    why = _why(failed)
    asked, name = format_bytes(failed.requested_bytes), device_name(failed.device)
    return [
        Finding(
            rule="failed_request",
            severity=Severity.WARNING if went_on else Severity.CRITICAL,
            sentence=f"{name} could not give {asked}{'; the program went on' if went_on else ''}: {_words(why)}.",
            why=_sentence(failed, top),
            next_steps=_next_steps(snapshot, why, top),
            numbers={
                "device": failed.device,
                "cause": why,
                "requested_bytes": failed.requested_bytes,
                "device_free_bytes": failed.device_free_bytes,
                "live_bytes": failed.live.requested_bytes,
                "reserved_bytes": failed.live.reserved_bytes,
                "unused_bytes": failed.unused_bytes,
                "largest_free_bytes": failed.largest_free_bytes,
            },
            weight=1.0,
            evidence=in_snapshot(snapshot, device, failed.time_us),
        )
    ]


def _moment(device: DeviceReport) -> int:
    events = device.replay.snapshot.events
    return max(i for i, event in enumerate(events) if event.action == "oom")


def _why(failed: FailedRequest) -> Why:
    free = failed.device_free_bytes or 0
    if failed.requested_bytes > free + failed.live.reserved_bytes:
        return "too large"
    return "fragmented" if failed.requested_bytes <= free + failed.unused_bytes else "full"


def _words(why: Why) -> str:
    return {
        "too large": "it is more than this process could ever have",
        "fragmented": "enough was free, but not in one piece that it could take",
        "full": "the device was full",
    }[why]


def _sentence(failed: FailedRequest, top: HeldLine | None) -> str:
    free = failed.device_free_bytes
    device = "" if free is None else f", and {format_bytes(free)} were free on the device"
    held = "" if top is None else f" {format_bytes(top.bytes)} were held by {shown_line(top)}."
    return (
        f"{format_bytes(failed.live.requested_bytes)} were live and {format_bytes(failed.live.reserved_bytes)} "
        f"reserved; {format_bytes(failed.unused_bytes)} lay unused in pieces of at most "
        f"{format_bytes(failed.largest_free_bytes)}{device}.{held}"
    )


def _next_steps(snapshot: SnapshotReport, why: Why, top: HeldLine | None) -> tuple[str, ...]:
    look = (f"Look at {top.site}: it holds the most.",) if top is not None else ()
    if why == "fragmented":
        return (f"Let segments grow instead of lying in pieces: {alloc_conf(snapshot, EXPANDABLE)}.", *look, LESS[0])
    return (*look, *LESS)
