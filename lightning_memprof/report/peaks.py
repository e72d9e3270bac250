"""The peaks of a run beside each other: each counts something else, or over another time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import PEAKS
from lightning_memprof.report.memory import peak_allocations
from lightning_memprof.report.memory_tables import DIM, Line, notes
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.report.labels import Peak
    from lightning_memprof.report.view import View

__all__ = ["peaks_lines", "run_peaks"]

LABEL: Final = 10
NAME: Final = 14


def run_peaks(view: View) -> list[tuple[Peak, int]]:
    """Return the peaks of the lead rank that are known, the widest first, each in bytes."""
    lead, memory = view.lead, view.memory.lead
    live = peak_allocations(memory)
    found = {
        "rss": lead.host.peak_rss_bytes or lead.host.max_rss_bytes,
        "device": lead.device.peak_allocated_bytes if lead.device is not None else None,
        "tensors": memory.peak.total_bytes if memory.peak is not None else None,
        "live": live[1].peak_bytes if live is not None else None,
    }
    return [(PEAKS[name], size) for name, size in found.items() if size is not None]


def peaks_lines(view: View, width: int) -> list[Line]:
    """Return a line for each peak, and what it counts; none where there are not two to be told apart."""
    found = run_peaks(view)
    if len(found) < 2:
        return []
    lines: list[Line] = []
    indent = LABEL + NAME + 9 + 2
    for peak, size in found:
        head = f"{'' if lines else 'peaks':<{LABEL}}"
        first, *more = notes(f"{peak.counts}; {peak.span}", max(width, indent + 20), indent)
        words = f"{peak.label:<{NAME}}{format_bytes(size):>9}  "
        lines.append(((head, "bold"), (words, ""), (first[0][0].strip(), DIM)))
        lines += more
    return lines
