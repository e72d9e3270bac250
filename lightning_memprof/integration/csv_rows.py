"""What was given to a logger that keeps it until it is saved, and that the disk may then not take.

Lightning saves a ``CSVLogger`` when the fit is torn down, and what this raises ends the fit: curves of ours may not be
the reason.
"""

from __future__ import annotations

from typing import Any

__all__ = ["save_rows", "take_back"]


def save_rows(logger: Any) -> None:
    """Have a ``CSVLogger`` save what it was given so far; other loggers keep nothing.

    Raises:
        Exception: what its ``save`` raises; what it was given is still kept.

    """
    if _keeps(logger) and getattr(logger.experiment, "metrics", None):
        logger.save()


def take_back(logger: Any, prefixes: tuple[str, ...]) -> None:
    """Take the rows of our curves out of what a ``CSVLogger`` keeps; those of the program stay."""
    rows = getattr(logger.experiment, "metrics", None) if _keeps(logger) else None
    if isinstance(rows, list):
        rows[:] = [row for row in rows if not any(prefix in name for name in row for prefix in prefixes)]


def _keeps(logger: Any) -> bool:
    return any(base.__name__ == "CSVLogger" for base in type(logger).__mro__)
