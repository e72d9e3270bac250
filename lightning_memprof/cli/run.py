"""``lightning-memprof run``: replace this process with a training program that records itself."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import Command
from lightning_memprof.errors import ConfigError

_DESCRIPTION: Final = """\
Run a training program unchanged and record every Trainer in it. The callback
and profiler attach automatically; those that the program configures take
precedence. Exit code, output and signals are those of the program.

  SCRIPT ARGS...        the program; everything after SCRIPT belongs to it
  -m MODULE ARGS...     the program as a module, as with python -m

several processes:
  lightning-memprof run -m torch.distributed.run --nproc-per-node 2 train.py
"""


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a YAML file with the callback's options")


def _execute(options: Namespace) -> int:
    """Replace this process with the program; returns only where that fails."""
    if not options.program:
        raise ArgumentError(None, "run: name a program, as in: lightning-memprof run train.py")
    from lightning_memprof.estimation.program import require_program
    from lightning_memprof.integration.registration import ENVIRONMENT_VARIABLE

    # Python names a module that is missing.
    require_program(options.program, "run")
    os.environ[ENVIRONMENT_VARIABLE] = "1" if options.config is None else str(_checked_config(Path(options.config)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options.program])  # noqa: S606 the user's own  # nosec B606


COMMAND: Final = Command(
    summary="run a training program unchanged, and record it",
    description=_DESCRIPTION,
    add_options=_add_options,
    execute=_execute,
    usage="lightning-memprof run [--config FILE] SCRIPT ARGS...",
)


def _checked_config(config: Path) -> Path:
    from lightning_memprof.integration.registration import options_fault

    try:
        fault = options_fault(config)
    except OSError as error:
        raise ConfigError(f"run: --config {str(config)!r}: {error.strerror}; name a readable YAML file") from error
    if fault is not None:
        raise ConfigError(f"run: --config {str(config)!r} is not a YAML file of options: {fault}")
    return config.absolute()
