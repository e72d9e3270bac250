"""What rules about snapshots have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprof.analysis.findings.model import Evidence
from lightning_memprof.artifacts.naming import SnapshotName

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, HeldLine, SnapshotReport

__all__ = ["alloc_conf", "device_name", "in_snapshot", "shown_line"]


def device_name(device: int) -> str:
    """Return a device's name as torch writes it."""
    return f"cuda:{device}"


def in_snapshot(
    snapshot: SnapshotReport, device: DeviceReport | None = None, moment_us: int | None = None
) -> tuple[Evidence, ...]:
    """Return a snapshot as evidence, narrowed to the ring of a device, or to one moment of it."""
    name = SnapshotName.parse(snapshot.file.name)
    start = moment_us if moment_us is not None else device.start_us if device is not None else None
    end = moment_us if moment_us is not None else device.end_us if device is not None else None
    return (
        Evidence(
            artifact=str(snapshot.file),
            rank=name.rank if name is not None else None,
            start_ns=None if start is None else start * 1000,
            end_ns=None if end is None else end * 1000,
        ),
    )


def shown_line(line: HeldLine) -> str:
    """Write a line of code, with what it called."""
    called = f" (in {line.called[0]})" if line.called else ""
    return f"{line.site or 'code that is not known'}{called}"


def alloc_conf(snapshot: SnapshotReport, setting: str) -> str:
    """Write how to set something of the allocator, beside what is set already.

    The variable's name is that of every torch since 2.0; what is set is in snapshots since torch 2.5.
    """
    found = snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF")
    name = setting.partition(":")[0]
    kept = [part for part in found.split(",") if part and not part.startswith(name)] if isinstance(found, str) else []
    return f"PYTORCH_CUDA_ALLOC_CONF={','.join([*kept, setting])}"
