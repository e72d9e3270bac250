"""Whether the page of a training names what keeps its memory: leaks of every kind, and twenty healthy trainings.

    python tests/programs/leaks.py [--only NAME ...] [--directory DIRECTORY]

Each training (``tests/support/leaking.py``, ``healthy_growth.py``) is a process with the callback's defaults, whose
recording is then opened. The chain and the line of a leak must be in the sentence of the finding; a healthy training
must have no finding about growth. Without ``--only`` the result is written to ``docs/measured/leaks.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

import leaking
from healthy_growth import HEALTHY
from leaking import LEAKS, Images
from lightning_memprof import MemProfilerCallback, load_run
from lightning_memprof.units import format_bytes
from measured import table, write_fragment
from training import loader

PLACE: Final = Path(leaking.__file__)
SOURCE: Final = PLACE.read_text(encoding="utf-8").splitlines()
GROWTH: Final = frozenset({"memory_growth", "worker_memory", "validation_memory"})
STEPS: Final = 160


@dataclass(frozen=True)
class Row:
    """What the page of a training says."""

    name: str
    chain: bool
    line: bool
    first: bool
    growth: int | None
    title: str

    @property
    def right(self) -> bool:
        return self.chain and self.line


def train(name: str, directory: Path) -> None:
    """Train, with a leak or without."""
    model: pl.LightningModule
    options: dict[str, Any]
    if name in LEAKS:
        model, data, options = LEAKS[name][0](), loader(STEPS), {"logger": Images()} if name == "logger" else {}
    else:
        healthy = HEALTHY[name]
        model, data, options = healthy.model(), healthy.data(directory), healthy.options(directory)
    quiet = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    options = {**quiet, "default_root_dir": directory, "logger": CSVLogger(directory), **options}
    callbacks = [*options.pop("callbacks", ()), MemProfilerCallback()]
    pl.Trainer(callbacks=callbacks, **options).fit(model, data)


def judged(name: str, directory: Path) -> Row:
    """Train in a process, and compare its page with what is expected."""
    directory.mkdir(parents=True)
    command = [sys.executable, __file__, "--train", name, "--directory", str(directory)]
    # One thread: where others use the cores, threads that wait for each other take minutes.
    started = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=started, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    (place,) = directory.rglob("memprofiler")
    run = load_run(place)
    document = run.document()
    found = next((finding for finding in run.findings() if finding.rule in GROWTH), None)
    sentence = found.title if found is not None else ""
    # A title has no room for the line of a long chain.
    words = f"{found.title} {found.why} {found.next}" if found is not None else ""
    growth = found.numbers.get("bytes") if found is not None else None
    if name in HEALTHY:
        is_silent = found is None and document.section("holders") is None
        return Row(name, is_silent, is_silent, document.rule not in GROWTH, growth, sentence)
    line = f"{PLACE.parent.name}/{PLACE.name}:{marked(name)}"
    # The page names the container, not its entry.
    chain = LEAKS[name][1].removesuffix("[...]")
    return Row(name, chain in words, line in words, document.rule in GROWTH, growth, sentence)


def marked(name: str) -> int:
    """Return the number of the line with the mark of a leak."""
    (number,) = (number for number, line in enumerate(SOURCE, 1) if line.endswith(f"# {name}"))
    return number


def fragment(rows: Sequence[Row]) -> str:
    """Return the tables of all trainings."""
    leaks, healthy = ([row for row in rows if row.name in group] for group in (LEAKS, HEALTHY))
    words = {True: "yes", False: "**no**"}
    right, silent = sum(row.right for row in leaks), sum(row.right for row in healthy)
    counts = [
        ["leaks whose holder and line are named", f"{right} of {len(leaks)}", f"{len(LEAKS) - 1} of {len(LEAKS)}"],
        ["of these the verdict of the page", f"{sum(row.right and row.first for row in leaks)} of {right}", ""],
        ["healthy trainings without a report", f"{silent} of {len(healthy)}", f"{len(HEALTHY)} of {len(HEALTHY)}"],
    ]  # fmt: skip
    found = [
        [row.name, words[row.chain], words[row.line], format_bytes(row.growth) if row.growth else "-", row.title]
        for row in leaks
    ]
    heading = ["leak", "holder", "line", "growth", "sentence of the page"]
    return "\n\n".join(
        [
            table(["", "measured", "target"], counts),
            table(heading, found),
            table(["healthy training", "reported"], [[row.name, row.title or "nothing"] for row in healthy]),
        ]
    )


def main() -> int:
    """Run the trainings and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="nothing is written")
    parser.add_argument("--directory", type=Path, help="for the recordings, which are kept")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.directory)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="leaks-") as made, ThreadPoolExecutor(options.parallel) as pool:

        def result(name: str) -> Row:
            return judged(name, (options.directory or Path(made)) / re.sub(r"\W+", "-", name))

        for row in pool.map(result, options.only or [*LEAKS, *HEALTHY]):
            rows.append(row)
            print(f"{'right' if row.right else 'WRONG'} {row.name}: {row.title or 'no growth'}", flush=True)
    print(f"{sum(row.right for row in rows)} of {len(rows)} right")
    if not options.only:
        write_fragment("leaks", f"python {os.path.relpath(__file__)}", fragment(rows))
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
