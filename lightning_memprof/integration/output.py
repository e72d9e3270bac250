"""Where results go, and what becomes of a collector that fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_memprof.errors import ConfigError

__all__ = ["Output"]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a run's results go.

    Args:
        dirpath: directory that gets the ``memprofiler`` directory; None is the Trainer's ``log_dir``.
        summary: print the summary on rank 0 when the run has ended.
        loggers: hand the report's files to those of the Trainer's loggers that take files.
        on_error: ``"warn"`` switches a failing collector off and lets training go on; ``"raise"`` is for tests.

    Raises:
        ConfigError: a value is not usable.

    """

    dirpath: str | Path | None = None
    summary: bool = True
    loggers: bool = False
    on_error: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.on_error not in ("warn", "raise"):
            msg = f"Output(on_error={self.on_error!r}): must be 'warn' or 'raise'"
            raise ConfigError(msg)
