"""Find out what a path means: a run, a trace, a snapshot of the CUDA allocator, or a directory of such files.

What a file is, is read from its first bytes; its name only decides where those say nothing.
"""

from __future__ import annotations

import codecs
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import Walk, has_run

FileKind = Literal["trace", "snapshot"]

# Metadata that torch writes before the events: some hundred bytes for each process group of the job.
_HEAD_BYTES: Final = 1 << 20
_PACKED_HEAD_BYTES: Final = 1 << 18
# A directory of more is a data set, and looking into each would take minutes.
_MAX_FILES: Final = 4096
_GZIP: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31  # zlib's number for gzip data with the largest window
_PICKLE: Final = b"\x80"
_TRACE_NAMES: Final = (".trace.json", ".trace.json.gz")
# A trace is an object, or a bare list of events.
_TRACE_WORDS: Final = MappingProxyType({b"{": b'"traceEvents"', b"[": b'"ph"'})
# The first keys of a snapshot, and of a segment where the file is a bare list of them.
_SNAPSHOT_WORDS: Final = (b"segments", b"device_traces", b"total_size")
_SUFFIXES: Final = frozenset({".json", ".gz", ".pickle", ".pkl", ".snapshot", ".trace"})


class Targets(msgspec.Struct, frozen=True):
    """What paths mean: either one run's path, or files of these two kinds, each once, in the order of their names.

    ``named`` are the paths as they were given. ``left_out`` says how many files of a directory were not looked at.
    """

    named: tuple[Path, ...] = ()
    run: Path | None = None
    traces: tuple[Path, ...] = ()
    snapshots: tuple[Path, ...] = ()
    left_out: int = 0


def find_targets(paths: Sequence[Path]) -> Targets:
    """Return what ``paths`` mean together.

    Args:
        paths: one run (its directory, its log directory or a parent), or any number of traces, snapshots and
            directories of them. Of a directory that holds a run the run is meant, and its files are left to it.

    Raises:
        ArtifactError: a path is missing or none of these, a directory has none of them, several runs are named, or a
            run together with files.
    """
    run: Path | None = None
    found: dict[Path, FileKind] = {}
    left_out = 0
    for path in paths:
        # Unlike Path.is_dir it returns False for a path without access; the problem is reported below.
        is_directory = os.path.isdir(path)  # noqa: PTH112
        if is_directory and has_run(path):
            if run is not None:
                raise ArtifactError(
                    f"{run} and {path}: two runs; name one, or put them side by side: lightning-memprof compare"
                )
            run = path
        elif is_directory:
            inside, more = _files_in(path)
            found |= inside
            left_out += more
        else:
            found[path] = _named(path)
    if run is not None and found:
        raise ArtifactError(
            f"{run} and {next(iter(found))}: a run and a file; name the run alone, which has its files, or files"
        )
    return Targets(
        named=tuple(paths),
        run=run,
        traces=tuple(path for path, kind in found.items() if kind == "trace"),
        snapshots=tuple(path for path, kind in found.items() if kind == "snapshot"),
        left_out=left_out,
    )


def file_kind(path: Path) -> FileKind | None:
    """Say what a file is by its first bytes, plain or gzip-compressed; None where it is neither, or not readable."""
    try:
        # A pipe would wait for a writer, and its bytes can be read only once.
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            head = stream.read(_PACKED_HEAD_BYTES)
            if head.startswith(_GZIP):
                head = zlib.decompressobj(_GZIP_WINDOW).decompress(head, _HEAD_BYTES)
            else:
                head += stream.read(_HEAD_BYTES - len(head))
    except (OSError, zlib.error):
        return None
    head = head.removeprefix(codecs.BOM_UTF8)
    if head.startswith(_PICKLE):
        return "snapshot" if any(word in head for word in _SNAPSHOT_WORDS) else None
    begin = head.lstrip()[:1]
    if begin in _TRACE_WORDS and (path.name.endswith(_TRACE_NAMES) or _TRACE_WORDS[begin] in head):
        return "trace"
    # The oldest protocols of pickle are text: a dictionary or a list, and the keys as they are.
    return "snapshot" if head[:2] in {b"(d", b"(l", b"}q", b"]q"} and b"segments" in head else None


def _named(path: Path) -> FileKind:
    """Return the kind of a single named file.

    Raises:
        ArtifactError: it is missing, may not be read, can be read only once, or is neither a trace nor a snapshot.
    """
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
        if is_regular:
            path.open("rb").close()
    except PermissionError as error:
        raise ArtifactError(f"{path}: may not be read by you; ask its owner, or copy it") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path}: there is no such file or directory; give a run's log directory, a trace or a snapshot"
        ) from error
    if not is_regular:
        raise ArtifactError(
            f"{path}: is a pipe or a device, and a file is read several times; write it into a file first"
        )
    kind = file_kind(path)
    # What a broken file of that name should have been is known: its reader says what is wrong with it.
    if kind is None and path.name.endswith(_TRACE_NAMES):
        return "trace"
    if kind is None and path.name.endswith((".pickle", ".pickle.gz")):
        return "snapshot"
    if kind is None:
        raise ArtifactError(
            f"{path}: is neither a trace (JSON with traceEvents) nor a snapshot of the CUDA allocator (a pickle), "
            "plain or gzip; of a run name its log directory"
        )
    return kind


def _files_in(directory: Path) -> tuple[dict[Path, FileKind], int]:
    """Return the traces and snapshots below a directory, and how many candidates were not looked at."""
    found: dict[Path, FileKind] = {}
    left_out = 0
    walk = Walk(directory)
    paths = (here / name for here, _, files in walk for name in files if os.path.splitext(name)[1] in _SUFFIXES)  # noqa: PTH122 of thousands
    for seen, path in enumerate(paths):
        if seen >= _MAX_FILES:
            left_out += 1
        elif (kind := file_kind(path)) is not None:
            found[path] = kind
    if not found:
        walk.check_whole(directory)
        raise ArtifactError(
            f"{directory}: no run is in it (a run has memprofiler/manifest.rank00000.jsonl), no trace and no snapshot; "
            "train with MemProfilerCallback, or give the log directory of a run"
        )
    return dict(sorted(found.items())), left_out
