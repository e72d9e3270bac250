"""The recorded history of the allocator, replayed: live bytes, allocation sites and free ranges at each event.

The history is a ring of the last events, so it is replayed backwards from the blocks live at its end: a freed block was
live before the event, an allocated one was not. Nothing is assumed about earlier events, and a missing event affects
only its own block.

Terms as in `torch.cuda.memory_stats`: `requested` counts requested sizes from `alloc` to `free_completed`, `allocated`
block sizes until `free_requested`, `reserved` segments. The history has no block sizes: a block that is not live at the
end counts as its requested size rounded up to 512 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import ALLOCATED, INACTIVE, DeviceSnapshot, Snapshot
from lightning_memprof.read.stacks import Frame, native_site, user_frame

_ROUND: Final = 512
_BEFORE: Final = -1  # allocated before the history
_UNMAPPED: Final = "segment_unmap"
GROWS: Final = frozenset({"segment_alloc", "segment_map"})
SHRINKS: Final = frozenset({"segment_free", _UNMAPPED})
_CHANGES: Final = frozenset({"alloc", "free_requested", "free_completed", *GROWS, *SHRINKS})


class BlockLife(NamedTuple):
    """One block of the recorded history, sizes in bytes.

    It is live from event `born` (-1: before the history) until `died`; `freed` is the event that requested the free.
    Both equal the number of events if the block outlives the history.
    """

    address: int
    requested_size: int
    size: int
    born: int
    freed: int
    died: int
    stack: int


class Live(NamedTuple):
    """Live bytes at one moment."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Holder(msgspec.Struct, frozen=True):
    """Blocks of one stack: its Python frames, innermost first, as `file.py(12): function`, and its allocation site.

    `site` is the user's innermost frame. Without Python frames (autograd threads) the stack has C++ frames and `site`
    is the autograd node or operator; without any stack (allocated before the history) `site` is empty.
    """

    stack: tuple[str, ...]
    site: str
    bytes: int
    blocks: int


class FreeRange(NamedTuple):
    """A free range, in bytes; ``is_segment`` where it spans a whole segment, which can be returned to the driver."""

    address: int
    size: int
    is_segment: bool


class Replay(msgspec.Struct, frozen=True, dict=True):
    """The replayed history of one device.

    Events are counted from 0; moment `n` is after event `n`, and -1 before the first.
    """

    snapshot: DeviceSnapshot

    @property
    def device(self) -> int:
        """Index of the device."""
        return self.snapshot.device

    @property
    def events(self) -> int:
        """Number of events."""
        return len(self.snapshot.events)

    @cached_property
    def lives(self) -> tuple[BlockLife, ...]:
        """Every block of the history, unordered."""
        return tuple(_lives(self.snapshot))

    @cached_property
    def _requested(self) -> Sequence[int]:
        return running_bytes(self.events, ((life.born, life.died, life.requested_size) for life in self.lives))

    @cached_property
    def _allocated(self) -> Sequence[int]:
        return running_bytes(self.events, ((life.born, life.freed, life.size) for life in self.lives))

    @cached_property
    def _reserved(self) -> Sequence[int]:
        reserved = [self.snapshot.reserved_bytes]
        for event in reversed(self.snapshot.events):
            change = event.size if event.action in GROWS else -event.size if event.action in SHRINKS else 0
            reserved.append(max(0, reserved[-1] - change))
        return reserved[::-1]

    @cached_property
    def peak_event(self) -> int:
        """Last rise of the live requested bytes to their maximum: most blocks have stacks by then."""
        live = self._requested
        most = max(live)
        return max(i for i in range(len(live)) if live[i] == most and (i == 0 or live[i - 1] < most)) - 1

    @property
    def peak_requested_bytes(self) -> int:
        """Maximum of the live requested bytes."""
        return self._requested[self.peak_event + 1]

    @property
    def peak_time_us(self) -> int | None:
        """Unix microseconds of that maximum; None without times or before the first event."""
        return self.snapshot.events[self.peak_event].time_us if self.peak_event >= 0 else None

    @property
    def peak_reserved_bytes(self) -> int:
        """Maximum of the reserved bytes."""
        return max(self._reserved)

    @cached_property
    def holders_at_peak(self) -> tuple[Holder, ...]:
        """Requested bytes by stack at the peak, largest first; they sum to the peak."""
        return self.holders_at(self.peak_event)

    def live_at(self, event: int) -> Live:
        """Return the live bytes after an event; -1 is the start of the history."""
        return Live(self._requested[event + 1], self._allocated[event + 1], self._reserved[event + 1])

    def lives_at(self, event: int) -> list[BlockLife]:
        """Return the blocks that are live after an event."""
        return [life for life in self.lives if life.born <= event < life.died]

    def holders_at(self, event: int) -> tuple[Holder, ...]:
        """Return requested bytes by stack after an event, largest first; -1 is the start of the history."""
        return holders_of(self.snapshot, self.lives_at(event))


def replay(snapshot: Snapshot, device: int = 0) -> Replay:
    """Return the replay of one device by its index.

    Raises:
        ArtifactError: the snapshot has no such device.
    """
    found = snapshot.devices.get(device)
    if found is None:
        known = ", ".join(map(str, snapshot.devices)) or "none"
        raise ArtifactError(f"{snapshot.source}: has no device {device}; it has {known}")
    return Replay(found)


def _lives(device: DeviceSnapshot) -> list[BlockLife]:
    """Return every block of the history."""
    events, count = device.events, len(device.events)
    actions = {event.action for event in events}
    ends = "free_completed" if "free_completed" in actions else "free_requested"
    # A completed free without its request was requested before the history, unless the history has no requests at all.
    is_asked = {"free_requested", "free_completed"} <= actions
    # Blocks whose allocation is not reached yet.
    opened = {
        block.address: BlockLife(
            address=block.address,
            requested_size=block.requested_size,
            size=block.size,
            born=_BEFORE,
            freed=count if block.state == ALLOCATED else _BEFORE,
            died=count,
            stack=block.stack,
        )
        for segment in device.segments
        for block in segment.blocks
        if block.state != INACTIVE
    }
    lives = []
    for i in range(count - 1, -1, -1):
        event = events[i]
        if event.action == ends:
            later = opened.get(event.address)
            if later is not None:  # its allocation is missing: it was not live before this event
                lives.append(later._replace(born=i))
            size, freed = -(-event.size // _ROUND) * _ROUND, _BEFORE if is_asked else i
            opened[event.address] = BlockLife(event.address, event.size, size, _BEFORE, freed, died=i, stack=0)
        elif event.action == "free_requested":
            block = opened.get(event.address)
            if block is not None and block.freed in (_BEFORE, block.died):
                opened[event.address] = block._replace(freed=i)
        elif event.action == "alloc":
            block = opened.pop(event.address, None)
            if block is not None:
                lives.append(block._replace(born=i, stack=event.stack or block.stack))
    return [*lives, *opened.values()]


def running_bytes(count: int, spans: Iterable[tuple[int, int, int]]) -> Sequence[int]:
    """Return the bytes at each of ``count + 1`` moments from -1 on; a span has its bytes from one event to another."""
    deltas = [0] * (count + 2)
    for begin, end, size in spans:
        deltas[begin + 1] += size
        deltas[max(end, begin) + 1] -= size
    return tuple(accumulate(deltas[: count + 1]))


def holders_of(device: DeviceSnapshot, lives: Sequence[BlockLife]) -> tuple[Holder, ...]:
    """Sum blocks by the Python part of their stacks, largest first."""
    stacks = {number: device.stacks[number] for number in {life.stack for life in lives}}
    shown = {number: tuple(frame for frame in stack if frame.is_python) or stack for number, stack in stacks.items()}
    held: Counter[tuple[Frame, ...]] = Counter()
    blocks: Counter[tuple[Frame, ...]] = Counter()
    for life in lives:
        held[shown[life.stack]] += life.requested_size
        blocks[shown[life.stack]] += 1
    return tuple(
        Holder(stack=tuple(map(str, stack)), site=site_of(stack), bytes=count, blocks=blocks[stack])
        for stack, count in held.most_common()
    )


def site_of(stack: tuple[Frame, ...]) -> str:
    """Return the allocation site of a stack, see ``Holder``; empty where it is unknown."""
    frame = user_frame(stack) or next((frame for frame in stack if frame.is_python), None)
    return str(frame) if frame else native_site(stack) or ""


def free_ranges(ring: Replay, event: int) -> tuple[FreeRange, ...]:
    """Return each free range after an event, by address.

    Where nothing changes after the event these are the inactive blocks of the snapshot, otherwise the gaps between the
    blocks of that moment. The history has requested sizes, not block sizes, so a gap can be too large by the rounding.
    """
    if not any(later.action in _CHANGES for later in ring.snapshot.events[event + 1 :]):
        return tuple(
            FreeRange(block.address, block.size, len(segment.blocks) == 1)
            for segment in ring.snapshot.segments
            for block in segment.blocks
            if block.state == INACTIVE
        )
    live = sorted((life.address, life.address + life.size) for life in ring.lives_at(event))
    return tuple(_gaps(_segments_at(ring, event), live))


def _segments_at(ring: Replay, event: int) -> list[tuple[int, int]]:
    """Return start and end of each reserved range after an event, by address."""
    alone = {segment.address for segment in ring.snapshot.segments if not segment.is_expandable}
    reserved = {segment.address: segment.address + segment.size for segment in ring.snapshot.segments}
    for later in reversed(ring.snapshot.events[event + 1 :]):
        start, end = later.address, later.address + later.size
        if later.action in SHRINKS:
            reserved[start] = max(end, reserved.get(start, end))
            alone |= set() if later.action == _UNMAPPED else {start}
        elif later.action in GROWS:
            # A part of an expandable segment is usually the end of a longer range.
            inside = start if start in reserved else next((at for at, to in reserved.items() if at < start < to), None)
            if inside is not None:
                until = reserved.pop(inside)
                reserved |= {inside: start} if inside < start else {}
                reserved |= {end: until} if end < until else {}
    joined: list[tuple[int, int]] = []
    for start, end in sorted(reserved.items()):
        if joined and joined[-1][1] == start and alone.isdisjoint((joined[-1][0], start)):
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _gaps(segments: Iterable[tuple[int, int]], live: list[tuple[int, int]]) -> Iterable[FreeRange]:
    i = 0
    for start, end in segments:
        at = start
        while i < len(live) and live[i][1] <= start:
            i += 1
        while i < len(live) and live[i][0] < end:
            if live[i][0] > at:
                yield FreeRange(at, live[i][0] - at, is_segment=False)
            at = max(at, live[i][1])
            i += 1
        if end > at:
            yield FreeRange(at, end - at, is_segment=at == start)
