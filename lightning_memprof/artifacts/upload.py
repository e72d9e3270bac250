"""Uploads of a run to its URL: files are written locally, then copied whole by a thread and its worker process."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.naming import temporary_name
from lightning_memprof.artifacts.remote import Remote, Retries, UploadWorker, protocol_of
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Uploads"]

log = logging.getLogger(__name__)

# A pulse grows by 100 bytes per step and is uploaded whole each time.
LIVE_PAUSE_S: Final = 30.0
# Behind Ctrl-C or SIGTERM: the first is ignored by then, and the second is followed by SIGKILL.
HURRY_S: Final = 10.0
LAST_LOOK_S: Final = 1.0
# At the end of a run: after so many files in a row that could not be copied, the rest is not tried.
MAX_FAILURES: Final = 2


class Uploads:
    """Copies one rank's files to the run's URL during training.

    Nothing here raises. A file that could not be copied stays where it is; it is tried again after a pause and at the
    end of the run.

    Args:
        root: local directory whose files have the same names below the URL.
        url: where they go.
        live: files that grow during the run; a copy of each goes up behind finished ones.
        retries: how stubborn.

    """

    def __init__(self, root: Path, url: str, live: tuple[Path, ...] = (), retries: Retries | None = None) -> None:
        self.url = url
        self._root = root
        self._live = live
        self._retries = retries or Retries()
        self._remote: Remote | UploadWorker | None = None
        self._queue: queue.SimpleQueue[Path | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[Path, None] = {}
        self._thread: threading.Thread | None = None
        self._down_until = 0.0
        self._live_again = 0.0
        self._bearable = MAX_FAILURES
        self._progress = time.monotonic()
        self._patience_s = self._retries.patience_s
        self._given_up = False
        self.error: Exception | None = None

    def add(self, path: Path) -> None:
        """Take a file that is whole; one outside the root was sent elsewhere by the user and is left there."""
        if not path.is_relative_to(self._root) or ".." in path.relative_to(self._root).parts:
            return
        with self._lock:
            self._pending[path] = None
        self._start()
        self._queue.put(path)

    def remove(self, path: Path) -> None:
        """Take a file away from the URL too; where that fails it is left there."""
        with self._lock:
            self._pending.pop(path, None)
        self._start()
        self._queue.put(path)

    def left(self) -> list[Path]:
        """Return the files that are not at the URL yet."""
        with self._lock:
            return list(self._pending)

    def hurry(self) -> None:
        """Stop waiting for a place that does not answer: the program is ending."""
        self._patience_s = min(self._patience_s, HURRY_S)

    def settle(self) -> list[Path]:
        """Wait until every file is at the URL or was tried in vain; return those that are not there."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done)
            self._wait(done.is_set)
        return self.left()

    def finish(self) -> list[Path]:
        """Copy the growing files for the last time and end the thread; return what is not at the URL."""
        for path in self._live:
            if path.exists():
                self.add(path)
        left = self.settle()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            self._wait(lambda: not thread.is_alive())
        remote, self._remote = self._remote, None
        if remote is not None and not isinstance(remote, Remote):
            remote.close(kill=thread is not None and thread.is_alive())
        return left

    def _start(self) -> None:
        # The training thread and the sink's writer both add files: nothing would ever end a second thread.
        with self._lock:
            if self._thread is None:
                # A daemon: Ctrl-C during a wait for the network must end the program.
                self._thread = threading.Thread(target=self._work, name="memprof-upload", daemon=True)
                self._thread.start()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait; only for a moment more where that was in vain before, or where Ctrl-C has ended it."""
        given_up, self._given_up = self._given_up, True
        self._progress = time.monotonic()
        while not ready():
            time.sleep(0.01)
            largest = max((_size(path) for path in self.left()), default=0)
            bound = LAST_LOOK_S if given_up else self._patience_s + largest / MIB
            if time.monotonic() - self._progress > bound:
                if not given_up:
                    log.warning("%s does not answer: files that are not there are kept in %s", self.url, self._root)
                return
        self._given_up = given_up

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._flush(last=True)
                item.set()
            elif not item.exists():
                self._erase(item)
            elif time.monotonic() >= self._down_until:
                self._flush()
                self._copy_live()

    def _flush(self, *, last: bool = False) -> None:
        failures = 0
        for path in self.left():
            if not path.exists():  # the budget took it away again
                self._done(path)
            elif self._put(path, path):
                failures = 0
            elif (failures := failures + 1) == self._bearable or not last:
                self._bearable = 1 if last else self._bearable
                return

    def _put(self, path: Path, content: Path) -> bool:
        # One attempt is enough to see that what was down a moment ago is still down.
        retries = self._retries if time.monotonic() >= self._down_until else Retries(attempts=1)
        name = path.relative_to(self._root).as_posix()
        try:
            retries.call(lambda: self._reach().put(content, name))
        except Exception as error:  # noqa: BLE001 each file system has errors of its own; the training must not stop
            if self.error is None:
                log.warning("%s/%s cannot be written (%s); its file is kept in %s", self.url, name, error, self._root)
            self.error = error
            self._down_until = time.monotonic() + self._retries.pause_s
            with self._lock:
                # Behind the others: it may be this file that the place does not take.
                if path in self._pending:
                    del self._pending[path]
                    self._pending[path] = None
            return False
        self._down_until = 0.0
        self._done(path)
        return True

    def _done(self, path: Path) -> None:
        with self._lock:
            self._pending.pop(path, None)
        self._progress = time.monotonic()

    def _copy_live(self) -> None:
        now = time.monotonic()
        if not self._queue.empty() or now < max(self._down_until, self._live_again):
            return
        self._live_again = now + LIVE_PAUSE_S
        for path in self._live:
            copy = path.with_name(temporary_name(f"{path.name}.upload"))
            with suppress(OSError):
                try:
                    # It grows while it is read: what goes up must not change under way.
                    shutil.copyfile(path, copy)
                    self._put(path, copy)
                finally:
                    copy.unlink(missing_ok=True)

    def _erase(self, path: Path) -> None:
        try:
            self._reach().remove(path.relative_to(self._root).as_posix())
        except Exception as error:  # noqa: BLE001 a file too many is no reason to stop
            log.debug("%s is not removed from %s: %s", path.name, self.url, error)

    def _reach(self) -> Remote | UploadWorker:
        if self._remote is None:
            # Another process has a memory of its own.
            self._remote = Remote(self.url) if protocol_of(self.url) == "memory" else UploadWorker(self.url)
        return self._remote


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
