"""Run a training with the profiler, or take the recording that is kept, and score its page."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from page_commands import recorded, shown
from results import Result
from scoring import Expected, Known, accusations, page_of, score, squeezed

HERE: Final = Path(__file__).resolve().parent
# In the directory of a recording: written when its training has ended.
RAN: Final = "ran.json"


@dataclass(frozen=True)
class Case:
    """One training: its fault, its folder, whether it is the healthy twin, and the rules that are not scored."""

    expected: Expected | Known
    folder: str
    healthy: bool
    repeat: int
    without: tuple[str, ...] = ()


def is_recorded(case: Case, recordings: Path) -> bool:
    """Tell whether the recording of a training is there as a whole."""
    return (path_of(case, recordings) / RAN).is_file()


def path_of(case: Case, recordings: Path) -> Path:
    return recordings.resolve() / f"{case.expected.name}-{'healthy' if case.healthy else 'fault'}-{case.repeat}"


def run_case(case: Case, recordings: Path | None, *, is_loaded: bool = False) -> Result:
    """Run one training in a directory of its own and read its page. A failure is the result's error."""
    expected = case.expected
    result = Result(
        name=expected.name, domain=expected.domain, healthy=case.healthy, repeat=case.repeat, set=case.folder
    )
    with kept_directory(case, recordings) as directory:
        try:
            printed = None if (directory / RAN).is_file() else train(case, directory, is_loaded=is_loaded)
            for name, value in json.loads((directory / RAN).read_text()).items():
                setattr(result, name, value)
            read_page(case, directory, printed, result)
        except Exception as error:  # noqa: BLE001 - a page that cannot be made is a result, too
            result.error = f"{type(error).__name__}: {error}"
    return result


@contextlib.contextmanager
def kept_directory(case: Case, recordings: Path | None) -> Iterator[Path]:
    """Yield the directory of a training: one that stays in ``recordings``, or one that does not stay."""
    if recordings is None:
        with tempfile.TemporaryDirectory(prefix="verdicts-") as name:
            yield Path(name)
    else:
        path = path_of(case, recordings)
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
    began = time.process_time()
    values = shown(runs[0])
    result.read_s = round(time.process_time() - began, 3)
    page = page_of(values)
    # Rank 0 prints its page before the others have written all.
    if printed is not None and len(values["ranks"]) == 1 and squeezed(page.verdict.sentence) not in squeezed(printed):
        raise ValueError(f"the terminal page lacks the verdict {page.verdict.sentence!r}")
    page = page.without(case.without, case.expected)
    result.rule, result.remedies = page.verdict.rule, list(page.verdict.remedies)
    result.sentence, result.next_step = page.verdict.sentence, page.verdict.next_step
    result.findings = [found.sentence for found in page.problems]
    if case.healthy:
        result.accused = accusations(case.expected, page)
    else:
        points = score(case.expected, page)
        result.cause, result.fix = points.cause, points.fix
