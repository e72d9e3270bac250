"""The text of a JSON trace, plain or gzip-compressed, in pieces of whole events and in bounded memory.

A piece is about a MiB. It ends where one event ends and the next begins, which the bytes `}, {"ph"` tell without
parsing: inside a valid JSON string its quotes would be escaped. Where that fails (another first key, an array of
objects inside an event) the place is found by counting brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

import msgspec
from isal import igzip, isal_zlib

from lightning_memprof.errors import ArtifactError

__all__ = ["TraceText"]

_T = TypeVar("_T")

# isal's stub calls its exception class an instance.
_UNREADABLE: Final[tuple[type[Exception], ...]] = (OSError, isal_zlib.error)  # type: ignore[assignment]

_CHUNK: Final = 1 << 20
_HEAD_LIMIT: Final = 64 << 20
_STUCK_LIMIT: Final = 64 << 20
_GAP: Final = 256
_DAY_US: Final = 86_400_000_000

_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN: Final = re.compile(_STRING + rb'|["\[\]{},]', re.DOTALL)
_BETWEEN_EVENTS: Final = re.compile(rb"\}\s*,\s*\{\s*\Z")
_FIRST_KEY: Final = re.compile(rb'\s*\{\s*("[^"\\]*")')
_ARRAY_OPENS: Final = re.compile(rb"\s*:\s*\[")
_NAME_LINE: Final = re.compile(rb'^(\s*"name": ")(.*)(",?[ \t]*)$', re.MULTILINE)
_BARE_QUOTE: Final = re.compile(rb'(?<!\\)"')
_NON_FINITE: Final = re.compile(_STRING + rb"|([-+]?\b(?:nan|inf(?:inity)?)\b)", re.IGNORECASE | re.DOTALL)
# 16 digits of microseconds since 1970 and a fraction: more than a double holds.
_EPOCH_TS: Final = re.compile(rb'("ts":\s*)(\d{16})(?=[.,\s}])')
_EPOCH_TS_WITH_FRACTION: Final = re.compile(rb'"ts":\s*(\d{16})\.\d')


class TraceText:
    """A trace file as text: its metadata, and its events in pieces.

    Args:
        path: a JSON trace, plain or gzip-compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.ts_offset_us = 0
        """What was taken off every `ts` that counts from 1970, because a double would lose its fraction."""
        self.bytes_read = 0
        """How far the file was read, in its own, perhaps compressed, bytes."""

    def pieces(self, decode: Callable[[bytes], list[_T]], chunk: int = _CHUNK) -> Iterator[list[_T]]:
        """What `decode` makes of each piece, a JSON array of events.

        Args:
            decode: raises `msgspec.DecodeError` for what is not valid JSON; the piece is then repaired and tried again.
            chunk: bytes of text that are read at a time.

        Raises:
            ArtifactError: the file is missing, no gzip data under a name that ends in `.gz`, cut off, or no trace.
        """
        try:
            with _open(self.path) as raw:
                yield from self._read(raw, _plain(raw), decode, chunk)
        except EOFError as error:
            raise _truncated(self.path) from error
        except RecursionError as error:
            raise ArtifactError(f"{self.path}: is damaged, an event is nested too deeply; record it again") from error
        except _UNREADABLE as error:
            raise ArtifactError(
                f"{self.path}: cannot be read ({error}); a trace is Kineto JSON, plain or gzip: copy it again"
            ) from error

    def _read(
        self, raw: IO[bytes], stream: IO[bytes], decode: Callable[[bytes], list[_T]], chunk: int
    ) -> Iterator[list[_T]]:
        head, buffer = _read_head(self.path, stream, chunk)
        splitter = _Splitter(self.path, buffer, decode)
        self.ts_offset_us = splitter.ts_offset_us
        while True:
            data = stream.read(chunk)
            self.bytes_read = raw.tell()
            # The first chunk came with the head: it is cut before the next is added, so that pieces stay small.
            piece = splitter.split(buffer + data, at_end=not data)
            buffer = piece.rest
            if piece.events:
                yield piece.events
            if piece.finished:
                self.metadata = _metadata(self.path, head, buffer + stream.read())
                return


class _Piece(NamedTuple):
    events: list[Any]
    rest: bytes
    finished: bool  # the event array has ended; `rest` is what stands behind its bracket


class _Splitter:
    """Cuts complete events off the front of a buffer."""

    def __init__(self, path: Path, sample: bytes, decode: Callable[[bytes], list[Any]]) -> None:
        first = _FIRST_KEY.match(sample)
        epoch = _EPOCH_TS_WITH_FRACTION.search(sample)
        self._path = path
        self._keys = dict.fromkeys((b'"ph"', first[1] if first else b'"ph"'))
        self._decode = decode
        # A day before the first event, so that no time becomes negative.
        self.ts_offset_us = int(epoch[1]) - _DAY_US if epoch else 0

    def split(self, buffer: bytes, *, at_end: bool) -> _Piece:
        """Cut off what is complete.

        Raises:
            ArtifactError: the buffer ends within an event and there is no more, or is not valid JSON.
        """
        failure: msgspec.DecodeError | None = None
        repaired = buffer
        for repair in (None, _repair):
            if repair is not None:
                repaired = repair(buffer)
                if repaired == buffer:
                    break
            for cut in (self._quick_cut, _careful_cut):
                try:
                    piece = cut(repaired)
                    if piece is not None:
                        return _Piece(self._events(repaired[: piece[0]]), repaired[piece[1] :], piece[2])
                except msgspec.DecodeError as error:
                    failure = error
        if not at_end and len(buffer) < _STUCK_LIMIT:
            return _Piece([], buffer, finished=False)
        if failure is None:
            raise _truncated(self._path)
        raise ArtifactError(
            f"{self._path}: is damaged, its events are not valid JSON ({failure}); copy or record the trace again"
        ) from failure

    def _quick_cut(self, buffer: bytes) -> tuple[int, int, bool] | None:
        for key in self._keys:
            at = buffer.rfind(key)
            while at > 0:
                gap = _BETWEEN_EVENTS.search(buffer, max(0, at - _GAP), at)
                if gap:
                    return gap.start() + 1, buffer.index(b",", gap.start()) + 1, False
                at = buffer.rfind(key, 0, at)
        return None

    def _events(self, piece: bytes) -> list[Any]:
        offset = self.ts_offset_us
        if offset:
            piece = _EPOCH_TS.sub(lambda found: b"%b%d" % (found[1], int(found[2]) - offset), piece)
        return self._decode(b"[" + piece + b"]")


def _open(path: Path) -> IO[bytes]:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a trace is a file named *.pt.trace.json or *.pt.trace.json.gz")
    return path.open("rb")


def _plain(raw: IO[bytes]) -> IO[bytes]:
    """The file's text as a byte stream; what it is compressed with is seen from its first bytes."""
    path = Path(raw.name)
    magic = raw.read(2)
    raw.seek(0)
    if not magic:
        raise ArtifactError(f"{path}: is empty; the program that wrote it was stopped: record the trace again")
    if magic == b"\x1f\x8b":
        untyped: Any = igzip.IGzipFile
        compressed: IO[bytes] = untyped(fileobj=raw, mode="rb")
        return compressed
    if path.suffix == ".gz":
        raise ArtifactError(f"{path}: is named .gz but holds no gzip data; compress it, or take the suffix away")
    return raw


def _truncated(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: is cut off before its end; copy it again, or record the trace again")


def _read_head(path: Path, stream: IO[bytes], chunk: int) -> tuple[bytes, bytes]:
    """Read until the event array opens: what stands before it, its bracket included, and the bytes behind."""
    data = stream.read(chunk)
    first = data.lstrip()[:1]
    if first == b"[":
        return b"[", data.lstrip()[1:]
    if first != b"{":
        raise ArtifactError(f"{path}: is not a trace; a trace is a JSON object with `traceEvents`")
    while True:
        opening = _events_open_at(data)
        if opening is not None:
            return data[:opening], data[opening:]
        more = stream.read(chunk)
        if not more and not data.rstrip().endswith(b"}"):
            raise _truncated(path)
        if not more or len(data) > _HEAD_LIMIT:
            raise ArtifactError(f"{path}: has no `traceEvents`; its events stand there: name a profiler's trace")
        data += more


def _events_open_at(data: bytes) -> int | None:
    """Where the top-level array `traceEvents` opens (behind its bracket), or None as long as it does not."""
    depth = 0
    for token in _TOKEN.finditer(data):
        text = token[0]
        if text in {b"{", b"["}:
            depth += 1
        elif text in {b"}", b"]"}:
            depth -= 1
        elif depth == 1 and text == b'"traceEvents"':
            opens = _ARRAY_OPENS.match(data, token.end())
            if opens:
                return opens.end()
    return None


def _careful_cut(buffer: bytes) -> tuple[int, int, bool] | None:
    """Cut by counting brackets: end of the last complete event, start of the rest, whether the array has ended."""
    depth = 0
    comma = 0
    for token in _TOKEN.finditer(buffer):
        text = token[0]
        if text in {b"{", b"["}:
            depth += 1
        elif text in {b"}", b"]"}:
            depth -= 1
            if depth < 0:
                if text == b"}":  # a name's bare quotes led astray
                    return None
                end = token.start()
                last = buffer[:end].rstrip()
                return (len(last) - 1 if last.endswith(b",") else end), end + 1, True
        elif text == b"," and depth == 0:
            comma = token.start()
        elif text == b'"':  # a string that goes on behind the buffer
            break
    return (comma, comma + 1, False) if comma else None


def _repair(buffer: bytes) -> bytes:
    """Mend what Kineto writes wrongly: bare quotes in a name, bytes that are no UTF-8, numbers that JSON lacks."""
    text = buffer.decode("utf-8", errors="replace").encode()
    text = _NAME_LINE.sub(lambda line: line[1] + _BARE_QUOTE.sub(rb'\\"', line[2]) + line[3], text)
    return _NON_FINITE.sub(lambda found: b"null" if found[1] else found[0], text)


def _metadata(path: Path, head: bytes, tail: bytes) -> dict[str, Any]:
    """Everything but the events; `head` ends with the array's opening bracket, `tail` begins behind the closing one."""
    if head == b"[":
        if tail.strip():
            raise ArtifactError(f"{path}: goes on behind its events; a list of events ends with its bracket")
        return {}
    if not tail.rstrip().endswith(b"}"):
        raise _truncated(path)
    try:
        found = msgspec.json.decode(head + b"]" + tail, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{path}: its metadata is not valid JSON ({error}); record the trace again") from error
    found.pop("traceEvents", None)
    return found
