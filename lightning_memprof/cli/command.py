"""The interface of a command, and checks of options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.naming import parse_manifest_name, parse_pulse_name
from lightning_memprof.errors import ConfigError

__all__ = ["RUN_HELP", "TARGET_HELP", "Command", "check_output", "parse_numbers"]

RUN_HELP: Final = "a log_dir, its memprofiler directory, or a folder with one run"
TARGET_HELP: Final = f"{RUN_HELP}; or traces, snapshots, and folders of them"
_MOST_NUMBERS: Final = 1_000_000


def _no_options(parser: ArgumentParser) -> None:
    """Add nothing."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ``lightning-memprof``; its module defines it as ``COMMAND``.

    The list of commands imports every command module: a module imports numpy, rich, torch and the packages ``analysis``
    and ``report`` inside functions.

    Attributes:
        summary: one line in the list of commands.
        description: first paragraph of the command's own help.
        execute: runs the command with the parsed options; returns the exit code.
        add_options: adds the command's options to its parser.
        usage: replaces the generated usage line.

    """

    summary: str
    description: str
    execute: Callable[[Namespace], int]
    add_options: Callable[[ArgumentParser], None] = _no_options
    usage: str | None = None


def parse_numbers(option: str, text: str) -> list[int]:
    """Return the numbers in a text such as ``0,3-5``, in ascending order.

    Raises:
        ConfigError: the text is malformed, a range is reversed, or it has more than a million numbers.

    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (number.strip() for number in part.partition("-"))
        if not (first.isdecimal() and first.isascii()) or (dash and not (last.isdecimal() and last.isascii())):
            raise ConfigError(f"{option} {text!r}: {part.strip()!r} is not a number or a range, as in 0,3-5")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ConfigError(f"{option} {text!r}: the range {part.strip()!r} is reversed; write {high}-{low}")
        if high - low + len(found) > _MOST_NUMBERS:
            raise ConfigError(f"{option} {text!r}: has more than {_MOST_NUMBERS} numbers")
        found.update(range(low, high + 1))
    return sorted(found)


def check_output(out: Path, inputs: Iterable[Path], run_directory: Path | None = None) -> None:
    """Refuse an output path that would overwrite an input; links are followed.

    Args:
        out: the file to write.
        inputs: files that the command reads.
        run_directory: also protect the manifests and pulses in this directory.

    Raises:
        ConfigError: the output is one of the inputs.

    """
    protected = list(inputs)
    if run_directory is not None and any(
        parse(out.name) is not None for parse in (parse_manifest_name, parse_pulse_name)
    ):
        protected.append(run_directory / out.name)
    place = _resolved(out)
    if place is not None and any(_resolved(path) == place for path in protected):
        raise ConfigError(f"-o {out}: this is an input file; choose another name")


def _resolved(path: Path) -> Path | None:
    # A loop of links or a zero byte makes a path that cannot be a file.
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
