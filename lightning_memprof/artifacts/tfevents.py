"""Event files of TensorBoard: curves and how they are laid out, written with nothing but the standard library.

TensorBoard's own writers load TensorFlow where it is installed, or half a second of other modules, into a process that
trains. The formats: ``tensorflow/core/lib/io/record_writer.cc`` (records with masked CRC-32C), ``event.proto``,
``summary.proto`` and ``tensor.proto`` as in ``tensorboard/compat/proto``, and ``layout.proto`` of its custom scalars.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["EventFile", "Layout"]

Layout = dict[str, dict[str, "Sequence[str]"]]

_DOUBLE, _BYTES, _FLOAT = 1, 2, 5
_DT_STRING: Final = 7
_CUSTOM_SCALARS: Final = (b"custom_scalars__config__", b"custom_scalars")
_POLYNOMIAL: Final = 0x82F63B78
_MASK_DELTA: Final = 0xA282EAD8


class EventFile:
    """One file of curves.

    Args:
        path: the file; must not exist. Its name has to contain ``.tfevents.``.
        time_s: Unix time of its beginning in seconds.

    Raises:
        OSError: it cannot be written.

    """

    def __init__(self, path: Path, time_s: float) -> None:
        self._file = path.open("xb")
        self._write(_double(1, time_s) + _chunk(3, b"brain.Event:2"))

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Add one point to each of several curves; TensorBoard keeps values with the precision of a 32-bit float.

        Args:
            step: place on the horizontal axis.
            time_s: Unix time in seconds.
            values: by the curve's name.

        Raises:
            OSError: the file cannot be written.

        """
        summary = b"".join(
            _chunk(1, _chunk(1, name.encode()) + bytes((2 << 3 | _FLOAT,)) + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._write(_double(1, time_s) + _number(2, step) + _chunk(5, summary))

    def lay_out(self, layout: Layout, time_s: float) -> None:
        """Say which curves the dashboard of custom scalars draws together.

        Args:
            layout: by category and chart, regular expressions of the curves' names.
            time_s: Unix time in seconds.

        Raises:
            OSError: the file cannot be written.

        """
        content = b"".join(_chunk(2, _category(title, charts)) for title, charts in layout.items())
        tag, plugin = _CUSTOM_SCALARS
        tensor = _number(1, _DT_STRING) + _chunk(2, b"") + _chunk(8, content)
        value = _chunk(1, tag) + _chunk(8, tensor) + _chunk(9, _chunk(1, _chunk(1, plugin)))
        self._write(_double(1, time_s) + _chunk(5, _chunk(1, value)))

    def flush(self) -> None:
        """Let others see what was added."""
        self._file.flush()

    def close(self) -> None:
        """Write the rest and release the file."""
        self._file.close()

    def _write(self, record: bytes) -> None:
        size = struct.pack("<Q", len(record))
        self._file.write(size + _masked_crc(size) + record + _masked_crc(record))


def _category(title: str, charts: Mapping[str, Sequence[str]]) -> bytes:
    drawn = (
        _chunk(1, name.encode()) + _chunk(2, b"".join(_chunk(1, curve.encode()) for curve in curves))
        for name, curves in charts.items()
    )
    return _chunk(1, title.encode()) + b"".join(_chunk(2, chart) for chart in drawn)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return bytes((field << 3,)) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return bytes((field << 3 | _DOUBLE,)) + struct.pack("<d", value)


def _chunk(field: int, content: bytes) -> bytes:
    return bytes((field << 3 | _BYTES,)) + _varint(len(content)) + content


@cache
def _crc_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = value >> 1 ^ _POLYNOMIAL if value & 1 else value >> 1
        return value

    return tuple(map(entry, range(256)))


def _masked_crc(content: bytes) -> bytes:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)
