"""Pages of runs, cached per revision of their runs.

This module is also the separate process that renders a page, so that TensorBoard stays responsive and its memory does
not grow.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.errors import MemprofError, ReportError

if TYPE_CHECKING:
    from lightning_memprof.tensorboard.runs import FoundRun

# Each page is a busy process; more of them would compete with training.
MAX_PROCESSES: Final = 2
# The oldest finished pages above this number are dropped; a page takes about 0.5 MiB.
MAX_JOBS: Final = 128
GZIP_LEVEL: Final = 3
MAX_MESSAGE_CHARS: Final = 2000
# Training on this machine has priority.
NICENESS: Final = 10

# Only scripts with the nonce of the page's own policy run; markup injected through a name in the run has none.
_POLICY: Final = re.compile(r"script-src (?:'|&#39;)nonce-([\w-]+)")
_SCRIPT: Final = re.compile(r"<script nonce=\"([\w-]+)\"[^>]*>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True)
class PageRequest:
    """A page of one run, or of two to compare; ``state`` is the revision of its runs."""

    runs: tuple[FoundRun, ...]
    rank: int | None = None
    window: int | None = None
    state: str = ""

    @property
    def key(self) -> str:
        """Identifier of the finished page."""
        fields = [[run.id for run in self.runs], self.rank, self.window, self.state]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Page:
    """A rendered page: gzip-compressed HTML, and the Base64 SHA-256 of its scripts."""

    content: bytes
    scripts: Sequence[str]


class Pages:
    """Cache of requested pages; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Future[Page]] = OrderedDict()
        self._pool = ThreadPoolExecutor(MAX_PROCESSES, "memprof-page")

    def request(self, page: PageRequest, *, retry: bool = False) -> str:
        """Return the page's key; start to render it if nothing has, or if it failed and ``retry`` is set."""
        key = page.key
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (retry and job.done() and job.exception()):
                self._jobs[key] = self._pool.submit(_rendered, page)
            self._jobs.move_to_end(key)
            self._drop_oldest()
        return key

    def state(self, key: str) -> dict[str, Any] | None:
        """Return the state of a requested page as a JSON object; None if it is unknown or was dropped."""
        with self._lock:
            job = self._jobs.get(key)
        if job is None:
            return None
        if not job.done():
            return {"key": key, "state": "building" if job.running() else "waiting", "message": ""}
        error = job.exception()
        return {"key": key, "state": "failed" if error else "ready", "message": str(error or "")}

    def page(self, key: str) -> Page | None:
        """Return a page that is ready, else None."""
        with self._lock:
            job = self._jobs.get(key)
        return None if job is None or not job.done() or job.exception() else job.result()

    def _drop_oldest(self) -> None:
        done = [key for key, job in self._jobs.items() if job.done()]
        # The client is about to read the page requested last.
        for key in done[:-1][: max(len(self._jobs) - MAX_JOBS, 0)]:
            del self._jobs[key]


def _rendered(page: PageRequest) -> Page:
    """Render a page in a process of its own.

    Raises:
        ReportError: it cannot be made; with the process's reason.
    """
    runs = [{"directory": str(run.directory), "top": str(run.top), "label": run.label} for run in page.runs]
    fields = {"runs": runs, "rank": page.rank, "window": page.window}
    done = subprocess.run(own_program(__name__), input=json.dumps(fields).encode(), capture_output=True, check=False)
    if done.returncode or not done.stdout:
        # Python may have warned above the reason.
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ReportError(reason[:MAX_MESSAGE_CHARS] or f"the page process exited with status {done.returncode}")
    return Page(gzip.compress(done.stdout, GZIP_LEVEL), _hashes(done.stdout.decode("utf-8")))


def _hashes(html: str) -> list[str]:
    """Return the distinct Base64 SHA-256 of the scripts that carry the nonce of the page's policy."""
    policy = _POLICY.search(html)
    if policy is None:
        return []
    texts = dict.fromkeys(text for nonce, text in _SCRIPT.findall(html) if nonce == policy[1])
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in texts]


def main() -> int:
    """Render the page that standard input requests to standard output; return 0, or 1 with the error as a line."""
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        page = _render(json.loads(sys.stdin.read()))
    except Exception as error:  # noqa: BLE001 the tab shows it
        kind = "" if isinstance(error, MemprofError) else f"{type(error).__name__}: "
        sys.stderr.write(f"{kind}{' '.join(str(error).split())}\n")
        return 1
    # A file name that is not UTF-8 contains surrogates, which no encoding accepts.
    sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()
    return 0


def _render(request: Mapping[str, Any]) -> str:
    from lightning_memprof.report.opened import OpenOptions, opened
    from lightning_memprof.report.printers.html import render_document, to_html

    runs = [(Path(run["directory"]), Path(run["top"]), str(run["label"])) for run in request["runs"]]
    if len(runs) == 2:
        from lightning_memprof.compare.comparison import compare
        from lightning_memprof.compare.sides import run_side
        from lightning_memprof.read.run.confined import load_confined
        from lightning_memprof.report.sections.comparison import comparison_document

        a, b = (run_side(load_confined(directory, top), label) for directory, top, label in runs)
        return render_document(comparison_document(compare(a, b)))
    directory, top, _ = runs[0]
    options = OpenOptions(rank=request.get("rank"), window=request.get("window"), below=top)
    with opened([str(directory)], options) as view:
        return to_html(view)


if __name__ == "__main__":
    sys.exit(main())
