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
    code,
    count,
    index,
    phrase,
    size,
    text,
)
from lightning_memprof.report.sections.labels import called, peak_note
from lightning_memprof.report.sections.memory import MAX_ROWS, peak_allocations, window_name

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
    footer = [
        *(
            [_rest("freed, allocated before the window", -device.freed_outside_bytes)]
            if device.freed_outside_bytes
            else []
        ),
        _rest("unattributed", device.unattributed_bytes),
    ]
    parameters = memory.activations.parameters if memory.activations else {}
    columns = (
        Column("operator", "code"),
        Column("bytes", "bytes"),
        Column("blocks", "count", priority=2),
        Column("module", "code"),
        Column("line", "code", priority=1),
    )
    rows = site_rows(device.sites, parameters)
    parts: list[Part] = [
        Chart("holders"),
        Paragraph(f"{peak_note('live')}."),
        Table(id="sites", title="Allocation sites at the peak", columns=columns, rows=rows, footer=footer),
        _every_site(device),
    ]
    return Section("sites", "Allocation sites", lead, parts)


def site_rows(sites: Sequence[Site], parameters: Mapping[str, int]) -> list[Row]:
    """Return the sites, repeated blocks as one row, the largest first; whatever their step and phase."""
    shared = patterns({site.module for site in sites if site.module}, parameters)
    sums: dict[tuple[str, str, str | None], list[int]] = {}
    for site in sites:
        where = shared[site.module] if site.module else f"({site.phase})" if site.phase else ""
        row = sums.setdefault((site.operator.removeprefix("aten::"), where, short_line(site.line)), [0, 0])
        row[0] += site.bytes
        row[1] += site.blocks
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], *(part or "" for part in item[0])))
    most = ordered[0][1][0] if ordered else None
    return [
        (code(operator), size(total, most), count(blocks), code(where or None), code(line))
        for (operator, where, line), (total, blocks) in ordered[:MAX_ROWS]
    ]


def short_line(line: str | None) -> str | None:
    """Return ``file.py(12)`` of ``directory/file.py(12): function``."""
    return None if line is None else line.rpartition(": ")[0].rpartition("/")[2] or line


def _every_site(device: DeviceAllocations) -> Table:
    most = device.sites[0].bytes
    rows = [
        (
            code(site.operator.removeprefix("aten::")),
            size(site.bytes, most),
            count(site.blocks),
            code(site.module),
            code(site.line),
            text(called(site.phase) if site.phase else None),
            index(site.step),
        )
        for site in device.sites[:MAX_ROWS]
    ]
    columns = (
        Column("operator", "code"),
        Column("bytes", "bytes"),
        Column("blocks", "count"),
        Column("module", "code"),
        Column("line", "code"),
        Column("phase"),
        Column("step", "index"),
    )
    rest = device.sites[MAX_ROWS:]
    footer = []
    if rest:
        sums = sum(site.bytes for site in rest), sum(site.blocks for site in rest)
        footer = [(text(f"{len(rest)} more"), size(sums[0]), count(sums[1]), *[text("")] * 4)]
    return Table(
        id="every-site",
        title="By module, line, phase and step",
        columns=columns,
        rows=rows,
        footer=footer,
        is_detail=True,
    )


def _rest(name: str, rest: int) -> Row:
    return text(name), size(rest), text(""), text(""), text("")
