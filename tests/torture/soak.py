"""Does anything grow in a long fit? ``python tests/torture/soak.py [--steps N] [--every N] [--quick]``.

20,000 steps with a window every 100: with this package, with torch.profiler by hand and the same windows, and bare.
Once more with this package, the C library touches all memory that it hands out or takes back (MALLOC_PERTURB_): what
the resident size grows by then is no page that was free since the first windows. The exit code is 1 where something of
the first grows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import measured

SUPPORT: Final = Path(__file__).resolve().parents[1] / "support"
COMMAND: Final = "make soak"
STEPS, EVERY = 20_000, 100
QUICK_STEPS: Final = 3000
# Ten windows are not judged, and a slope needs some more; a window has three steps and some wait before it.
LEAST_WINDOWS, LEAST_EVERY = 15, 5
WARM_WINDOWS: Final = 10
MOST_BYTES: Final = 1000
MOST_TIMES: Final = 1.5
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


@dataclass(frozen=True)
class Fit:
    """A fit that is watched: what soaked_fit.py calls it, its name, whether free memory is touched."""

    how: str
    name: str
    touched: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its process."""
        touched = {"MALLOC_PERTURB_": "1"} if self.touched else {}
        return os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"} | touched


JUDGED: Final = Fit("ours", "lightning-memprof")
FITS: Final = (
    JUDGED,
    Fit("ours", "lightning-memprof, free memory touched", touched=True),
    Fit("plain", "torch.profiler by hand"),
    Fit("bare", "bare"),
)


def watch(directory: Path, steps: int, every: int, fit: Fit) -> Soaked:
    """Run one fit with a bar.

    Raises:
        subprocess.CalledProcessError: it failed.

    """
    lines = []
    asked = [sys.executable, str(SUPPORT / "soaked_fit.py"), str(directory), str(steps), str(every), fit.how]
    with measured.progress() as bar:
        task = bar.add_task(f"soak: {fit.name}", total=steps // every)
        with subprocess.Popen(
            asked, env=fit.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    lines.append(json.loads(line))
                    bar.update(task, advance=1, refresh=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, asked)
    return Soaked(lines)


def page(fits: Mapping[Fit, Soaked], every: int, faults: Sequence[str]) -> str:
    """Give the table and what is judged."""

    def cell(soaked: Soaked, column: str, unit: str) -> str:
        slope = f"{round(soaked.slope(column)):+,} {unit}".rstrip()
        return "{} ({:,} to {:,})".format(slope, *soaked.spread(column))

    def row(what: str, column: str, unit: str) -> tuple[str, ...]:
        return (what, *(cell(fit, column, unit) for fit in fits.values()))

    rows = [
        row("resident size", "bytes", "B"),
        row("file handles", "handles", ""),
        row("threads", "threads", ""),
        row("files of windows", "window_files", ""),
        row("size of the files of windows", "window_bytes", "B"),
        row("size of the files that grow by lines", "other_bytes", "B"),
    ]
    head = ("a window more, after the tenth (least to most)", *(fit.name for fit in fits))
    lines = fits[JUDGED].lines
    steps = lines[-1]["step"] + every // 2
    said = f"{steps:,} steps, {len(lines)} windows, one every {every} steps, of which 5 are kept."
    judged = "\n".join(f"- **red**: {fault}" for fault in faults) or "Nothing grows beyond its bound."
    return f"{said}\n\n{measured.table(head, rows)}\n\n{judged}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each fit ({STEPS})")
    parser.add_argument("--every", type=int, default=EVERY, help=f"steps from window to window ({EVERY})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_STEPS} steps only; the resident size is not judged, nothing is written",
    )
    options = parser.parse_args()
    if options.steps < LEAST_WINDOWS * options.every or options.every < LEAST_EVERY:
        parser.error(
            f"--steps {options.steps} --every {options.every}: at least {LEAST_WINDOWS} windows of {LEAST_EVERY} steps"
        )
    steps = QUICK_STEPS if options.quick else options.steps
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        fits = {fit: watch(Path(directory, str(row)), steps, options.every, fit) for row, fit in enumerate(FITS)}
    faults = fits[JUDGED].faults(resident=not options.quick)
    body = page(fits, options.every, faults)
    print(body)
    if options.quick:
        print("The resident size is not judged: that needs some hundred windows.")
    else:
        print(measured.write_fragment("soak", COMMAND, body))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
