"""Gaps of a run: damaged files, failed collectors, missing measurements, and notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CUT: Final = "its last line is truncated: its process died while it wrote"


@dataclass(frozen=True)
class Problem:
    """A piece of the run that is missing or damaged, and the consequence for the reader."""

    piece: str
    message: str
    rank: int | None = None


@dataclass(frozen=True)
class CollectorError:
    """A collector that failed and was disabled; training continued without it."""

    rank: int
    collector: str
    where: str
    window: int | None
    message: str
    traceback: str


@dataclass(frozen=True)
class Unavailable:
    """A collector that could not record, and why."""

    rank: int
    collector: str
    reason: str


@dataclass(frozen=True)
class Note:
    """A warning of the run for its reader."""

    rank: int
    collector: str
    message: str
