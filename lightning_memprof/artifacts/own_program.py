"""Starting modules of this package as separate processes."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lightning_memprof

# `python -m` searches the directory that the training was started in first: a script there with the name of a needed
# module would run instead of it, and might train again.
_PROGRAM: Final = (
    "import sys, runpy; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; import lightning_memprof; "
    "sys.path.append(sys.path.pop(0)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

# Source: prctl(2).
_PR_SET_PDEATHSIG: Final = 1


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package, as it is imported here, as a program.

    Raises:
        OSError: there is no interpreter; a frozen program would start itself again.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise OSError("this program has no Python interpreter to start")
    package = Path(lightning_memprof.__file__).absolute().parent.parent
    return [sys.executable, "-c", _PROGRAM, str(package), module, *arguments]


def ignore_job_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, which reach every process of a job: the parent still needs this one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Let Linux kill this process when its parent ends: one that is stopped or computes would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Raise Ctrl-C and other ends after the context: amid the start of a process, it would be lost and continue."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)
