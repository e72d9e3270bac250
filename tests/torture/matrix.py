"""The matrix of faults: ``python tests/torture/matrix.py [--only TEXT ...] [--jobs N] [--quick]``.

Every cell is a fit in which one fault strikes at one moment, in one process or in two, with this package and without
it. The exit code is 1 where a cell is red.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import workers
from rich.markup import escape

import measured

# One cell of each kind: the short form, which the tests run.
QUICK: Final = (
    ("exception in training_step", "before", 1),
    ("exception in backward", "warmup", 1),
    ("exception in the optimizer's step", "active", 1),
    ("exception in validation", "save", 1),
    ("exception in a callback", "teardown", 1),
    ("exception in a data loader worker (fork)", "active", 1),
    ("Ctrl-C", "save", 1),
    ("SIGTERM", "active", 1),
    ("SIGKILL of all ranks", "save", 1),
    ("SIGKILL of one rank", "save", 2),
    ("host out of memory (refused)", "active", 1),
    ("a collector hangs (waits)", "active", 1),
)


def main() -> int:
    options = parse()
    if options.quick and not options.only:
        asked = [workers.Asked(*case, number) for number, case in enumerate(QUICK)]
    else:
        asked = cells(options)
    # Below it a data loader's worker listens on a socket, whose path may have 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="torture-", dir="/tmp"))
    began = time.monotonic()
    found = watch(asked, directory, options.jobs)
    if options.results is not None:
        options.results.write_text("".join(json.dumps(result) + "\n" for result in found.values()))
    seconds = time.monotonic() - began
    if not (options.quick or options.only):
        print(write_page(found, seconds))
    red = sum(bool(result["red"]) for result in found.values())
    lost = sum(result.get("lost", 0) for result in found.values())
    print(f"{len(found)} cells, {red} red, {lost} windows lost, {seconds:.0f} s")
    if red:
        print(f"what the red ones left: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if red or len(found) < len(asked) else 0


def watch(asked: list[workers.Asked], directory: Path, jobs: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Run the cells and say on the way what is red."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    with measured.progress() as bar:
        task = bar.add_task("faults", total=len(asked))
        for result in workers.results(asked, directory, jobs):
            found[result["fault"], result["moment"], result["world"]] = result
            bar.update(task, advance=1, refresh=True)
            if result["red"]:
                where = f"{result['fault']}, {result['moment']}, world={result['world']}"
                bar.console.print(f"[red]red[/red]: {escape(where)}: {escape(' | '.join(result['red'])[-600:])}")
    return found


def write_page(found: dict[tuple[str, str, int], dict[str, Any]], seconds: float) -> Path:
    # Not above: these load torch, and the short form needs neither.
    import page
    import registry

    return measured.write_fragment("faults", "make torture", page.body(registry.faults(), found, seconds))


def cells(options: argparse.Namespace) -> list[workers.Asked]:
    """Give the cells that are asked for: two ranks last, they take longest."""
    import moments
    import registry

    rows = registry.faults()
    every = [
        (row.name, moment.name, world)
        for world in (1, 2)
        for row in rows
        for moment in moments.MOMENTS
        if moment.name not in row.absent and world in row.worlds
    ]
    if options.quick:
        every = [cell for cell in every if cell in QUICK]
    for text in options.only or ():
        every = [cell for cell in every if text.lower() in f"{cell[0]} {cell[1]} world={cell[2]}".lower()]
    if not every:
        sys.exit(f"no cell has {' and '.join(options.only)}; faults: {', '.join(row.name for row in rows)}")
    return [workers.Asked(*cell, number) for number, cell in enumerate(every)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="cells whose fault, moment or world=N have all of these"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--quick", action="store_true", help="a dozen cells, one of each kind")
    parser.add_argument("--results", type=Path, help="also write every cell's result there, a line of JSON each")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    if options.results is not None and not options.results.parent.is_dir():
        parser.error(f"--results {options.results}: there is no directory {options.results.parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
