"""``lightning-memprof run``: become the user's program, with the recording switched on in its environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.options_file import options_fault
from lightning_memprof.integration.registration import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["run", "split_program"]


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the options of ``run`` from the program and everything after it.

    Returns:
        Our options, and what the interpreter is called with: ``[SCRIPT, ...]`` or ``["-m", MODULE, ...]``.

    """
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if not argument.startswith("-") or (argument.startswith("-m") and not argument.startswith("--")):
            return list(arguments[:index]), list(arguments[index:])
        index += 2 if argument == "--config" else 1
    return list(arguments), []


def run(program: Sequence[str], config: Path | None = None) -> int:
    """Replace this process by the program; comes back only where that cannot be done.

    Args:
        program: ``[SCRIPT, *ARGS]`` or ``["-m", MODULE, *ARGS]``, handed on as they are.
        config: a YAML file that says what to record; the defaults where none is given.

    Raises:
        ConfigError: there is no such script, module or configuration, or the configuration is no YAML.

    """
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
    """Look for a top-level package as ``python -m`` will, the current directory first; imports nothing."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before


def _checked_config(config: Path) -> Path:
    try:
        fault = options_fault(config)
    except OSError as error:
        raise ConfigError(
            f"run: --config {str(config)!r}: {error.strerror}; name a YAML file that can be read"
        ) from error
    if fault is not None:
        raise ConfigError(f"run: --config {str(config)!r} is no YAML of options: {fault}")
    return config.absolute()
