"""Gaps of a run: damaged files, failed collectors, missing measurements, and notes."""

from __future__ import annotations

from typing import Final

import msgspec

CUT: Final = "its last line is truncated: its process died while it wrote"


class Problem(msgspec.Struct, frozen=True):
    """A piece of the run that is missing or damaged, and the consequence for the reader."""

    piece: str
    message: str
    rank: int | None = None


class CollectorError(msgspec.Struct, frozen=True):
    """A collector that failed and was disabled; training continued without it."""

    rank: int
    collector: str
    where: str
    window: int | None
    message: str
    traceback: str


class Unavailable(msgspec.Struct, frozen=True):
    """A collector that could not record, and why."""

    rank: int
    collector: str
    reason: str


class Note(msgspec.Struct, frozen=True):
    """A warning of the run for its reader."""

    rank: int
    collector: str
    message: str
