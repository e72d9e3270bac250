"""Score the first line and the first next step on real trainings with one known fault each.

    python tests/verdicts/run.py                     the faults that rules may be developed with
    python tests/verdicts/run.py --set holdout       the faults that nobody may look at before a release
    python tests/verdicts/run.py --set gpu           those of a GPU
    python tests/verdicts/run.py --only padding --repeat 3 --loaded
    python tests/verdicts/run.py --recordings DIR    keep the recordings; where one is there, only read its page again
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
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from page_commands import command, recorded
from results import Result, page, totals
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from scoring import (
    CAUSE_AIM,
    NEXT_AIM,
    ON_GPU,
    SETS,
    Expected,
    accusations,
    expected_of,
    is_healthy,
    page_of,
    score,
    squeezed,
)

from measured import write_fragment

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE.parents[1] / "build" / "verdicts.json"
# In the directory of a recording: written when its training has ended.
RAN: Final = "ran.json"


@dataclass(frozen=True)
class Case:
    """One training: its fault, its folder, and whether it is the healthy twin."""

    expected: Expected
    folder: str
    healthy: bool
    repeat: int


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
        Case(expected, folder, healthy, repeat)
        for folder in (SETS if options.set == "all" else (options.set,))
        for expected in expected_of(folder)
        if not options.only or any(text in expected.name for text in options.only)
        for repeat in range(options.repeat)
        for healthy in ((True,) if options.twins else (False, True))
    ]
    if not cases:
        raise SystemExit(f"There is no training in the set {options.set} with such a name.")
    with busy_core() if options.loaded else contextlib.nullcontext():
        return run_all(cases, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=(*SETS, ON_GPU, "all"), default="faults", help="default: faults")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="trainings whose name contains a text")
    parser.add_argument("--twins", action="store_true", help="the healthy twins only")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run each training N times")
    parser.add_argument("--loaded", action="store_true", help="keep one core busy with another process")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at the same time; default 1")
    parser.add_argument("--recordings", type=Path, metavar="DIR", help="keep recordings here, and read those that are")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=f"default: {RESULTS}")
    parser.add_argument("--read", type=Path, nargs="+", default=[], metavar="FILE", help="results instead of trainings")
    parser.add_argument("--write", action="store_true", help="write docs/measured/verdicts.md")
    return parser.parse_args()


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep another process busy meanwhile."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        task = progress.add_task("trainings", total=len(cases))
        pending = {pool.submit(run_case, case, options): index for index, case in enumerate(cases)}
        results: dict[int, Result] = {}
        for future in as_completed(pending):
            results[pending[future]] = result = future.result()
            progress.update(task, advance=1, description=result.name)
    return [results[index] for index in sorted(results)]


def run_case(case: Case, options: argparse.Namespace) -> Result:
    """Run one training in a directory of its own and read its page. A failure is the result's error."""
    expected = case.expected
    result = Result(
        name=expected.name, domain=expected.domain, healthy=case.healthy, repeat=case.repeat, set=case.folder
    )
    with kept_directory(case, options.recordings) as directory:
        try:
            printed = None if (directory / RAN).is_file() else train(case, directory, is_loaded=options.loaded)
            for name, value in json.loads((directory / RAN).read_text()).items():
                setattr(result, name, value)
            read_page(case, directory, printed, result)
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            result.error = f"{type(error).__name__}: {error}"
    return result


@contextlib.contextmanager
def kept_directory(case: Case, recordings: Path | None) -> Iterator[Path]:
    """Yield the directory of a training: one that stays in ``recordings``, or one that does not stay."""
    if recordings is None:
        with tempfile.TemporaryDirectory(prefix="verdicts-") as name:
            yield Path(name)
    else:
        path = recordings.resolve() / f"{case.expected.name}-{'healthy' if case.healthy else 'fault'}-{case.repeat}"
        path.mkdir(parents=True, exist_ok=True)
        yield path


def train(case: Case, directory: Path, *, is_loaded: bool) -> str:
    """Run a training, from nothing, note that it ended, and give what it printed."""
    for part in directory.iterdir():
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    began = time.monotonic()
    script = HERE / case.folder / case.expected.script
    printed = recorded(str(script), case.expected.name, directory, is_healthy=case.healthy)
    seconds, load = round(time.monotonic() - began, 1), round(os.getloadavg()[0], 1)
    (directory / RAN).write_text(json.dumps({"seconds": seconds, "load": load, "loaded": is_loaded}))
    return printed


def read_page(case: Case, directory: Path, printed: str | None, result: Result) -> None:
    """Score what the page of a recording says; raise if the run that just ended printed another verdict."""
    runs = sorted(directory.rglob("memprofiler"))
    if len(runs) != 1:
        raise LookupError(f"{len(runs)} runs instead of 1")
    shown = json.loads(command("show", str(runs[0]), "--format", "json", directory=directory))
    page = page_of(shown)
    # Rank 0 prints its page before the others have written all.
    if printed is not None and len(shown["ranks"]) == 1 and squeezed(page.sentence) not in squeezed(printed):
        raise ValueError(f"the terminal page lacks the verdict {page.sentence!r}")
    result.sentence, result.next_step, result.findings = page.sentence, page.next_step, list(page.findings)
    if case.healthy:
        result.accused = accusations(case.expected, page)
    else:
        points = score(case.expected, page)
        result.cause, result.fix = points.cause, points.fix


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
        if result.healthy and result.sentence and not is_healthy(result.sentence):
            console.print(f"Another verdict on a healthy twin: {result.name}: {result.sentence}", markup=False)
    found = totals(results)
    console.print(
        f"Cause {found.cause:.0%} (aim {CAUSE_AIM:.0%}), next step {found.fix:.0%} (aim {NEXT_AIM:.0%}), of "
        f"{found.faults} faults; healthy twins accused: {found.accused}; failed to run: {found.errors}",
        highlight=False,
    )
    return found.are_met


if __name__ == "__main__":
    raise SystemExit(main())
