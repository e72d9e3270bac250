"""Lanes of a trace: the calls of threads and of streams of devices, for flame graphs.

Events of a thread come in any order. An event takes 20 bytes, and its nesting about 60 more, a lane at a time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightning_memprof.read.trace.events import read_trace
from lightning_memprof.read.trace.intervals import Column, nest

_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
# Spans that cover lanes and are no calls in them.
_NOT_CALLS: Final = frozenset({"Trace", "gpu_user_annotation", "overhead", "ac2g", "async_gpu", "fwdbwd"})


def _longs() -> array[int]:
    return array("q")


def _numbers() -> array[int]:
    return array("i")


class Call(NamedTuple):
    """The begin or the end of a call, in ns after the first event of the trace; ``name`` is a number."""

    is_begin: bool
    at_ns: int
    name: int


class Lane(msgspec.Struct):
    """One thread, or one stream of a device: starts and ends in ns, and numbers of names."""

    title: str
    start: array[int] = msgspec.field(default_factory=_longs)
    end: array[int] = msgspec.field(default_factory=_longs)
    name: array[int] = msgspec.field(default_factory=_numbers)

    def calls(self, origin_ns: int) -> Iterator[Call]:
        """Yield begins and ends in the order of time, each end with the begin that it closes.

        A call that outlasts the call that it began in ends with it: a lane is calls inside calls.
        """
        order, parents, ends = nest(self.start, self.end, slack=None)
        opened: list[int] = []
        for at in order.tolist():
            while opened and opened[-1] != parents[at]:
                yield self._end(opened.pop(), ends, origin_ns)
            yield Call(is_begin=True, at_ns=self.start[at] - origin_ns, name=self.name[at])
            opened.append(at)
        while opened:
            yield self._end(opened.pop(), ends, origin_ns)

    def _end(self, at: int, ends: Column, origin_ns: int) -> Call:
        return Call(is_begin=False, at_ns=int(ends[at]) - origin_ns, name=self.name[at])


class Lanes(msgspec.Struct):
    """All lanes of a trace. ``names`` are by number."""

    names: list[str] = msgspec.field(default_factory=list)
    lanes: list[Lane] = msgspec.field(default_factory=list)

    @property
    def origin_ns(self) -> int:
        """Start of the first call of all lanes."""
        return min((min(lane.start) for lane in self.lanes if lane.start), default=0)

    @property
    def end_ns(self) -> int:
        """End of the last call, after the origin."""
        return max((max(lane.end) for lane in self.lanes if lane.end), default=0) - self.origin_ns

    def self_times(self) -> Counter[tuple[str, ...]]:
        """Return self time in ns by path: the lane, and the calls from the outermost to the one itself."""
        paths: Counter[tuple[str, ...]] = Counter()
        origin = self.origin_ns
        for lane in self.lanes:
            path: list[str] = [lane.title]
            before = 0
            for call in lane.calls(origin):
                if len(path) > 1:
                    paths[tuple(path)] += call.at_ns - before
                before = call.at_ns
                if call.is_begin:
                    path.append(self.names[call.name])
                else:
                    path.pop()
        return Counter({path: ns for path, ns in paths.items() if ns > 0})


def read_lanes(path: Path) -> Lanes:
    """Read a trace once.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    found = Lanes()
    names: dict[str, int] = {}
    lanes: dict[tuple[int | str, int | str, bool], Lane] = {}
    for batch in read_trace(path).batches():
        for event in batch:
            if event.ph != "X" or event.cat in _NOT_CALLS:
                continue
            is_device = event.cat in _DEVICE
            key = (event.pid, event.tid, is_device)
            lane = lanes.get(key)
            if lane is None:
                title = f"device {event.pid} stream {event.tid}" if is_device else f"thread {event.tid}"
                lane = lanes[key] = Lane(title=title)
                found.lanes.append(lane)
            number = names.setdefault(event.name, len(names))
            if number == len(found.names):
                found.names.append(event.name)
            start = event.start_ns
            lane.start.append(start)
            lane.end.append(start + max(event.duration_ns, 0))
            lane.name.append(number)
    return found
