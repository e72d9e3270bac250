"""What a long fit may not do: grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

WARM_WINDOWS: Final = 10
MOST_BYTES: Final = 1000
MOST_TIMES: Final = 1.5
SUPPORT: Final = Path(__file__).parent

Line = dict[str, Any]


@dataclass(frozen=True)
class Soaked:
    """The lines that a fit has printed, one a window, judged."""

    lines: Sequence[Line]

    @property
    def settled(self) -> Sequence[Line]:
        """Those after the tenth window."""
        return self.lines[WARM_WINDOWS:]

    def slope(self, column: str) -> float:
        """Give the growth a window after the tenth: the median of the slopes between all pairs (Theil and Sen)."""
        points = list(enumerate(sample[column] for sample in self.settled))
        pairs = combinations(points, 2)
        return float(median((later - first) / (after - before) for (before, first), (after, later) in pairs))

    def spread(self, column: str) -> tuple[int, int]:
        """Give the least and the most after the tenth window."""
        values = [sample[column] for sample in self.settled]
        return min(values), max(values)

    def faults(self, *, resident: bool) -> list[str]:
        """Say what grew; ``resident`` judges the resident size too, which needs some hundred windows."""
        found = []
        if resident and self.slope("bytes") >= MOST_BYTES:
            found.append(f"rss grows by {self.slope('bytes'):.0f} bytes a window, fewer than {MOST_BYTES} are allowed")
        for column in ("handles", "threads"):
            least, most = self.spread(column)
            if most > least:
                found.append(f"{column}: {least} to {most}, after the tenth window it must not change")
        for column in ("window_files", "window_bytes"):
            least, most = self.spread(column)
            # Traces are not of one size to the byte, and a window has none while the writer is behind.
            if most > MOST_TIMES * least:
                found.append(f"{column}: {least} to {most}; keep_windows bounds them")
        return found


def command(directory: Path, steps: int, every: int, how: str) -> list[str]:
    """Give what runs such a fit in a process of its own."""
    return [sys.executable, str(SUPPORT / "soaked_fit.py"), str(directory), str(steps), str(every), how]


def environment() -> dict[str, str]:
    """Give its variables."""
    return os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}


def soaked(directory: Path, steps: int, every: int, seconds: float) -> Soaked:
    """Run one to its end."""
    done = subprocess.run(
        command(directory, steps, every, "ours"),
        env=environment(), stdout=subprocess.PIPE, text=True, timeout=seconds, check=True,
    )  # fmt: skip
    return Soaked([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
