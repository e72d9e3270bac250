"""A power cut at any moment: ``python tests/torture/power_cut.py [--windows N] [--jobs N] [--quick]``.

One fit is recorded, each of its file operations with what lay in its directory then. A crash in front of, behind or
within any of them leaves one state of that directory; each is built, shown as ``lightning-memprof show`` does, and
judged. The exit code is 1 where one is not worth what it must be.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from rich.console import Console
from rich.progress import track

import measured
from crash_judge import Verdict, judge
from file_operations import Photograph, State, crashes, lost_data

SUPPORT: Final = Path(__file__).resolve().parents[1] / "support"
COMMAND: Final = "make power-cut"
Case = tuple[str | None, State]


def record(directory: Path, windows: int) -> list[Photograph]:
    """Fit in a process of its own and give what was recorded."""
    out = directory / "photographs"
    subprocess.run(
        [sys.executable, str(SUPPORT / "recorded_fit.py"), str(directory / "fit"), str(out), str(windows)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    found: list[Photograph] = pickle.loads(out.read_bytes())  # noqa: S301 written by our own process just now
    return found


def cases(photographs: list[Photograph]) -> Iterator[Case]:
    """Give every state, with the file whose content is lost where it is one of those."""
    yield from ((None, state) for state in crashes(photographs))
    yield from lost_data(photographs)


def judged(case: Case) -> tuple[str, Verdict]:
    """Judge one state in this process's own room."""
    lost, state = case
    with tempfile.TemporaryDirectory(prefix="power-cut-") as room:
        return state.said, judge(state, Path(room) / "room", lost=lost)


def judge_all(chosen: Iterable[Case], jobs: int, total: int) -> list[tuple[str, Verdict]]:
    """Judge them, with a bar."""
    with ProcessPoolExecutor(jobs) as pool:
        console = Console(stderr=True)
        return list(track(pool.map(judged, chosen, chunksize=4), "power cuts", total=total, console=console))


def page(photographs: list[Photograph], found: list[tuple[str, Verdict]]) -> str:
    """Give the table."""
    kinds = [photograph.operation.kind for photograph in photographs if photograph.operation is not None]
    operations = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    verdicts = [verdict for _, verdict in found]
    closed = sum(verdict.closed for verdict in verdicts)
    rows = [
        ("operations of the fit", f"{len(kinds)}: {operations}"),
        ("states that were built and shown", len(found)),
        ("of these not shown, or with something unsaid", sum(bool(verdict.faults) for verdict in verdicts)),
        ("pieces that were torn and named", sum(verdict.torn for verdict in verdicts)),
        ("closed windows that were read in them", closed),
        ("of these lost", closed - sum(verdict.whole for verdict in verdicts)),
    ]
    return measured.table(("what", "count"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=3, help="of the fit (3)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="states judged at a time")
    parser.add_argument("--quick", action="store_true", help="every 20th state only; nothing is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="power-cut-") as directory:
        photographs = record(Path(directory), options.windows)
    chosen = list(cases(photographs))[:: 20 if options.quick else 1]
    found = judge_all(chosen, options.jobs, len(chosen))
    for said, verdict in found:
        for fault in verdict.faults:
            print(f"{said}: {fault}")
    body = page(photographs, found)
    print(body)
    if not options.quick:
        print(measured.write_fragment("power-cut", COMMAND, body))
    return 1 if any(verdict.faults for _, verdict in found) else 0


if __name__ == "__main__":
    sys.exit(main())
