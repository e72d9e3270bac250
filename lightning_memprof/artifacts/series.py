"""Rows over time: a collector's series (JSON lines) and the pulse (CSV)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.manifest import read_rows
from lightning_memprof.artifacts.plain_file import read_plain
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["PHASES", "PULSE_COLUMNS", "PulseRow", "encode_pulse", "parse_pulse_row", "read_pulse", "read_series"]

PHASES: Final = ("data_wait", "forward", "backward", "optimizer", "callbacks", "other")
PULSE_COLUMNS: Final = (
    "step",
    "global_step",
    "epoch",
    "window",
    "start_ns",
    "duration_ns",
    *(f"{phase}_ns" for phase in PHASES),
    "rss_bytes",
    "device_peak_bytes",
    "device_duration_ns",
    *(f"device_{phase}_ns" for phase in PHASES),
)

# Those of Unix time in nanoseconds until the year 2286: what is longer is damage, and at last too much for a float.
MAX_DIGITS: Final = 19

PulseRow = dict[str, int | None]


def read_series(path: Path) -> list[dict[str, Any]]:
    """Read a series; a last line that a dying process tore is left out.

    Raises:
        ArtifactError: the file cannot be read or is damaged before its last line.

    """
    return read_rows(path)[0]


def encode_pulse(rows: Iterable[Sequence[int | None]]) -> str:
    """Write rows of ``PULSE_COLUMNS`` as CSV lines; None becomes an empty field.

    The text is cut out of Python's own notation of the rows, which is written in C: a sixth of the time that joining
    the fields of a row takes, and the training waits for it.
    """
    text = repr([tuple(row) for row in rows])[2:-2]
    if not text:
        return ""
    return text.replace("), (", "\n").replace("None", "").replace(" ", "") + "\n"


def read_pulse(path: Path) -> list[PulseRow]:
    """Read a pulse, also while it is being written: a torn last line is left out.

    Raises:
        ArtifactError: the file cannot be read, its header is another one, or a line is damaged.

    """
    try:
        lines = read_plain(path).decode("ascii", "replace").split("\n")
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); is the run directory complete?"
        raise ArtifactError(msg) from error
    lines.pop()
    if not lines:
        return []
    if tuple(lines[0].split(",")) != PULSE_COLUMNS:
        msg = f"{path}: its columns are not those of this version; upgrade lightning-memprof to read it"
        raise ArtifactError(msg)
    rows: list[PulseRow] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(parse_pulse_row(line))
        except ValueError as error:
            msg = f"{path}:{number}: damaged; remove the line to read the rest"
            raise ArtifactError(msg) from error
    return rows


def parse_pulse_row(line: str) -> PulseRow:
    """Read one line of a pulse.

    Raises:
        ValueError: it is damaged.

    """
    fields = line.split(",")
    if len(max(fields, key=len)) > MAX_DIGITS:
        raise ValueError(line)
    return dict(zip(PULSE_COLUMNS, [int(field) if field else None for field in fields], strict=True))
