"""Rules about one operator trace, whoever recorded it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings.model import Finding
    from lightning_memprof.analysis.trace_model import TraceReport

__all__ = ["TRACE_RULES"]

TRACE_RULES: Final[tuple[Callable[[TraceReport], list[Finding]], ...]] = ()
