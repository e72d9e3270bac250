"""The page at the end of a training, made by a process of its own that nobody waits for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import lightning_memprof
from lightning_memprof.report.written import PAGE_NAME

if TYPE_CHECKING:
    from lightning_memprof.artifacts.sink import RunPlace

__all__ = ["VARIABLE", "start_report"]

log = logging.getLogger(__name__)

VARIABLE: Final = "LIGHTNING_MEMPROF_REPORT"
"""Set to ``0``, no run of this environment has a page made, whatever ``Output(report=...)`` says."""

# It holds none of our pipes, which a caller would wait for, and none of our terminal, whose Ctrl-C is not for it. The
# shell ends at once, so the process is a child of nobody here: it may outlive the training, and leaves no zombie.
_DETACHED: Final = '"$@" </dev/null >/dev/null 2>&1 &'
# It is this package that writes the page, wherever the training found it; and no module of the directory that the
# training was started in, where a script may have the name of one that the page needs, and would train again.
_PROGRAM: Final = (
    "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; import lightning_memprof; "
    "sys.path.append(sys.path.pop(0)); from lightning_memprof.report.written import main; sys.exit(main())"
)
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
        package = Path(lightning_memprof.__file__).absolute().parent.parent
        command = [sys.executable, "-c", _PROGRAM, str(package), str(place.directory.absolute())]
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
