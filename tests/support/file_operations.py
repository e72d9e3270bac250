"""What lies below a directory at every file operation of a program, and every way in which it could have been cut off.

A photograph is taken in front of each operation that Python tells of (opening for writing, renaming, removing, making
and removing directories) and of each ``os.write``. What was written since then by whatever means, torch's own code for
one, is the difference to the next photograph.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS: Final = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
# Torch's own code writes a trace under this name, and then renames it.
_NATIVE: Final = ".tmp"
# Lengths at which what was written is torn.
_CUTS: Final = 3


@dataclass(frozen=True)
class Operation:
    """One operation: ``kind`` is create, write, rename, remove, mkdir or rmdir; paths are relative, with ``/``."""

    kind: str
    path: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" -> {self.target}" if self.target else "")


@dataclass(frozen=True)
class Photograph:
    """What lay there when ``operation`` was about to happen; None is the end of the program."""

    files: Mapping[str, bytes]
    directories: frozenset[str]
    operation: Operation | None


@dataclass(frozen=True)
class State:
    """What a crash leaves: ``said`` tells which one it was."""

    said: str
    files: Mapping[str, bytes]
    directories: frozenset[str]

    def build(self, root: Path) -> None:
        """Put it below ``root``, which has to be empty."""
        for name in sorted(self.directories):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)


@dataclass
class Recorder:
    """Photographs what lies below ``root`` at every operation of this process there, until it ends.

    There is no way back: a process that was recorded is not to be used for anything else.
    """

    root: Path
    photographs: list[Photograph] = field(default_factory=list)
    _blobs: dict[bytes, bytes] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _busy: bool = False

    def start(self) -> None:
        """Begin."""
        written = os.write

        def write(fd: int, data: Any) -> int:
            self._photograph(Operation("write", self._relative(f"/proc/self/fd/{fd}") or ""))
            return written(fd, data)

        os.write = write
        sys.addaudithook(self._hear)

    def finish(self) -> list[Photograph]:
        """Take the last photograph."""
        with self._lock:
            self._busy = True
            self.photographs.append(self._now(None))
            return self.photographs

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if event in _EVENTS and not (event == "open" and not (values[2] or 0) & _WRITING):
            paths = [self._relative(value) for value in values[:2] if isinstance(value, (str, bytes, os.PathLike))]
            kind = {"open": "create"}.get(event, event.removeprefix("os."))
            if event == "open" and paths and paths[0] and not values[2] & os.O_TRUNC:
                kind = "append" if (self.root / paths[0]).exists() else kind
            if paths and paths[0]:
                target = paths[1] if event == "os.rename" else ""
                self._photograph(Operation(kind, paths[0], target or ""))

    def _photograph(self, operation: Operation) -> None:
        if operation.path:
            with self._lock:
                if not self._busy:
                    self._busy = True
                    try:
                        self.photographs.append(self._now(operation))
                    finally:
                        self._busy = False

    def _now(self, operation: Operation | None) -> Photograph:
        files: dict[str, bytes] = {}
        directories = set()
        for here, below, names in os.walk(self.root):
            base = Path(here)
            directories |= {(base / name).relative_to(self.root).as_posix() for name in below}
            for name in names:
                try:
                    content = (base / name).read_bytes()
                except FileNotFoundError:
                    continue
                files[(base / name).relative_to(self.root).as_posix()] = self._blobs.setdefault(content, content)
        return Photograph(files, frozenset(directories), operation)

    def _relative(self, path: Any) -> str | None:
        place = os.path.realpath(os.fsdecode(path)) if not isinstance(path, int) else ""
        inside = os.path.relpath(place, os.path.realpath(self.root)) if place else ".."
        return None if inside.startswith("..") else Path(inside).as_posix()


def crashes(photographs: Sequence[Photograph]) -> Iterator[State]:
    """Give every state in which a crash between two operations, or in the middle of a write, leaves the directory.

    Args:
        photographs: of one program, in order.

    """
    created: set[str] = set()
    for number, (now, then) in enumerate(pairwise(photographs)):
        if now.operation is not None:
            created |= {now.operation.path, now.operation.target}
        said = f"{number} before {now.operation}"
        yield State(said, now.files, now.directories)
        files, directories = _done(now)
        if files != dict(now.files) or directories != now.directories:
            yield State(f"{number} after {now.operation}", files, directories)
        for name in sorted(name for name, content in then.files.items() if files.get(name) != content):
            for length, part in _parts(files.get(name, b""), then.files[name]):
                native = _NATIVE if name not in files and name not in created else ""
                state = {**files, name + native: part}
                yield State(f"{number} {name}{native} torn at {length} after {now.operation}", state, directories)
    last = photographs[-1]
    yield State("at the end", last.files, last.directories)


def lost_data(photographs: Sequence[Photograph]) -> Iterator[tuple[str, State]]:
    """Give, by file, the states after a renaming whose name reached the disk and whose content did not."""
    for number, (now, then) in enumerate(pairwise(photographs)):
        operation = now.operation
        if operation is not None and operation.kind == "rename" and operation.target in then.files:
            # The manifest's line about it comes next, and may be on the disk as well.
            for later in photographs[number + 1 : number + 3]:
                files = {**later.files, operation.target: b""}
                yield operation.target, State(f"{number} empty after {operation}", files, later.directories)


def _done(photograph: Photograph) -> tuple[dict[str, bytes], frozenset[str]]:
    """Do the operation to what was there."""
    files, directories, operation = dict(photograph.files), set(photograph.directories), photograph.operation
    if operation is None or operation.kind in {"write", "append", "truncate"}:
        return files, frozenset(directories)
    if operation.kind == "create":
        files[operation.path] = b""
    elif operation.kind == "rename" and operation.path in files:
        files[operation.target] = files.pop(operation.path)
    elif operation.kind == "remove":
        files.pop(operation.path, None)
    elif operation.kind == "mkdir":
        directories.add(operation.path)
    elif operation.kind == "rmdir" and not any(name.startswith(operation.path + "/") for name in files):
        directories.discard(operation.path)
    return files, frozenset(directories)


def _parts(before: bytes, after: bytes) -> Iterator[tuple[int, bytes]]:
    if not after.startswith(before):
        return
    grown = len(after) - len(before)
    for length in sorted({min(max(1, grown * cut // _CUTS - (cut == _CUTS)), grown) for cut in range(1, _CUTS + 1)}):
        if length < grown:
            yield length, after[: len(before) + length]
