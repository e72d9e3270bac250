"""The allocator's ring of events, replayed: what was live at each of them, the peak, and who held it.

A ring holds the last events only, so it is read backwards from the blocks that are live at its end: what an event freed
was live before it, what it allocated was not. Nothing is assumed about what came before the ring, and where an event is
missing the blocks around it stay right.

Words as in `torch.cuda.memory_stats`: `requested` counts what was asked for from `alloc` to `free_completed`,
`allocated` the blocks as handed out, to `free_requested` already; `reserved` the segments. A ring does not say how
large the block was that a request got: where it is not live at the end, the least is counted, 512 bytes rounded up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from lightning_memprof.analysis.snapshot.reader import INACTIVE, DeviceSnapshot, Event, Snapshot
from lightning_memprof.analysis.stacks import Frame, native_site, user_frame
from lightning_memprof.errors import ArtifactError

__all__ = ["BlockLife", "Fragmentation", "Holder", "Live", "Replay", "holders_of", "replay"]

_ROUND: Final = 512
_BEFORE: Final = -1  # born before the ring
_GROWS: Final = frozenset({"segment_alloc", "segment_map"})
_SHRINKS: Final = frozenset({"segment_free", "segment_unmap"})


class BlockLife(NamedTuple):
    """One block that was live in the ring.

    It lives after event `born` (-1: since before the ring) until event `freed` asked for its end and event `died` ended
    it; both are the number of events where it outlives them.
    """

    address: int
    requested_size: int
    size: int
    born: int
    freed: int
    died: int
    stack: int


class Live(NamedTuple):
    """What is live at one moment, in bytes."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Holder:
    """Blocks of one stack: its Python frames, innermost first, as `file.py(12): function`, and the user's own of them.

    Without Python frames the stack is what there is: C++ frames, as in backward's threads, and `site` is the autograd
    node or the operator; or none, as for blocks from before the history was switched on, and `site` is empty.
    """

    stack: tuple[str, ...]
    site: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class Fragmentation:
    """What is reserved and of no use, at the end of the ring, in bytes.

    `inactive_split_bytes` lie between blocks in use, where `empty_cache()` cannot reach them; `free_segment_bytes` it
    gives back; `rounding_bytes` are inside blocks, beyond what was asked for.
    """

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int
    inactive_split_bytes: int
    free_segment_bytes: int
    rounding_bytes: int
    largest_free_block: int


@dataclass(frozen=True)
class Replay:
    """A device's ring.

    Events are counted from 0; the moment `n` is the one after event `n`, and -1 the one before the first.

    Attributes:
        device: the device's number.
        peak_requested_bytes: the most that was asked for and live.
        peak_event: the moment of that, the first one.
        peak_time_us: Unix microseconds of it; None where the ring has no times, or it was before the first event.
        peak_reserved_bytes: the most that was reserved.
        holders_at_peak: who held the requested bytes at that moment, largest first; they add up.
        live_now: at the end.
        fragmentation: at the end.
        segments_made: how many segments (or parts of expandable ones) the ring saw made, and their bytes.
        segments_returned: how many it saw given back to the driver, and their bytes.
        lives: every block that was live in the ring, in no order.

    """

    device: int
    peak_requested_bytes: int
    peak_event: int
    peak_time_us: int | None
    peak_reserved_bytes: int
    holders_at_peak: tuple[Holder, ...]
    live_now: Live
    fragmentation: Fragmentation
    segments_made: tuple[int, int]
    segments_returned: tuple[int, int]
    lives: tuple[BlockLife, ...]
    snapshot: DeviceSnapshot
    _requested: Sequence[int]
    _allocated: Sequence[int]
    _reserved: Sequence[int]

    @property
    def events(self) -> int:
        """How many events the ring holds."""
        return len(self.snapshot.events)

    def live_at(self, event: int) -> Live:
        """Return what is live after an event; -1 asks for the start of the ring.

        Raises:
            IndexError: there is no such event.

        """
        if not -1 <= event < self.events:
            raise IndexError(event)
        return Live(self._requested[event + 1], self._allocated[event + 1], self._reserved[event + 1])

    def holders_at(self, event: int) -> tuple[Holder, ...]:
        """Return who holds the requested bytes after an event, largest first; -1 asks for the start of the ring."""
        return holders_of(self.snapshot, [life for life in self.lives if life.born <= event < life.died])

    def event_at(self, time_us: int) -> int:
        """Return the last event until a time (Unix microseconds), -1 where it is before all; events have times."""
        return bisect_right(self.snapshot.events, time_us, key=lambda event: event.time_us or 0) - 1


def replay(snapshot: Snapshot, device: int = 0) -> Replay:
    """Replay a device's ring of events, backwards from its end.

    Args:
        snapshot: what was read.
        device: the device's number.

    Raises:
        ArtifactError: the snapshot has no such device.

    """
    found = snapshot.devices.get(device)
    if found is None:
        known = ", ".join(map(str, snapshot.devices)) or "none"
        raise ArtifactError(f"{snapshot.source}: has nothing of device {device}; it has {known}")
    count = len(found.events)
    lives = _lives(found)
    requested = _running(count, [(life.born, life.died, life.requested_size) for life in lives])
    allocated = _running(count, [(life.born, life.freed, life.size) for life in lives])
    reserved = _reserved(found)
    peak = max(range(count + 1), key=requested.__getitem__) - 1
    return Replay(
        device=device,
        peak_requested_bytes=requested[peak + 1],
        peak_event=peak,
        peak_time_us=found.events[peak].time_us if peak >= 0 else None,
        peak_reserved_bytes=max(reserved),
        holders_at_peak=holders_of(found, [life for life in lives if life.born <= peak < life.died]),
        live_now=Live(requested[-1], allocated[-1], reserved[-1]),
        fragmentation=_fragmentation(found),
        segments_made=_churn(found.events, _GROWS),
        segments_returned=_churn(found.events, _SHRINKS),
        lives=tuple(lives),
        snapshot=found,
        _requested=requested,
        _allocated=allocated,
        _reserved=reserved,
    )


@dataclass(slots=True)
class _Open:
    """A block on its way back to where it was born."""

    requested_size: int
    size: int
    freed: int | None
    died: int
    stack: int

    def close(self, address: int, born: int) -> BlockLife:
        freed = self.died if self.freed is None else self.freed
        return BlockLife(address, self.requested_size, self.size, born, freed, self.died, self.stack)


def _lives(device: DeviceSnapshot) -> list[BlockLife]:
    """Every block that was live at some moment of the ring."""
    events, count = device.events, len(device.events)
    actions = {event.action for event in events}
    ends = "free_completed" if "free_completed" in actions else "free_requested"
    # A free whose request is not in the ring was asked for before it, unless the ring leaves all requests out.
    asked = -1 if {"free_requested", "free_completed"} <= actions else None
    opened = {
        block.address: _Open(
            block.requested_size, block.size, None if _is_allocated(block.state) else -1, count, block.stack
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
            if later is not None:  # its allocation is missing: it cannot have been there before this
                lives.append(later.close(event.address, i))
            opened[event.address] = _Open(event.size, -(-event.size // _ROUND) * _ROUND, asked, i, 0)
        elif event.action == "free_requested":
            block = opened.get(event.address)
            if block is not None and (block.freed is None or block.freed < 0):
                block.freed = i
        elif event.action == "alloc":
            block = opened.pop(event.address, None)
            if block is not None:
                block.stack = event.stack or block.stack
                lives.append(block.close(event.address, i))
    lives += [block.close(address, _BEFORE) for address, block in opened.items()]
    return lives


def _is_allocated(state: str) -> bool:
    return state == "active_allocated"


def _running(count: int, spans: Sequence[tuple[int, int, int]]) -> Sequence[int]:
    """Bytes at each moment, from -1 on, of spans that begin with an event and end with another."""
    deltas = [0] * (count + 2)
    for begin, end, size in spans:
        deltas[begin + 1] += size
        deltas[max(end, begin) + 1] -= size
    return tuple(accumulate(deltas[: count + 1]))


def _reserved(device: DeviceSnapshot) -> Sequence[int]:
    """Reserved bytes at each moment, from -1 on."""
    reserved = [device.reserved_bytes]
    for event in reversed(device.events):
        change = event.size if event.action in _GROWS else -event.size if event.action in _SHRINKS else 0
        reserved.append(max(0, reserved[-1] - change))
    reserved.reverse()
    return reserved


def _churn(events: Sequence[Event], actions: frozenset[str]) -> tuple[int, int]:
    sizes = [event.size for event in events if event.action in actions]
    return len(sizes), sum(sizes)


def holders_of(device: DeviceSnapshot, lives: Sequence[BlockLife]) -> tuple[Holder, ...]:
    """Sum blocks up by the Python part of their stacks, largest first."""
    shown = {number: _python(device.stacks[number]) for number in {life.stack for life in lives}}
    held: Counter[tuple[Frame, ...]] = Counter()
    blocks: Counter[tuple[Frame, ...]] = Counter()
    for life in lives:
        held[shown[life.stack]] += life.requested_size
        blocks[shown[life.stack]] += 1
    return tuple(
        Holder(tuple(map(str, stack)), _site(stack), count, blocks[stack]) for stack, count in held.most_common()
    )


def _python(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    return tuple(frame for frame in stack if frame.is_python) or stack


def _site(stack: tuple[Frame, ...]) -> str:
    frame = user_frame(stack) or next((frame for frame in stack if frame.is_python), None)
    return str(frame) if frame else native_site(stack) or ""


def _fragmentation(device: DeviceSnapshot) -> Fragmentation:
    return Fragmentation(
        reserved_bytes=device.reserved_bytes,
        allocated_bytes=device.allocated_bytes,
        pending_bytes=device.pending_bytes,
        inactive_split_bytes=device.inactive_bytes - device.free_segment_bytes,
        free_segment_bytes=device.free_segment_bytes,
        rounding_bytes=device.allocated_bytes - device.requested_bytes,
        largest_free_block=device.largest_free_block,
    )
