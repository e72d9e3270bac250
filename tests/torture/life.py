"""The life of one rank in a cell: it trains, the fault strikes, and what is left of it writes down its outcome."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fault
import fit

import leaks
from lightning_memprof.artifacts.naming import TraceName, temporary_name

NUMBERS = re.compile(r"\d+")
SERIES = re.compile(r"rank(\d{5})\.")
GONE = re.compile(r"(?i)connection (closed|reset) by peer|peer .*(closed|reset)|gloo/transport|broken pipe")


@dataclass
class Outcome:
    """What became of one rank that lived to tell it.

    Attributes:
        error: the exception that left the fit, as ``Type: text``; None where there was none.
        code: what Python would exit with.
        weights: digest of the model and the random generator.
        leaks: what was left behind in the process.
        after: digest of the next fit in this process, or the error that it ended with; None where there was none.

    """

    error: str | None
    code: int
    weights: str
    leaks: list[str]
    after: str | None


def outcome(directory: Path, rank: int) -> dict[str, Any] | None:
    """Read what a rank wrote; None where it did not live to write it."""
    path = directory / f"outcome.rank{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def live(cell: fault.Cell, port: int) -> int:
    """Train, write the outcome, and give the exit code; for a process that was forked for this."""
    _settle_in(cell, port)
    cell.write_pid()
    before, files = leaks.state(cell.log_dir), _open_files()
    error: BaseException | None = None
    with cell.fault.prepare(cell):
        try:
            fit.fit(cell)
        except BaseException as caught:  # noqa: BLE001 whatever it is, it is the outcome
            traceback.print_exc()
            error = caught
        said, code = _said(error), _code(error)
    model = cell.notes.pop("model", None)
    weights = fit.digest(model) if model is not None else "none"
    if error is not None:
        # The program's frames hold what they held.
        traceback.clear_frames(error.__traceback__)
    error = model = None
    gc.collect()
    left = [leftover for leftover in leaks.leftovers(before, cell.log_dir) if not _of_another(leftover, cell.rank)]
    left += [f"file still open: {path}" for path in sorted(_open_files() - files)]
    after = _after(cell) if cell.fault.survives else None
    told = Outcome(said, code, weights, left, after)
    (cell.directory / f"outcome.rank{cell.rank}.json").write_text(json.dumps(asdict(told)))
    return code


def _settle_in(cell: fault.Cell, port: int) -> None:
    out = os.open(cell.directory / f"out.rank{cell.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    temporary = cell.directory / f"tmp.rank{cell.rank}"
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    if cell.world > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(cell.world), "NODE_RANK": "0",
            "LOCAL_RANK": str(cell.rank),
        }  # fmt: skip
    logging.getLogger("lightning_memprof").addHandler(logging.StreamHandler(sys.stderr))
    warnings.simplefilter("ignore")


def _of_another(leak: str, rank: int) -> bool:
    """Whether a file is another rank's: that one looks itself, or was killed over it, and the page has to name it."""
    name = leak.rpartition("/")[2] if leak.startswith("file still there:") else ""
    series, trace = SERIES.match(name), TraceName.parse(name.partition(temporary_name(""))[0])
    whose = int(series[1]) if series is not None else trace.rank if trace is not None else rank
    return whose != rank


def _after(cell: fault.Cell) -> str:
    try:
        return fit.next_fit(cell)
    except BaseException as error:  # noqa: BLE001 Ctrl-C among others
        traceback.print_exc()
        return f"the next fit ended with {type(error).__name__}: {error}"


def _said(error: BaseException | None) -> str | None:
    if error is None:
        return None
    text = str(error)
    # How a rank hears of its peer's death depends on who closes first.
    return f"{type(error).__name__}: " + ("the peer is gone" if GONE.search(text) else NUMBERS.sub("0", text))


def _code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def _open_files() -> frozenset[str]:
    found = set()
    for number in Path("/proc/self/fd").iterdir():
        try:
            path = str(number.readlink())
        except OSError:
            continue
        if path.startswith("/") and not path.startswith(("/dev", "/proc")):
            found.add(path)
    return frozenset(found)
