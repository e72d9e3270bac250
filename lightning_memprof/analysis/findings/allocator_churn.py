"""Memory that goes back to the driver and is taken again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import alloc_conf, device_name, in_snapshot
from lightning_memprof.analysis.stacks import user_frame
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport

__all__ = ["allocator_churn"]

MADE: Final = frozenset({"segment_alloc", "segment_map"})
RETURNED: Final = frozenset({"segment_free", "segment_unmap"})
# Once is an empty_cache() between two stages, or one batch that was larger than all before.
MIN_ROUNDS: Final = 2
# A cudaMalloc takes about 1 ms for each 100 MiB, and a cudaFree waits for the device: less than this is not felt.
MIN_BYTES: Final = 256 * MIB
MIN_SHARE: Final = 0.05
EMPTY_CACHE: Final = "empty_cache"


class Churn(NamedTuple):
    """Times that memory was given back and some of it taken again, and the bytes that were taken again."""

    rounds: int
    bytes: int


def allocator_churn(snapshot: SnapshotReport) -> list[Finding]:
    """Say how often the allocator gave memory back and took it again, and whether the program asked for that."""
    return [found for device in snapshot.devices for found in _of(snapshot, device)]


def _of(snapshot: SnapshotReport, device: DeviceReport) -> list[Finding]:
    churn = _churn(device)
    if churn.rounds < MIN_ROUNDS or churn.bytes < max(MIN_BYTES, MIN_SHARE * device.peak_reserved_bytes):
        return []
    line = _emptied_by(device)
    share = churn.bytes / max(device.peak_reserved_bytes, 1)
    took = ""
    if device.start_us is not None and device.end_us is not None and device.end_us > device.start_us:
        took = f" in {(device.end_us - device.start_us) / 1e6:.3g} s"
    cause = (
        f"torch.cuda.empty_cache() asks for it, called by {line}"
        if line
        else "the device is nearly full, so that the allocator must return what it keeps before it gets more"
    )
    return [
        Finding(
            rule="allocator_churn",
            severity=Severity.WARNING,
            sentence=f"{device_name(device.device)}'s memory went back to the driver and was taken again "
            f"{churn.rounds} times{took}.",
            why=(
                f"{format_bytes(churn.bytes)} ({percent(share)} of what was reserved) were taken again: {cause}. Each "
                "cudaFree waits until the device has done all its work, collectives included."
            ),
            next_steps=_next_steps(snapshot, device, line),
            numbers={
                "device": device.device,
                "rounds": churn.rounds,
                "again_bytes": churn.bytes,
                "segments_made": device.segments_made[0],
                "segments_returned": device.segments_returned[0],
                "peak_reserved_bytes": device.peak_reserved_bytes,
                "empty_cache": line,
            },
            weight=min(share, 1.0),
            evidence=in_snapshot(snapshot, device),
        )
    ]


def _churn(device: DeviceReport) -> Churn:
    """Count rounds: memory is given back, and then some of it is taken again."""
    rounds = again = owed = 0
    is_new = False
    for event in device.replay.snapshot.events:
        if event.action in RETURNED:
            owed += event.size
            is_new = True
        elif event.action in MADE and owed:
            rounds += is_new
            is_new = False
            again += min(event.size, owed)
            owed = max(0, owed - event.size)
    return Churn(rounds, again)


def _emptied_by(device: DeviceReport) -> str | None:
    """Return the line that called ``empty_cache``, where the ring has the stacks of what was given back."""
    found = device.replay.snapshot
    for event in found.events:
        if event.action in RETURNED and any(frame.name == EMPTY_CACHE for frame in found.stacks[event.stack]):
            line = user_frame(found.stacks[event.stack])
            return str(line) if line is not None else "a library"
    return None


def _next_steps(snapshot: SnapshotReport, device: DeviceReport, line: str | None) -> tuple[str, ...]:
    if line:
        return ("Leave torch.cuda.empty_cache() out of the training loop: the allocator reuses what it keeps.",)
    room = "Leave room: a smaller batch with Trainer(accumulate_grad_batches=...), or bf16-mixed precision."
    if device.is_expandable:
        return (room,)
    return (room, f"Let segments grow instead of being made anew: {alloc_conf(snapshot, 'expandable_segments:True')}.")
