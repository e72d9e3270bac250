"""A process that copies files to a URL.

Clients of remote storage draw the waits between their attempts from Python's global random generator, and encrypt under
the GIL: in the training's process the first would change the training and the second slow it down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.artifacts.upload import Remote, claim_remote, protocol_of
from lightning_memprof.errors import ArtifactError, MemprofError

__all__ = ["UploadWorker", "claim_url", "main"]

_CLOSE_SECONDS: Final = 10
# A training waits for it, on every rank. Clients try for half an hour to reach a host that does not answer.
_CLAIM_SECONDS: Final = 60.0
_CLAIM: Final = "--claim"
_END: Final = "\n"


def claim_url(url: str, patience_s: float = _CLAIM_SECONDS) -> int:
    """Claim a run directory at a URL as :func:`~lightning_memprof.artifacts.upload.claim_remote` does.

    In a process of its own, but for ``memory://``, so that it can be given up.

    Args:
        url: where files go.
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
        msg = f"{url}: cannot be written (no answer in {patience_s:g} s); look at the URL and its network"
        raise ArtifactError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{url}: cannot be written (the process that should has died); look at the URL and its credentials"
        raise ArtifactError(msg) from error
    if "error" in answer:
        raise ArtifactError(answer["error"])
    return int(answer["number"])


class UploadWorker:
    """Copies and removes files as :class:`~lightning_memprof.artifacts.upload.Remote` does, in a process of its own.

    The process is started by the first order, and again by the next one where it died. It ends with this one, however
    this one ends.

    Args:
        url: where files go.

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
