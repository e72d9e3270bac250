"""Throughput: its lines on the page and its part of the document."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.report.memory_tables import DIM, Line, notes
from lightning_memprof.report.words import clean
from lightning_memprof.units import percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.steps.throughput import RankThroughput, Rate
    from lightning_memprof.report.view import View

__all__ = ["amount", "throughput_document", "throughput_lines"]

LABEL: Final = 12
_STEPS: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def throughput_lines(view: View, width: int) -> list[Line]:
    """Return the lead rank's throughput in lines of at most ``width`` characters; none where it was not counted."""
    found = next((rate for rate in view.throughput if rate.rank == view.lead.rank), None)
    if found is None:
        return []
    lines: list[Line] = []
    for name, size, rate in (
        ("samples", found.samples, found.samples_per_s),
        ("tokens", found.tokens, found.tokens_per_s),
        ("batches", None, found.batches_per_s),
    ):
        if rate is not None:
            label = "throughput" if not lines else ""
            lines.append(((f"{label:<{LABEL}}", "bold"), *_rate(name, size, rate, bold=not lines)))
    if found.flops is not None:
        lines.append(((" " * LABEL, ""), (_operations(found), "")))
    if len(view.ranks) > 1:
        lines += notes(f"rank {found.rank} alone; each rank's own: --format json", width)
    return [*lines, *notes(clean(found.basis), width)]


def throughput_document(view: View) -> list[dict[str, Any]]:
    """Return every rank's throughput: rates per second, null where not known."""
    return [dataclasses.asdict(rate) for rate in view.throughput]


def amount(value: float, unit: str = "") -> str:
    """Write a number with three figures and a decimal prefix: ``"1.23 k"``, ``"45.6 TFLOP/s"``."""
    scale, prefix = next(((scale, prefix) for scale, prefix in _STEPS if abs(value) >= scale), (1.0, ""))
    scaled = value / scale
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f} {prefix}{unit}".rstrip()


def _rate(name: str, size: float | None, rate: Rate, *, bold: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    a_step = "" if size is None else f", {_size(size)} a step"
    spread = f" ({amount(rate.p10)} to {amount(rate.p90)} in 8 of 10 steps{a_step})"
    return (f"{amount(rate.mean)} {name}/s", "bold" if bold else ""), (spread, DIM)


def _size(size: float) -> str:
    return f"{size:.0f}" if size.is_integer() and size < 100_000 else amount(size)


def _operations(found: RankThroughput) -> str:
    words = f"{amount(found.flops or 0, 'FLOP')} a step, {amount(found.flops_per_s or 0, 'FLOP/s')}"
    if found.utilization is None or found.peak_flops is None:
        return f"{words}; the device's peak is not known"
    return f"{words}: {percent(found.utilization)} of the device's {amount(found.peak_flops, 'FLOP/s')}"
