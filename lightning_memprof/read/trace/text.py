"""The text of a JSON trace, plain or gzip-compressed, in pieces of whole events and in bounded memory.

A piece is about a MiB. It ends where one event ends and the next begins, which the bytes `}, {"ph` show without
parsing: inside a valid JSON string the quote would be escaped. Where that fails (an array of objects inside an event)
the splitter counts brackets.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

import msgspec
from isal import igzip, isal_zlib

from lightning_memprof.artifacts.trace_rewriting import original_categories
from lightning_memprof.errors import ArtifactError

_T = TypeVar("_T")

# isal's stub calls its exception class an instance.
UNREADABLE: Final[tuple[type[Exception], ...]] = (OSError, EOFError, isal_zlib.error)  # type: ignore[assignment]
"""Errors of reading a file that is missing, damaged or truncated."""

LARGEST: Final = 1 << 62
"""Sums of two such numbers still fit into 64 bits; a larger number in a column is damage."""

MERGED_TRACES: Final = "mergedTraces"
"""Key of a merged trace's metadata: the number of traces that it was made from."""

BASE_TIME: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')

# Bytes inside a string that are not UTF-8 raise Python's own error.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)

_GZIP: Final = b"\x1f\x8b"
# A file that is its events, without metadata.
_LIST: Final = b"["
_CHUNK: Final = 1 << 20
# The text beside the events; for 4,096 ranks with all their groups it is a few MiB.
_HEAD_LIMIT: Final = 32 << 20
# One event, or text that is not an event.
_STUCK_LIMIT: Final = 16 << 20
# Recorded traces grow by 8 to 35 when they are decompressed; 1,032 is the most that gzip can.
_MOST_GROWTH: Final = 100
_UNWATCHED: Final = 64 << 20
# Strings and brackets of one event, or of the text before the first: recorded ones have thousands; millions take
# seconds.
_MOST_TOKENS: Final = 1_000_000
_MOST_DEPTH: Final = 500
# Most events are shorter: the last one begins in this part of a buffer.
_TAIL: Final = 1 << 14
# Times since 1970 lose their first digits: the rest counts from eight or nine of these before the first event.
_BUCKET_US: Final = 10_000_000_000

# Each escape costs memory while it is matched; no name has so many.
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*){0,100000}"'
_TOKEN: Final = re.compile(_STRING + rb'|["\[\]{}]', re.DOTALL)
_COMMA: Final = re.compile(rb"\s*,")
_OPENING: Final = frozenset({b"{", b"["})
_BRACKETS: Final = _OPENING | {b"}", b"]"}
# The end of an event and the first key of the next one: in a string, a letter cannot follow a quote.
_BETWEEN_EVENTS: Final = re.compile(rb'\}\s*,\s*\{\s*"\w')
_ARRAY_OPENS: Final = re.compile(rb"\s*:\s*\[")
_NAME_LINE: Final = re.compile(rb'^([ \t]*"name": ")(.*)(",?[ \t]*)$', re.MULTILINE)
_BARE_QUOTE: Final = re.compile(rb'(?<!\\)"')
# A string need not end: else each escaped quote of a string that continues after the buffer would begin another.
_NON_FINITE: Final = re.compile(_STRING + rb"?|([-+]?\b(?:nan|inf(?:inity)?)\b)", re.IGNORECASE | re.DOTALL)
# Lists that torch's EventList writes have no categories: the process is the kind of an event.
_LIST_PROCESS: Final = re.compile(rb'"pid":\s*"(\w+) functions"')
_LIST_HOST: Final = b'"cat":"cpu_op","pid":"CPU functions"'
_LIST_DEVICE: Final = b'"cat":"kernel","pid":0'
# 16 digits of microseconds since 1970 and a fraction: more than a double holds.
_EPOCH_TS: Final = re.compile(rb'("ts":\s*)(\d{16})(?=[.,\s}])')
_EPOCH_TS_WITH_FRACTION: Final = re.compile(rb'("ts":\s*)(\d{16})\.\d')


class TraceText:
    """A trace file as text: its metadata, and its events in pieces.

    Args:
        path: a JSON trace, plain or gzip-compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.ts_offset_us = 0
        """Offset subtracted from every `ts` that counts from 1970, because a double would lose its fraction."""
        self.bytes_read = 0
        """Bytes read of the file, as it is on disk, perhaps compressed."""

    @property
    def base_ns(self) -> int:
        """Unix epoch time in ns from which the times in the file count, 0 where unknown; right once all were read."""
        base = self.metadata.get("baseTimeNanoseconds")
        return base if type(base) is int and 0 <= base < LARGEST else 0

    @property
    def time_origin_ns(self) -> int:
        """Unix epoch time in ns from which `ts` counts; right once all events were read."""
        return self.base_ns + self.ts_offset_us * 1000

    @property
    def merged_traces(self) -> int:
        """Number of traces that were merged into this one, else 0; right once all events were read."""
        number = self.metadata.get(MERGED_TRACES)
        return number if isinstance(number, int) and number > 1 else 0

    def pieces(
        self, decode: Callable[[bytes], list[_T]], chunk: int = _CHUNK, *, as_written: bool = False
    ) -> Iterator[list[_T]]:
        """Yield the result of `decode` for each piece, a JSON array of events.

        Args:
            decode: raises `msgspec.DecodeError` for text that is not valid JSON; the piece is then repaired and decoded
                again.
            chunk: bytes of text read at a time.
            as_written: whether events keep the categories in the file, if it was rewritten for TensorBoard's profiler
                tab; otherwise they have the categories that torch wrote.

        Raises:
            ArtifactError: the file is missing, no gzip data under a name that ends in `.gz`, truncated, or no trace.
        """
        try:
            with open_trace(self.path) as (raw, stream):
                yield from self._read(raw, stream, decode if as_written else _originally(decode), chunk)
        except EOFError as error:
            raise _truncated(self.path) from error
        except RecursionError as error:
            raise ArtifactError(f"{self.path}: is damaged, an event is nested too deeply; record it again") from error
        except UNREADABLE as error:
            raise ArtifactError(
                f"{self.path}: cannot be read ({error}); a trace is Kineto JSON, plain or gzip: copy it again"
            ) from error

    def _read(
        self, raw: IO[bytes], stream: IO[bytes], decode: Callable[[bytes], list[_T]], chunk: int
    ) -> Iterator[list[_T]]:
        head, buffer = _read_head(self.path, stream, chunk)
        decode = _with_categories(decode) if head == _LIST else decode
        splitter = _Splitter(self.path, buffer, decode)
        self.ts_offset_us = splitter.ts_offset_us
        plain, found = len(buffer), True
        while True:
            # An event larger than a piece is searched again with each read: twice as much each time.
            data = stream.read(chunk if found else max(chunk, len(buffer)))
            self.bytes_read = raw.tell()
            plain += len(data)
            if plain > _UNWATCHED and plain > _MOST_GROWTH * self.bytes_read:
                raise ArtifactError(
                    f"{self.path}: decompresses to more than {_MOST_GROWTH} times its size: not a trace"
                )
            # The first chunk came with the head: it is cut before the next is added, so that pieces stay small.
            piece = splitter.split(buffer + data, at_end=not data)
            buffer, found = piece.rest, bool(piece.events)
            if piece.events:
                yield piece.events
            if piece.finished:
                tail = buffer + stream.read(_HEAD_LIMIT)
                if len(tail) >= _HEAD_LIMIT:
                    raise ArtifactError(
                        f"{self.path}: more than {_HEAD_LIMIT:,} bytes after the events; record the trace again"
                    )
                self.metadata = _metadata(self.path, head, tail)
                return


class _Piece(NamedTuple):
    events: list[Any]
    rest: bytes
    finished: bool  # the event array has ended; `rest` is the text after its bracket


class _Splitter:
    """Cuts complete events off the front of a buffer."""

    def __init__(self, path: Path, sample: bytes, decode: Callable[[bytes], list[Any]]) -> None:
        epoch = _EPOCH_TS_WITH_FRACTION.search(sample)
        bucket = int(epoch[2]) // _BUCKET_US if epoch else 0
        self._path = path
        self._decode = decode
        # Some time before the first event, so that no time becomes negative.
        self.ts_offset_us = (bucket - 8) * _BUCKET_US if epoch else 0
        self._prefix = (b"%b%d" % (epoch[1], bucket), b"%b8" % epoch[1]) if epoch else None

    def split(self, buffer: bytes, *, at_end: bool) -> _Piece:
        """Cut off the complete events.

        Raises:
            ArtifactError: the file ends within an event, or is not valid JSON.
        """
        failure: Exception | None = None
        repaired = buffer
        for repair in (None, _repair):
            if repair is not None:
                repaired = repair(buffer)
                if repaired == buffer:
                    break
            for cut in (self._quick_cut, self._careful_cut):
                try:
                    piece = cut(repaired)
                    if piece is not None:
                        return _Piece(self._events(memoryview(repaired)[: piece[0]]), repaired[piece[1] :], piece[2])
                except _UNDECODABLE as error:
                    failure = error
        if not at_end and len(buffer) < _STUCK_LIMIT:
            return _Piece([], buffer, finished=False)
        if failure is None:
            raise _truncated(self._path)
        raise ArtifactError(
            f"{self._path}: is damaged, its events are not valid JSON ({failure}); copy or record the trace again"
        ) from failure

    def _quick_cut(self, buffer: bytes) -> tuple[int, int, bool] | None:
        for begin in (max(0, len(buffer) - _TAIL), 0):
            gaps = [gap.start() for gap in _BETWEEN_EVENTS.finditer(buffer, begin)]
            if gaps:
                return gaps[-1] + 1, buffer.index(b",", gaps[-1]) + 1, False
        return None

    def _careful_cut(self, buffer: bytes) -> tuple[int, int, bool] | None:
        """Cut by counting brackets: end of the last complete event, start of the rest, whether the array has ended."""
        depth = comma = 0
        for count, token in enumerate(_TOKEN.finditer(buffer)):
            text = token[0]
            if depth > _MOST_DEPTH or (count > _MOST_TOKENS and not comma):
                raise _endless(self._path)
            if text in _OPENING:
                depth += 1
            elif text in _BRACKETS:
                depth -= 1
                if depth < 0:
                    if text == b"}":  # a name's bare quotes led astray
                        return None
                    end = token.start()
                    last = buffer[:end].rstrip()
                    return (len(last) - 1 if last.endswith(b",") else end), end + 1, True
                found = _COMMA.match(buffer, token.end()) if depth == 0 else None
                comma = found.end() - 1 if found else comma
            elif text == b'"':  # a string that continues after the buffer
                break
        return (comma, comma + 1, False) if comma else None

    def _events(self, piece: memoryview) -> list[Any]:
        text = b"".join((b"[", piece, b"]"))
        return self._decode(self._less_offset(text, *self._prefix) if self._prefix else text)

    def _less_offset(self, piece: bytes, prefix: bytes, short: bytes) -> bytes:
        """Subtract the offset from every `ts`; if all begin alike, change the first digits, which is far faster."""
        shortened = piece.replace(prefix, short)
        if len(piece) - len(shortened) == piece.count(b'"ts":') * (len(prefix) - len(short)):
            return shortened
        return _EPOCH_TS.sub(lambda found: b"%b%d" % (found[1], int(found[2]) - self.ts_offset_us), piece)


def _originally(decode: Callable[[bytes], list[_T]]) -> Callable[[bytes], list[_T]]:
    return lambda text: decode(original_categories(text))


def _with_categories(decode: Callable[[bytes], list[_T]]) -> Callable[[bytes], list[_T]]:
    return lambda text: decode(
        _LIST_PROCESS.sub(lambda found: _LIST_HOST if found[1] == b"CPU" else _LIST_DEVICE, text)
    )


@contextmanager
def open_trace(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a trace; yield the file as it is on disk, and its text: the first bytes show whether it is compressed.

    Raises:
        ArtifactError: no such file, an empty one, or no gzip data under a name that ends in `.gz`.
        OSError: it cannot be opened.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a trace is a file named *.pt.trace.json or *.pt.trace.json.gz")
    with path.open("rb") as raw:
        magic = raw.read(2)
        raw.seek(0)
        if not magic:
            raise ArtifactError(f"{path}: is empty; its writer was stopped: record the trace again")
        if magic != _GZIP and path.suffix == ".gz":
            raise ArtifactError(f"{path}: is named .gz but is not gzip data; compress it, or remove the suffix")
        untyped: Any = igzip.IGzipFile
        yield raw, untyped(fileobj=raw, mode="rb") if magic == _GZIP else raw


def _truncated(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: is truncated; copy it again, or record the trace again")


def _read_head(path: Path, stream: IO[bytes], chunk: int) -> tuple[bytes, bytes]:
    """Read until the event array opens; return the text up to its bracket, and the bytes after it."""
    data = stream.read(chunk).removeprefix(codecs.BOM_UTF8)
    first = data.lstrip()[:1]
    if first == _LIST:
        return _LIST, data.lstrip()[1:]
    if first != b"{":
        raise ArtifactError(f"{path}: is not a trace; a trace is a JSON object with `traceEvents`")
    length = chunk
    while True:
        opening = _events_open_at(path, data)
        if opening is not None:
            return data[:opening], data[opening:]
        more = stream.read(length)  # doubling: a search after every chunk would take quadratic time
        length *= 2
        if not more and not data.rstrip().endswith(b"}"):
            raise _truncated(path)
        if not more or len(data) > _HEAD_LIMIT:
            raise ArtifactError(f"{path}: has no `traceEvents`, so it is not a trace; name a profiler's trace")
        data += more


def _events_open_at(path: Path, data: bytes) -> int | None:
    """Return the position after the opening bracket of the array `traceEvents`, or None before it opens."""
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(data)):
        text = token[0]
        if depth > _MOST_DEPTH or count > _MOST_TOKENS:
            raise _endless(path)
        if text in _BRACKETS:
            depth += 1 if text in _OPENING else -1
        elif depth == 1 and text == b'"traceEvents"':
            opens = _ARRAY_OPENS.match(data, token.end())
            if opens:
                return opens.end()
        elif text == b'"':  # a string that continues after the buffer
            break
    return None


def _endless(path: Path) -> ArtifactError:
    return ArtifactError(
        f"{path}: is damaged, an event or the metadata have more than {_MOST_TOKENS:,} parts, or over {_MOST_DEPTH} "
        "levels; copy or record it again"
    )


def _repair(buffer: bytes) -> bytes:
    """Repair Kineto's errors: bare quotes in a name, bytes that are not UTF-8, numbers that JSON does not have."""
    text = buffer.decode("utf-8", errors="replace").encode()
    text = _NAME_LINE.sub(lambda line: line[1] + _BARE_QUOTE.sub(rb'\\"', line[2]) + line[3], text)
    return _NON_FINITE.sub(lambda found: b"null" if found[1] else found[0], text)


def _metadata(path: Path, head: bytes, tail: bytes) -> dict[str, Any]:
    """Return all except the events; `head` ends at the array's opening bracket, `tail` begins after the closing one."""
    if head == _LIST:
        if tail.strip():
            raise ArtifactError(f"{path}: has text after its events; a list of events ends with its bracket")
        return {}
    if not tail.rstrip().endswith(b"}"):
        raise _truncated(path)
    try:
        found = msgspec.json.decode(head + b"]" + tail, type=dict[str, Any])
    except _UNDECODABLE as error:
        raise ArtifactError(f"{path}: its metadata is not valid JSON ({error}); record the trace again") from error
    found.pop("traceEvents", None)
    return found
