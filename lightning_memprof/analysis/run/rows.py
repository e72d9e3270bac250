"""Read the files of a rank as far as they can be read: a damaged line hides only itself."""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.manifest import (
    MOST_LINES,
    SCHEMA_VERSION,
    decode_line,
    is_fact,
    plain_lines,
    read_manifest,
)
from lightning_memprof.artifacts.plain_file import read_plain
from lightning_memprof.artifacts.series import PULSE_COLUMNS, PulseRow, parse_pulse_row, read_pulse, read_series
from lightning_memprof.errors import ArtifactError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "ManifestRows",
    "Row",
    "first_row",
    "integer",
    "kept_artifacts",
    "last_row",
    "manifest_rows",
    "mapping",
    "noted",
    "pulse_rows",
    "rows_of",
    "series_rows",
    "text",
    "whole",
    "whole_numbers",
]

Row = dict[str, Any]

# No count of bytes, nanoseconds or steps is larger; what is, is damage, and too much for a float or a column.
_MOST: Final = 1 << 63
_LESS: Final = MappingProxyType({"no_stack": "no Python stacks", "no_shapes": "no input shapes"})


class ManifestRows(list[Row]):
    """The rows of a manifest, each with a kind; those of one kind are found without a look at the others."""

    @cached_property
    def by_kind(self) -> Mapping[str, list[Row]]:
        """The rows of every kind, oldest first."""
        found: dict[str, list[Row]] = {}
        for row in self:
            found.setdefault(row["kind"], []).append(row)
        return found


def manifest_rows(path: Path) -> tuple[ManifestRows, str | None]:
    """Return the readable rows of a manifest (none where it is newer than this version) and what is wrong with it."""
    try:
        manifest = read_manifest(path)
    except ArtifactError as error:
        rows = ManifestRows(row for row in _salvage(path, most=MOST_LINES) if is_fact(row))
        version = whole(first_row(rows, "run"), "schema_version")
        return (rows if version is not None and version <= SCHEMA_VERSION else ManifestRows()), str(error)
    wrong = "its last line is torn: it is being written, or the process died while it wrote" if manifest.torn else None
    if manifest.cut:
        wrong = f"it has more than {format_count(MOST_LINES, 'line')}; those behind them are not read"
    return ManifestRows(manifest.rows), wrong


def pulse_rows(path: Path) -> tuple[list[PulseRow], str | None]:
    """Return the readable rows of a pulse and what is wrong with it; a run without one is not wrong."""
    if not path.exists():
        return [], None
    try:
        return read_pulse(path), None
    except ArtifactError as error:
        rows = _salvage_pulse(path)
        return rows, f"{error}; {format_count(len(rows), 'step')} could be read"


def series_rows(path: Path) -> tuple[list[Row], str | None]:
    """Return the readable rows of a series and what is wrong with it."""
    try:
        return read_series(path), None
    except ArtifactError as error:
        rows = list(_salvage(path))
        return rows, f"{error}; {format_count(len(rows), 'row')} could be read"


def rows_of(rows: ManifestRows, kind: str) -> list[Row]:
    """Return the rows of one kind."""
    return rows.by_kind.get(kind, [])


def first_row(rows: ManifestRows, kind: str) -> Row | None:
    """Return the first row of a kind."""
    return next(iter(rows_of(rows, kind)), None)


def last_row(rows: ManifestRows, kind: str) -> Row | None:
    """Return the last row of a kind."""
    return next(reversed(rows_of(rows, kind)), None)


def text(row: Mapping[str, Any] | None, key: str) -> str | None:
    """Return a field where it is text."""
    value = row.get(key) if row else None
    return value if isinstance(value, str) else None


def whole(row: Mapping[str, Any] | None, key: str) -> int | None:
    """Return a field where it is a whole number of 64 bits."""
    return integer(row.get(key)) if row else None


def integer(value: object) -> int | None:
    """Return a value where it is a whole number of 64 bits."""
    return value if isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST else None


def whole_numbers(row: Mapping[str, Any] | None, key: str) -> tuple[int, ...]:
    """Return the whole numbers of a field that is a list."""
    value = row.get(key) if row else None
    return tuple(number for number in value if integer(number) is not None) if isinstance(value, list) else ()


def mapping(row: Mapping[str, Any] | None, key: str) -> Mapping[str, Any] | None:
    """Return a field where it is a JSON object."""
    value = row.get(key) if row else None
    return value if isinstance(value, dict) else None


def kept_artifacts(rows: list[Row]) -> list[Row]:
    """Return the rows of all files but those that the run itself has removed, with their whole window."""
    kept: dict[int, Row] = {}
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.get("kind") == "artifact":
            kept[number] = row
            numbers.setdefault(text(row, "path") or "", []).append(number)
        elif row.get("kind") == "removed" and isinstance(row.get("paths"), list):
            for path in row["paths"]:
                # What was written again afterwards is there.
                for earlier in numbers.pop(path, ()) if isinstance(path, str) else ():
                    del kept[earlier]
    return list(kept.values())


def noted(rows: ManifestRows) -> list[tuple[str, str]]:
    """Return the collector and the text of every warning: those written out, and what a budget has left out."""
    found = [(text(row, "collector") or "?", text(row, "message") or "") for row in rows_of(rows, "note")]
    for row in rows_of(rows, "budget"):
        level, steps = text(row, "level"), whole(row, "active_steps")
        less = _LESS.get(level or "", f"at most {steps} active step{'' if steps == 1 else 's'}")
        found.append(("budget", f"from window {whole(row, 'window')} on traces have {less}: {text(row, 'reason')}"))
    if removed := [window for row in rows_of(rows, "removed") if (window := whole(row, "window")) is not None]:
        count = f"{len(removed)} windows (the last one {removed[-1]})" if len(removed) > 1 else f"window {removed[0]}"
        reason = text(last_row(rows, "removed"), "reason") or "no reason given"
        found.append(("budget", f"the files of {count} were removed: {reason}"))
    return found


def _salvage(path: Path, most: int | None = None) -> Iterator[Row]:
    try:
        lines = plain_lines(path)
    except OSError:
        return
    for line in islice(lines, most):
        try:
            row = decode_line(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _salvage_pulse(path: Path) -> list[PulseRow]:
    rows: list[PulseRow] = []
    try:
        lines = read_plain(path).decode("ascii", "replace").split("\n")
    except OSError:
        return rows
    if tuple(lines[0].split(",")) != PULSE_COLUMNS:
        return rows
    for line in lines[1:-1]:
        try:
            rows.append(parse_pulse_row(line))
        except ValueError:
            continue
    return rows
