"""Starting modules of this package as separate processes, and what they answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import lightning_memprof

# `python -m` searches the directory that the training was started in first: a script there with the name of a needed
# module would run instead of it, and might train again.
_PROGRAM: Final = (
    "import sys, runpy; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; import lightning_memprof; "
    "sys.path.append(sys.path.pop(0)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


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


@contextmanager
def answers() -> Iterator[Callable[..., None]]:
    """Provide a function that writes its keywords to standard output, as one line of JSON.

    Other output of this process, as of a storage client, goes to standard error. A caller that has ended is ignored.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)

        def answer(**values: Any) -> None:
            with suppress(OSError):
                print(json.dumps(values), file=stream, flush=True)

        yield answer
