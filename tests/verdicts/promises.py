"""Compare what a finding promises with what its remedy gains.

    python tests/verdicts/promises.py [--only TEXT ...] [--rounds 3] [--cpu]

Each fault runs once with the profiler: the finding that names the fault promises a gain. Then the training with its
fault and its healthy twin, which has the remedy, run without the profiler in turns (A B B A ...); the gain is the
difference of the medians. A promise is kept if the gain is within 30 % of its range. Prints a table in Markdown. The
exit code is 1 if a promise is broken or a training fails. ``--cpu`` compares the CPU time of the process, as a share of
that before the remedy: on a busy machine a second of CPU time does more or less work from one run to the next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent))

from page_commands import bare, command
from rich.progress import track
from scoring import FULL, PARTIAL, Expected, Known, expected_of, found_of

HERE: Final = Path(__file__).resolve().parent
TOLERANCE: Final = 0.3
MS: Final = 1e6
MIB: Final = 2**20


@dataclass(frozen=True)
class Promise:
    """What a finding says that its first next step recovers: milliseconds per step or MiB of the peak."""

    rule: str
    unit: str
    least: float
    most: float
    whole: float


@dataclass(frozen=True)
class Comparison:
    """A promise, if the page makes one, and the gain per step or at the peak."""

    name: str
    promise: Promise | None
    before: float = 0.0
    after: float = 0.0

    @property
    def gain(self) -> float:
        return self.before - self.after

    @property
    def is_kept(self) -> bool:
        found = self.promise
        return found is None or is_within(self.gain, found.least, found.most)


def is_within(gain: float, least: float, most: float) -> bool:
    """Tell whether a gain is within 30 % of a range.

    >>> is_within(9.5, 7, 8), is_within(11, 7, 8), is_within(5, 7, 8), is_within(4.8, 7, 8)
    (True, False, True, False)
    """
    return least * (1 - TOLERANCE) <= gain <= most * (1 + TOLERANCE)


def main() -> int:
    options = parse()
    faults = [
        row for row in expected_of("faults") if not options.only or any(text in row.name for text in options.only)
    ]
    rows = []
    print(f"| training | finding | promised | before | after | gain | |\n|{'---|' * 7}")
    for fault in track(faults, "promises", disable=not sys.stderr.isatty()):
        try:
            rows.append(compared(fault, options.rounds, "cpu_ms" if options.cpu else "mean_ms"))
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            print(f"| {fault.name} | {type(error).__name__}: {error} | | | | | failed |")
        else:
            print(line_of(rows[-1]), flush=True)
    made = [row for row in rows if row.promise is not None]
    kept, failed = sum(row.is_kept for row in made), len(faults) - len(rows)
    print(
        f"\n{kept} of {len(made)} promises kept; {len(rows) - len(made)} trainings without a promise, {failed} failed"
    )
    return 0 if kept == len(made) and not failed else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="trainings whose name contains a text")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs of runs without the profiler")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time per step, on a busy machine")
    return parser.parse_args()


def compared(fault: Expected | Known, rounds: int, clock: str) -> Comparison:
    """Run a training with the profiler for the promise, and without it for the gain."""
    script = str(HERE / "faults" / fault.script)
    with tempfile.TemporaryDirectory(prefix="promises-") as name:
        directory = Path(name)
        command("run", script, fault.name, directory=directory)
        (run,) = directory.rglob("memprofiler")
        promise = promised(json.loads(command("show", str(run), "--format", "json", directory=directory)), fault)
        if promise is None:
            return Comparison(fault.name, None)
        turns = [is_healthy for turn in range(rounds) for is_healthy in ((False, True) if turn % 2 else (True, False))]
        found: dict[bool, list[float]] = {False: [], True: []}
        for is_healthy in turns:
            figures = bare(script, fault.name, directory, is_healthy=is_healthy)
            found[is_healthy].append(figures[clock if promise.unit == "ms" else "peak_mib"])
    before, after = statistics.median(found[False]), statistics.median(found[True])
    scale = promise.whole / before if promise.unit == "ms" and clock == "cpu_ms" else 1
    return Comparison(fault.name, promise, scale * before, scale * after)


def promised(shown: Mapping[str, Any], fault: Expected | Known) -> Promise | None:
    """Return what the first finding that names the fault, or its surroundings, says that it recovers.

    What other processes take of the machine, no remedy of the training recovers.
    """
    for points in (FULL, PARTIAL):
        for row in shown["findings"]:
            if (
                row["recovers"] is not None
                and row["rule"] != "core_wait"
                and fault.cause_points(found_of(row)) == points
            ):
                found = row["recovers"]
                unit, scale = ("ms", MS) if found["unit"] == "ns" else ("MiB", MIB)
                return Promise(row["rule"], unit, *(found[key] / scale for key in ("min", "max", "whole")))
    return None


def line_of(row: Comparison) -> str:
    if row.promise is None:
        return f"| {row.name} | none | | | | | |"
    found = row.promise
    cells = [f"`{found.rule}`", f"{found.least:.1f} to {found.most:.1f} {found.unit}"]
    cells += [f"{value:.1f}" for value in (row.before, row.after, row.gain)]
    return f"| {row.name} | {' | '.join(cells)} | {'kept' if row.is_kept else 'broken'} |"


if __name__ == "__main__":
    raise SystemExit(main())
