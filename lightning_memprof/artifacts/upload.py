"""Files of a run at a URL: written locally first, then copied whole by a thread of their own."""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import shutil
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.naming import RUN_DIRECTORY, numbered, temporary_name
from lightning_memprof.artifacts.secrets import has_password, without_password
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightning_memprof.artifacts.upload_worker import UploadWorker

__all__ = ["Remote", "Retries", "Uploads", "check_url", "claim_remote", "is_url", "protocol_of", "url_path"]

log = logging.getLogger(__name__)

LOCAL_PROTOCOLS: Final = frozenset({"file", "local"})
# An object is seen when it is whole; elsewhere a file is copied under another name and renamed.
OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "gsfs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf", "memory", "r2", "tos"}
)
CLAIM_NAME: Final = "claim.json"
MAX_RUNS: Final = 10_000
# A pulse grows by 100 bytes per step and is uploaded whole each time.
LIVE_PAUSE_S: Final = 30.0
# Behind Ctrl-C or SIGTERM: the first is ignored by then, and the second is followed by SIGKILL.
HURRY_S: Final = 10.0
LAST_LOOK_S: Final = 1.0
# At the end of a run: after so many files in a row that could not be copied, the rest is not tried.
MAX_FAILURES: Final = 2


@dataclass(frozen=True)
class Retries:
    """How stubborn uploads are.

    Attributes:
        attempts: for one file, in a row; file systems try some seconds again themselves.
        first_wait_s: before the second attempt; doubled before each further one.
        pause_s: how long nothing is tried after a file has failed at all attempts; what comes meanwhile waits.
        patience_s: how long the end of a run waits for one file, and a second more for each MiB.

    """

    attempts: int = 3
    first_wait_s: float = 0.5
    pause_s: float = 60.0
    patience_s: float = 300.0

    def waits(self) -> Iterator[float]:
        """Yield the waits between the attempts, in seconds."""
        for number in range(self.attempts - 1):
            yield self.first_wait_s * 2**number

    def call(self, action: Callable[[], None]) -> None:
        """Do ``action``, again after each wait while it fails; raises what the last attempt raised."""
        for wait in self.waits():
            try:
                return action()
            except Exception as error:  # noqa: BLE001 each file system has errors of its own
                log.debug("failed, trying again in %s s: %s", wait, error)
                time.sleep(wait)
        return action()


def is_url(text: str) -> bool:
    """Say whether ``text`` names a place by protocol, as in ``s3://bucket/runs``."""
    return "://" in text


def protocol_of(url: str) -> str:
    """Return what stands before ``://``."""
    return url.partition("://")[0]


def url_path(url: str) -> str | None:
    """Return the path of a URL of this machine's own disk, None of any other."""
    return url.partition("://")[2] if protocol_of(url) in LOCAL_PROTOCOLS else None


def check_url(url: str) -> None:
    """Refuse a URL that nothing here can write to; does not ask the network.

    Raises:
        ConfigError: fsspec does not know the protocol, its package is not installed, or it tells a password.

    """
    from fsspec import get_filesystem_class

    if has_password(url):
        msg = (
            f"{without_password(url)}: has a password, a key or a token, which would appear in the run's files and in "
            "the list of processes; give it by the environment or by fsspec's configuration"
        )
        raise ConfigError(msg)
    protocol = protocol_of(url).partition("::")[0]
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        msg = f"{url}: {error}; install fsspec's package for {protocol}://, or give a local directory"
        raise ConfigError(msg) from error
    if not url.partition("://")[2].strip("/"):
        msg = f"{url}: names no place; give one, as in {protocol}://bucket/runs"
        raise ConfigError(msg)


class Remote:
    """A directory at an fsspec URL.

    Args:
        url: with the protocol; credentials and endpoints come from the environment and fsspec's own configuration.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is not installed.

    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        check_url(url)
        self.url = url.rstrip("/")
        filesystem, path = url_to_fs(self.url)
        self.filesystem: Any = filesystem
        self.path: str = str(path).rstrip("/")

    def put(self, local: Path, name: str) -> None:
        """Copy a file to ``name`` below the URL, where it appears when it is whole; raises what fsspec raises."""
        target = self.at(name)
        if protocol_of(self.url) in OBJECT_STORES:
            self.filesystem.put_file(str(local), target)
            return
        self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.filesystem.put_file(str(local), temporary_name(target))
        self.filesystem.mv(temporary_name(target), target)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that is not there yet; False where it is."""
        target = self.at(name)
        if protocol_of(self.url) not in OBJECT_STORES:
            self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self.filesystem.pipe_file(target, data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            # Between looking and writing another job could come: this file system cannot do better.
            self.filesystem.pipe_file(target, data)
        return True

    def exists(self, name: str) -> bool:
        """Say whether a file or a directory has this name."""
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(self.at(name)))

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is none the less gone."""
        with suppress(FileNotFoundError):
            self.filesystem.rm_file(self.at(name))

    def at(self, name: str) -> str:
        """Return the file system's own path of ``name``."""
        return f"{self.path}/{name}" if name else self.path


def claim_remote(remote: Remote, retries: Retries | None = None) -> int:
    """Claim the first run directory below the URL that no earlier run has; return its number, from 1.

    Raises:
        ArtifactError: the URL cannot be written, with the reason.

    """
    claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time_ns": time.time_ns()}).encode()
    claimed: list[int] = []

    def attempt() -> None:
        for number in range(1, MAX_RUNS):
            name = numbered(RUN_DIRECTORY, number)
            if not remote.exists(name) and remote.create(f"{name}/{CLAIM_NAME}", claim):
                claimed.append(number)
                return

    # Clients draw the waits between their attempts from the generator that the program may have seeded.
    state = random.getstate()
    try:
        (retries or Retries()).call(attempt)
    except Exception as error:
        msg = f"{remote.url}: cannot be written ({type(error).__name__}: {error}); look at the URL and its credentials"
        raise ArtifactError(msg) from error
    finally:
        random.setstate(state)
    if not claimed:
        msg = f"{remote.url}: holds {MAX_RUNS} runs; give another place"
        raise ArtifactError(msg)
    return claimed[0]


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
            from lightning_memprof.artifacts.upload_worker import UploadWorker

            # Another process has a memory of its own.
            self._remote = Remote(self.url) if protocol_of(self.url) == "memory" else UploadWorker(self.url)
        return self._remote


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
