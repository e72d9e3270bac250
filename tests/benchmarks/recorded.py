"""What a fit of ours left in its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.report.written import LOG_NAME, PAGE_NAME

if TYPE_CHECKING:
    from pathlib import Path


def facts(directory: Path) -> dict[str, Any]:
    """Give ``size_bytes``, ``pulse_us`` and ``faults`` of a fit."""
    pulse_us, faults = None, []
    for path in directory.rglob("memprofiler/manifest.*.jsonl"):
        for row in decode_rows(path.read_bytes(), dict)[0]:
            if row["kind"] == "end" and row["steps"] and pulse_us is None:
                pulse_us = row["overhead"]["pulse_ns"] / row["steps"] / 1000
            elif row["kind"] == "error":
                faults.append(f"{row.get('collector')} failed: {row.get('message') or row.get('error')}")
    return {
        "size_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "pulse_us": pulse_us,
        "faults": tuple(faults),
    }


def has_page(directory: Path) -> bool:
    """Say whether the page that is made after the fit is there, or why not."""
    return any(path.name in {PAGE_NAME, LOG_NAME} for path in directory.rglob("memprofiler/report.*"))
