"""Pages of runs, each made once for a state of its runs, by processes of their own."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import subprocess
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.tensorboard.runs import FoundRun

__all__ = ["Asked", "Job", "Pages"]

# Each is a process that computes; more at once would take the machine from a training.
AT_ONCE: Final = 2
# Of finished pages the oldest are forgotten beyond this, packed; one takes half a MiB.
MOST_BYTES: Final = 64 * MIB
MOST_JOBS: Final = 128
LEVEL: Final = 3
MOST_MESSAGE: Final = 2000

# Those that the page's own policy lets run, and no others: what a name of the run made would have no number.
_POLICY: Final = re.compile(r"script-src (?:'|&#39;)nonce-([\w-]+)")
_SCRIPT: Final = re.compile(r"<script nonce=\"([\w-]+)\"[^>]*>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True)
class Asked:
    """What page is asked for: of one run, or two to be compared; ``state`` is what its runs were when it was asked."""

    runs: tuple[FoundRun, ...]
    rank: int | None = None
    window: int | None = None
    state: str = ""

    @property
    def key(self) -> str:
        """What the finished page is asked for by."""
        asked = [[run.id for run in self.runs], self.rank, self.window, self.state]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]


@dataclass
class Job:
    """A page that is made. ``page`` is HTML, packed by gzip; ``scripts`` are the SHA-256 of its scripts, in Base64."""

    state: Literal["waiting", "building", "ready", "failed"] = "waiting"
    message: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    page: bytes = b""
    scripts: Sequence[str] = ()

    def document(self, key: str) -> dict[str, Any]:
        """Return how far it is, as JSON."""
        return {"key": key, "state": self.state, "message": self.message, "progress": self.progress}


class Pages:
    """The pages that were asked for. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._slots = threading.Semaphore(AT_ONCE)

    def ask(self, asked: Asked, *, again: bool = False) -> tuple[str, Job]:
        """Return the page's key and its job, which is begun where there is none; ``again`` tries a failed one anew."""
        key = asked.key
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (again and job.state == "failed"):
                job = self._jobs[key] = Job()
                threading.Thread(target=self._make, args=(asked, job), name="memprof-page", daemon=True).start()
            self._jobs.move_to_end(key)
            self._forget()
        return key, job

    def job(self, key: str) -> Job | None:
        """Return the job of a page that was asked for, None where there is none, or not any more."""
        with self._lock:
            return self._jobs.get(key)

    def _forget(self) -> None:
        done = [key for key, job in self._jobs.items() if job.state in {"ready", "failed"}]
        total = sum(len(job.page) for job in self._jobs.values())
        # The one that was asked for last is about to be read.
        for key in done[:-1]:
            if total <= MOST_BYTES and len(self._jobs) <= MOST_JOBS:
                break
            total -= len(self._jobs.pop(key).page)

    def _make(self, asked: Asked, job: Job) -> None:
        with self._slots:
            job.state = "building"
            try:
                _build(asked, job)
            except Exception as error:  # noqa: BLE001 the tab shows it, and the server continues
                job.message, job.state = f"{type(error).__name__}: {error}", "failed"


def _build(asked: Asked, job: Job) -> None:
    runs = [{"directory": str(run.directory), "top": str(run.top), "label": run.label} for run in asked.runs]
    words = {"runs": runs, "rank": asked.rank, "window": asked.window}
    process = subprocess.Popen(
        own_program("lightning_memprof.tensorboard.page_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("a process without its pipes")
        process.stdin.write(json.dumps(words).encode())
        process.stdin.close()
        hearing = threading.Thread(target=_hear, args=(process.stderr, job), daemon=True)
        hearing.start()
        html = process.stdout.read()
        status = process.wait()
        hearing.join()
    if status or not html:
        job.message = job.message or f"the process that makes the page ended with {status}"
        job.state = "failed"
        return
    job.message = ""
    job.scripts = _hashes(html.decode("utf-8"))
    job.page = gzip.compress(html, LEVEL)
    job.state = "ready"


def _hear(stream: IO[bytes], job: Job) -> None:
    """Take what the process says: lines of JSON; anything else is what Python itself says when it fails."""
    for line in stream:
        try:
            said = json.loads(line)
        except ValueError:
            job.message = line.decode("utf-8", "replace").strip()[:MOST_MESSAGE]
            continue
        if "error" in said:
            job.message = str(said["error"])[:MOST_MESSAGE]
        else:
            job.progress = said


def _hashes(html: str) -> list[str]:
    """Return the SHA-256 of the scripts that carry the number of the page's own policy, each once."""
    policy = _POLICY.search(html)
    if policy is None:
        return []
    texts = dict.fromkeys(text for nonce, text in _SCRIPT.findall(html) if nonce == policy[1])
    return [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in texts]
