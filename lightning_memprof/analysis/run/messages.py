"""What a run says of its gaps: what is damaged, failed, could not be measured, or is to be known."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CollectorError", "Note", "Problem", "Unavailable"]


@dataclass(frozen=True)
class Problem:
    """A piece of the run that is missing or damaged, and what that means for the reader."""

    piece: str
    message: str
    rank: int | None = None


@dataclass(frozen=True)
class CollectorError:
    """A collector that failed and was switched off; the training went on without it."""

    rank: int
    collector: str
    where: str
    window: int | None
    message: str
    traceback: str


@dataclass(frozen=True)
class Unavailable:
    """What could not be measured, and why."""

    rank: int
    collector: str
    reason: str


@dataclass(frozen=True)
class Note:
    """A warning that the run left for its reader."""

    rank: int
    collector: str
    message: str
