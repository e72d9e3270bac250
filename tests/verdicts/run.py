"""Score the first line and the first next step on real trainings with one known fault each.

    python tests/verdicts/run.py                     the faults that rules may be developed with
    python tests/verdicts/run.py --set holdout       the faults that nobody may look at before a release
    python tests/verdicts/run.py --set gpu           those of a GPU
    python tests/verdicts/run.py --only padding --repeat 3 --loaded
    python tests/verdicts/run.py --recordings DIR    keep the recordings; where one is there, only read its page again
    python tests/verdicts/run.py --recordings DIR --reread     only read the pages of the recordings that are there
    python tests/verdicts/run.py --read build/verdicts.json --write

Each training runs as ``lightning-memprof run SCRIPT`` with defaults: once with its fault, once healthy. Writes
``build/verdicts.json``; ``--write`` writes ``docs/measured/verdicts.md`` too, also from the results of earlier runs.
The exit code is 1 if a training fails, the aims are missed or a healthy twin is accused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from results import Result, page, totals
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scoring import (
    CAUSE_AIM,
    NEXT_AIM,
    NOTHING_FOUND,
    ON_GPU,
    SETS,
    expected_of,
)
from trainings import Case, is_recorded, run_case

from measured import progress, write_fragment

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE.parents[1] / "build" / "verdicts.json"


def main() -> int:
    options = parse()
    results = [Result(**row) for file in options.read for row in json.loads(file.read_text())] or trained(options)
    console = Console()
    console.print(table_of(results))
    passed = report(results, console)
    if not options.read:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        console.print(f"Pages and points: {options.results}", soft_wrap=True)
    if options.write:
        path = write_fragment("verdicts", "make verdicts", page(results), is_dated=False)
        console.print(f"Wrote {path}", soft_wrap=True)
    return 0 if passed else 1


def trained(options: argparse.Namespace) -> list[Result]:
    """Run the trainings that the command line selects."""
    cases = [
        Case(expected, folder, healthy, repeat, tuple(options.without))
        for folder in (SETS if options.set == "all" else (options.set,))
        for expected in expected_of(folder)
        if not options.only or any(text in expected.name for text in options.only)
        for repeat in range(options.repeat)
        for healthy in ((True,) if options.twins else (False, True))
    ]
    if options.reread:
        cases = [case for case in cases if is_recorded(case, options.recordings)]
    if not cases:
        raise SystemExit(f"There is no such training in the set {options.set}, or no recording.")
    with busy_core() if options.loaded else contextlib.nullcontext():
        return run_all(cases, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=(*SETS, ON_GPU, "all"), default="faults", help="default: faults")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="trainings whose name contains a text")
    parser.add_argument("--twins", action="store_true", help="the healthy twins only")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each training N times")
    parser.add_argument("--loaded", action="store_true", help="keep one core busy with another process")
    parser.add_argument("--jobs", type=int, metavar="N", help="trainings at the same time; default 1, pages one a core")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="keep recordings here, and read those that are")
    parser.add_argument(
        "--reread", action="store_true", help="no training: read the pages of the kept recordings again"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="RULE",
        help="rules that are not scored where they are not the fault: core_wait for recordings from a busy machine",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS}")
    parser.add_argument("--read", type=Path, nargs="+", default=[], metavar="FILE", help="results instead of trainings")
    parser.add_argument("--write", action="store_true", help="write docs/measured/verdicts.md")
    options = parser.parse_args()
    if options.reread and options.recordings is None:
        parser.error("--reread reads --recordings DIR")
    options.jobs = options.jobs or ((os.cpu_count() or 1) if options.reread else 1)
    return options


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep another process busy meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> list[Result]:
    with progress() as bar, ProcessPoolExecutor(options.jobs) as pool:
        task = bar.add_task("trainings", total=len(cases))
        pending = {
            pool.submit(run_case, case, options.recordings, is_loaded=options.loaded): index
            for index, case in enumerate(cases)
        }
        results: dict[int, Result] = {}
        for future in as_completed(pending):
            results[pending[future]] = result = future.result()
            bar.update(task, advance=1, description=result.name, refresh=True)
    return [results[index] for index in sorted(results)]


def table_of(results: Sequence[Result]) -> Table:
    table = Table("training", "s", "cause", "next", "first line · next step", title="Verdicts", show_lines=True)
    for result in results:
        name = f"{result.name}{' (healthy)' if result.healthy else ''}"
        text = result.error or f"{result.sentence}\n→ {result.next_step}"
        if result.healthy and not result.error:
            text = "\n".join(["ACCUSED: " + line for line in result.accused] or [f"not accused: {result.sentence}"])
        points = ["" if value < 0 else str(value) for value in (result.cause, result.fix)]
        table.add_row(name, f"{result.seconds:.0f}", *points, escape(text))
    return table


def report(results: Sequence[Result], console: Console) -> bool:
    """Print the scores and return whether all aims are met."""
    for result in results:
        if result.healthy and result.rule not in {"", NOTHING_FOUND}:
            console.print(f"Another verdict on a healthy twin: {result.name}: {result.sentence}", markup=False)
    found = totals(results)
    if found.faults:
        console.print(
            f"Cause {found.cause:.0%} (aim {CAUSE_AIM:.0%}), next step {found.fix:.0%} (aim {NEXT_AIM:.0%}), of "
            f"{found.faults} faults",
            highlight=False,
        )
    console.print(
        f"Healthy twins accused: {found.accused} of {found.twins}; failed to run: {found.errors}", highlight=False
    )
    seconds = [result.read_s for result in results if not result.error]
    if seconds:
        console.print(
            f"A page takes {statistics.mean(seconds):.2f} s of CPU time, at most {max(seconds):.2f} s", highlight=False
        )
    return found.are_met


if __name__ == "__main__":
    raise SystemExit(main())
