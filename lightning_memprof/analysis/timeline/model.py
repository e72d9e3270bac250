"""What one timeline is made of: sources, and events that did not come from a trace file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Source", "TimelineEvent"]


class TimelineEvent(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """An event that did not come from a trace file.

    Attributes:
        ph: what it is, in the letters of the Trace Event Format: ``X`` a slice, ``i`` an instant, ``C`` the value of
            a counter, ``s`` and ``f`` the two ends of an arrow.
        name: what a viewer writes on it; of a counter the name of its track.
        start_ns: Unix epoch time in ns, by the clock of the source's host.
        duration_ns: length of a slice in ns, 0 or more.
        process: the row of tracks that it stands in, below the source's label; empty for the label itself.
        thread: its track in that row; counters have a track by their name instead.
        cat: category, by which a viewer filters.
        id: ties the two ends of an arrow together; unique within the source, cat and name.
        args: what a viewer shows on a click; of a counter ``{"value": number}``, the number in base units.
    """

    ph: Literal["X", "i", "C", "s", "f"] = "X"
    name: str
    start_ns: int
    duration_ns: int = 0
    process: str = ""
    thread: str = ""
    cat: str = ""
    id: int | None = None
    args: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one process group's events come from: a trace file or ready events, one of the two.

    Sources with one label share their processes and tracks, so that the windows of a rank, and what was recorded beside
    its traces, stand together.

    Attributes:
        label: name of the process group, such as ``rank 3 · host``; empty: the names in the trace are kept as they are.
        sort: place of the group from the top, the global rank; groups of one place stand in the order of the sources.
        trace: a trace file in the Trace Event Format, plain or gzip-compressed.
        events: called to get the events, twice, so that they need not be held in memory; in any order.
        offset_ns: is added to every time, which aligns the clock of this source's host with the others'.
        span_ns: what of a trace is wanted, from and to, in ns by its own ``ts``; what reaches out of it is clipped,
            what lies outside is left out.
    """

    label: str
    sort: int = 0
    trace: Path | None = None
    events: Callable[[], Iterable[TimelineEvent]] | None = None
    offset_ns: int = 0
    span_ns: tuple[int, int] | None = None
