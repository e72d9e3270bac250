"""The user's program: its command line, and running it in this process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.aliases import replaced_packages

_CLI: Final = ("fit",)
_CONFIG: Final = ("--config", "-c")


def is_cli(program: Sequence[str]) -> bool:
    """Return whether a program is a bare ``LightningCLI``."""
    return program[0] in _CLI and not Path(program[0]).is_file()


def require_program(program: Sequence[str], command: str = "estimate") -> None:
    """Check that the files of a program's command line exist.

    Args:
        program: ``[SCRIPT, *ARGS]``, ``["-m", MODULE, *ARGS]``, or ``["fit", *ARGS]`` for a bare ``LightningCLI``.
        command: the name of the command that runs it.

    Raises:
        MemprofError: one does not.
    """
    first = program[0]
    if first == "-m" and not program[1:]:
        raise MemprofError(f"{command}: -m needs the name of a module")
    if is_cli(program):
        words = [part for word in program for part in word.split("=", 1)]
        files = [file for option, file in pairwise(words) if option in _CONFIG]
    else:
        files = [] if first.startswith("-m") else [first]
    for file in files:
        if not Path(file).exists():
            raise MemprofError(f"{command}: {file}: no such file")
    if first.endswith((".yaml", ".yml")):
        raise MemprofError(f"{command}: {first} is not a program: give its script before fit --config {first}")


def run_program(program: Sequence[str]) -> None:
    """Run a program in this process, as Python would; ``pytorch_lightning`` in it is ``lightning.pytorch``.

    Args:
        program: as for :func:`require_program`.
    """
    argv = sys.argv
    first, rest = program[0], list(program[1:])
    with replaced_packages():
        try:
            if first.startswith("-m"):
                module, rest = (first[2:], rest) if first[2:] else (rest[0], rest[1:])
                sys.argv = [module, *rest]
                sys.path.insert(0, os.getcwd())  # noqa: PTH109 what python -m inserts
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            elif is_cli(program):
                from lightning.pytorch.cli import LightningCLI

                sys.argv = ["lightning", first, *rest]
                sys.path.insert(0, os.getcwd())  # noqa: PTH109 configurations name the user's own modules
                LightningCLI(save_config_callback=None)
            else:
                sys.argv = [first, *rest]
                sys.path.insert(0, str(Path(first).resolve().parent))
                runpy.run_path(first, run_name="__main__")
        finally:
            sys.argv = argv
