"""Reader of CUDA allocator snapshots: pickles, plain or gzip, of `torch.cuda.memory._snapshot()`.

It reads all forms since torch 2.0: the dictionary of segments and events, and the bare list of segments of
`torch.cuda.memory_snapshot()`; blocks without address (2.0), events without times (2.1), expandable segments, private
pools. Unknown keys are ignored.

Format: `torch/csrc/cuda/memory_snapshot.cpp` and `torch/cuda/_memory_viz.py` of torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal

import msgspec
from isal import igzip

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.restricted_pickle import MAX_BYTES, read_pickle
from lightning_memprof.read.stacks import Frame
from lightning_memprof.read.trace.text import UNREADABLE

ALLOCATED: Final = "active_allocated"
INACTIVE: Final = "inactive"


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# In ns they fit into 64 bits.
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) // 1000)]


class Stack(int):
    """The index of a stack in `DeviceSnapshot.stacks`; 0 without one."""


class AllocatorBlock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block of a segment. `state` as torch writes it; neither allocated nor inactive means pending free.

    `size` is rounded by the allocator, `requested_size` is not, both in bytes.
    """

    address: _Bytes
    size: _Bytes
    requested_size: _Bytes
    state: str
    stack: Stack = msgspec.field(name="frames", default=Stack(0))


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory obtained from the driver, tiled by its blocks in address order."""

    address: _Bytes
    size: _Bytes = msgspec.field(name="total_size")
    blocks: tuple[AllocatorBlock, ...]
    device: _Bytes = 0
    stream: _Int64 = 0
    kind: str = msgspec.field(name="segment_type", default="")
    pool: tuple[_Int64, _Int64] = msgspec.field(name="segment_pool_id", default=(0, 0))
    is_expandable: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event of the recorded history; `size` is the requested size in bytes, of an `oom` the failed allocation.

    `device_free` are the free bytes of the device at an `oom`, which has no address.
    """

    action: str
    address: _Int64 = msgspec.field(name="addr", default=0)
    size: _Bytes = 0
    stream: _Int64 = 0
    time_us: _Microseconds | None = None
    stack: Stack = msgspec.field(name="frames", default=Stack(0))
    device_free: _Bytes | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    segments: list[Segment]
    device_traces: list[tuple[Event, ...] | None] = msgspec.field(default_factory=list)
    allocator_settings: dict[str, Any] | None = None


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

    def _blocks(self, state: str) -> list[AllocatorBlock]:
        return [block for segment in self.segments for block in segment.blocks if block.state == state]


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: `devices` by index, those with segments or events.

    `settings` are the allocator settings, as recorded in the file.
    """

    source: str
    form: Literal["dict", "list"]
    devices: Mapping[int, DeviceSnapshot]
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot from a pickle, plain or gzip, without executing anything from it.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, not a snapshot, or names a global.
    """
    return parse_snapshot(load_snapshot(path), str(path))


def load_snapshot(path: Path) -> Any:
    """Return the content of a pickle, plain or gzip, unchecked.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, or names a global.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; torch.cuda.memory._dump_snapshot writes snapshots")
    try:
        with path.open("rb") as stream:
            compressed = stream.read(2) == b"\x1f\x8b"
        opened: IO[bytes] = igzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[no-untyped-call]
        with opened as stream:
            data = stream.read(MAX_BYTES + 1)
    except UNREADABLE as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); copy it again") from error
    if not data:
        raise ArtifactError(f"{path}: the file is empty: the dump was interrupted, or the disk was full")
    return read_pickle(data, str(path))


def parse_snapshot(data: Any, source: str) -> Snapshot:
    """Parse the value returned by torch.

    Args:
        data: the dictionary of `torch.cuda.memory._snapshot()`, or the list of `torch.cuda.memory_snapshot()`.
        source: its origin, the start of every error message.

    Raises:
        ArtifactError: it is not a snapshot, or damaged: a value has an unexpected type, or a block exceeds its segment.
    """
    form: Literal["dict", "list"] = "list" if isinstance(data, list) else "dict"
    top = {"segments": data} if form == "list" else data
    if not isinstance(top, dict) or "segments" not in top:
        raise ArtifactError(f"{source}: has no segments: it is not a CUDA allocator snapshot")
    stacks = _Stacks()
    try:
        _check_lists(top)
        whole = {**top, "segments": [completed(segment) for segment in top["segments"]]}
        file = msgspec.convert(whole, _File, dec_hook=stacks.number_of)
        segments: dict[int, list[Segment]] = {}
        for segment in file.segments:
            _check_blocks(segment)
            segments.setdefault(segment.device, []).append(segment)
    # Keys of torch 2.0 are read before types are known.
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ArtifactError(f"{source}: {error}; the file is damaged: copy it again") from error
    events = {device: found for device, found in enumerate(file.device_traces) if found}
    shared = tuple(stacks.stacks)
    devices = {
        device: DeviceSnapshot(
            device=device, segments=tuple(segments.get(device, ())), events=events.get(device, ()), stacks=shared
        )
        for device in sorted(segments.keys() | events.keys())
    }
    return Snapshot(source=source, form=form, devices=devices, settings=file.allocator_settings or {})


def completed(segment: dict[str, Any]) -> dict[str, Any]:
    """Return a segment of the file with the addresses, sizes and stacks of its blocks; torch 2.0 wrote a history."""
    blocks, address = [], segment["address"]
    for entry in segment["blocks"]:
        block = {"address": address, **entry}
        history = (entry.get("history") or [{}])[0]
        if block.get("frames") is None:
            block["frames"] = history.get("frames") or []
        if block.get("requested_size") is None:
            block["requested_size"] = history.get("real_size", entry["size"])
        blocks.append(block)
        address = block["address"] + block["size"]
    return {**segment, "blocks": blocks}


def _check_lists(top: Mapping[str, Any]) -> None:
    """Refuse shared lists, which torch does not write: a small file that shares lists could expand to any size."""
    segments, rings = top["segments"], top.get("device_traces") or []
    lists = [segments, rings, *(segment["blocks"] for segment in segments), *(ring for ring in rings if ring)]
    if not all(isinstance(found, list) for found in lists):
        raise ValueError("segments, blocks and device_traces are not lists")
    if any(len({*map(id, found)}) < len(found) for found in (lists, *lists)):
        raise ValueError("segments, blocks or device_traces are shared lists")


def _check_blocks(segment: Segment) -> None:
    requested = sum(block.requested_size for block in segment.blocks if block.state == ALLOCATED)
    used = max(requested, sum(block.size for block in segment.blocks))
    if used > segment.size:
        raise ValueError(f"a segment of {segment.size} bytes has blocks of {used} bytes")


class _Frame(msgspec.Struct, frozen=True):
    filename: str = ""
    line: _Int64 = 0
    name: str = ""


class _Stacks:
    """Numbers the stacks of a file; torch shares lists of frames, and frames."""

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._numbers: dict[tuple[Frame, ...], Stack] = {(): Stack(0)}
        self._of_list: dict[int, Stack] = {}
        self._of_frames: dict[tuple[int, ...], Stack] = {}
        self._frames: dict[Frame, Frame] = {}
        self._frame_of: dict[int, Frame] = {}

    def number_of(self, _: type, frames: Any) -> Stack:
        """Return the number of a list of frames."""
        number = self._of_list.get(id(frames))
        if number is None:
            # Most lists differ, but few are new: equal frames are mostly one dictionary.
            same = tuple(map(id, frames or ()))
            number = self._of_frames.get(same)
            if number is None:
                stack = tuple(map(self._frame, frames or ()))
                number = self._of_frames[same] = self._numbers.setdefault(stack, Stack(len(self.stacks)))
                if number == len(self.stacks):
                    self.stacks.append(stack)
            self._of_list[id(frames)] = number
        return number

    def _frame(self, raw: Any) -> Frame:
        frame = self._frame_of.get(id(raw))
        if frame is None:
            found = msgspec.convert(raw, _Frame)
            made = Frame(found.filename, found.line, found.name)
            frame = self._frame_of[id(raw)] = self._frames.setdefault(made, made)
        return frame
