"""The page at the end of a training, made by a process of its own that nobody waits for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.own_program import own_program
from lightning_memprof.report.written import PAGE_NAME

if TYPE_CHECKING:
    from lightning_memprof.artifacts.sink import RunPlace

__all__ = ["VARIABLE", "start_report"]

log = logging.getLogger(__name__)

VARIABLE: Final = "LIGHTNING_MEMPROF_REPORT"
"""Set to ``0``, no run of this environment has a page made, whatever ``OutputOptions(report=...)`` says."""

# It holds none of our pipes, which a caller would wait for, and none of our terminal, whose Ctrl-C is not for it. The
# shell ends at once, so the process is a child of nobody here: it may outlive the training, and leaves no zombie.
_DETACHED: Final = '"$@" </dev/null >/dev/null 2>&1 &'
_SECONDS: Final = 5


def start_report(place: RunPlace) -> bool:
    """Start making the page of a run that has ended; takes some milliseconds.

    Its failure is a line in ``report.log`` beside it.

    Returns:
        Whether it was started: not for a run at a URL, whose working copy is about to be removed, and not in a program
        that is no Python interpreter, which would run itself again.

    """
    if os.environ.get(VARIABLE) == "0":
        return False
    if place.url is not None or getattr(sys, "frozen", False) or not sys.executable:
        log.info("the page of this run is made with: lightning-memprof report %s", place.location)
        return False
    try:
        command = own_program("lightning_memprof.report.written", str(place.directory.absolute()))
        subprocess.run(
            ["/bin/sh", "-c", _DETACHED, "sh", *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the page cannot be made now (%s); later: lightning-memprof report %s", error, place.location)
        return False
    log.info("the page of this run will be at %s", place.directory / PAGE_NAME)
    return True
