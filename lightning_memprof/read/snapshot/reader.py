"""Reader of CUDA allocator snapshots: pickles, plain or gzip, of `torch.cuda.memory._snapshot()`.

It reads all forms since torch 2.0: the dictionary of segments and events, and the bare list of segments of
`torch.cuda.memory_snapshot()`; blocks without address (2.0), events without times (2.1), expandable segments, private
pools. Unknown keys are ignored.

Format: `torch/csrc/cuda/memory_snapshot.cpp` and `torch/cuda/_memory_viz.py` of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import msgspec
from isal import igzip, isal_zlib

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.restricted_pickle import Limits, read_pickle
from lightning_memprof.read.stacks import Frame

ALLOCATED: Final = "active_allocated"
INACTIVE: Final = "inactive"
_LARGEST: Final = 1 << 63
# isal's stub calls its exception class an instance.
_UNREADABLE: Final[tuple[type[Exception], ...]] = (OSError, EOFError, isal_zlib.error)  # type: ignore[assignment]


class Block(NamedTuple):
    """A block of a segment. `state` as torch writes it; neither allocated nor inactive means pending free.

    `size` is rounded by the allocator, `requested_size` is not, both in bytes; `stack` indexes `DeviceSnapshot.stacks`.
    """

    address: int
    size: int
    requested_size: int
    state: str
    stack: int


class Segment(NamedTuple):
    """Memory obtained from the driver, tiled by its blocks in address order."""

    address: int
    size: int
    stream: int
    kind: str
    pool: tuple[int, int]
    is_expandable: bool
    blocks: tuple[Block, ...]


class Event(NamedTuple):
    """An event of the recorded history; `size` is the requested size in bytes, of an `oom` the failed allocation.

    `device_free` are the free bytes of the device at an `oom`, which has no address.
    """

    action: str
    address: int
    size: int
    stream: int
    time_us: int | None
    stack: int
    device_free: int | None = None


class DeviceSnapshot(msgspec.Struct, frozen=True):
    """One device: segments, events (oldest first), and the stacks that both index (0: without a stack)."""

    device: int
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    stacks: tuple[tuple[Frame, ...], ...]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated blocks, with rounding."""
        return sum(block.size for block in self._blocks(ALLOCATED))

    @property
    def requested_bytes(self) -> int:
        """Bytes of allocated blocks, as requested."""
        return sum(block.requested_size for block in self._blocks(ALLOCATED))

    @property
    def inactive_bytes(self) -> int:
        """Bytes of inactive blocks."""
        return sum(block.size for block in self._blocks(INACTIVE))

    @property
    def pending_bytes(self) -> int:
        """Bytes of freed blocks that another stream may still use."""
        return self.reserved_bytes - self.allocated_bytes - self.inactive_bytes

    @property
    def rounding_bytes(self) -> int:
        """Bytes of allocated blocks beyond their requested sizes."""
        return self.allocated_bytes - self.requested_bytes

    @property
    def inactive_split_bytes(self) -> int:
        """Bytes of inactive blocks beside blocks in use, which `torch.cuda.empty_cache()` cannot release."""
        return self.inactive_bytes - self.free_segment_bytes

    @property
    def free_segment_bytes(self) -> int:
        """Bytes that `torch.cuda.empty_cache()` can release: segments without a block in use."""
        return sum(
            segment.size for segment in self.segments if all(block.state == INACTIVE for block in segment.blocks)
        )

    @property
    def largest_free_block(self) -> int:
        """Bytes of the largest allocation that needs no new segment."""
        return max((block.size for block in self._blocks(INACTIVE)), default=0)

    @property
    def is_expandable(self) -> bool:
        """Whether any segment is expandable."""
        return any(segment.is_expandable for segment in self.segments)

    def _blocks(self, state: str) -> list[Block]:
        return [block for segment in self.segments for block in segment.blocks if block.state == state]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: `devices` by index, those with segments or events.

    `settings` are the allocator settings, as recorded in the file.
    """

    source: str
    form: Literal["dict", "list"]
    devices: Mapping[int, DeviceSnapshot]
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)


def read_snapshot(path: Path, limits: Limits | None = None) -> Snapshot:
    """Read a snapshot from a pickle, plain or gzip, without executing anything from it.

    Args:
        path: the file.
        limits: maximum sizes.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, not a snapshot, or names a global.
    """
    limits = limits or Limits()
    return parse_snapshot(load_snapshot(path, limits), str(path), limits)


def load_snapshot(path: Path, limits: Limits | None = None) -> Any:
    """Return the content of a pickle, plain or gzip, unchecked.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, or names a global.
    """
    limits = limits or Limits()
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; torch.cuda.memory._dump_snapshot writes snapshots")
    try:
        with path.open("rb") as stream:
            compressed = stream.read(2) == b"\x1f\x8b"
        opened: IO[bytes] = igzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[no-untyped-call]
        with opened as stream:
            data = stream.read(limits.bytes + 1)
    except _UNREADABLE as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); copy it again") from error
    if not data:
        raise ArtifactError(f"{path}: the file is empty: the dump was interrupted, or the disk was full")
    return read_pickle(data, str(path), limits)


def parse_snapshot(data: Any, source: str, limits: Limits | None = None) -> Snapshot:
    """Parse the value returned by torch.

    Args:
        data: the dictionary of `torch.cuda.memory._snapshot()`, or the list of `torch.cuda.memory_snapshot()`.
        source: its origin, the start of every error message.
        limits: maximum sizes.

    Raises:
        ArtifactError: it is not a snapshot, or a value in it has an unexpected type.
    """
    return _Parser(source, limits or Limits()).snapshot(data)


class _Parser:
    def __init__(self, source: str, limits: Limits) -> None:
        self._source = source
        self._left = limits.containers
        self._frames: dict[Frame, Frame] = {}
        self._frame_of: dict[int, Frame] = {}
        self._stacks: list[tuple[Frame, ...]] = [()]
        self._number_of: dict[int, int] = {}
        self._seen: set[int] = set()
        self._numbers: dict[tuple[int, ...], int] = {}
        self._stack_numbers: dict[tuple[Frame, ...], int] = {(): 0}

    def snapshot(self, data: Any) -> Snapshot:
        form: Literal["dict", "list"] = "list" if isinstance(data, list) else "dict"
        top = {"segments": data} if isinstance(data, list) else self._mapping(data, "the snapshot")
        if "segments" not in top:
            raise ArtifactError(f"{self._source}: has no segments: it is not a CUDA allocator snapshot")
        segments: dict[int, list[Segment]] = {}
        for raw in self._own(top["segments"], "segments"):
            fields = self._mapping(raw, "a segment")
            segments.setdefault(self._size(fields, "device", 0), []).append(self._segment(fields))
        events = {
            device: self._events(ring)
            for device, ring in enumerate(self._list(top.get("device_traces", []), "device_traces"))
            if ring
        }
        stacks = tuple(self._stacks)
        devices = {
            device: DeviceSnapshot(
                device=device, segments=tuple(segments.get(device, ())), events=events.get(device, ()), stacks=stacks
            )
            for device in sorted(segments.keys() | events.keys())
        }
        return Snapshot(
            source=self._source,
            form=form,
            devices=devices,
            settings=self._mapping(top.get("allocator_settings") or {}, "allocator_settings"),
        )

    def _segment(self, fields: Mapping[str, Any]) -> Segment:
        address = self._size(fields, "address")
        size = self._size(fields, "total_size")
        blocks, at = [], address
        for raw in self._own(fields.get("blocks"), "blocks"):
            block = self._block(self._mapping(raw, "a block"), at)
            blocks.append(block)
            at = block.address + block.size
        requested = sum(block.requested_size for block in blocks if block.state == ALLOCATED)
        if requested > size:
            raise ArtifactError(
                f"{self._source}: a segment of {size} bytes has live blocks of {requested} requested bytes; "
                "the file is damaged: copy it again"
            )
        pool = fields.get("segment_pool_id", (0, 0))
        if not (isinstance(pool, (tuple, list)) and [type(part) for part in pool] == [int, int]):
            raise self._odd("segment_pool_id", pool, "two numbers")
        kind = fields.get("segment_type", "")
        return Segment(
            address=address,
            size=size,
            stream=self._integer(fields, "stream", 0),
            kind=kind if isinstance(kind, str) else "",
            pool=(pool[0], pool[1]),
            is_expandable=fields.get("is_expandable") is True,
            blocks=tuple(blocks),
        )

    def _block(self, fields: Mapping[str, Any], address: int) -> Block:
        size = self._size(fields, "size")
        frames, requested = fields.get("frames"), self._size(fields, "requested_size", size)
        history = fields.get("history")
        if frames is None and history:
            frames = self._mapping(self._list(history, "history")[0], "a history").get("frames")
        state = fields.get("state")
        if not isinstance(state, str):
            raise self._odd("state", state, "a word")
        return Block(self._size(fields, "address", address), size, requested, state, self._stack(frames))

    def _events(self, ring: Any) -> tuple[Event, ...]:
        found = []
        for raw in self._own(ring, "device_traces"):
            fields = self._mapping(raw, "an event")
            action = fields.get("action")
            if not isinstance(action, str):
                raise self._odd("action", action, "a word")
            found.append(
                Event(
                    action=action,
                    address=self._integer(fields, "addr", 0),
                    size=self._size(fields, "size", 0),
                    stream=self._integer(fields, "stream", 0),
                    time_us=self._integer(fields, "time_us", 0) if "time_us" in fields else None,
                    stack=self._stack(fields.get("frames")),
                    device_free=self._size(fields, "device_free") if "device_free" in fields else None,
                )
            )
        return tuple(found)

    def _stack(self, frames: Any) -> int:
        """Return the index of a stack; torch shares lists of frames, and frames."""
        if not frames:
            return 0
        number = self._number_of.get(id(frames))
        if number is None:
            # Most lists differ, but few are new: equal frames are mostly one dictionary.
            same = tuple(map(id, self._list(frames, "frames")))
            number = self._numbers.get(same)
            if number is None:
                stack = tuple(self._frame(frame) for frame in frames)
                number = self._numbers[same] = self._stack_numbers.setdefault(stack, len(self._stacks))
                if number == len(self._stacks):
                    self._stacks.append(stack)
            self._number_of[id(frames)] = number
        return number

    def _frame(self, raw: Any) -> Frame:
        frame = self._frame_of.get(id(raw))
        if frame is None:
            fields = self._mapping(raw, "a frame")
            filename, name = fields.get("filename"), fields.get("name")
            made = Frame(
                filename if isinstance(filename, str) else "",
                self._integer(fields, "line", 0),
                name if isinstance(name, str) else "",
            )
            frame = self._frame_of[id(raw)] = self._frames.setdefault(made, made)
        return frame

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._odd(what, value, "a list")
        # A list that is shared is walked each time: a small file can mean a very long walk.
        self._left -= len(value)
        if self._left < 0:
            raise ArtifactError(f"{self._source}: has too many entries; record fewer events (max_entries)")
        return value

    def _own(self, value: Any, what: str) -> list[Any]:
        """Return a list that torch never shares: a small file that shares lists could expand to any size."""
        found = self._list(value, what)
        if id(found) in self._seen or len(set(map(id, found))) < len(found):
            raise ArtifactError(f"{self._source}: {what} has shared lists; the file is damaged: copy it again")
        self._seen.add(id(found))
        return found

    def _mapping(self, value: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self._odd(what, value, "a dictionary")
        return value

    def _size(self, fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = self._integer(fields, key, default)
        if value < 0:
            raise self._odd(key, value, "at least 0")
        return value

    def _integer(self, fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = fields.get(key, default)
        if type(value) is not int or not -_LARGEST <= value < 2 * _LARGEST:
            raise self._odd(key, value, "a number of 64 bits")
        return value

    def _odd(self, what: str, value: Any, rule: str) -> ArtifactError:
        # A container's own text may be as long as the file, and endless.
        shown = repr(value)[:60] if isinstance(value, (int, float, str, type(None))) else type(value).__name__
        return ArtifactError(f"{self._source}: {what} is {shown}, expected {rule}; the file is damaged: copy it again")
