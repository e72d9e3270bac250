"""The manifest: one JSON object a line, one line a fact, appended and never rewritten."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightning_memprof.artifacts.plain_file import read_plain
from lightning_memprof.artifacts.secrets import FREE_TEXTS, masking
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "MOST_LINES",
    "SCHEMA_VERSION",
    "Manifest",
    "ManifestWriter",
    "decode_line",
    "is_fact",
    "plain_lines",
    "read_manifest",
    "read_rows",
]

log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
MOST_LINES: Final = 1_000_000
"""Of a manifest, that are read. A window writes some ten."""
_decode: Final = msgspec.json.Decoder().decode
# Rows that a full disk has refused, of some hundred bytes each; beyond, the oldest go.
_MOST_WAITING: Final = 4096


class ManifestWriter:
    """Append facts to a rank's manifest.

    Every row is one ``write`` to a descriptor that was opened for appending: a process that dies loses no row that
    was written before, and tears at most the last one. Safe to use from several threads. A disk that refuses a row
    is logged once; it never stops the training. What was refused is written with the next row that the disk takes.

    Args:
        path: the file; created where it is missing.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._refused = False
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)

    def append(self, kind: str, **facts: Any) -> None:
        """Write one row. Values that JSON does not know are written as their ``str``, free texts without secrets."""
        if texts := [name for name in FREE_TEXTS.intersection(facts) if isinstance(facts[name], str)]:
            mask = masking()
            facts |= {name: mask(facts[name]) for name in texts}
        row = {"kind": kind, "time_ns": time.time_ns(), **facts}
        line = (json.dumps(row, default=str, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if self._fd < 0:
                return
            self._waiting.append(line)
            self._write_waiting()

    def close(self) -> None:
        """Release the file; further rows are dropped."""
        with self._lock:
            if self._fd >= 0:
                self._write_waiting()
                os.close(self._fd)
                self._fd = -1

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._refused:
                log.warning(
                    "%s cannot be written (%s); facts of this run are lost where it stays so",
                    self.path, error.strerror,
                )  # fmt: skip
            self._refused = True

    def _write(self, line: bytes) -> None:
        written = os.write(self._fd, line)
        if written < len(line):
            # Half a line with another behind it would make the whole file unreadable.
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Manifest:
    """The rows of one rank's manifest, oldest first.

    ``torn`` where the last line was cut by a dying process, ``cut`` where there are more than ``MOST_LINES`` lines.
    """

    path: Path
    rows: list[dict[str, Any]]
    torn: bool
    cut: bool = False


def plain_lines(path: Path) -> Iterator[bytes]:
    """Give the lines of a file one after the other, with their ends; a torn last line has none.

    Raises:
        OSError: the file cannot be read.

    """
    # A list of all of them takes twenty times as much as a file of short lines.
    return io.BytesIO(read_plain(path))


def decode_line(line: bytes) -> object:
    """Return what a line of JSON says.

    Raises:
        ValueError: it is none.
        RecursionError: it is too deep.

    """
    try:
        return _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        # Python writes and reads NaN and halves of characters, which are no JSON.
        return json.loads(line)


def is_fact(row: object) -> bool:
    """Say whether a row of a manifest says of what kind it is; nobody looks for another."""
    return isinstance(row, dict) and isinstance(row.get("kind"), str)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read a file of JSON objects, one a line; return the rows and whether the last line was torn.

    Raises:
        ArtifactError: the file cannot be read, or a line other than the last is no JSON object.

    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.endswith(b"\n"):
            return rows, True
        rows.append(_row(path, number, line))
    return rows, False


def _lines(path: Path) -> Iterator[bytes]:
    try:
        return plain_lines(path)
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); is the run directory complete?"
        raise ArtifactError(msg) from error


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = decode_line(line)
    except (ValueError, RecursionError) as error:
        msg = f"{path}:{number}: not a JSON object; the file is damaged, remove the line to read the rest"
        raise ArtifactError(msg) from error
    if not isinstance(row, dict):
        msg = f"{path}:{number}: holds {type(row).__name__}, a JSON object is expected; remove the line"
        raise ArtifactError(msg)
    return row


def read_manifest(path: Path) -> Manifest:
    """Read one rank's manifest: of its first ``MOST_LINES`` lines the rows that have a kind.

    Raises:
        ArtifactError: the file is missing, damaged, holds no run, or was written by a newer version.

    """
    rows: list[dict[str, Any]] = []
    torn = cut = False
    for number, line in enumerate(_lines(path), start=1):
        torn, cut = not line.endswith(b"\n"), number > MOST_LINES
        if torn or cut:
            break
        if is_fact(row := _row(path, number, line)):
            rows.append(row)
    run = next((row for row in rows if row["kind"] == "run"), None)
    if run is None:
        msg = f"{path}: holds no run; it is no manifest of lightning-memprof, or its process died at once"
        raise ArtifactError(msg)
    version = run.get("schema_version")
    if not isinstance(version, int):
        msg = f"{path}: schema version {version!r} is no number; the file is damaged, or not of lightning-memprof"
        raise ArtifactError(msg)
    if version > SCHEMA_VERSION:
        msg = f"{path}: schema version {version!r} is newer than {SCHEMA_VERSION}; upgrade lightning-memprof"
        raise ArtifactError(msg)
    return Manifest(path=path, rows=rows, torn=torn and not cut, cut=cut)
