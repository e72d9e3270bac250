"""Programs that the scores run: the command line of the package, and its pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

COMMAND: Final = Path(sys.executable).parent / "lightning-memprof"
LIMIT_S: Final = 600
# Two threads that spin while they wait make a step ten times as long where another process has a core.
ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}


def command(*arguments: str, directory: Path) -> str:
    """Run the command line in a directory and give its standard output; raise with its last lines if it fails."""
    return _output([str(COMMAND), *arguments], directory)


def shown(target: Path) -> dict[str, Any]:
    """Give what ``lightning-memprof show TARGET --format json`` prints, without starting a program."""
    from lightning_memprof.cli.command import infrequent_gc
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.printers.json import to_json

    with infrequent_gc(), opened([str(target)]) as view:
        return to_json(view)


def recorded(script: str, name: str, directory: Path, *, is_healthy: bool) -> str:
    """Run a training with the profiler in a directory and give all that it printed, the page at its end included."""
    healthy = ["--healthy"] if is_healthy else []
    return _output([str(COMMAND), "run", script, name, *healthy], directory, errors=subprocess.STDOUT)


def _output(program: list[str], directory: Path, *, errors: int = subprocess.PIPE) -> str:
    ended = subprocess.run(
        program,
        cwd=directory,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise ValueError(f"{program[1]} ended with {ended.returncode}: {(ended.stderr or ended.stdout)[-600:]}")
    return ended.stdout
