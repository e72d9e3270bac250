"""Rules about one snapshot of the CUDA allocator, whoever recorded it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Finding
    from lightning_memprof.analysis.snapshot_model import SnapshotReport

__all__ = ["SNAPSHOT_RULES"]

SNAPSHOT_RULES: Final[tuple[Callable[[SnapshotReport], list[Finding]], ...]] = ()
