"""What is worth doing: rules about runs, operator traces and allocator snapshots, and the verdict."""

from __future__ import annotations

from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import NOTHING_FOUND, Evidence, Finding, Severity
from lightning_memprof.judge.verdict import examine, examine_files, nothing_in_files, verdict_of

__all__ = [
    "NOTHING_FOUND",
    "Evidence",
    "Facts",
    "Finding",
    "Severity",
    "examine",
    "examine_files",
    "nothing_in_files",
    "verdict_of",
]
