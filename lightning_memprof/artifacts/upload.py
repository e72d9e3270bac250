"""Uploads of a run to its URL: a separate process copies the files that a rank's manifest lists.

Storage clients draw the waits between their attempts from Python's global random generator, and encrypt under the GIL:
in the training process the first would change the training, and the second would slow it down.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from lightning_memprof.artifacts.naming import temporary_name
from lightning_memprof.artifacts.own_program import answers, ignore_job_signals, own_program
from lightning_memprof.artifacts.remote import Remote, protocol_of
from lightning_memprof.artifacts.secrets import masked
from lightning_memprof.logs import logger_of
from lightning_memprof.units import MIB

log = logger_of(__name__)

# How often the process looks for new files.
POLL_S: Final = 0.5
# A pulse grows by 100 bytes per step and is uploaded whole each time.
LIVE_PAUSE_S: Final = 30.0
# After Ctrl-C or SIGTERM: the first is ignored by then, and the second is followed by SIGKILL.
HURRY_S: Final = 10.0
# Wait for a store that did not answer before.
LAST_LOOK_S: Final = 1.0
# Files in a row that fail before the end of the run tries no more of them.
MAX_FAILURES: Final = 2
_CLOSE_S: Final = 10.0
_KILL_S: Final = 5.0

_FLUSH, _END = "flush", "end"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pauses and attempts of the uploads; storage clients retry for some seconds themselves.

    Attributes:
        first_pause_s: pause of all uploads after a failure; doubled after each further one.
        longest_pause_s: limit of this pause.
        attempts: attempts for the remaining files at the end of a run.
        patience_s: wait for one file at the end of a run, plus one second per MiB.
    """

    first_pause_s: float = 0.5
    longest_pause_s: float = 60.0
    attempts: int = 3
    patience_s: float = 300.0


class Mirror:
    """Copies the files of one rank to its URL as the manifest lists them, and removes those that the run removed.

    Args:
        root: local directory whose files have the same names below the URL.
        url: the URL.
        live: names of files that grow during the run, the manifest first; a copy of each follows finished files.
        pace: pauses and attempts.
        report: called with ``done=NAME``, ``error=TEXT, name=NAME`` and ``flushed=[NAMES]``, those not at the URL.
    """

    def __init__(self, root: Path, url: str, live: tuple[str, ...], pace: Pace, report: Callable[..., None]) -> None:
        self._root = root
        self._url = url
        self._live = live
        self._pace = pace
        self._report = report
        self._remote: Remote | None = None
        self._offset = 0
        self._pending: dict[str, None] = {}
        self._copied: dict[str, tuple[int, int] | None] = {}
        self._pause_s = 0.0
        self._resume = 0.0
        self._live_again = 0.0
        self._attempts = pace.attempts

    def run(self, orders: queue.SimpleQueue[str]) -> None:
        """Copy until ``end`` is ordered or this process has lost its parent; then try the remaining files once more."""
        parent = os.getppid()
        while True:
            try:
                order = orders.get(timeout=POLL_S)
            except queue.Empty:
                # A DataLoader worker that was forked from the parent may hold the pipe of the orders open.
                order = "" if os.getppid() == parent else _END
            if order == _FLUSH or os.getppid() != parent:
                self.flush()
            if order == _END:
                return
            self.look()
            self.copy_pending()

    def look(self) -> None:
        """Read the new rows of the manifest."""
        with suppress(OSError), (self._root / self._live[0]).open("rb") as manifest:
            manifest.seek(self._offset)
            rows = manifest.read()
            whole = rows.rpartition(b"\n")[0]
            self._offset += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                self._take(line)

    def copy_pending(self) -> None:
        """Copy files until one fails; behind them the growing files, at most every 30 s."""
        found = tuple(self._pending)
        if not found or time.monotonic() < self._resume or not all(map(self._copy, found)):
            return
        if time.monotonic() >= self._live_again:
            self._live_again = time.monotonic() + LIVE_PAUSE_S
            all(map(self._copy, self._live))

    def flush(self) -> None:
        """Copy everything, also files that were written again after they were copied."""
        self.look()
        changed = [name for name, state in self._copied.items() if _state(self._root / name) != state]
        self._pending |= dict.fromkeys((*changed, *self._live))
        self._pause_s = 0.0
        for attempt in range(self._attempts):
            time.sleep(self._pause_s if attempt else 0)
            failures = 0
            for name in tuple(self._pending):
                failures = 0 if self._copy(name) else failures + 1
                if failures == MAX_FAILURES:
                    break
            if not self._pending:
                break
        else:
            # The next flush only looks whether the store is back.
            self._attempts = 1
        self._report(flushed=list(self._pending))

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if row.get("kind") == "artifact":
            name = PurePosixPath(row["path"])
            # A file that the user sent elsewhere has an absolute path, and stays there.
            if not name.is_absolute() and ".." not in name.parts:
                self._pending[row["path"]] = None
        elif row.get("kind") == "removed":
            for name in row["paths"]:
                self._pending.pop(name, None)
                if self._copied.pop(name, None) is not None:
                    with suppress(Exception):  # a file too many is no reason to stop
                        self._connected().remove(name)

    def _copy(self, name: str) -> bool:
        path = self._root / name
        state = _state(path)
        if state is not None:
            try:
                self._put(path, name)
            except Exception as error:  # noqa: BLE001 each file system has errors of its own
                self._pause_s = min(2 * self._pause_s or self._pace.first_pause_s, self._pace.longest_pause_s)
                self._resume = time.monotonic() + self._pause_s
                if name in self._pending:
                    # Behind the others: the store may refuse only this one.
                    del self._pending[name]
                    self._pending[name] = None
                self._report(error=str(error) or type(error).__name__, name=name)
                return False
        self._pause_s = 0.0
        self._pending.pop(name, None)
        self._copied[name] = state
        self._report(done=name)
        return True

    def _put(self, path: Path, name: str) -> None:
        if name not in self._live:
            self._connected().put(path, name)
            return
        # It grows while it is read: the upload must not change on the way.
        copy = path.with_name(temporary_name(f"{path.name}.upload"))
        try:
            shutil.copyfile(path, copy)
            self._connected().put(copy, name)
        finally:
            copy.unlink(missing_ok=True)

    def _connected(self) -> Remote:
        self._remote = self._remote or Remote(self._url)
        return self._remote


class Uploads:
    """The uploads of one rank, as the training process sees them. Nothing here raises, and files need no call.

    A file that could not be copied stays where it is; it is tried again after a pause and at the end of the run. The
    process ends with this one, however this one ends. ``memory://`` is copied by a thread: no other process sees it.

    Args:
        root: local directory whose files have the same names below the URL.
        url: the URL.
        live: files that grow during the run, the manifest first.
        pace: pauses and attempts.

    Attributes:
        error: the last failure; None without one.
    """

    def __init__(self, root: Path, url: str, live: tuple[Path, ...], pace: Pace | None = None) -> None:
        self.error: str | None = None
        self._root = root
        self._url = url
        self._live = tuple(path.relative_to(root).as_posix() for path in live)
        self._pace = pace or Pace()
        self._patience_s = self._pace.patience_s
        self._done: set[str] = set()
        self._flushed: tuple[str, ...] = ()
        self._answered = threading.Event()
        self._progress = time.monotonic()
        self._has_given_up = False
        self._process: subprocess.Popen[str] | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = self._start()

    def hurry(self) -> None:
        """Wait only a few seconds for a store that does not answer: the program is ending."""
        self._patience_s = min(self._patience_s, HURRY_S)

    def settle(self, paths: Iterable[Path] = ()) -> list[str]:
        """Wait until every file is at the URL or has failed; return the names of those that are not there."""
        names = [path.relative_to(self._root).as_posix() for path in paths if path.is_relative_to(self._root)]
        # Only a moment for a store that did not answer before; an exception below, as of Ctrl-C, has the same effect.
        was_given_up, self._has_given_up = self._has_given_up, True
        if not self._thread.is_alive() and not was_given_up:
            self._thread = self._start()
        self._answered.clear()
        self._flushed, self._progress = self._live, time.monotonic()
        self._order(_FLUSH)
        # Ctrl-C amid Event.wait may become a RuntimeError, in time.sleep never.
        while not self._answered.is_set() and self._thread.is_alive():
            time.sleep(0.01)
            largest = max((_size(self._root / name) for name in names if name not in self._done), default=0)
            bound = LAST_LOOK_S if was_given_up else self._patience_s + largest / MIB
            if time.monotonic() - self._progress > bound:
                if not was_given_up:
                    log.warning("%s does not answer: files that are not there are kept in %s", self._url, self._root)
                break
        else:
            self._has_given_up = was_given_up
        return list(dict.fromkeys((*self._flushed, *(name for name in names if name not in self._done))))

    def finish(self, paths: Iterable[Path] = ()) -> list[str]:
        """Copy the growing files for the last time and end the process; return the names that are not at the URL."""
        left = self.settle(paths)
        self._order(_END)
        if (process := self._process) is not None:
            try:
                process.wait(0 if self._has_given_up else _CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                try:
                    process.wait(_KILL_S)
                except subprocess.TimeoutExpired:
                    # The kernel ends no process that waits for a disk; closing its pipe would wait for the reader.
                    return left
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        return left

    def _start(self) -> threading.Thread:
        if protocol_of(self._url) == "memory":
            mirror = Mirror(self._root, self._url, self._live, self._pace, self._hear)
            work = partial(mirror.run, self._orders)
        else:
            task = {"root": str(self._root), "url": self._url, "live": self._live, "pace": asdict(self._pace)}
            pipe = subprocess.PIPE
            try:
                command = own_program(__name__, json.dumps(task))
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            except OSError as error:
                self.error = str(error)
                return threading.Thread()
            self._process = process
            work = partial(self._listen, process)
        # A daemon: Ctrl-C during a wait for the network must end the program.
        thread = threading.Thread(target=work, name="memprof-upload", daemon=True)
        thread.start()
        return thread

    def _listen(self, process: subprocess.Popen[str]) -> None:
        with suppress(OSError, ValueError):
            for line in process.stdout or ():
                self._hear(**json.loads(line))

    def _hear(self, **message: Any) -> None:
        self._progress = time.monotonic()
        if "done" in message:
            self._done.add(message["done"])
        if "error" in message:
            name, error = message["name"], masked(message["error"])
            self._done.discard(name)
            if self.error is None:
                log.warning("%s/%s cannot be written (%s); its file is kept in %s", self._url, name, error, self._root)
            self.error = error
        if "flushed" in message:
            self._flushed = tuple(message["flushed"])
            self._answered.set()

    def _order(self, order: str) -> None:
        self._orders.put(order)
        if self._process is not None:
            with suppress(OSError, ValueError):
                print(order, file=self._process.stdin, flush=True)


def _state(path: Path) -> tuple[int, int] | None:
    """Return size and time of change, or None where there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    return (_state(path) or (0, 0))[0]


def main(task: str) -> None:
    """Mirror a rank; orders come from standard input, reports go to standard output, one per line."""
    ignore_job_signals()
    options = json.loads(task)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line.strip())
        orders.put(_FLUSH)
        orders.put(_END)

    with answers() as report:
        threading.Thread(target=read, daemon=True).start()
        pace = Pace(**options["pace"])
        Mirror(Path(options["root"]), options["url"], tuple(options["live"]), pace, report).run(orders)


if __name__ == "__main__":
    main(*sys.argv[1:])
