"""A process that copies files to a URL.

Clients of remote storage draw the waits between their attempts from Python's global random generator, and encrypt under
the GIL: in the training's process the first would change the training and the second slow it down.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_memprof.artifacts.upload import Remote

__all__ = ["UploadWorker", "main"]

_CLOSE_SECONDS: Final = 10


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
        """End the process; ``kill`` where it does not answer."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]

    def _order(self, order: dict[str, str]) -> None:
        with self._lock:
            process = self._process = self._process or self._start()
            try:
                process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                answer = process.stdout.readline()  # type: ignore[union-attr]
            except (OSError, ValueError):
                answer = ""
            if not answer:
                self.close(kill=True)
                msg = f"the process that copies files to {self._url} has died"
                raise OSError(msg)
        if (error := json.loads(answer)) is not None:
            raise OSError(error)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_memprof.artifacts.upload_worker", self._url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def main(url: str) -> None:
    """Do the orders of standard input, one JSON object a line, and answer each with null or what went wrong."""
    # Ctrl-C and a scheduler's SIGTERM reach every process of a job; this one is needed until its parent is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    remote: Remote | None = None
    for line in sys.stdin:
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
        print(json.dumps(error), flush=True)  # noqa: T201 the answer


if __name__ == "__main__":
    main(sys.argv[1])
