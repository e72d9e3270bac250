"""What an allocator snapshot says of the moment at which it was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_memprof.analysis.snapshot.reader import read_snapshot
from lightning_memprof.analysis.snapshot.replay import Holder, replay

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SnapshotMemory", "snapshot_memory"]


@dataclass(frozen=True)
class SnapshotMemory:
    """One device at the moment of a snapshot, in bytes; ``holders`` hold what was asked for and live, largest first."""

    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    is_expandable: bool
    holders: tuple[Holder, ...]

    @property
    def has_stacks(self) -> bool:
        """Whether the history was on when anything of it was allocated."""
        return any(holder.stack for holder in self.holders)


def snapshot_memory(path: Path, device: int) -> SnapshotMemory:
    """Read a snapshot.

    Args:
        path: the file.
        device: the device's number.

    Raises:
        ArtifactError: it cannot be read, or has nothing of this device.

    """
    replayed = replay(read_snapshot(path), device)
    found = replayed.snapshot
    return SnapshotMemory(
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        largest_free_bytes=found.largest_free_block,
        is_expandable=any(segment.is_expandable for segment in found.segments),
        holders=replayed.holders_at(replayed.events - 1),
    )
