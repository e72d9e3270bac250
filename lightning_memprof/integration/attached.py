"""The callback that the environment attaches to a program that knows nothing of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from jsonargparse import ArgumentParser

from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.options_file import options_fault

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import Trainer

__all__ = ["AttachedCallback", "load_options"]


class AttachedCallback(MemProfilerCallback):
    """A MemProfilerCallback that gives way to the program's own, and leaves the program's standard output alone."""

    def summary_file(self) -> TextIO | None:
        """Print to standard error: what the program prints may be read by another."""
        return sys.stderr

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether the program has a MemProfilerCallback itself."""
        return any(
            isinstance(other, MemProfilerCallback)
            and not isinstance(other, AttachedCallback)
            and not other.steps_aside(trainer)
            for other in trainer.callbacks  # type: ignore[attr-defined]
        )


def load_options(path: Path) -> dict[str, Any]:
    """Read arguments of :class:`MemProfilerCallback` from a YAML file.

    Raises:
        ConfigError: the file is missing or one of its values is not usable.

    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MemProfilerCallback)
    try:
        fault = options_fault(path)
        options = {} if fault else parser.instantiate_classes(parser.parse_path(str(path)))
    except Exception as error:
        raise _unusable(path, str(error)) from error
    if fault:
        raise _unusable(path, fault)
    return dict(options)


def _unusable(path: Path, reason: str) -> ConfigError:
    reason = " ".join(reason.split())
    return ConfigError(f"LIGHTNING_MEMPROF={path}: {reason}; give a YAML file of MemProfilerCallback's options, or 1")
