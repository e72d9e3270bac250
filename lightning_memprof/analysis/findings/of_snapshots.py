"""Rules about one snapshot of the CUDA allocator, whoever recorded it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.allocator_churn import allocator_churn
from lightning_memprof.analysis.findings.failed_request import failed_request
from lightning_memprof.analysis.findings.fragmentation import fragmentation
from lightning_memprof.analysis.findings.peak_holder import peak_holder
from lightning_memprof.analysis.findings.pending_frees import pending_frees
from lightning_memprof.analysis.findings.private_pools import private_pools

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Finding
    from lightning_memprof.analysis.snapshot.model import SnapshotReport

__all__ = ["SNAPSHOT_RULES"]

SNAPSHOT_RULES: Final[tuple[Callable[[SnapshotReport], list[Finding]], ...]] = (
    failed_request,
    allocator_churn,
    fragmentation,
    pending_frees,
    private_pools,
    peak_holder,
)
