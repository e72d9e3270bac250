"""The blocks of one device over a window: time of allocation and free, address, size, stack and category.

Traces and snapshots do not have categories. The category of a block is derived from the phase of the step in which it
was allocated, and from whether it outlives that phase; of a snapshot by ``categories``:

| allocated in | freed in the same phase | freed later |
|---|---|---|
| fetch of the batch | temporary | input |
| forward | temporary | activation |
| backward | temporary | gradient |
| optimizer | temporary | optimizer_state |
| between them | temporary | other |

Bytes live before the first event are `before`; `with_held` splits them by category.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.memory.categories import BEFORE, OUTLIVING, categories
from lightning_memprof.account.memory.columns import (
    DeviceMemory,
    MemoryColumns,
    MemoryTrace,
    Origin,
    Origins,
    counted_bytes,
    read_memory,
)
from lightning_memprof.account.memory.model import curve_corners
from lightning_memprof.account.snapshot.replay import Replay
from lightning_memprof.read.stacks import Frame, is_library

# These are not freed between steps.
STAYING: Final = ("parameter", "optimizer_state")
# In stacking order, the longest-lived at the bottom.
KINDS: Final = (BEFORE, "parameter", "optimizer_state", "gradient", "activation", "input", "other", "temporary")
_AFTER_POINT: Final = {
    "step_start": "data_wait",
    "batch_start": "forward",
    "after_forward": "forward",
    "before_backward": "backward",
    "after_backward": "optimizer",
    "before_optimizer_step": "optimizer",
}
# Frames shown of a stack, innermost first.
_FRAMES: Final = 6


class BlockLives(msgspec.Struct):
    """The blocks of one device in columns. Times are Unix ns if `is_timed`, otherwise event numbers.

    Attributes:
        device: `cpu`, `cuda:0`, ...
        is_timed: whether the events have times.
        start: time of the first event.
        end: time of the last event.
        before_bytes: bytes allocated before the window, without `held_before`.
        freed_before: time and bytes of each free of a block allocated before the window.
        held_before: bytes allocated before the window by category, where another collector counted them.
        knows_before: whether the bytes allocated before the window are known.
        born: time of the allocation.
        died: time of the free; `end + 1` for a block live at the end.
        address: address of the block.
        size: size of the block in bytes.
        kind: index in `KINDS`.
        stack: index in `stacks`.
        stacks: texts of the stacks.
    """

    device: str
    is_timed: bool = True
    start: int = 0
    end: int = 0
    before_bytes: int = 0
    freed_before: list[tuple[int, int]] = msgspec.field(default_factory=list)
    held_before: Mapping[str, int] = msgspec.field(default_factory=dict)
    knows_before: bool = True
    born: array[int] = msgspec.field(default_factory=lambda: array("q"))
    died: array[int] = msgspec.field(default_factory=lambda: array("q"))
    address: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    size: array[int] = msgspec.field(default_factory=lambda: array("q"))
    kind: array[int] = msgspec.field(default_factory=lambda: array("b"))
    stack: array[int] = msgspec.field(default_factory=lambda: array("i"))
    stacks: list[str] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        """Return the count of blocks."""
        return len(self.size)

    def at(self, positions: Iterable[int]) -> BlockLives:
        """Return the blocks at the given positions, in that order."""
        chosen = list(positions)

        def picked(column: array[int]) -> array[int]:
            return array(column.typecode, [column[i] for i in chosen])

        return replace(
            self,
            born=picked(self.born),
            died=picked(self.died),
            address=picked(self.address),
            size=picked(self.size),
            kind=picked(self.kind),
            stack=picked(self.stack),
        )

    def add(self, life: tuple[int, int, int, int], kind: str, stack: int) -> None:
        """Append a block: born, died, address, size."""
        for column, value in zip((self.born, self.died, self.address, self.size), life, strict=True):
            column.append(value)
        self.kind.append(KINDS.index(kind))
        self.stack.append(stack)


def lives_of_trace(path: Path) -> tuple[BlockLives, ...]:
    """Return the blocks of a trace by device, the host first; needs about 150 bytes of memory per event.

    Empty for traces recorded without `profile_memory`, or by torch before 1.11, whose events have no address.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    trace = read_memory(path)
    origins = Origins(trace)
    found = (_of_device(trace, device, memory, origins) for device, memory in sorted(trace.devices.items()))
    return tuple(lives for lives in found if lives is not None)


def _of_device(trace: MemoryTrace, device: DeviceMemory, memory: MemoryColumns, origins: Origins) -> BlockLives | None:
    if not any(memory.address):
        return None
    counted = counted_bytes(device, memory)
    begin, end = trace.origin_ns + memory.time[0], trace.origin_ns + memory.time[-1]
    before = 0 if device.is_host else memory.start_bytes or 0
    lives = BlockLives(
        device=str(device), start=begin, end=end, before_bytes=max(0, before), knows_before=not device.is_host
    )
    phases = _Phases(trace.points)
    stacks: dict[str, int] = {}
    opened: dict[int, int] = {}

    def close(first: int, died: int | None) -> None:
        born = trace.origin_ns + memory.time[first]
        origin = origins.of(memory, first)
        kind = phases.kind(born, died, origin.phase)
        words = _words(origin)
        life = (born, end + 1 if died is None else died, memory.address[first], memory.bytes[first])
        lives.add(life, kind, stacks.setdefault(words, len(stacks)))

    for i, (address, size) in enumerate(zip(memory.address, memory.bytes, strict=True)):
        moment = trace.origin_ns + memory.time[i]
        first = opened.pop(address, None)
        if first is not None:  # also if its free was not recorded and the address is used again
            close(first, moment)
        if size > 0:
            opened[address] = i
        elif first is None and counted[i]:
            lives.freed_before.append((moment, -counted[i]))
    for first in opened.values():
        close(first, None)
    lives.stacks = list(stacks)
    return lives


def _words(origin: Origin) -> str:
    place = [f"{origin.operator or 'unknown'}{f' in {origin.module}' if origin.module else ''}"]
    return "\n".join(place + [str(frame) for frame in shown_stack(origin.stack)])


def shown_stack(stack: Sequence[Frame]) -> list[Frame]:
    """Return the innermost frames of the user's code, or of any code if there is none; at most six."""
    own = [frame for frame in stack if not is_library(frame.filename)]
    return (own or [frame for frame in stack if frame.is_python] or list(stack))[:_FRAMES]


class _Phases:
    """The phases of the steps of a trace, from their marks."""

    def __init__(self, points: Sequence[tuple[int, str]]) -> None:
        self._times: list[int] = []
        self._phases: list[str] = []
        for time, point in sorted(points, key=itemgetter(0)):
            phase = _AFTER_POINT.get(point, "other")
            if not self._phases or self._phases[-1] != phase or point == "step_start":
                self._times.append(time)
                self._phases.append(phase)

    def kind(self, born: int, died: int | None, phase: str | None) -> str:
        """Return the category of a block; `phase` is the phase of the range that allocated it, None if unknown."""
        at = bisect_right(self._times, born)
        named = self._phases[at - 1] if at else phase or "other"
        until = self._times[at] if at < len(self._times) else None
        if died is not None and (until is None or died <= until):
            return "temporary"
        return OUTLIVING.get(named, "other")


def lives_of_replay(ring: Replay) -> BlockLives:
    """Return the blocks of a snapshot's recorded history; their phases are derived from the stacks."""
    events = ring.snapshot.events
    times = [event.time_us for event in events]
    is_timed = bool(times) and all(times)
    moments = [time * 1000 for time in times if time] if is_timed else list(range(len(events)))
    start, end = (moments[0], moments[-1]) if moments else (0, 0)
    words = ["\n".join(map(str, shown_stack(stack))) for stack in ring.snapshot.stacks]
    lives = BlockLives(device=f"cuda:{ring.device}", is_timed=is_timed, start=start, end=end, stacks=words)
    for life, kind in zip(ring.lives, categories(ring), strict=True):
        born = moments[life.born] if life.born >= 0 else start
        died = moments[life.died] if life.died < len(events) else end + 1
        lives.add((born, died, life.address % (1 << 64), life.requested_size), kind, life.stack)
    return lives


def with_held(lives: BlockLives, held: Mapping[str, int]) -> BlockLives:
    """Return the blocks with parameters and optimizer state from before the first event as `held_before`.

    Args:
        lives: the blocks of the device that the model is on.
        held: live bytes by category at the end of the window's last step, from another collector.
    """
    made = dict.fromkeys(STAYING, 0)
    for died, size, kind in zip(lives.died, lives.size, lives.kind, strict=True):
        if died > lives.end and KINDS[kind] in made:
            made[KINDS[kind]] += size
    found = {name: rest for name in STAYING if (rest := held.get(name, 0) - made[name]) > 0}
    if lives.before_bytes and sum(found.values()) > lives.before_bytes:
        return lives  # some of them are on another device
    rest_bytes = max(0, lives.before_bytes - sum(found.values()))
    return replace(lives, held_before=found, before_bytes=rest_bytes, knows_before=True)


def live_by_kind(lives: BlockLives) -> tuple[list[int], dict[str, list[int]]]:
    """Return times, and live bytes by category from each time to the next.

    There are at most 401 times, with every large maximum and minimum of the sum. Categories without blocks are omitted.
    """
    changes = [(lives.start, KINDS.index(BEFORE), lives.before_bytes)]
    changes += [(moment, KINDS.index(BEFORE), -size) for moment, size in lives.freed_before]
    columns = list(zip(lives.born, lives.died, lives.size, lives.kind, strict=True))
    changes += [(born, kind, size) for born, _, size, kind in columns]
    changes += [(died, kind, -size) for _, died, size, kind in columns if died <= lives.end]
    changes.sort(key=itemgetter(0))
    corners = curve_corners(list(accumulate(size for _, _, size in changes)))
    moments, live = [], {kind: [0] * len(corners) for kind in KINDS}
    sums = [lives.held_before.get(kind, 0) for kind in KINDS]
    done = 0
    for place, corner in enumerate(corners):
        for _, kind, size in changes[done : corner + 1]:
            sums[kind] += size
        done = corner + 1
        moments.append(changes[corner][0])
        for kind, name in enumerate(KINDS):
            live[name][place] = sums[kind]
    if moments[-1] < lives.end:
        moments.append(lives.end)
        for values in live.values():
            values.append(values[-1])
    return moments, {name: values for name, values in live.items() if any(values)}
