"""The user's program: its command line, and running it in this process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Final

from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.aliases import replaced_packages

_CLI: Final = ("fit",)
_CONFIG: Final = ("--config", "-c")
_CLI_OPTIONS: Final = (
    "--config", "--trainer", "--model", "--data", "--optimizer", "--lr_scheduler", "--ckpt_path", "--weights_only",
    "--seed_everything", "--print_config", "--help",
)  # fmt: skip
OPTIONS: Final = (
    "--device",
    "--device-memory",
    "--devices",
    "--strategy",
    "--rank",
    "--batch-size",
    "--seq-len",
    "--batch-shape",
    "--what-if",
)
"""Options of ``lightning-memprof estimate`` that change what is estimated."""


def is_cli(program: Sequence[str]) -> bool:
    """Return whether a program is a bare ``LightningCLI``."""
    return program[0] in _CLI and not Path(program[0]).is_file()


def require_program(program: Sequence[str], command: str = "estimate") -> None:
    """Check that the files of a program's command line exist.

    Args:
        program: ``[SCRIPT, *ARGS]``, ``["-m", MODULE, *ARGS]``, or ``["fit", *ARGS]`` for a bare ``LightningCLI``.
        command: the name of the command that runs it.

    Raises:
        MemprofError: one does not, or a bare ``LightningCLI`` does not have an option.
    """
    first = program[0]
    if first == "-m" and not program[1:]:
        raise MemprofError(f"{command}: -m needs the name of a module")
    if is_cli(program):
        words = [part for word in program for part in word.split("=", 1)]
        files = [file for option, file in pairwise(words) if option in _CONFIG]
        names = [word.partition("=")[0].partition(".")[0].rstrip("+") for word in program if word.startswith("--")]
        for name in names:
            if name not in _CLI_OPTIONS:
                alike = get_close_matches(name, (*_CLI_OPTIONS, *OPTIONS), 1)
                known = f"did you mean {alike[0]}?" if alike else f"a LightningCLI has {', '.join(_CLI_OPTIONS[:5])}"
                raise MemprofError(f"{command}: {name}: unknown option; {known}")
    else:
        files = [] if first.startswith("-m") else [first]
    for file in files:
        if not Path(file).is_file():
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
