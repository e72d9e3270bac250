"""A trace as lanes of nested calls: each thread of the host and each stream of a device, in the order of time.

Kept are 20 bytes for each event; a lane that is not sorted costs about 80 more for each of its events while it is being
sorted.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from lightning_memprof.analysis.trace.nesting import nesting_order
from lightning_memprof.analysis.trace.reader import read_trace

__all__ = ["Call", "Lane", "Lanes", "read_lanes"]

_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
# Spans that cover lanes and are no calls in them.
_NOT_CALLS: Final = frozenset({"Trace", "gpu_user_annotation", "overhead", "ac2g", "async_gpu", "fwdbwd"})


class Call(NamedTuple):
    """The begin or the end of a call, in ns after the first event of the trace; ``name`` is a number."""

    is_begin: bool
    at_ns: int
    name: int


@dataclass(slots=True)
class Lane:
    """One thread, or one stream of a device: starts and ends in ns, and numbers of names."""

    title: str
    is_device: bool
    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("i"))

    def calls(self, origin_ns: int) -> Iterator[Call]:
        """Yield begins and ends in the order of time, each end with the begin that it closes.

        A call that outlives the one that it began in ends with it: what a lane does is one thing inside another.
        """
        stack: list[tuple[int, int]] = []
        for at in nesting_order(self.start, self.end):
            start, end, name = self.start[at] - origin_ns, self.end[at] - origin_ns, self.name[at]
            while stack and stack[-1][0] <= start:
                closed, closing = stack.pop()
                yield Call(is_begin=False, at_ns=closed, name=closing)
            if stack:
                end = min(end, stack[-1][0])
            yield Call(is_begin=True, at_ns=start, name=name)
            stack.append((end, name))
        while stack:
            closed, closing = stack.pop()
            yield Call(is_begin=False, at_ns=closed, name=closing)


@dataclass(slots=True)
class Lanes:
    """All lanes of a trace. ``names`` are by number."""

    names: list[str] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)

    @property
    def origin_ns(self) -> int:
        """When the first call of all began."""
        return min((min(lane.start) for lane in self.lanes if lane.start), default=0)

    @property
    def end_ns(self) -> int:
        """When the last one ended, after the origin."""
        return max((max(lane.end) for lane in self.lanes if lane.end), default=0) - self.origin_ns

    def own_times(self) -> Counter[tuple[str, ...]]:
        """Return ns by path: the lane, and the calls from the outermost to the one whose own time it is."""
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
        ArtifactError: the trace is missing, damaged or cut off.

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
                words = f"device {event.pid} stream {event.tid}" if is_device else f"thread {event.tid}"
                lane = lanes[key] = Lane(words, is_device)
                found.lanes.append(lane)
            number = names.setdefault(event.name, len(names))
            if number == len(found.names):
                found.names.append(event.name)
            start = event.start_ns
            lane.start.append(start)
            lane.end.append(start + max(event.duration_ns, 0))
            lane.name.append(number)
    return found
