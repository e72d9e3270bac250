"""Does anything grow in a long fit? ``python tests/torture/soak.py [--steps N] [--every N] [--quick]``.

20,000 steps with a window every 100: with this package, with torch.profiler by hand and the same windows, and bare.
The exit code is 1 where something of the first grows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import measured
from soak_judge import Soaked, command, environment

COMMAND: Final = "make soak"
STEPS, EVERY = 20_000, 100
QUICK_STEPS: Final = 3000
# Ten windows are not judged, and a slope needs some more; a window has three steps and some wait before it.
LEAST_WINDOWS, LEAST_EVERY = 15, 5
# By what soaked_fit.py calls a fit, how the head of the table begins.
FITS: Final = {"ours": "", "plain": "torch.profiler by hand: ", "bare": "bare: "}


def watch(directory: Path, steps: int, every: int, how: str) -> Soaked:
    """Run one fit with a bar.

    Raises:
        subprocess.CalledProcessError: it failed.

    """
    lines = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    asked = command(directory / how, steps, every, how)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"soak, {how}", total=steps // every)
        with subprocess.Popen(
            asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    lines.append(json.loads(line))
                    bar.advance(task)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, asked)
    return Soaked(lines)


def page(fits: Mapping[str, Soaked], every: int, faults: Sequence[str]) -> str:
    """Give the table and what is judged."""

    def row(what: str, column: str, unit: str) -> tuple[str, ...]:
        slopes = [f"{one.slope(column):+,.0f} {unit}".rstrip() for one in fits.values()]
        ranges = ["{:,} to {:,}".format(*one.spread(column)) for one in fits.values()]
        return (what, *chain.from_iterable(zip(slopes, ranges, strict=True)))

    rows = [
        row("resident size", "bytes", "B"),
        row("file handles", "handles", ""),
        row("threads", "threads", ""),
        row("files of windows", "window_files", ""),
        row("size of the files of windows", "window_bytes", "B"),
        row("size of the files that grow by lines", "other_bytes", "B"),
    ]
    named = (f"{name}{what}" for name in FITS.values() for what in ("a window more", "least to most"))
    lines = fits["ours"].lines
    steps = lines[-1]["step"] + every // 2
    said = f"{steps:,} steps, {len(lines)} windows, one every {every} steps, of which 5 are kept."
    judged = "\n".join(f"- **red**: {one}" for one in faults) or "Nothing grows beyond its bound."
    return f"{said}\n\n{measured.table(('after the tenth window', *named), rows)}\n\n{judged}"


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
        fits = {how: watch(Path(directory), steps, options.every, how) for how in FITS}
    faults = fits["ours"].faults(resident=not options.quick)
    body = page(fits, options.every, faults)
    print(body)
    if options.quick:
        print("The resident size is not judged: that needs some hundred windows.")
    else:
        print(measured.write_fragment("soak", COMMAND, body))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
