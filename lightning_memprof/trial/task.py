"""What a process of a trial is asked to do, and the names under which it answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["VARIABLE", "Task", "result_path"]

VARIABLE: Final = "LIGHTNING_MEMPROF_TRIAL"
"""The environment variable with the task; ranks that Lightning starts inherit it."""


class Task(msgspec.Struct, kw_only=True, frozen=True):
    """One run of the program.

    Attributes:
        directory: where its files go.
        steps: how many steps are measured, or recorded.
        remedies: as on the command line.
        warmup: steps before them.
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
    warmup: int = 5
    turn: int = 0
    samples: int = 0
    host_limit_bytes: int = 0
    device_limit_bytes: int = 0
    is_check: bool = False
    is_recorded: bool = False


def result_path(directory: str | Path, rank: int | None = None) -> Path:
    """Return the file that a rank writes; None is this process's."""
    number = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    return Path(directory) / f"measured-{number}.json"
