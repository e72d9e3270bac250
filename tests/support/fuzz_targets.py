"""What is fuzzed: the readers of files that may come from anywhere, each as a function of bytes.

A reader gives a result, or refuses with one line. Everything else is a crash: another exception, a refusal of several
lines, or more time and memory than whoever calls it allows.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.errors import MemprofError
from lightning_memprof.judge import examine_files
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.trace.communication import collectives
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view

SEEDS: Final = Path(__file__).parents[1] / "fuzz" / "seeds"
LONGEST_LINE: Final = 2_000
# What stands between a manifest, a pulse and a series in one input.
BETWEEN: Final = b"\0\0\0"

Target = Callable[[bytes], str]


def outcome(read: Callable[[], Any]) -> str:
    """Return the words of the refusal, which are one line; nothing where there is a result."""
    try:
        read()
    except MemprofError as error:
        said = str(error)
        assert "\n" not in said
        assert len(said) < LONGEST_LINE
        return said
    return ""


def target(name: str, directory: Path) -> Target:
    """Return a target that writes its input into a directory and reads it."""
    return TARGETS[name](directory)


def _trace(directory: Path) -> Target:
    path = directory / "a.json"

    def read(content: bytes) -> str:
        path.write_bytes(content)
        said = outcome(lambda: examine_files([trace_report(path)], []))
        outcome(lambda: collectives(path))
        return said

    return read


def _snapshot(directory: Path) -> Target:
    path = directory / "a.pickle"

    def examine() -> None:
        report = snapshot_report(path)
        for device in report.devices:
            assert sum(line.bytes for line in device.lines_at_peak) == device.peak_requested_bytes
        examine_files([], [report])

    def read(content: bytes) -> str:
        path.write_bytes(content)
        return outcome(examine)

    return read


def _small_run(directory: Path) -> tuple[Path, list[Path]]:
    """Make a run of one rank; return its directory and its manifest, pulse and one series."""
    run = make_run(directory, FakeRun(steps=4, windows=((1, 2),), trace=False, memory=None))
    series = sorted(run.glob("window*/*.jsonl"))
    return run, [run / "manifest.rank00000.jsonl", run / "pulse.rank00000.csv", series[0]]


def _manifest(directory: Path) -> Target:
    run, files = _small_run(directory)
    whole = [path.read_bytes() for path in files]

    def show() -> None:
        loaded = load_run(run)
        json.dumps(to_json(run_view(loaded, run_allocations(loaded))))

    def read(content: bytes) -> str:
        given = content.split(BETWEEN, 2)
        for path, part in zip(files, [*given, *whole[len(given) :]], strict=True):
            path.write_bytes(part)
        return outcome(show)

    return read


TARGETS: Final[dict[str, Callable[[Path], Target]]] = {"trace": _trace, "snapshot": _snapshot, "manifest": _manifest}


def scratch() -> Path:
    """Return a new directory in memory where there is one: a disk would be most of the time."""
    memory = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix=f"memprof-fuzz-{os.getpid()}-", dir=memory if os.access(memory, os.W_OK) else None)
    )


def remove(directory: Path) -> None:
    """Remove such a directory."""
    shutil.rmtree(directory, ignore_errors=True)
