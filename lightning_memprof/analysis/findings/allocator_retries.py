"""A device that is nearly full: the allocator had to give its cached memory back before it could go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import Evidence, Facts, Finding, Severity
from lightning_memprof.analysis.run.rows import text, whole
from lightning_memprof.artifacts.naming import series_path
from lightning_memprof.artifacts.series import read_series
from lightning_memprof.errors import ArtifactError
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank, Window

__all__ = ["allocator_retries"]

# Ranks of one job are as full as each other: of many ranks so many tell.
MAX_RANKS: Final = 32
MAX_WINDOWS: Final = 16
# Each retry waits for all kernels, frees segments and gets new ones: at one a step every step pays for it.
SEVERE_A_STEP: Final = 1.0
NEXT: Final = (
    "Leave more memory free: a smaller batch, activation checkpointing, Trainer(accumulate_grad_batches=...).",
    "Waste less of it: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and batches of few different shapes.",
    "See who holds it at the peak: MemProfilerCallback(collectors=[AllocatorHistory()]).",
)


@dataclass(frozen=True)
class _Retries:
    """What a window's rows say: ``grown`` within it, ``total`` since the process began."""

    rank: int
    window: Window
    device: str
    grown: int
    total: int
    reserved_bytes: int | None


def allocator_retries(facts: Facts) -> list[Finding]:
    """Say that the allocator retried, in the recorded steps or before, and with how much memory."""
    found = [
        retries
        for rank in facts.run.ranks[:MAX_RANKS]
        for window in rank.windows[-MAX_WINDOWS:]
        if (retries := _of_window(rank, window)) is not None
    ]
    if not found:
        return []
    worst = max(found, key=lambda retries: (retries.grown, retries.total))
    steps = max(len(worst.window.steps) + len(worst.window.warmup_steps), 1)
    rate = worst.grown / steps
    return [
        Finding(
            rule="allocator_retries",
            severity=_severity(worst, rate),
            sentence=_sentence(worst, steps, several=len(facts.run.ranks) > 1),
            why=_why(worst),
            next_steps=NEXT,
            evidence=(
                Evidence(
                    artifact=f"{facts.run.directory.name}/{series_path(worst.window.index, worst.rank, 'allocator')}",
                    rank=worst.rank,
                    window=worst.window.index,
                    steps=(min(worst.window.steps), max(worst.window.steps)) if worst.window.steps else None,
                ),
            ),
            numbers={
                "rank": worst.rank,
                "device": worst.device,
                "retries": worst.grown,
                "retries_in_all": worst.total,
                "steps": steps,
                "reserved_bytes": worst.reserved_bytes,
            },
            weight=min(rate, 1.0),
        )
    ]


def _of_window(rank: Rank, window: Window) -> _Retries | None:
    path = window.series.get("allocator")
    if path is None:
        return None
    try:
        rows = read_series(path)
    except ArtifactError:
        return None
    counts = [count for row in rows if (count := whole(row, "num_alloc_retries")) is not None]
    if not counts or counts[-1] <= 0:
        return None
    reserved = [size for row in rows if (size := whole(row, "reserved_bytes.all.current")) is not None]
    return _Retries(
        rank=rank.rank,
        window=window,
        device=_device(rows),
        grown=max(counts[-1] - counts[0], 0),
        total=counts[-1],
        reserved_bytes=max(reserved, default=None),
    )


def _device(rows: list[dict[str, Any]]) -> str:
    return next((name for row in rows if (name := text(row, "device"))), "the device")


def _severity(worst: _Retries, rate: float) -> Severity:
    if not worst.grown:
        return Severity.INFO
    return Severity.CRITICAL if rate >= SEVERE_A_STEP else Severity.WARNING


def _sentence(worst: _Retries, steps: int, *, several: bool) -> str:
    rank = f" of rank {worst.rank}" if several else ""
    if worst.grown:
        often = "once" if worst.grown == 1 else f"{worst.grown:,} times"
        return (
            f"The memory of {worst.device}{rank} is nearly full: the allocator gave its cache back {often} in "
            f"{steps} recorded steps."
        )
    often = "once" if worst.total == 1 else f"{worst.total:,} times"
    return f"The memory of {worst.device}{rank} was full {often} before the recorded steps: the allocator retried."


def _why(worst: _Retries) -> str:
    reserved = f" with {format_bytes(worst.reserved_bytes)} reserved" if worst.reserved_bytes is not None else ""
    return (
        f"A request did not fit{reserved}: the allocator waited for all kernels, freed what it kept and asked again; "
        "on several devices the others wait in their next collective meanwhile."
    )
