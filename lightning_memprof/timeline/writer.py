"""Write a trace in parts; the file appears under its name when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from isal import igzip

from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.artifacts.naming import temporary_name
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.text import MERGED_TRACES
from lightning_memprof.timeline.events import Row

_LEVEL: Final = 1
_COPY: Final = 1 << 20
_encode: Final = msgspec.json.Encoder().encode


def trace_head(origin_ns: int, traces: int, metadata: list[Row]) -> bytes:
    """Return the text of a trace before its parts.

    Args:
        origin_ns: Unix epoch time in ns from which its times count.
        traces: number of traces that it is merged from; several are written into its metadata.
        metadata: the metadata events; there is one if the trace has any event.
    """
    merged = f',"{MERGED_TRACES}":{traces}' if traces > 1 else ""
    text = f'{{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":{origin_ns}{merged}'
    return f'{text},"traceEvents":[\n'.encode() + _encode(metadata)[1:-1]


def write_part(path: Path, batches: Iterable[list[Row]], *, compressed: bool) -> int:
    """Write events without the text around them, and return their number.

    Raises:
        ArtifactError: it cannot be written.
    """
    events = 0
    try:
        with path.open("wb") as raw, _compressed(raw) if compressed else raw as stream:
            for rows in batches:
                if rows:
                    stream.write(b",\n" if events else b"")
                    stream.write(memoryview(_encode(rows))[1:-1])
                    events += len(rows)
    except OSError as error:
        raise _unwritable(path, error) from error
    return events


def join_parts(out: Path, head: bytes, parts: Iterable[tuple[Path, int]]) -> int:
    """Write a trace from its parts, each with its number of events, and remove them; return the number of all events.

    Args:
        out: the file; the parts are compressed where its name ends in ``.gz``.
        head: what precedes the parts.
        parts: taken one by one, and may be written meanwhile.

    Raises:
        ArtifactError: it cannot be written.
    """
    events = 0
    temporary = out.with_name(temporary_name(out.name))
    try:
        with own_temporary(out).open("wb") as stream:
            stream.write(_packed(out, head))
            for part, count in parts:
                if count:
                    # gzip data is a sequence of members.
                    stream.write(_packed(out, b",\n"))
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, stream, _COPY)
                    events += count
                part.unlink()
            stream.write(_packed(out, b"\n]}\n"))
        temporary.replace(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return events


def _unwritable(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{path}: cannot be written ({error}); choose another place, or free space")


def _packed(out: Path, text: bytes) -> bytes:
    return igzip.compress(text, _LEVEL, mtime=0) if out.suffix == ".gz" else text


def _compressed(raw: IO[bytes]) -> IO[bytes]:
    untyped: Any = igzip.IGzipFile
    stream: IO[bytes] = untyped(fileobj=raw, mode="wb", compresslevel=_LEVEL, mtime=0)
    return stream
