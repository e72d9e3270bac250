"""``lightning-memprof run``: replace this process with a training program that records itself."""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence
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
    if not options.program:
        raise ArgumentError(None, "run: name a program, as in: lightning-memprof run train.py")
    return run(options.program, None if options.config is None else Path(options.config))


COMMAND: Final = Command(
    summary="run a training program unchanged, and record it",
    description=_DESCRIPTION,
    add_options=_add_options,
    execute=_execute,
    usage="lightning-memprof run [--config FILE] SCRIPT ARGS...",
)


def run(program: Sequence[str], config: Path | None = None) -> int:
    """Replace this process with the program; returns only where that fails.

    Args:
        program: ``[SCRIPT, *ARGS]`` or ``["-m", MODULE, *ARGS]``, passed on unchanged.
        config: a YAML file with the callback's options; None uses the defaults.

    Raises:
        ConfigError: the script, module or configuration is missing, or the configuration is not YAML.
    """
    from lightning_memprof.integration.registration import ENVIRONMENT_VARIABLE

    _check_program(program)
    os.environ[ENVIRONMENT_VARIABLE] = "1" if config is None else str(_checked_config(config))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *program])  # noqa: S606 the user's own  # nosec B606


def _check_program(program: Sequence[str]) -> None:
    if program[0].startswith("-m"):
        module = program[0][2:] or "".join(program[1:2])
        if not _importable(module.partition(".")[0]):
            raise ConfigError(f"run: no module named {module!r} in the current directory or the installed packages")
    elif not Path(program[0]).exists():
        raise ConfigError(f"run: no such script: {program[0]!r}; name a Python file, or a module with -m")


def _importable(package: str) -> bool:
    """Search for a top-level package as ``python -m`` does, the current directory first; imports nothing."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before


def _checked_config(config: Path) -> Path:
    from lightning_memprof.integration.registration import options_fault

    try:
        fault = options_fault(config)
    except OSError as error:
        raise ConfigError(f"run: --config {str(config)!r}: {error.strerror}; name a readable YAML file") from error
    if fault is not None:
        raise ConfigError(f"run: --config {str(config)!r} is not a YAML file of options: {fault}")
    return config.absolute()
