"""Streaming reader of Kineto JSON traces, plain or gzip-compressed, in bounded memory.

A trace is read in pieces of about a MiB. A piece ends where one event ends and the next begins, which the bytes
`}, {"ph"` tell without parsing: inside a valid JSON string its quotes would be escaped. Where that fails (another first
key, an array of objects inside an event) the place is found by counting brackets. What a file holds besides its events
is known in full once the events were read, because the format allows metadata behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final, NamedTuple

import msgspec
from isal import igzip, isal_zlib

from lightning_memprof.errors import ArtifactError

__all__ = ["Event", "EventArgs", "Trace", "read_events", "read_trace"]

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


# Sums of two are still 64 bits in ns; what is beyond (127 years) is damage.
_LONGEST_US: Final = 4e15
_LARGEST: Final = 1 << 64
_Microseconds = Annotated[float, msgspec.Meta(ge=-_LONGEST_US, le=_LONGEST_US)]


class EventArgs(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that analyses read; 0 or empty where the event has none.

    Torch numbers devices and autograd nodes from 0: there the event has none where it says -1.
    """

    external_id: int = msgspec.field(default=0, name="External id")
    legacy_external_id: int = msgspec.field(default=0, name="external id")
    correlation: int = 0
    input_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    bytes: int = msgspec.field(default=0, name="Bytes")
    device_type: int = msgspec.field(default=0, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    address: int = msgspec.field(default=0, name="Addr")
    total_allocated: int = msgspec.field(default=0, name="Total Allocated")
    sequence_number: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")

    @property
    def link(self) -> int:
        """The number that ties a device event or a runtime call to the operator that caused it; 0 where none does."""
        return self.external_id or self.legacy_external_id


_NO_ARGS: Final = EventArgs()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event. `ts` and `dur` are microseconds; `start_ns` and `duration_ns` are the exact nanoseconds in them.

    Times count from `Trace.time_origin_ns`.
    """

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Microseconds = 0.0
    dur: _Microseconds = 0.0
    args: EventArgs = _NO_ARGS

    @property
    def start_ns(self) -> int:
        """Start in ns after `Trace.time_origin_ns`."""
        return round(self.ts * 1000)

    @property
    def duration_ns(self) -> int:
        """Duration in ns."""
        return round(self.dur * 1000)


class Trace:
    """A trace file: its metadata, and its events as a stream.

    Reading starts with the iterator; every iterator reads the file again, so a trace is never held in memory.

    Args:
        path: a Kineto JSON file, plain or gzip-compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata: dict[str, Any] = {}
        self._ts_offset_us = 0

    @property
    def metadata(self) -> dict[str, Any]:
        """Everything beside the events (`schemaVersion`, `distributedInfo`, ...); empty until they were all read."""
        return self._metadata

    @property
    def time_origin_ns(self) -> int:
        """Unix epoch time in ns from which `ts` counts; right once all events were read."""
        base = self._metadata.get("baseTimeNanoseconds", 0)
        return (base if isinstance(base, int) else 0) + self._ts_offset_us * 1000

    def events(self) -> Iterator[Event]:
        """All events in the file's order.

        Raises:
            ArtifactError: the file is missing, no gzip data under a name that ends in `.gz`, cut off, or no trace.
        """
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Event]]:
        """All events in the file's order, as lists of a few thousand: the fast way through a large trace.

        Raises:
            ArtifactError: as `events` does.
        """
        try:
            with _open(self.path) as stream:
                yield from self._read(stream)
        except EOFError as error:
            raise _truncated(self.path) from error
        except _UNREADABLE as error:
            raise ArtifactError(
                f"{self.path}: cannot be read ({error}); a trace is Kineto JSON, plain or gzip: copy it again"
            ) from error

    def _read(self, stream: IO[bytes]) -> Iterator[list[Event]]:
        head, buffer = _read_head(self.path, stream)
        splitter = _Splitter(self.path, buffer)
        self._ts_offset_us = splitter.ts_offset_us
        while True:
            data = stream.read(_CHUNK)
            # The first chunk came with the head: it is cut before the next is added, so that pieces stay small.
            piece = splitter.split(buffer + data, at_end=not data)
            buffer = piece.rest
            if piece.events:
                yield piece.events
            if piece.finished:
                self._metadata = _metadata(self.path, head, buffer + stream.read())
                return


class _Piece(NamedTuple):
    events: list[Event]
    rest: bytes
    finished: bool  # the event array has ended; `rest` is what stands behind its bracket


class _Splitter:
    """Cuts complete events off the front of a buffer."""

    def __init__(self, path: Path, sample: bytes) -> None:
        first = _FIRST_KEY.match(sample)
        epoch = _EPOCH_TS_WITH_FRACTION.search(sample)
        self._path = path
        self._keys = dict.fromkeys((b'"ph"', first[1] if first else b'"ph"'))
        self._decode = msgspec.json.Decoder(list[Event]).decode
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

    def _events(self, piece: bytes) -> list[Event]:
        offset = self.ts_offset_us
        if offset:
            piece = _EPOCH_TS.sub(lambda found: b"%b%d" % (found[1], int(found[2]) - offset), piece)
        text = b"[" + piece + b"]"
        try:
            return self._decode(text)
        except msgspec.ValidationError:  # valid JSON, but an argument of another type than Kineto's: read one by one
            return [_lenient_event(fields) for fields in msgspec.json.decode(text)]


def read_trace(path: Path) -> Trace:
    """Open a trace for reading; nothing is read before its events are asked for."""
    return Trace(path)


def read_events(path: Path) -> Iterator[Event]:
    """All events of a trace in the file's order.

    Raises:
        ArtifactError: as `Trace.events` does.
    """
    return Trace(path).events()


def _open(path: Path) -> IO[bytes]:
    """The file's text as a byte stream; what it is compressed with is seen from its first bytes."""
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; a trace is a file named *.pt.trace.json or *.pt.trace.json.gz")
    with path.open("rb") as stream:
        magic = stream.read(2)
    if not magic:
        raise ArtifactError(f"{path}: is empty; the program that wrote it was stopped: record the trace again")
    if magic == b"\x1f\x8b":
        compressed: IO[bytes] = igzip.open(path, "rb")  # type: ignore[no-untyped-call]  # isal ships no types for it
        return compressed
    if path.suffix == ".gz":
        raise ArtifactError(f"{path}: is named .gz but holds no gzip data; compress it, or take the suffix away")
    return path.open("rb")


def _truncated(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: is cut off before its end; copy it again, or record the trace again")


def _read_head(path: Path, stream: IO[bytes]) -> tuple[bytes, bytes]:
    """Read until the event array opens: what stands before it, its bracket included, and the bytes behind."""
    data = stream.read(_CHUNK)
    first = data.lstrip()[:1]
    if first == b"[":
        return b"[", data.lstrip()[1:]
    if first != b"{":
        raise ArtifactError(f"{path}: is not a trace; a trace is a JSON object with `traceEvents`")
    while True:
        opening = _events_open_at(data)
        if opening is not None:
            return data[:opening], data[opening:]
        more = stream.read(_CHUNK)
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


def _lenient_event(fields: Any) -> Event:
    if not isinstance(fields, dict):
        raise msgspec.DecodeError(f"an event is a JSON object, not {type(fields).__name__}")
    given = fields.get("args")
    args: dict[str, Any] = given if isinstance(given, dict) else {}
    pid, tid = fields.get("pid"), fields.get("tid")
    return Event(
        ph=str(fields.get("ph") or ""),
        cat=str(fields.get("cat") or ""),
        name=str(fields.get("name") or ""),
        pid=pid if isinstance(pid, int) else str(pid),
        tid=tid if isinstance(tid, int) else str(tid),
        ts=_microseconds(fields.get("ts")),
        dur=_microseconds(fields.get("dur")),
        args=EventArgs(
            external_id=int(_number(args.get("External id"))),
            legacy_external_id=int(_number(args.get("external id"))),
            correlation=int(_number(args.get("correlation"))),
            input_dims=msgspec.Raw(msgspec.json.encode(args["Input Dims"]) if "Input Dims" in args else b""),
            bytes=int(_number(args.get("Bytes"))),
            device_type=int(_number(args.get("Device Type"))),
            device_id=int(_number(args.get("Device Id", -1))),
            address=int(_number(args.get("Addr"))),
            total_allocated=int(_number(args.get("Total Allocated"))),
            sequence_number=int(_number(args.get("Sequence number", -1))),
            forward_thread=int(_number(args.get("Fwd thread id"))),
        ),
    )


def _microseconds(value: Any) -> float:
    time = _number(value)
    return time if -_LONGEST_US <= time <= _LONGEST_US else 0


def _number(value: Any) -> float:
    """A number, also one that was written as a string; 0 for anything else. Integers keep all their digits."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return 0
    return value if isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST else 0


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
