"""How this package starts a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import lightning_memprof

__all__ = ["own_program"]

# `python -m` would look for every module in the directory that the training was started in first: a script there with
# the name of one that is needed would run instead of it, and perhaps train again.
_PROGRAM: Final = (
    "import sys, runpy; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; import lightning_memprof; "
    "sys.path.append(sys.path.pop(0)); runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package, the one that is imported here, as a program."""
    package = Path(lightning_memprof.__file__).absolute().parent.parent
    return [sys.executable, "-c", _PROGRAM, str(package), module, *arguments]
