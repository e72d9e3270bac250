"""Allocation sites at the highest peak of live bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprof.analysis.memory.activations import patterns
from lightning_memprof.report.document import (
    Chart,
    Column,
    Paragraph,
    Part,
    Row,
    Section,
    Table,
    count,
    phrase,
    size,
    text,
)
from lightning_memprof.report.sections.labels import called, peak_note
from lightning_memprof.report.sections.memory import MAX_ROWS, peak_allocations, window_name
from lightning_memprof.report.sections.tables import Field, filled, grid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.memory.model import DeviceAllocations, Site
    from lightning_memprof.report.view import View

__all__ = ["short_line", "site_rows", "sites_section"]


def sites_section(view: View) -> Section | None:
    """Return the allocation sites at the highest peak of live bytes; None where no allocations were recorded."""
    memory = view.memory.lead
    found = peak_allocations(memory)
    if found is None or not found[1].sites:
        reason = memory.reasons.get("sites")
        if reason is None or not memory.allocations:
            return None
        return Section("sites", "Allocation sites", f"Allocation sites are not available: {reason}.")
    window, device = found
    step = "" if device.peak_step is None else f" in step {device.peak_step}"
    lead = phrase(f"Live bytes on {device.device} peak at {{}}{step}, {window_name(window)}.", size(device.peak_bytes))
    parameters = memory.activations.parameters if memory.activations else {}
    columns, rows = site_rows(device.sites, parameters)
    footer = [filled(columns, text("unattributed"), size(device.unattributed_bytes))]
    if device.freed_outside_bytes:
        freed = text("freed, allocated before the window"), size(-device.freed_outside_bytes)
        footer.insert(0, filled(columns, *freed))
    parts: list[Part] = [
        Chart("holders"),
        Paragraph(f"{peak_note('live')}."),
        Table("sites", "Allocation sites at the peak", columns, rows, footer),
        _every_site(device),
    ]
    return Section("sites", "Allocation sites", lead, parts)


def site_rows(sites: Sequence[Site], parameters: Mapping[str, int]) -> tuple[list[Column], list[Row]]:
    """Return a table of the sites, repeated blocks as one row, the largest first; whatever their step and phase."""
    shared = patterns({site.module for site in sites if site.module}, parameters)
    sums: dict[tuple[str, str, str | None], list[int]] = {}
    for site in sites:
        where = shared[site.module] if site.module else f"({site.phase})" if site.phase else ""
        row = sums.setdefault((site.operator.removeprefix("aten::"), where, short_line(site.line)), [0, 0])
        row[0] += site.bytes
        row[1] += site.blocks
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], *(part or "" for part in item[0])))
    return grid(
        ordered[:MAX_ROWS],
        Field("operator", "code", lambda row: row[0][0]),
        Field("bytes", "bytes", lambda row: row[1][0], bar=True),
        Field("blocks", "count", lambda row: row[1][1], priority=2),
        Field("module", "code", lambda row: row[0][1] or None),
        Field("line", "code", lambda row: row[0][2], priority=1),
    )


def short_line(line: str | None) -> str | None:
    """Return ``file.py(12)`` of ``directory/file.py(12): function``."""
    return None if line is None else line.rpartition(": ")[0].rpartition("/")[2] or line


def _every_site(device: DeviceAllocations) -> Table:
    columns, rows = grid(
        device.sites[:MAX_ROWS],
        Field("operator", "code", lambda site: site.operator.removeprefix("aten::")),
        Field("bytes", "bytes", lambda site: site.bytes, bar=True),
        Field("blocks", "count", lambda site: site.blocks),
        Field("module", "code", lambda site: site.module),
        Field("line", "code", lambda site: site.line),
        Field("phase", "text", lambda site: called(site.phase) if site.phase else None),
        Field("step", "index", lambda site: site.step),
    )
    footer = []
    if others := device.sites[MAX_ROWS:]:
        sums = size(sum(site.bytes for site in others)), count(sum(site.blocks for site in others))
        footer = [filled(columns, text(f"{len(others)} more"), *sums)]
    return Table("every-site", "By module, line, phase and step", columns, rows, footer, is_detail=True)
