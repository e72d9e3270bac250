"""What a training that hangs waits for: its report."""

from __future__ import annotations

import json
from pathlib import Path


def is_reported(file: Path, step: int) -> bool:
    """Whether the file has the report of this step; on a busy machine others may take long, too."""
    if not file.exists():
        return False
    rows = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return any(row["kind"] in {"hang", "asked"} and row["step"] == step for row in rows)
