"""A section with a table: disk space by collector."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_memprof.report.document import Cell, Column, Section, Table, phrase

if TYPE_CHECKING:
    from lightning_memprof.report.view import View


def disk_use_section(view: View) -> Section:
    """Return the bytes and the number of files of each collector, largest first."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for artifact in view.run.artifacts:
        sizes[artifact.collector].append(artifact.size_bytes or 0)
    total = sum(sum(found) for found in sizes.values())
    rows = sorted(sizes.items(), key=lambda row: sum(row[1]), reverse=True)
    table = Table(
        id="disk-use",
        title="Disk space by collector",
        columns=[
            Column("collector", "code"),
            Column("size", "bytes", has_share=True),
            Column("files", "count"),
            Column("largest file", "bytes", priority=1),
        ],
        rows=[
            (Cell(name, "code"), Cell(sum(found), "bytes", total), Cell(len(found), "count"), Cell(max(found), "bytes"))
            for name, found in rows
        ],
    )
    return Section("disk", "Disk space", phrase("The recording takes {bytes}.", total), [table])
