"""All benchmarks, one after the other: what `make bench` runs.

    python tests/benchmarks/all_parts.py                       everything, about an hour on a quiet machine
    python tests/benchmarks/all_parts.py --quick               small and once, some minutes; a trial: nothing is written
    python tests/benchmarks/all_parts.py --only fits growth

Each part writes its figures below ``docs/measured``. A part that fails does not keep the others from running; its name
and the exit code say so. A missed target is a figure and no failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich.console import Console

HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """One program of the benchmark.

    Attributes:
        says: what it measures.
        script: beside this file.

    """

    says: str
    script: str


@dataclass(frozen=True)
class Outcome:
    """How a part ended: its name, the exit code (negative: the signal that ended it) and how long it took."""

    name: str
    code: int
    seconds: float


PARTS: Final[Mapping[str, Part]] = MappingProxyType(
    {
        "fits": Part("what recording costs a fit, beside the peers", "bench.py"),
        "traces": Part("how fast a trace is analysed, beside the peers", "traces.py"),
        "estimate": Part("how exact estimates of memory are, beside measured trainings", "estimates.py"),
        "try": Part("how far a trial of remedies can be trusted", "trials.py"),
        "growth": Part("how cost grows with modules, steps, ranks and bytes", "growth.py"),
    }
)


def run_parts(parts: Mapping[str, Part], arguments: Sequence[str], folder: Path, console: Console) -> list[Outcome]:
    """Run each part to its end, whatever became of the one before it; say which one it is.

    Args:
        parts: by name, in order.
        arguments: handed to each.
        folder: where the scripts are.
        console: where progress is told; a part draws its own bar below its line.

    """
    outcomes = []
    for number, (name, part) in enumerate(parts.items(), start=1):
        console.print(f"\n[bold]{number} of {len(parts)}: {name}[/], {part.says}")
        begun = time.monotonic()
        done = subprocess.run([sys.executable, str(folder / part.script), *arguments], check=False)
        outcomes.append(Outcome(name, done.returncode, time.monotonic() - begun))
    return outcomes


def tell(outcomes: Sequence[Outcome], console: Console) -> int:
    """Print how each part ended; give the exit code."""
    console.print()
    for outcome in outcomes:
        word = "done" if not outcome.code else f"[red]failed with {outcome.code}[/]"
        console.print(f"{outcome.name:10} {outcome.seconds / 60:5.1f} min   {word}", highlight=False)
    return 1 if any(outcome.code for outcome in outcomes) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small and once; nothing is judged, nothing written")
    options = parser.parse_args()
    chosen = {name: part for name, part in PARTS.items() if name in (options.only or PARTS)}
    console = Console(stderr=True)
    return tell(run_parts(chosen, ["--quick"] if options.quick else [], HERE, console), console)


if __name__ == "__main__":
    sys.exit(main())
