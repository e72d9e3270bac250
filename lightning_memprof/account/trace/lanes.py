"""Lanes of a trace: the calls of threads and of streams of devices, for flame graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from lightning_memprof.read.trace.columns import DEVICE_KINDS, Kind, read_columns
from lightning_memprof.read.trace.intervals import Column, nest


class Call(NamedTuple):
    """The begin or the end of a call, in ns after the first event of the trace; ``name`` is a number."""

    is_begin: bool
    at_ns: int
    name: int


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One thread, or one stream of a device: ``(n,)`` starts and ends in ns, and numbers of names."""

    title: str
    starts: Column
    ends: Column
    names: Column

    def calls(self) -> Iterator[Call]:
        """Yield begins and ends in the order of time, each end with the begin that it closes.

        A call that outlasts the call that it began in ends with it: a lane is calls inside calls.
        """
        order, *nesting = nest(self.starts, self.ends, slack=None)
        parents, ends, starts, names = (column.tolist() for column in (*nesting, self.starts, self.names))
        opened: list[int] = []
        for at in (*order.tolist(), None):
            around = -1 if at is None else parents[at]
            while opened and opened[-1] != around:
                closed = opened.pop()
                yield Call(is_begin=False, at_ns=ends[closed], name=names[closed])
            if at is not None:
                yield Call(is_begin=True, at_ns=starts[at], name=names[at])
                opened.append(at)


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """All lanes of a trace, in ns after the first call. ``names`` are by number."""

    names: tuple[str, ...]
    lanes: tuple[Lane, ...]

    @property
    def end_ns(self) -> int:
        """End of the last call."""
        return max((int(lane.ends.max()) for lane in self.lanes), default=0)


def read_lanes(path: Path) -> Lanes:
    """Read a trace once.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    columns = read_columns(path)
    rows = np.flatnonzero(~np.isin(columns.kinds, (Kind.OVERHEAD, Kind.SPAN)))
    on_device = np.isin(columns.kinds[rows], DEVICE_KINDS)
    keys = 2 * columns.lanes[rows].astype(np.int64) + on_device
    origin = int(columns.starts[rows].min()) if len(rows) else 0
    found = []
    for key in dict.fromkeys(keys.tolist()):
        process, thread = columns.lane_of[key // 2]
        mine = rows[keys == key]
        found.append(
            Lane(
                title=f"device {process} stream {thread}" if key % 2 else f"thread {thread}",
                starts=columns.starts[mine] - origin,
                ends=columns.ends[mine] - origin,
                names=columns.names[mine].astype(np.int64),
            )
        )
    return Lanes(names=columns.name_of, lanes=tuple(found))
