"""Memory of private pools that nothing uses, and nothing else can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.snapshot_parts import device_name, in_snapshot
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport, SnapshotReport

__all__ = ["private_pools"]

SHARED_POOL: Final = (0, 0)
# A tenth of the memory is what the next larger batch would need.
NOTABLE_SHARE: Final = 0.10
MIN_BYTES: Final = 512 * MIB


def private_pools(snapshot: SnapshotReport) -> list[Finding]:
    """Say how much private pools, mostly those of CUDA graphs, keep unused."""
    return [found for device in snapshot.devices for found in _of(snapshot, device)]


def _of(snapshot: SnapshotReport, device: DeviceReport) -> list[Finding]:
    pools = [pool for pool in device.pools if pool.pool != SHARED_POOL]
    unused = sum(pool.inactive_bytes for pool in pools)
    share = unused / device.reserved_bytes if device.reserved_bytes else 0.0
    if unused < MIN_BYTES or share < NOTABLE_SHARE:
        return []
    count = len({pool.pool for pool in pools})
    return [
        Finding(
            rule="private_pools",
            severity=Severity.INFO,
            sentence=f"{percent(share)} of {device_name(device.device)}'s reserved memory is unused in private pools.",
            why=(
                f"{format_bytes(unused)} of {format_bytes(sum(pool.reserved_bytes for pool in pools))} in {count} "
                f"private pool{'s' * (count > 1)} hold nothing, and only their own CUDA graphs may use them."
            ),
            next_steps=(
                "Capture graphs that never run at once into one pool: torch.cuda.graph(graph, pool=other.pool()).",
                "With torch.compile(mode='reduce-overhead') keep the number of input shapes small: each has its graph.",
            ),
            numbers={"device": device.device, "unused_bytes": unused, "pools": count},
            weight=share,
            evidence=in_snapshot(snapshot, device),
        )
    ]
