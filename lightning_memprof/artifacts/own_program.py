"""Starting modules of this package as separate processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Final

import lightning_memprof

__all__ = ["ignore_job_signals", "own_program"]

# `python -m` searches the directory that the training was started in first: a script there with the name of a needed
# module would run instead of it, and might train again.
_PROGRAM: Final = (
    "import sys, runpy; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; import lightning_memprof; "
    "sys.path.append(sys.path.pop(0)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package, as it is imported here, as a program."""
    package = Path(lightning_memprof.__file__).absolute().parent.parent
    return [sys.executable, "-c", _PROGRAM, str(package), module, *arguments]


def ignore_job_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, which reach every process of a job: the parent still needs this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
