"""Where results go, and what becomes of a collector that fails."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lightning_memprof.artifacts.upload import check_url, is_url
from lightning_memprof.errors import ConfigError

__all__ = ["OutputOptions"]

_MANGLED: Final = re.compile(r"[a-z][a-z0-9+.:-]+:/[^/]")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where a run's results go.

    Args:
        dirpath: directory that gets the ``memprofiler`` directory; None is the Trainer's ``log_dir``. Also an fsspec
            URL (``s3://``, ``gs://``, ``memory://``): files are written locally and copied there in the background.
        summary: print the summary on rank 0 when the run has ended.
        loggers: hand the report's files to those of the Trainer's loggers that take files: TensorBoard (as text),
            MLflow, W&B.
        curves: draw what the pulse and the windows see while the run goes on: through the Trainer's loggers, if it has
            any, on rank 0, and for TensorBoard in a file of each rank in the run directory. Largest values, not
            samples, and none without a logger.
        report: have the page, ``report.html`` in the run directory, made at the end of fit, by a process of its own
            that rank 0 starts and nobody waits for.
        on_error: ``"warn"`` switches a failing collector off and lets training go on; ``"raise"`` is for tests.

    Raises:
        ConfigError: a value is not usable.

    """

    dirpath: str | Path | None = None
    summary: bool = True
    loggers: bool = False
    curves: bool = True
    report: bool = True
    on_error: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.on_error not in ("warn", "raise"):
            msg = f"OutputOptions(on_error={self.on_error!r}): must be 'warn' or 'raise'"
            raise ConfigError(msg)
        if self.dirpath is not None and not isinstance(self.dirpath, str | os.PathLike):
            msg = f"OutputOptions(dirpath={self.dirpath!r}): must be a path or a URL"
            raise ConfigError(msg)
        if isinstance(self.dirpath, Path) and _MANGLED.match(str(self.dirpath)):
            msg = f"OutputOptions(dirpath={self.dirpath!r}): a Path drops one '/' of a URL; give the URL as a string"
            raise ConfigError(msg)
        if isinstance(self.dirpath, str) and is_url(self.dirpath):
            check_url(self.dirpath)
