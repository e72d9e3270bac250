"""The blocks of one device over a window, from an operator trace or an allocator snapshot.

Neither has categories. The category of a block is derived from the phase of the step in which it was allocated, and
from whether it outlives that phase:

| allocated in | freed in the same phase | freed later |
|---|---|---|
| fetch of the batch | temporary | input |
| loading of weights | temporary | parameter |
| forward | temporary | activation |
| backward | temporary | gradient |
| optimizer | temporary | optimizer_state |
| between them | temporary | other |

The phases of a trace come from its marks, those of a snapshot from its stacks. Bytes live before the first event are
`before`; `with_held` splits them by category.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from lightning_memprof.account.memory.columns import (
    NOWHERE,
    DeviceMemory,
    MemoryColumns,
    MemoryTrace,
    Origin,
    Origins,
    Step,
    read_memory,
)
from lightning_memprof.account.memory.model import curve_corners
from lightning_memprof.account.snapshot.frames import GRADIENTS, phase_of
from lightning_memprof.account.snapshot.replay import Replay, running_bytes, site_of
from lightning_memprof.read.snapshot.reader import read_snapshot
from lightning_memprof.read.stacks import Frame, is_library, native_site

BEFORE: Final = "before"
ALLOC: Final = "alloc"
OUTLIVING: Final = {
    "data_wait": "input",
    "loading": "parameter",
    "forward": "activation",
    "backward": "gradient",
    "optimizer": "optimizer_state",
}
"""Category by phase of a block that outlives it; ``other`` between phases."""
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


class Blocks(msgspec.Struct, kw_only=True):
    """The blocks of one device over a window, in columns; moments are numbers of events.

    Attributes:
        device: `cpu`, `cuda:0`, ...
        times: Unix ns of each event; numbers of events if not `is_timed`.
        is_timed: whether the events have times.
        before_bytes: bytes of other blocks, allocated before the window, without `held_before`; None where unknown.
        held_before: the part of them by category that another collector counted.
        steps: start and end in Unix ns, and number, of the steps of a trace, by time.
        points: Unix ns and `schedule.Point` of the marks of steps, by time.
        peak: event after which most bytes are live, -1 for the start; None for the first such event.
        born: event of the allocation; -1 for a block allocated before the window.
        died: event of the free; the number of events for a block live at the end.
        address: address of the block.
        size: size of the block in bytes.
        place: key of its origin in `origins`.
        kind: index in `KINDS`.
        origins: where blocks were allocated, by place; without an operator where that is unknown.
    """

    device: str
    times: Sequence[int]
    is_timed: bool = True
    before_bytes: int | None
    held_before: Mapping[str, int] = msgspec.field(default_factory=dict)
    steps: Sequence[Step] = ()
    points: Sequence[tuple[int, str]] = ()
    peak: int | None = None
    born: array[int] = msgspec.field(default_factory=lambda: array("q"))
    died: array[int] = msgspec.field(default_factory=lambda: array("q"))
    address: array[int] = msgspec.field(default_factory=lambda: array("q"))
    size: array[int] = msgspec.field(default_factory=lambda: array("q"))
    place: array[int] = msgspec.field(default_factory=lambda: array("q"))
    kind: array[int] = msgspec.field(default_factory=lambda: array("b"))
    origins: Origins | Sequence[Origin]

    def __len__(self) -> int:
        """Return the count of blocks."""
        return len(self.size)

    @property
    def start_bytes(self) -> int | None:
        """Bytes allocated before the first event; None where they are unknown."""
        if self.before_bytes is None:
            return None
        return self.before_bytes + sum(size for born, size in zip(self.born, self.size, strict=True) if born < 0)

    @property
    def start(self) -> int:
        """Time of the first event."""
        return self.times[0] if self.times else 0

    @property
    def end(self) -> int:
        """Time of the last event."""
        return self.times[-1] if self.times else 0

    def times_of(self, events: Iterable[int]) -> list[int]:
        """Return the times of births or deaths; `end + 1` for blocks live at the end."""
        times, count = self.times, len(self.times)
        return [self.start if event < 0 else times[event] if event < count else self.end + 1 for event in events]

    def add(self, life: tuple[int, int, int, int], place: int, kind: str = "other") -> None:
        """Append a block: born, died, address, size."""
        born, died, address, size = life
        self.born.append(born)
        self.died.append(died)
        self.address.append(address)
        self.size.append(size)
        self.place.append(place)
        self.kind.append(KINDS.index(kind))

    def chosen(self, positions: Iterable[int]) -> Blocks:
        """Return the blocks at the given positions, in that order."""
        chosen = list(positions)
        columns = {name: getattr(self, name) for name in ("born", "died", "address", "size", "place", "kind")}
        return replace(self, **{name: array(of.typecode, [of[i] for i in chosen]) for name, of in columns.items()})

    def live(self) -> Sequence[int]:
        """Return the live bytes after each event, relative to the start."""
        start, *live = running_bytes(len(self.times), zip(self.born, self.died, self.size, strict=True))
        return [size - start for size in live]

    def texts(self) -> tuple[array[int], list[str]]:
        """Return the number of each block's text, and the texts: operator, module and frames."""
        texts: dict[str, int] = {}
        numbers = {
            place: texts.setdefault(_text(self.origins[place]), len(texts)) for place in dict.fromkeys(self.place)
        }
        return array("i", [numbers[place] for place in self.place]), list(texts)


def read_blocks(path: Path) -> tuple[Blocks, ...]:
    """Return the blocks of a trace or an allocator snapshot by device, the host first.

    Reads the file once and needs about 150 bytes of memory per event of a thread with allocations, and 50 of others. A
    trace recorded without `profile_memory` has none.

    Raises:
        ArtifactError: the file is missing, damaged or truncated.
    """
    if ".pickle" in path.name:
        return tuple(replayed_blocks(Replay(device)) for device in read_snapshot(path).devices.values())
    trace = read_memory(path)
    return tuple(_traced(trace, device, memory) for device, memory in sorted(trace.devices.items()))


def _traced(trace: MemoryTrace, device: DeviceMemory, memory: MemoryColumns) -> Blocks:
    blocks = Blocks(
        device=str(device),
        times=memory.time,
        before_bytes=None if device.is_host else memory.start_bytes,
        steps=trace.steps,
        points=trace.points,
        origins=trace.origins,
    )
    count, opened = len(memory.time), dict[int, int]()
    for i, (address, size) in enumerate(zip(memory.address, memory.bytes, strict=True)):
        at = opened.pop(address, None)
        if at is not None:  # also if its free was not recorded and the address is used again
            blocks.died[at] = i
        if size > 0:
            opened[address] = len(blocks)
            blocks.add((i, count, address, size), memory.inner[i])
        elif size < 0 and at is None and not device.is_host:
            blocks.add((-1, i, address, -size), NOWHERE)
    if blocks.before_bytes is not None:
        blocks.before_bytes -= sum(size for born, size in zip(blocks.born, blocks.size, strict=True) if born < 0)
    phases = _marked_phases(memory.time, trace.points)
    lives = [
        (born, died, phases[born] or trace.origins[place].phase if born >= 0 else None)
        for born, died, place in zip(blocks.born, blocks.died, blocks.place, strict=True)
    ]
    kinds = (BEFORE if born < 0 else kind for (born, _, _), kind in zip(lives, _kinds(lives, phases), strict=True))
    blocks.kind = array("b", map(KINDS.index, kinds))
    return blocks


def _marked_phases(times: Sequence[int], points: Sequence[tuple[int, str]]) -> list[str | None]:
    """Return the phase of each event by the last mark before it, None before the first one."""
    phases = [None, *(_AFTER_POINT.get(point, "other") for _, point in points)]
    marks = np.array([time for time, _ in points], np.int64)
    return [phases[mark] for mark in np.searchsorted(marks, np.array(times, np.int64), side="right").tolist()]


def replayed_blocks(ring: Replay) -> Blocks:
    """Return the blocks of a snapshot's recorded history, with requested sizes."""
    times = [event.time_us * 1000 for event in ring.snapshot.events if event.time_us is not None]
    is_timed = 0 < len(times) == ring.events
    stacks = ring.snapshot.stacks
    blocks = Blocks(
        device=f"cuda:{ring.device}",
        times=times if is_timed else range(ring.events),
        is_timed=is_timed,
        before_bytes=0,
        peak=ring.peak_event,
        origins=[Origin((native_site(stack) or ALLOC) if stack else None, stack=stack) for stack in stacks],
    )
    for life, kind in zip(ring.lives, categories(ring), strict=True):
        blocks.add((life.born, life.died, life.address, life.requested_size), life.stack, kind)
    return blocks


def categories(ring: Replay) -> list[str]:
    """Return the category of each block of a history, in the order of ``lives``.

    ``before`` is allocated before the history, without a stack. In a history that ends in a backward, gradients of this
    backward are those of ``GRADIENTS``: what the others become is not known.
    """
    stacks, count = ring.snapshot.stacks, ring.events
    # Without any stack, an empty one does not mean a thread of backward.
    known = [phase_of(stack) if any(stacks) else None for stack in stacks]
    phases = [known[event.stack] if event.action == "alloc" else None for event in ring.snapshot.events]
    last = next((i for i in reversed(range(count)) if phases[i] not in (None, "backward")), -1)
    kinds = _kinds([(life.born, life.died, known[life.stack]) for life in ring.lives], phases)
    held = [i for i, life in enumerate(ring.lives) if kinds[i] == "gradient" and life.born > last]
    # Reading a stack of C++ frames takes some 0.1 ms.
    others = {number for number in {ring.lives[i].stack for i in held} if site_of(stacks[number]) not in GRADIENTS}
    for i in held:
        kinds[i] = "temporary" if ring.lives[i].stack in others else "gradient"
    for i, life in enumerate(ring.lives):
        kinds[i] = BEFORE if life.born < 0 and not stacks[life.stack] else kinds[i]
    return kinds


def _kinds(lives: Iterable[tuple[int, int, str | None]], phases: Sequence[str | None]) -> list[str]:
    """Return the category of each block: born, died, and phase; by the phases of all events."""
    ends = _phase_ends(phases)
    return [
        "temporary" if born >= 0 and died < ends[born] else OUTLIVING.get(phase or "", "other")
        for born, died, phase in lives
    ]


def _phase_ends(phases: Sequence[str | None]) -> list[int]:
    """Return for each event the next event of another phase; events of unknown phase end none."""
    count = len(phases)
    known = [i for i, phase in enumerate(phases) if phase is not None]
    changes = [i for before, i in pairwise(known) if phases[i] != phases[before]]
    following = np.array([*known, count])[np.searchsorted(known, np.arange(count))]
    ends: list[int] = np.array([*changes, count])[np.searchsorted(changes, following, side="right")].tolist()
    return ends


def _text(origin: Origin) -> str:
    place = f"{origin.operator or 'unknown'}{f' in {origin.module}' if origin.module else ''}"
    return "\n".join([place] * (place != ALLOC) + [str(frame) for frame in shown_stack(origin.stack)])


def shown_stack(stack: Sequence[Frame]) -> list[Frame]:
    """Return the innermost frames of the user's code, or of any code if there is none; at most six."""
    own = [frame for frame in stack if not is_library(frame.filename)]
    return (own or [frame for frame in stack if frame.is_python] or list(stack))[:_FRAMES]


def with_held(blocks: Blocks, held: Mapping[str, int]) -> Blocks:
    """Return the blocks with parameters and optimizer state from before the first event as `held_before`.

    Args:
        blocks: those of the device that the model is on.
        held: live bytes by category at the end of the window's last step, from another collector.
    """
    made = dict.fromkeys(STAYING, 0)
    for died, size, kind in zip(blocks.died, blocks.size, blocks.kind, strict=True):
        if died == len(blocks.times) and KINDS[kind] in made:
            made[KINDS[kind]] += size
    found = {name: rest for name in STAYING if (rest := held.get(name, 0) - made[name]) > 0}
    before = blocks.before_bytes or 0
    if before and sum(found.values()) > before:
        return blocks  # some of them are on another device
    return replace(blocks, held_before=found, before_bytes=max(0, before - sum(found.values())))


def live_by_kind(blocks: Blocks) -> tuple[list[int], dict[str, list[int]]]:
    """Return times, and live bytes by category from each time to the next.

    There are at most 401 times, with every large maximum and minimum of the sum. Categories without blocks are omitted.
    """
    columns = (np.array(column, np.int64) for column in (blocks.born, blocks.died, blocks.size, blocks.kind))
    born, died, sizes, kinds = columns
    freed = died < len(blocks.times)
    events = np.concatenate(([-1], born, died[freed]))
    order = np.argsort(events, kind="stable")
    sizes = np.concatenate(([max(0, blocks.before_bytes or 0)], sizes, -sizes[freed]))[order]
    kinds = np.concatenate(([KINDS.index(BEFORE)], kinds, kinds[freed]))[order]
    corners = list(curve_corners(np.cumsum(sizes).tolist()))
    live = {
        name: (blocks.held_before.get(name, 0) + np.cumsum(np.where(kinds == kind, sizes, 0))[corners]).tolist()
        for kind, name in enumerate(KINDS)
    }
    moments = blocks.times_of(events[order[corners]].tolist())
    if moments[-1] < blocks.end:
        moments.append(blocks.end)
        for values in live.values():
            values.append(values[-1])
    return moments, {name: values for name, values in live.items() if any(values)}
