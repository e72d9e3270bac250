"""One line of code that holds half of the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import device_name, in_snapshot, shown_line
from lightning_memprof.units import GIB, format_bytes, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, HeldLine, SnapshotReport

__all__ = ["peak_holder"]

# Whoever wants less memory begins there, whatever the rest is.
NOTABLE_SHARE: Final = 0.5
MIN_BYTES: Final = GIB


def peak_holder(snapshot: SnapshotReport) -> list[Finding]:
    """Say which line of the program holds half of the peak or more."""
    return [
        found
        for device in snapshot.devices
        for line in device.lines_at_peak[:1]
        if line.site and line.bytes >= max(MIN_BYTES, NOTABLE_SHARE * device.peak_requested_bytes)
        for found in [_finding(snapshot, device, line)]
    ]


def _finding(snapshot: SnapshotReport, device: DeviceReport, line: HeldLine) -> Finding:
    share = line.bytes / device.peak_requested_bytes
    blocks = f"{line.blocks:,} block{'s' * (line.blocks > 1)}"
    return Finding(
        rule="peak_holder",
        severity=Severity.INFO,
        sentence=f"{percent(share)} of {device_name(device.device)}'s peak is held by {shown_line(line)}.",
        why=f"{format_bytes(line.bytes)} of {format_bytes(device.peak_requested_bytes)}, in {blocks}.",
        next_steps=(
            "Hold less there: a cache can be made smaller, and what is kept for backward recomputed by checkpointing.",
            "Checkpointing is torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        ),
        numbers={
            "device": device.device,
            "line": line.site,
            "bytes": line.bytes,
            "blocks": line.blocks,
            "peak_requested_bytes": device.peak_requested_bytes,
        },
        weight=share,
        evidence=in_snapshot(snapshot, device, device.peak_time_us),
    )
