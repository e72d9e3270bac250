"""The file of the pulse: CSV, one row per step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from lightning_memprof.artifacts.rows import DAMAGE
from lightning_memprof.artifacts.series import MAX_DIGITS, PULSE_COLUMNS, PulseRow

# Of the first version; later ones have more.
_FIRST_COLUMNS: Final = PULSE_COLUMNS.index("device_other_ns") + 1
_encode: Final = msgspec.json.Encoder().encode
_decode_rows: Final = msgspec.json.Decoder(list[PulseRow]).decode
# Of a field of at most ``MAX_DIGITS`` characters that Python and JSON read alike.
_IS_LONG: Final = re.compile(rb"[^,\n]{%d}" % (MAX_DIGITS + 1)).search


def encode_pulse(rows: Sequence[PulseRow | Sequence[int | None]]) -> str:
    """Write rows of ``PULSE_COLUMNS`` as CSV lines; None becomes an empty field.

    The text is cut out of their JSON, half a microsecond a row: the training waits for it.
    """
    text = _encode(rows)[2:-2]
    return text.replace(b"],[", b"\n").replace(b"null", b"").decode() + "\n" if text else ""


def decode_pulse(content: bytes) -> tuple[list[PulseRow], str | None]:
    """Return the readable rows of a pulse, and the place and problem of the first damage.

    A last line without its end is ignored: it is still being written, or its process died.
    """
    header, newline, body = content[: content.rfind(b"\n") + 1].partition(b"\n")
    if not newline:
        return [], None
    columns = tuple(header.decode("ascii", "replace").split(","))
    missing = len(PULSE_COLUMNS) - len(columns)
    if len(columns) < _FIRST_COLUMNS or columns != PULSE_COLUMNS[: len(columns)]:
        return [], "1: its columns are not those of this version; upgrade lightning-memprof to read it"
    body = body.replace(b"\n", b"," * missing + b"\n") if missing else body
    if not body.translate(None, b"0123456789-,\n") and _IS_LONG(body) is None:
        with suppress(*DAMAGE):
            return _decode_rows(_as_json(body)), None
    rows: list[PulseRow] = []
    damaged: list[int] = []
    for number, line in enumerate(body.decode("ascii", "replace").split("\n")[:-1], start=2):
        try:
            rows.append(parse_pulse_row(line))
        except ValueError:
            damaged.append(number)
    return rows, f"{damaged[0]}: damaged; remove the line to read the rest" if damaged else None


def parse_pulse_row(line: str) -> PulseRow:
    """Read one line of a pulse, also of a version with fewer columns.

    Raises:
        ValueError: it is damaged.
    """
    fields = line.split(",")
    if not _FIRST_COLUMNS <= len(fields) <= len(PULSE_COLUMNS) or len(max(fields, key=len)) > MAX_DIGITS:
        raise ValueError(line)
    missing = [None] * (len(PULSE_COLUMNS) - len(fields))
    return PulseRow(*[int(field) if field else None for field in fields], *missing)


def _as_json(lines: bytes) -> bytes:
    """Return CSV lines as a JSON array of arrays."""
    if not lines:
        return b"[]"
    rows = b"[[" + lines[:-1].replace(b"\n", b"],[") + b"]]"
    for gap, filled in ((b",,", b",null,"), (b",,", b",null,"), (b"[,", b"[null,"), (b",]", b",null]")):
        rows = rows.replace(gap, filled)
    return rows
