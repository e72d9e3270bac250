"""Uploads of a run to its URL, by one thread: at the end of each window, and at the end of the run."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from lightning_memprof.artifacts.naming import temporary_name
from lightning_memprof.artifacts.remote import Remote
from lightning_memprof.artifacts.secrets import masked
from lightning_memprof.logs import logger_of

log = logger_of(__name__)

PATIENCE_S: Final = 300.0
"""Longest wait for the copies at the end of a run."""
HURRY_S: Final = 10.0
"""The same after Ctrl-C or SIGTERM: the first is ignored by then, and the second is followed by SIGKILL."""

# A wait that is shorter needs no line.
_NOTICEABLE_S: Final = 2.0
_POLL_S: Final = 0.02
# The state of a file that does not exist.
_GONE: Final = (0, 0)


class Uploads:
    """The copies of one rank's files at its URL. Nothing here raises.

    A file that could not be copied is tried again with the next window and at the end of the run.

    Args:
        root: local directory whose files have the same names below the URL.
        url: the URL.
        growing: files that other threads may extend during a copy.
    """

    def __init__(self, root: Path, url: str, growing: Iterable[Path] = ()) -> None:
        self._root = root
        self._url = url
        self._growing = frozenset(self._names(growing))
        # The names of the files, and the event to set when each is at the URL or has failed.
        self._orders: queue.SimpleQueue[tuple[list[str], threading.Event] | None] = queue.SimpleQueue()
        self._remote: Remote | None = None
        self._copied: dict[str, tuple[int, int]] = {}
        self._errors: dict[str, str] = {}
        # A daemon: a copy that hangs must not keep the program.
        threading.Thread(target=self._serve, name="memprof-upload", daemon=True).start()

    def copy(self, paths: Iterable[Path]) -> threading.Event:
        """Copy the files that have changed, and remove earlier ones that are not among them; returns at once.

        Args:
            paths: all files of the run so far; those outside the root stay where they are.

        Returns:
            An event that is set when each file is at the URL or has failed.
        """
        done = threading.Event()
        self._orders.put((self._names(paths), done))
        return done

    def settle(self, paths: Collection[Path], until: float) -> Mapping[str, str]:
        """Copy as :meth:`copy` does, and wait.

        Args:
            paths: as of :meth:`copy`.
            until: end of the wait, a reading of ``time.monotonic``.

        Returns:
            The names of the files that are not at the URL, each with the reason.
        """
        done = self.copy(paths)
        began = time.monotonic()
        is_noted = False
        # Ctrl-C amid Event.wait may become a RuntimeError, in time.sleep never.
        while not done.is_set() and (now := time.monotonic()) < until:
            time.sleep(_POLL_S)
            if now - began > _NOTICEABLE_S and not is_noted:
                is_noted = True
                log.info("copying the last files to %s, for at most %d s", self._url, until - began)
        return {name: self._errors.get(name, "no answer") for name in self._missing(self._names(paths))}

    def close(self) -> None:
        """End the thread after the copy that it is making."""
        self._orders.put(None)

    def _names(self, paths: Iterable[Path]) -> list[str]:
        inside = (path.relative_to(self._root) for path in paths if path.is_relative_to(self._root))
        return [name.as_posix() for name in inside if ".." not in name.parts]

    def _missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._state(name) not in (_GONE, self._copied.get(name))]

    def _state(self, name: str) -> tuple[int, int]:
        """Return size and time of change of a file."""
        try:
            status = (self._root / name).stat()
        except OSError:
            return _GONE
        return status.st_size, status.st_mtime_ns

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            names, done = order
            for name in self._copied.keys() - names:
                del self._copied[name]
                with suppress(Exception):  # a file too many is no reason to stop
                    self._connected().remove(name)
            # Growing files follow those that they list.
            for name in sorted(self._missing(names), key=self._growing.__contains__):
                self._copy(name)
            done.set()

    def _copy(self, name: str) -> None:
        state = self._state(name)
        try:
            self._put(self._root / name, name)
        except Exception as error:  # noqa: BLE001 each file system has errors of its own
            if self._state(name) == _GONE:
                return  # its window was removed meanwhile
            text = masked(str(error) or type(error).__name__)
            if not self._errors:
                log.warning("%s/%s cannot be written (%s); its file is kept in %s", self._url, name, text, self._root)
            self._errors[name] = text
        else:
            self._copied[name] = state

    def _put(self, path: Path, name: str) -> None:
        if name not in self._growing:
            self._connected().put(path, name)
            return
        copy = path.with_name(temporary_name(f"{path.name}.upload"))
        try:
            shutil.copyfile(path, copy)
            self._connected().put(copy, name)
        finally:
            copy.unlink(missing_ok=True)

    def _connected(self) -> Remote:
        self._remote = self._remote or Remote(self._url)
        return self._remote
