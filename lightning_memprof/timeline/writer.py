"""Write a trace piece by piece; the file appears under its name when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
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


class TraceWriter:
    """A trace being written.

    Args:
        out: the file; compressed at a fast level where the name ends in ``.gz``.
        origin_ns: Unix epoch time in ns from which its times count.
        traces: number of traces that it is merged from; several are written into its metadata.

    Raises:
        ArtifactError: it cannot be written.
    """

    def __init__(self, out: Path, origin_ns: int, traces: int) -> None:
        self._out = out
        self._temporary = out.with_name(temporary_name(out.name))
        merged = f',"{MERGED_TRACES}":{traces}' if traces > 1 else ""
        self._head = (
            f'{{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":{origin_ns}{merged},"traceEvents":[\n'
        ).encode()
        self._encode = msgspec.json.Encoder().encode
        self._streams: list[IO[bytes]] = []
        self.events = 0

    def write(self, rows: list[Row]) -> None:
        """Append events."""
        if rows:
            text = memoryview(self._encode(rows))[1:-1]
            self._put(b",\n" if self.events else b"")
            self._put(text)
            self.events += len(rows)

    def append(self, part: Path, events: int) -> None:
        """Append a part written by :class:`PartWriter`, and remove it.

        Raises:
            ArtifactError: it cannot be written.
        """
        try:
            if events:
                # Only text goes through the compressor: gzip data is a sequence of members.
                self._put(b",\n" if self.events else b"")
                self._end_member()
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, self._streams[0], _COPY)
                self.events += events
            part.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    def _end_member(self) -> None:
        if len(self._streams) > 1:
            self._streams.pop().close()

    def _put(self, data: bytes | memoryview) -> None:
        try:
            if len(self._streams) == 1 and self._out.suffix == ".gz":
                self._streams.append(_compressed(self._streams[0]))
            self._streams[-1].write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ArtifactError:
        return ArtifactError(f"{self._out}: cannot be written ({error}); choose another place, or free space")

    def __enter__(self) -> TraceWriter:  # noqa: PYI034 Self needs Python 3.11, or a package more
        try:
            self._streams.append(own_temporary(self._out).open("wb"))
            self._put(self._head)
        except OSError as error:
            raise self._unwritable(error) from error
        except BaseException:
            # Ctrl-C may come as soon as the file exists.
            self._temporary.unlink(missing_ok=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._put(b"\n]}\n")
            for stream in reversed(self._streams):
                stream.close()
            if kind is None:
                self._temporary.replace(self._out)
        except OSError as failure:
            raise self._unwritable(failure) from failure
        finally:
            self._streams[0].close()
            self._temporary.unlink(missing_ok=True)


@contextmanager
def part_files(out: Path) -> Iterator[Callable[[int], Path]]:
    """Yield a function that returns the file of a part, by its number, beside the result ``out``.

    Files that remain are removed at the end, when no process writes them.
    """
    files: list[Path] = []

    def file(number: int) -> Path:
        files.append(own_temporary(out.with_name(f"{out.name}.{number}")))
        return files[-1]

    try:
        yield file
    finally:
        for path in files:
            path.unlink(missing_ok=True)


class PartWriter:
    """A part of a trace: events without the text around them, for :meth:`TraceWriter.append`.

    Args:
        path: the file.
        compressed: whether the whole trace will be compressed.
    """

    def __init__(self, path: Path, *, compressed: bool) -> None:
        self._raw: IO[bytes] = path.open("wb")
        self._stream = _compressed(self._raw) if compressed else self._raw
        self._encode = msgspec.json.Encoder().encode
        self.events = 0

    def write(self, rows: list[Row]) -> None:
        """Append events."""
        if rows:
            if self.events:
                self._stream.write(b",\n")
            self._stream.write(memoryview(self._encode(rows))[1:-1])
            self.events += len(rows)

    def close(self) -> None:
        """Complete the part."""
        self._stream.close()
        self._raw.close()


def _compressed(raw: IO[bytes]) -> IO[bytes]:
    untyped: Any = igzip.IGzipFile
    stream: IO[bytes] = untyped(fileobj=raw, mode="wb", compresslevel=_LEVEL, mtime=0)
    return stream
