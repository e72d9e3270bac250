"""What run directories say of how they were recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training import rows_of


def nothing_found() -> dict[str, Any]:
    """Return what is known before a run was recorded."""
    return {"same": True, "errors": [], "unavailable": [], "windows": 0, "pages": 0}


def add_run(run: Path, found: dict[str, Any], ranks: Iterable[int] = (0,)) -> None:
    """Add what a run directory says, and whether its page can be made."""
    for rank in ranks:
        found["errors"] += [f"{row['collector']}: {row['exception']}" for row in rows_of(run, "error", rank)]
        left_out = {f"{row['collector']}: {row['reason']}" for row in rows_of(run, "unavailable", rank)}
        found["unavailable"] = sorted({*found["unavailable"], *left_out})
        found["windows"] += sum(row["event"] != "open" for row in rows_of(run, "window", rank))
    command = [sys.executable, "-m", "lightning_memprof", "show", str(run)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if shown.returncode != 0:
        found["errors"].append(f"show: {shown.stderr.strip()[-200:]}")
    found["pages"] += shown.returncode == 0
