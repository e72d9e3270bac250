"""Remote storage through fsspec: URLs, a directory at a URL, and the process that copies files to it.

Clients of remote storage draw the waits between their attempts from Python's global random generator, and encrypt under
the GIL: in the training process the first would change the training, and the second would slow it down.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.naming import RUN_DIRECTORY, numbered, temporary_name
from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.artifacts.secrets import has_password, without_password
from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Remote",
    "Retries",
    "UploadWorker",
    "check_url",
    "claim_remote",
    "claim_url",
    "is_url",
    "main",
    "protocol_of",
    "url_path",
]

log = logging.getLogger(__name__)

LOCAL_PROTOCOLS: Final = frozenset({"file", "local"})
# An object is seen when it is whole; elsewhere a file is copied under another name and renamed.
OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "gsfs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf", "memory", "r2", "tos"}
)
CLAIM_NAME: Final = "claim.json"
MAX_RUNS: Final = 10_000
_CLOSE_SECONDS: Final = 10
# A training waits for it, on every rank. Clients try for half an hour to reach a host that does not answer.
_CLAIM_SECONDS: Final = 60.0
_CLAIM: Final = "--claim"
_END: Final = "\n"


@dataclass(frozen=True)
class Retries:
    """Attempts and waits of an upload.

    Attributes:
        attempts: attempts in a row for one file; file systems retry for some seconds themselves.
        first_wait_s: wait before the second attempt; doubled before each further one.
        pause_s: pause of all uploads after all attempts for a file have failed.
        patience_s: wait for one file at the end of a run, plus one second per MiB.

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
        """Call ``action``, again after each wait while it fails; raises the exception of the last attempt."""
        for wait in self.waits():
            try:
                return action()
            except Exception as error:  # noqa: BLE001 each file system has errors of its own
                log.debug("failed, trying again in %s s: %s", wait, error)
                time.sleep(wait)
        return action()


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL, as ``s3://bucket/runs``."""
    return "://" in text


def protocol_of(url: str) -> str:
    """Return the part before ``://``."""
    return url.partition("://")[0]


def url_path(url: str) -> str | None:
    """Return the path of a URL of this machine's own disk, None of any other."""
    return url.partition("://")[2] if protocol_of(url) in LOCAL_PROTOCOLS else None


def check_url(url: str) -> None:
    """Refuse a URL that nothing here can write to; does not ask the network.

    Raises:
        ConfigError: fsspec does not know the protocol, its package is not installed, or the URL contains a password.

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
        msg = f"{url}: {error}; install fsspec's package for {protocol}://, or use a local directory"
        raise ConfigError(msg) from error
    if not url.partition("://")[2].strip("/"):
        msg = f"{url}: has no path; add one, as in {protocol}://bucket/runs"
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
        """Copy a file to ``name`` below the URL, where it appears complete; raises fsspec's exceptions."""
        target = self.at(name)
        if protocol_of(self.url) in OBJECT_STORES:
            self.filesystem.put_file(str(local), target)
            return
        self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.filesystem.put_file(str(local), temporary_name(target))
        self.filesystem.mv(temporary_name(target), target)

    def create(self, name: str, data: bytes) -> bool:
        """Create a file; return False where it exists."""
        target = self.at(name)
        if protocol_of(self.url) not in OBJECT_STORES:
            self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self.filesystem.pipe_file(target, data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            # This file system has no exclusive create: another job may write the file at the same time.
            self.filesystem.pipe_file(target, data)
        return True

    def exists(self, name: str) -> bool:
        """Return whether a file or a directory has this name."""
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(self.at(name)))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self.filesystem.rm_file(self.at(name))

    def at(self, name: str) -> str:
        """Return the file system's own path of ``name``."""
        return f"{self.path}/{name}" if name else self.path


def claim_remote(remote: Remote, retries: Retries | None = None) -> int:
    """Claim the first free run directory below the URL; return its number, from 1.

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
        msg = f"{remote.url}: cannot be written ({type(error).__name__}: {error}); check the URL and its credentials"
        raise ArtifactError(msg) from error
    finally:
        random.setstate(state)
    if not claimed:
        msg = f"{remote.url}: has {MAX_RUNS} runs already; use another one"
        raise ArtifactError(msg)
    return claimed[0]


def claim_url(url: str, patience_s: float = _CLAIM_SECONDS) -> int:
    """Claim a run directory at a URL, as :func:`claim_remote` does.

    In a process of its own, but for ``memory://``, so that it can be given up.

    Args:
        url: the URL of the runs.
        patience_s: how long to wait for it.

    Returns:
        The number of the directory, from 1.

    Raises:
        ArtifactError: the URL cannot be written, or does not answer.

    """
    if protocol_of(url) == "memory":
        return claim_remote(Remote(url))
    try:
        done = subprocess.run(
            own_program(__name__, url, _CLAIM),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, timeout=patience_s, check=False,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        msg = f"{url}: cannot be written (no answer in {patience_s:g} s); check the URL and its network"
        raise ArtifactError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{url}: cannot be written (the process that should has died); check the URL and its credentials"
        raise ArtifactError(msg) from error
    if "error" in answer:
        raise ArtifactError(answer["error"])
    return int(answer["number"])


class UploadWorker:
    """Copies and removes files as :class:`Remote` does, in a separate process.

    The process is started by the first order, and again by the next one where it died. It ends with this one, however
    this one ends.

    Args:
        url: the URL of the runs.

    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def put(self, local: Path, name: str) -> None:
        """Copy a file.

        Raises:
            OSError: it could not be copied, with the reason.

        """
        self._order({"put": str(local), "name": name})

    def remove(self, name: str) -> None:
        """Remove a file.

        Raises:
            OSError: it could not be removed, with the reason.

        """
        self._order({"remove": name})

    def close(self, *, kill: bool = False) -> None:
        """End the process; ``kill`` where it does not answer. Further orders are refused."""
        self._closed = True
        self._end(kill=kill)

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        with suppress(OSError, ValueError):
            # The end of the pipe is not enough: a data loader's worker that was forked meanwhile holds it open.
            process.stdin.write(_END)  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]

    def _order(self, order: dict[str, str]) -> None:
        with self._lock:
            if self._closed:
                msg = f"the process that copies files to {self._url} was ended"
                raise OSError(msg)
            process = self._process = self._process or self._start()
            try:
                process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                answer = process.stdout.readline()  # type: ignore[union-attr]
            except (OSError, ValueError):
                answer = ""
            if not answer:
                self._end(kill=True)
                msg = f"the process that copies files to {self._url} has died"
                raise OSError(msg)
        if (error := json.loads(answer)) is not None:
            raise OSError(error)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            own_program(__name__, self._url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def main(url: str, *, claim: bool = False) -> None:
    """Do the orders of standard input, one JSON object a line, and answer each with null or what went wrong."""
    # Output of a storage client must not mix with the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        if claim:
            print(json.dumps(_claim(url)), file=answers)
            return
        # Ctrl-C and a scheduler's SIGTERM reach every process of a job; this one is needed until its parent is done.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        remote: Remote | None = None
        for line in sys.stdin:
            if line == _END:
                return
            order: dict[str, Any] = json.loads(line)
            error = None
            try:
                remote = remote or Remote(url)
                if "put" in order:
                    remote.put(Path(order["put"]), order["name"])
                else:
                    remote.remove(order["remove"])
            except Exception as failure:  # noqa: BLE001 each file system has errors of its own; the parent tells them
                error = f"{type(failure).__name__}: {failure}"
            print(json.dumps(error), file=answers, flush=True)


def _claim(url: str) -> dict[str, Any]:
    try:
        return {"number": claim_remote(Remote(url))}
    except MemprofError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main(sys.argv[1], claim=_CLAIM in sys.argv[2:])
