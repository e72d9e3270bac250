"""What a run directory must still be worth, wherever a crash has left it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from file_operations import State
from lightning_memprof.artifacts.naming import manifest_name, parse_manifest_name
from lightning_memprof.errors import ArtifactError
from lightning_memprof.report.opened import OpenOptions, opened
from lightning_memprof.report.printers.terminal import print_document
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.view import View

_UNFINISHED: Final = (".partial", ".partial.tmp")
# Appended to while the run goes on, so that a crash tears the last line.
_APPENDED: Final = ("manifest.", "pulse.", "system.", "snapshots.")
# The page and the operator table are no part of what was recorded: they are made again.
_NOT_RECORDED: Final = ("report.html", "metrics.csv", "fit-fts_extended_pytorch_profiler-0.txt")
_RAW_TRACE: Final = "rank00000.operator_trace.jsonl.partial"

Row = dict[str, Any]


@dataclass
class Verdict:
    """What is wrong, one line each; how many windows had been closed, and how many were found whole."""

    faults: list[str] = field(default_factory=list)
    closed: int = 0
    whole: int = 0
    torn: int = 0


def judge(state: State, room: Path, *, lost: str | None = None) -> Verdict:
    """Build a state in ``room``, show it, and say what is not as it must be.

    Args:
        state: what the crash left; its run directory is ``log/memprofiler``.
        room: a directory that is removed and made again.
        lost: a file whose content did not reach the disk although its name did: it must be named, and is not whole.

    """
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    state.build(room)
    rows = _rows(state)
    verdict = Verdict()
    try:
        view = shown(room)
    except ArtifactError as error:
        if any(row["kind"] == "run" for row in rows):
            verdict.faults.append(f"is not shown: {error}")
        return verdict
    named = {problem.piece for problem in view.problems}
    for piece in _torn(state):
        verdict.torn += 1
        if piece not in named:
            verdict.faults.append(f"{piece} is torn and nothing says so")
    if lost is not None and _listed(rows, lost.removeprefix("log/")) and lost.removeprefix("log/") not in named:
        verdict.faults.append(f"{lost} is empty and nothing says so")
    for window in _closed(rows):
        verdict.closed += 1
        faults = list(_faults_of_window(state, rows, window, named, lost))
        verdict.faults += faults
        verdict.whole += not faults
    return verdict


def shown(room: Path) -> View:
    """Do what ``lightning-memprof show`` does with a log directory.

    Raises:
        ArtifactError: there is nothing to show.

    """
    with opened([str(room / "log")], OpenOptions()) as view:
        assert isinstance(view, View)
        print_document(run_document(view), io.StringIO(), is_full=True)
        return view


def _rows(state: State) -> list[Row]:
    rows: list[Row] = []
    for line in state.files.get(f"log/memprofiler/{manifest_name(0)}", b"").split(b"\n"):
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _torn(state: State) -> Iterator[str]:
    """Name what is there and unfinished, as a page names it: relative to the log directory or the run directory."""
    for name, content in state.files.items():
        piece = Path(name).name
        if piece.startswith(_NOT_RECORDED):
            continue
        if name.endswith(_UNFINISHED):
            yield name.removeprefix("log/")
        elif piece.startswith(_APPENDED) and content and not content.endswith(b"\n"):
            yield piece if parse_manifest_name(piece) is not None or "memprofiler" in name else name


def _closed(rows: list[Row]) -> list[int]:
    removed = {row["window"] for row in rows if row["kind"] == "removed"}
    closed = [row["window"] for row in rows if row["kind"] == "window" and row["event"] == "close"]
    return [window for window in closed if window not in removed]


def _listed(rows: list[Row], path: str) -> list[Row]:
    return [row for row in rows if row["kind"] == "artifact" and row["path"] == path]


def _faults_of_window(state: State, rows: list[Row], window: int, named: set[str], lost: str | None) -> Iterator[str]:
    own = [row for row in rows if row["kind"] == "artifact" and row["window"] == window]
    for row in own:
        name = f"log/{row['path']}"
        content = state.files.get(name)
        if name == lost:
            continue
        if content is None:
            yield f"window {window} is closed and {name} is missing"
        elif _sha(content) not in {entry["sha256"] for entry in _listed(rows, row["path"])}:
            yield f"window {window} is closed and {name} is torn"
    if not any(row["type"] == "trace" for row in own):
        yield from _faults_of_raw_trace(state.files, window, named)


def _faults_of_raw_trace(files: Mapping[str, bytes], window: int, named: set[str]) -> Iterator[str]:
    """The trace of a window that has just been closed is still plain JSON; all of it, and the page says so."""
    name = f"log/memprofiler/window{window:03d}/{_RAW_TRACE}"
    content = files.get(name)
    if content is None:
        yield f"window {window} is closed and has no trace, neither compressed nor as torch wrote it"
        return
    try:
        json.loads(content)
    except ValueError:
        yield f"window {window} is closed and {name} is torn"
    if name.removeprefix("log/") not in named:
        yield f"window {window} is closed, its trace is {name}, and nothing says so"


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
