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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.errors import MemprofError
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from lightning_memprof.tensorboard.runs import FoundRun

# Each page is a busy process; more of them would compete with training.
MAX_PROCESSES: Final = 2
# Compressed size above which the oldest finished pages are dropped; a page takes about 0.5 MiB.
MAX_BYTES: Final = 64 * MIB
MAX_JOBS: Final = 128
GZIP_LEVEL: Final = 3
MAX_MESSAGE_CHARS: Final = 2000
# Training on this machine has priority.
NICENESS: Final = 10
# Progress interval within a file.
PROGRESS_BYTES: Final = 4 << 20

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


@dataclass
class Job:
    """Rendering of one page. ``page`` is gzip-compressed HTML; ``scripts`` holds the Base64 SHA-256 of its scripts."""

    state: Literal["waiting", "building", "ready", "failed"] = "waiting"
    message: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    page: bytes = b""
    scripts: Sequence[str] = ()

    def document(self, key: str) -> dict[str, Any]:
        """Return state and progress as a JSON object."""
        return {"key": key, "state": self.state, "message": self.message, "progress": self.progress}


class Pages:
    """Cache of requested pages; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._slots = threading.Semaphore(MAX_PROCESSES)

    def request(self, page: PageRequest, *, retry: bool = False) -> tuple[str, Job]:
        """Return the page's key and its job, started if there is none; ``retry`` restarts a failed job."""
        key = page.key
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (retry and job.state == "failed"):
                job = self._jobs[key] = Job()
                threading.Thread(target=self._run, args=(page, job), name="memprof-page", daemon=True).start()
            self._jobs.move_to_end(key)
            self._drop_oldest()
        return key, job

    def job(self, key: str) -> Job | None:
        """Return the job of a requested page, None if it is unknown or was dropped."""
        with self._lock:
            return self._jobs.get(key)

    def _drop_oldest(self) -> None:
        done = [key for key, job in self._jobs.items() if job.state in {"ready", "failed"}]
        total = sum(len(job.page) for job in self._jobs.values())
        # The client is about to read the page requested last.
        for key in done[:-1]:
            if total <= MAX_BYTES and len(self._jobs) <= MAX_JOBS:
                break
            total -= len(self._jobs.pop(key).page)

    def _run(self, page: PageRequest, job: Job) -> None:
        with self._slots:
            job.state = "building"
            try:
                _build(page, job)
            except Exception as error:  # noqa: BLE001 the tab shows it, and the server continues
                job.message, job.state = f"{type(error).__name__}: {error}", "failed"


def _build(page: PageRequest, job: Job) -> None:
    runs = [{"directory": str(run.directory), "top": str(run.top), "label": run.label} for run in page.runs]
    fields = {"runs": runs, "rank": page.rank, "window": page.window}
    process = subprocess.Popen(
        own_program(__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("the page process has no pipes")
        process.stdin.write(json.dumps(fields).encode())
        process.stdin.close()
        reader = threading.Thread(target=_read_messages, args=(process.stderr, job), daemon=True)
        reader.start()
        html = process.stdout.read()
        status = process.wait()
        reader.join()
    if status or not html:
        job.message = job.message or f"the page process exited with status {status}"
        job.state = "failed"
        return
    job.message = ""
    job.scripts = _hashes(html.decode("utf-8"))
    job.page = gzip.compress(html, GZIP_LEVEL)
    job.state = "ready"


def _read_messages(stream: IO[bytes], job: Job) -> None:
    """Read progress and errors as lines of JSON; any other line is Python's own error output."""
    for line in stream:
        try:
            message = json.loads(line)
        except ValueError:
            job.message = line.decode("utf-8", "replace").strip()[:MAX_MESSAGE_CHARS]
            continue
        if "error" in message:
            job.message = str(message["error"])[:MAX_MESSAGE_CHARS]
        else:
            job.progress = message


def _hashes(html: str) -> list[str]:
    """Return the distinct Base64 SHA-256 of the scripts that carry the nonce of the page's policy."""
    policy = _POLICY.search(html)
    if policy is None:
        return []
    texts = dict.fromkeys(text for nonce, text in _SCRIPT.findall(html) if nonce == policy[1])
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in texts]


def main() -> int:
    """Render the page that standard input requests to standard output; return 0, or 1 after reporting the error.

    Standard error has one JSON object per line: progress (``file``, ``done``, ``total`` in bytes) or a failure
    (``error``).
    """
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        page = _render(json.loads(sys.stdin.read()))
    except MemprofError as error:
        return _report_error(str(error))
    except Exception as error:  # noqa: BLE001 the tab shows it
        return _report_error(f"{type(error).__name__}: {error}")
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
        return render_document(comparison_document(compare(a, b)), {})
    directory, top, _ = runs[0]
    options = OpenOptions(rank=request.get("rank"), window=request.get("window"), below=top)
    with opened([str(directory)], options, _progress_writer()) as view:
        return to_html(view)


def _progress_writer() -> Callable[[Path, int, int], None]:
    reported: dict[Path, int] = {}

    def write(file: Path, done: int, total: int) -> None:
        if file not in reported or done - reported[file] >= PROGRESS_BYTES:
            reported[file] = done
            _send(file=file.name, done=done, total=total)

    return write


def _report_error(message: str) -> int:
    _send(error=message)
    return 1


def _send(**fields: object) -> None:
    sys.stderr.write(json.dumps(fields) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
