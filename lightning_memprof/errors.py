"""Every error that this package raises on purpose."""

from __future__ import annotations

__all__ = ["ArtifactError", "ConfigError", "MemprofError", "ReportError"]


class MemprofError(Exception):
    """Base of all errors of lightning-memprof: one line that names the value, the rule and the way out."""


class ConfigError(MemprofError, ValueError):
    """A value of the configuration cannot be used; raised before training starts."""


class ArtifactError(MemprofError):
    """A run directory or a file in it is missing, damaged or newer than this version can read."""


class ReportError(MemprofError):
    """A view of a run cannot be produced."""


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C: amid a wait of ``threading`` it becomes "release unlocked lock"."""
    return type(error) is RuntimeError and isinstance(error.__context__, KeyboardInterrupt) and "lock" in str(error)
