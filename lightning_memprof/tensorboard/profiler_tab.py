"""Where the profiler tab of torch-tb-profiler shows a trace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["place_in_profiler_tab"]

# Source: torch_tb_profiler.consts.WORKER_PATTERN.
_NAMED: Final = re.compile(r"(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?")


def place_in_profiler_tab(file: Path, top: Path) -> dict[str, str] | None:
    """Return the run, the worker and the span of a trace as that tab's selectors have them, None where it has none.

    A run is a directory, a worker what stands before the span, and a span the place of its number among those of the
    worker, in the order of text, from 1.
    """
    real = file.resolve()
    named = _NAMED.fullmatch(real.name)
    if named is None:
        return None
    worker = named[1]
    try:
        below = real.parent.relative_to(top).as_posix()
        others = [
            file_match
            for path in real.parent.iterdir()
            if (file_match := _NAMED.fullmatch(path.name)) and file_match[1] == worker
        ]
    except (OSError, ValueError):
        return None
    spans = sorted(match[2] for match in others if match[2])
    span = str(spans.index(named[2]) + 1) if named[2] in spans else "default"
    return {"run": top.name if below == "." else below, "worker": worker, "span": span}
