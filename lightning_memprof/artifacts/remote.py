"""Remote storage through fsspec: URLs, a directory at a URL, and the claim of a run directory."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_memprof.artifacts.naming import RUN_DIRECTORY, numbered, temporary_name
from lightning_memprof.artifacts.secrets import has_password, without_password
from lightning_memprof.errors import ArtifactError, ConfigError, MemprofError

LOCAL_PROTOCOLS: Final = frozenset({"file", "local"})
# An object appears when it is complete; elsewhere a file is copied under another name and renamed.
OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "gsfs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf", "memory", "r2", "tos"}
)
CLAIM_NAME: Final = "claim.json"
MAX_RUNS: Final = 10_000
# Every rank of a training run waits for it. Clients try for half an hour to reach a host that does not answer.
_CLAIM_SECONDS: Final = 60.0


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL, as ``s3://bucket/runs``."""
    return "://" in text


def protocol_of(url: str) -> str:
    """Return the part before ``://``."""
    return url.partition("://")[0]


def url_path(url: str) -> str | None:
    """Return the path of a URL of this machine's own disk, None of any other."""
    return url.partition("://")[2] if protocol_of(url) in LOCAL_PROTOCOLS else None


def local_path(directory: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a directory that a user passes; None for a remote URL.

    ``~`` is expanded, as in Lightning. Absolute, because the program may change its working directory afterwards.

    Raises:
        OSError: the path is relative, and the working directory was removed.
    """
    named = os.fspath(directory)
    local = url_path(named) if is_url(named) else named
    return None if local is None else Path(os.path.expanduser(local)).absolute()  # noqa: PTH111 unknown users stay


def check_url(url: str) -> None:
    """Refuse a URL without a file system that can write it; does not use the network.

    Raises:
        ConfigError: fsspec does not know the protocol, its package is not installed, or the URL contains a password.
    """
    from fsspec import get_filesystem_class

    if has_password(url):
        raise ConfigError(
            f"{without_password(url)}: has a password, a key or a token, which would appear in the run's files and in "
            "its log; give it by the environment or by fsspec's configuration"
        )
    protocol = protocol_of(url).partition("::")[0]
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url}: {error}; install fsspec's package for {protocol}://, or use a local directory"
        ) from error
    if not url.partition("://")[2].strip("/"):
        raise ConfigError(f"{url}: has no path; add one, as in {protocol}://bucket/runs")


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
        filesystem, path = url_to_fs(self.url, **_without_retries(protocol_of(self.url)))
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


def _without_retries(protocol: str) -> dict[str, Any]:
    """Return the options with which botocore does not try again: that draws from Python's random numbers.

    The training draws from them too. What fails is copied again at the next window.
    """
    if protocol not in {"s3", "s3a"}:
        return {}
    from fsspec.config import conf

    configured = conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {**configured, "retries": {"total_max_attempts": 1}}}


def claim_remote(remote: Remote) -> int:
    """Claim the first free run directory below the URL; return its number, from 1.

    Raises:
        ArtifactError: every number is taken; or an exception of fsspec.
    """
    claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time_ns": time.time_ns()}).encode()
    for number in range(1, MAX_RUNS):
        name = numbered(RUN_DIRECTORY, number)
        if not remote.exists(name) and remote.create(f"{name}/{CLAIM_NAME}", claim):
            return number
    raise ArtifactError(f"{remote.url}: has {MAX_RUNS} runs already; use another one")


def claim_url(url: str, patience_s: float = _CLAIM_SECONDS) -> int:
    """Claim a run directory at a URL, as :func:`claim_remote` does, in a thread that can be abandoned.

    Returns:
        The number of the directory, from 1.

    Raises:
        ArtifactError: the URL cannot be written, or does not answer.
        ConfigError: fsspec does not know the protocol, or its package is not installed.
    """
    answers: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def claim() -> None:
        try:
            answers.put(claim_remote(Remote(url)))
        except Exception as error:  # noqa: BLE001 raised below
            answers.put(error)

    threading.Thread(target=claim, name="memprof-claim", daemon=True).start()
    try:
        answer = answers.get(timeout=patience_s)
    except queue.Empty as error:
        raise ArtifactError(
            f"{url}: cannot be written (no answer in {patience_s:g} s); check the URL and its network"
        ) from error
    if isinstance(answer, MemprofError):
        raise answer
    if isinstance(answer, Exception):
        raise ArtifactError(
            f"{url}: cannot be written ({type(answer).__name__}: {answer}); check the URL and its credentials"
        ) from answer
    return answer
