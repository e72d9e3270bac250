"""Every block of one device over a window: when it came and went, its address, size, stack and category.

Neither a trace nor a ring says what a block is for. Its category is told from the phase of the step in which it was
allocated, and from whether it outlived that phase; in the words of `torch.cuda.memory_stats` nothing of this is known:

| allocated in | freed in the same phase | lives on |
|---|---|---|
| fetch of the batch | temporary | input |
| forward | temporary | activation |
| backward | temporary | gradient |
| optimizer | temporary | optimizer_state |
| between them | temporary | other |

What is there before the first event is `before`, and of no block: `with_held` tells which categories it has.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Final

from lightning_memprof.analysis.memory.allocations import Origin, Origins, counted_bytes
from lightning_memprof.analysis.memory.columns import DeviceMemory, MemoryColumns, MemoryTrace, read_memory
from lightning_memprof.analysis.memory.model import curve_corners
from lightning_memprof.analysis.snapshot.replay import Replay
from lightning_memprof.analysis.stacks import Frame, is_library
from lightning_memprof.artifacts.naming import TraceName

__all__ = [
    "BEFORE",
    "KINDS",
    "BlockLives",
    "live_by_kind",
    "lives_of_replay",
    "lives_of_trace",
    "shown_stack",
    "with_held",
]

BEFORE: Final = "before"
# What a window finds and leaves: these are not given back between two steps.
STAYING: Final = ("parameter", "optimizer_state")
# In the order in which they are stacked: what stays longest lies lowest.
KINDS: Final = (BEFORE, "parameter", "optimizer_state", "gradient", "activation", "input", "other", "temporary")
_KEPT: Final = {
    "data_wait": "input",
    "forward": "activation",
    "backward": "gradient",
    "optimizer": "optimizer_state",
}
_AFTER_POINT: Final = {
    "step_start": "data_wait",
    "batch_start": "forward",
    "after_forward": "forward",
    "before_backward": "backward",
    "after_backward": "optimizer",
    "before_optimizer_step": "optimizer",
}
_FETCHING: Final = frozenset({"batch_to_device", "transfer_batch_to_device", "move_data_to_device"})
# A stack is shown in a small box: its innermost frames of the user's own.
_FRAMES: Final = 6


@dataclass(slots=True)
class BlockLives:
    """The blocks of one device in columns; `kind` is a position in `KINDS`, `stack` one in `stacks`.

    `born` and `died` are Unix ns where `is_timed`, else numbers of events; a block that outlives the last event has
    `end + 1`. `start` and `end` are the first and the last event. `before_bytes` are of blocks that are not among them:
    what a device held before its trace, and `freed_before` (moment, bytes) is what of it was given back. `held_before`
    are bytes of it by category, where another collector counted them; `knows_before` is False where nothing is known.
    """

    device: str
    is_timed: bool = True
    start: int = 0
    end: int = 0
    before_bytes: int = 0
    freed_before: list[tuple[int, int]] = field(default_factory=list)
    held_before: Mapping[str, int] = field(default_factory=dict)
    knows_before: bool = True
    born: array[int] = field(default_factory=lambda: array("q"))
    died: array[int] = field(default_factory=lambda: array("q"))
    address: array[int] = field(default_factory=lambda: array("Q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    stack: array[int] = field(default_factory=lambda: array("i"))
    stacks: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.size)

    def at(self, positions: Iterable[int]) -> BlockLives:
        """Return the blocks at some positions, in their order."""
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
    """Read the blocks of a trace, by device, the host first; about 150 bytes an event are kept meanwhile.

    On the host those that the trace saw allocated. None where it was recorded without `profile_memory`, or with a torch
    before 1.11, whose events have no address.

    Raises:
        ArtifactError: the trace is missing, damaged or cut off.

    """
    name = TraceName.parse(path.name)
    trace = read_memory(path, name.stage if name else "fit")
    origins = Origins(trace)
    found = (_of_device(trace, device, memory, origins) for device, memory in sorted(trace.devices.items()))
    return tuple(lives for lives in found if lives is not None)


def _of_device(trace: MemoryTrace, device: DeviceMemory, memory: MemoryColumns, origins: Origins) -> BlockLives | None:
    if not any(memory.address):
        return None
    counted = counted_bytes(device, memory)
    begin, end = trace.origin_ns + memory.time[0], trace.origin_ns + memory.time[-1]
    before = 0 if device.is_host or not memory.total[0] else memory.total[0] - memory.bytes[0]
    lives = BlockLives(
        str(device), start=begin, end=end, before_bytes=max(0, before), knows_before=not device.is_host
    )  # fmt: skip
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
        if first is not None:  # also where its free was not seen, and the address is given out again
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
    """Return the innermost frames of the user's own code, or of any code where there is none; at most six."""
    own = [frame for frame in stack if not is_library(frame.filename)]
    return (own or [frame for frame in stack if frame.is_python] or list(stack))[:_FRAMES]


class _Phases:
    """The phases of a trace's steps, from the points that they pass."""

    def __init__(self, points: Sequence[tuple[int, str]]) -> None:
        self._times: list[int] = []
        self._phases: list[str] = []
        for time, point in sorted(points, key=itemgetter(0)):
            phase = _AFTER_POINT.get(point, "other")
            if not self._phases or self._phases[-1] != phase or point == "step_start":
                self._times.append(time)
                self._phases.append(phase)

    def kind(self, born: int, died: int | None, phase: str | None) -> str:
        """Return the category of a block that was allocated in a range of a phase, None where that is not known."""
        at = bisect_right(self._times, born)
        named = self._phases[at - 1] if at else phase or "other"
        until = self._times[at] if at < len(self._times) else None
        if died is not None and (until is None or died <= until):
            return "temporary"
        return _KEPT.get(named, "other")


def lives_of_replay(ring: Replay) -> BlockLives:
    """Return the blocks of a snapshot's ring; the phases are told from the stacks that allocated."""
    events = ring.snapshot.events
    times = [event.time_us for event in events]
    is_timed = bool(times) and all(times)
    moments = [time * 1000 for time in times if time] if is_timed else list(range(len(events)))
    start, end = (moments[0], moments[-1]) if moments else (0, 0)
    words = ["\n".join(map(str, shown_stack(stack))) for stack in ring.snapshot.stacks]
    lives = BlockLives(f"cuda:{ring.device}", is_timed, start, end, stacks=words)
    phases = [_phase_of(stack) for stack in ring.snapshot.stacks]
    ends = _phase_ends([phases[event.stack] if event.action == "alloc" else None for event in events])
    for life in ring.lives:
        if life.born < 0:
            kind = BEFORE
        elif life.died <= ends[life.born] and life.died < len(events):
            kind = "temporary"
        else:
            kind = _KEPT.get(phases[life.stack] or "", "other")
        born = moments[life.born] if life.born >= 0 else start
        died = moments[life.died] if life.died < len(events) else end + 1
        lives.add((born, died, life.address % (1 << 64), life.requested_size), kind, life.stack)
    return lives


def _phase_of(stack: Sequence[Frame]) -> str | None:
    """Return the phase in which a stack allocates, None where it does not tell."""
    if stack and not any(frame.is_python for frame in stack):
        return "backward"  # its threads have no Python
    for frame in stack:
        path = frame.filename.replace("\\", "/")
        if "torch/optim/" in path:
            return "optimizer"
        if frame.name == "backward" and ("torch/_tensor" in path or "torch/autograd/" in path):
            return "backward"
        if frame.name in _FETCHING or "torch/utils/data/" in path:
            return "data_wait"
    return "forward" if any(frame.name in {"forward", "_call_impl"} for frame in stack) else None


def _phase_ends(phases: Sequence[str | None]) -> list[int]:
    """Return for each event the first one behind it that belongs to another phase; what tells none ends none."""
    ends = [len(phases)] * len(phases)
    current, until = None, len(phases)
    starts = until
    for i in range(len(phases) - 1, -1, -1):
        if phases[i] is not None and phases[i] != current:
            current, until = phases[i], starts
        if phases[i] is not None:
            starts = i
        ends[i] = until
    return ends


def with_held(lives: BlockLives, held: Mapping[str, int]) -> BlockLives:
    """Return the lives with what of parameters and optimizer state was there before their first event.

    Args:
        lives: the blocks of the device that the model is on.
        held: bytes by category that were held while the window went on, as a collector counted them at its last step.

    """
    made = dict.fromkeys(STAYING, 0)
    for died, size, kind in zip(lives.died, lives.size, lives.kind, strict=True):
        if died > lives.end and KINDS[kind] in made:
            made[KINDS[kind]] += size
    found = {name: rest for name in STAYING if (rest := held.get(name, 0) - made[name]) > 0}
    if lives.before_bytes and sum(found.values()) > lives.before_bytes:
        return lives  # not all of them are on this device
    rest_bytes = max(0, lives.before_bytes - sum(found.values()))
    return replace(lives, held_before=found, before_bytes=rest_bytes, knows_before=True)


def live_by_kind(lives: BlockLives) -> tuple[list[int], dict[str, list[int]]]:
    """Return moments, at most 401 that keep every large maximum and minimum of the sum, and live bytes by category.

    Categories of which there is never a block are left out; the values hold from their moment to the next.
    """
    changes = [(lives.start, KINDS.index(BEFORE), lives.before_bytes)]
    changes += [(moment, KINDS.index(BEFORE), -size) for moment, size in lives.freed_before]
    columns = list(zip(lives.born, lives.died, lives.size, lives.kind, strict=True))
    changes += [(born, kind, size) for born, _, size, kind in columns]
    changes += [(died, kind, -size) for _, died, size, kind in columns if died <= lives.end]
    changes.sort(key=itemgetter(0))
    kept = curve_corners(list(accumulate(size for _, _, size in changes)))
    moments, live = [], {kind: [0] * len(kept) for kind in KINDS}
    sums = [lives.held_before.get(kind, 0) for kind in KINDS]
    done = 0
    for place, corner in enumerate(kept):
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
