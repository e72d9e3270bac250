"""The rows of recorded files, for tests that look at what is on disk: a damaged line is an error here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.pulse import decode_pulse
from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.artifacts.series import PulseRow
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.events import FullEvent, full_events
from lightning_memprof.read.trace.text import TraceText


def read_rows(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read a file of JSON lines as plain objects; return the rows and whether the last line was truncated.

    Raises:
        ArtifactError: the file cannot be read, or a line other than the last is not a JSON object.

    """
    try:
        content = read_plain(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); is the run directory complete?") from error
    rows, damage = decode_rows(content, dict)
    if damage is not None:
        raise ArtifactError(f"{path}:{damage}")
    return rows, bool(content) and not content.endswith(b"\n")


def read_series(path: Path) -> list[dict[str, Any]]:
    """Read a series as plain objects; a truncated last line is left out.

    Raises:
        ArtifactError: the file cannot be read or is damaged before its last line.

    """
    return read_rows(path)[0]


def read_pulse(path: Path) -> list[PulseRow]:
    """Read a pulse, also while it is being written.

    Raises:
        ArtifactError: the file cannot be read, its header is another one, or a line is damaged.

    """
    try:
        rows, damage = decode_pulse(read_plain(path))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); is the run directory complete?") from error
    if damage is not None:
        raise ArtifactError(f"{path}:{damage}")
    return rows


def read_events(path: Path) -> Iterator[FullEvent]:
    """All events of a trace in the file's order.

    Raises:
        ArtifactError: the file is missing, damaged or truncated, or no trace.
    """
    return Trace(path).events()


class Trace(TraceText):
    """A trace file with all its events, which are read in pieces of ``chunk`` bytes."""

    def events(self, chunk: int = 1 << 20) -> Iterator[FullEvent]:
        """All events in the file's order."""
        for piece in self.pieces(full_events, chunk):
            yield from piece
