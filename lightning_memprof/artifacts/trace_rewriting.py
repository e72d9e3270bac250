"""A window's trace, from the JSON that torch wrote to the compressed file that stays: beside the training.

Looking through the text holds the GIL: what is large is done by a process of its own, which knows neither torch nor the
training.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from isal import igzip

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.artifacts.trace_categories import tensorboard_categories

__all__ = ["FAST_LEVEL", "main", "write_trace"]

FAST_LEVEL: Final = 1
# Starting a process costs about what rewriting this much does.
_SMALL_BYTES: Final = 8 << 20


def write_trace(raw: Path, target: Path) -> None:
    """Write what Kineto saved as ``raw`` to ``target``, as gzip, with the categories that TensorBoard reads.

    Raises:
        OSError: one of them cannot be read or written.

    """
    if raw.stat().st_size > _SMALL_BYTES and _by_process(raw, target):
        return
    _write(raw, target)


def _by_process(raw: Path, target: Path) -> bool:
    command = own_program(__name__, str(raw.absolute()), str(target.absolute()))
    quiet = subprocess.DEVNULL
    with suppress(OSError):
        return subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, check=False).returncode == 0
    return False


def _write(raw: Path, target: Path) -> None:
    with raw.open("rb") as source, igzip.open(target, "wb", compresslevel=FAST_LEVEL) as gz:  # type: ignore[no-untyped-call]
        tensorboard_categories(source, gz)


def main(raw: str, target: str) -> None:
    """Do it here."""
    # Ctrl-C and a scheduler's SIGTERM reach every process of a job; the trace is needed then most of all.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _write(Path(raw), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
