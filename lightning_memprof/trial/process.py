"""One run of the program, in a process of its own that ends at its limits."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from lightning_memprof.artifacts.own_program import uninterrupted
from lightning_memprof.compare.trial import Measured
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation import aliases
from lightning_memprof.trial.attach import VARIABLE
from lightning_memprof.trial.task import Task, result_path
from lightning_memprof.units import format_bytes

CAN_STOP: Final = hasattr(os, "waitid")
"""Whether a stopped process is noticed: not on macOS before Python 3.13."""

_MOST_LINE: Final = 300
_LOG: Final = "output.txt"
# A look takes 50 µs, of a core that the program uses; a turn takes half a second.
_POLL_S: Final = 0.02
# Reading shared pages takes about a millisecond.
_LOOK_S: Final = 0.05


class LateError(MemprofError):
    """The time limit of all runs together has passed."""


class Process:
    """One run of the program, in a process group of its own.

    Args:
        program: its command line.
        task: the steps; its directory is made.
        time_limit_s: the longest wait for the end of a turn.
        environment: further environment variables.
        end_s: when all runs have to end, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        program: Sequence[str],
        task: Task,
        time_limit_s: float,
        environment: Mapping[str, str],
        end_s: float = math.inf,
    ) -> None:
        self.is_stopped = False
        self._place = Path(task.directory)
        self._program = program
        self._limit_s = time_limit_s
        self._end_s = end_s
        self._limit_bytes = task.host_limit_bytes
        self._ended_for = ""
        self._place.mkdir(parents=True, exist_ok=True)
        own = {
            VARIABLE: msgspec.json.encode(task).decode(),
            "WANDB_DIR": str(self._place),
            "MLFLOW_TRACKING_URI": str(self._place),
            # It would write where the user's experiments are.
            "WANDB_MODE": "offline",
            "LIGHTNING_MEMPROF": "1" if task.is_recorded else "",
            # Lightning's other package is also replaced in processes that the program starts.
            "PYTHONPATH": os.pathsep.join(filter(None, (aliases.FOLDER, os.environ.get("PYTHONPATH")))),
            # Imported modules of the user have no cache where they had none.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with (self._place / _LOG).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_memprof.trial", *program],
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_turn_ends(self) -> None:
        """Wait until the process has stopped itself or ended; end it at its limits.

        Raises:
            LateError: the time limit of all runs has passed.
        """
        deadline = time.monotonic() + self._limit_s
        next_look = 0.0
        done = result_path(self._place, 0)
        while self._process.poll() is None:
            # The parent of spawned ranks waits for more than their end.
            if done.exists():
                self.close()
                return
            if CAN_STOP and self._has_stopped():
                self.is_stopped = True
                return
            now = time.monotonic()
            if now > self._end_s:
                name = " ".join(self._program)
                raise LateError(
                    f"try: {name}: the time limit passed before the first run was recorded; raise --minutes"
                )
            if now > deadline:
                limit = f"{self._limit_s:g} s"
                self._end(f"did not reach its last step within {limit}: change --steps or --time-limit")
            elif self._limit_bytes and now > next_look:
                next_look = now + _LOOK_S
                if _used_bytes(self._process.pid) > self._limit_bytes:
                    self._end(f"needs more than {format_bytes(self._limit_bytes)}")
            time.sleep(_POLL_S)

    def _has_stopped(self) -> bool:
        # waitid reports each stop once, and leaves an end to poll; of a process that has just ended it raises.
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is not None
        except ChildProcessError:
            return False

    def _end(self, reason: str) -> None:
        self._ended_for = reason
        self.close()

    def resume(self) -> None:
        """Let a stopped process run its next turn."""
        self.is_stopped = False
        os.killpg(self._process.pid, signal.SIGCONT)

    def result(self) -> Measured:
        """Return the measurement of an ended process, or its problem."""
        if self._ended_for:
            return Measured(problem=self._ended_for)
        paths = self._place.glob(result_path("", "*").name)
        # After an exception in one rank, the others have exceptions of their own.
        first = min(paths, key=lambda path: path.stat().st_mtime_ns, default=None)
        if first is None:
            return Measured(problem=_failure(self._process.wait(), self._place / _LOG))
        return msgspec.json.decode(first.read_bytes(), type=Measured)

    def close(self) -> None:
        """End the process with all that it started: workers and other ranks outlive it."""
        self.is_stopped = False
        pid = self._process.pid
        with suppress(psutil.NoSuchProcess):
            # Those of torchrun have sessions of their own.
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def started(
    program: Sequence[str], task: Task, time_limit_s: float, environment: Mapping[str, str], end_s: float = math.inf
) -> Iterator[Process]:
    """Start a process that ends with the context; the arguments are those of :class:`Process`."""
    process: Process | None = None
    try:
        with uninterrupted():
            process = Process(program, task, time_limit_s, environment, end_s)
        yield process
    finally:
        if process is not None:
            process.close()


def run_task(program: Sequence[str], task: Task, time_limit_s: float, end_s: float = math.inf) -> Measured:
    """Run the program once; only the files in the task's directory remain."""
    with started(program, task, time_limit_s, {}, end_s) as process:
        return run_in_turns([process])[0]


def run_in_turns(processes: Sequence[Process]) -> list[Measured]:
    """Let one process run while the others are stopped, until all have ended; return their measurements."""
    for process in processes:
        process.until_turn_ends()
    while any(process.is_stopped for process in processes):
        for process in processes:
            if process.is_stopped:
                process.resume()
                process.until_turn_ends()
    return [process.result() for process in processes]


def _used_bytes(pid: int) -> int:
    """Return the memory of a process and of all that it started; pages that they share count once."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                found += getattr(memory, "pss", memory.uss)
    return found


def _failure(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:_MOST_LINE] if lines else "it printed nothing"
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{ended}: {last}"
