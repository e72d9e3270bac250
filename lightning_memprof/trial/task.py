"""What a process of a trial is asked to do, and how it answers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

if TYPE_CHECKING:
    from lightning_memprof.compare.trial import Measured


SEED: Final = 20_251
_MOST_LINE: Final = 300


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """One run of the program.

    Attributes:
        directory: where its files go.
        steps: how many steps are measured, or recorded.
        remedies: as on the command line.
        turn: steps after which the process stops itself with all that it started, until it is continued; 0 never stops.
        samples: in a batch; 0 keeps the program's.
        host_limit_bytes: memory of the program's processes together, above which they are ended; 0 does not limit it.
        device_limit_bytes: memory that the device's allocator may take; 0 does not limit it.
        is_check: whether samples are seeded one by one and the final weights hashed, to compare trainings; such a run
            is not timed.
        is_recorded: whether the environment asks for a recording; the fit then ends in Lightning's own way.
    """

    directory: str
    steps: int
    remedies: tuple[str, ...] = ()
    turn: int = 0
    samples: int = 0
    host_limit_bytes: int = 0
    device_limit_bytes: int = 0
    is_check: bool = False
    is_recorded: bool = False


def result_path(directory: str | Path, rank: int | str) -> Path:
    """Return the file that rank 0 writes, or a rank with a problem."""
    return Path(directory) / f"measured-{rank}.json"


def end(task: Task, measured: Measured) -> NoReturn:
    """Write the result, and end the process without the program's own code or Python's cleanup.

    With a measurement it waits to be ended: a program that has started it must not continue before.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    while rank and not measured.problem:
        # Rank 0 may still receive from it, and its end ends all.
        signal.pause()
    path = result_path(task.directory, rank)
    # A process that the program has started may have trained, and the program ends after it.
    if not path.exists():
        partial = Path(f"{path}.partial")
        partial.write_bytes(msgspec.json.encode(measured))
        partial.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    while not measured.problem:
        signal.pause()
    os._exit(1)


def problem_of(error: Exception) -> str:
    """Return an exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a spawned rank the message is a whole traceback.
    line = "" if not lines else lines[-1] if any(line.startswith("Traceback (") for line in lines) else lines[0]
    return f"{type(error).__name__}: {line}"[:_MOST_LINE].removesuffix(": ")
