"""The report of one CUDA allocator snapshot, written by any tool."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from lightning_memprof.account.ledger.block_growth import piled_growth
from lightning_memprof.account.ledger.growth import Growth
from lightning_memprof.account.snapshot.replay import Holder, Live, Replay, free_ranges, site_of
from lightning_memprof.read.snapshot.reader import Snapshot, read_snapshot
from lightning_memprof.read.stacks import parse_frame
from lightning_memprof.units import format_bytes, percent

_CALLED: Final = 3


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last failed allocation (``oom`` event) of the recorded history.

    ``site`` is the user's line that asked, empty where it is unknown. ``live`` is the state at that event.
    ``unused_bytes`` were reserved but not allocated, ``largest_free_bytes`` is the largest contiguous part of them.
    """

    device: int
    requested_bytes: int
    device_free_bytes: int | None
    time_us: int | None
    live: Live
    largest_free_bytes: int = 0
    unused_bytes: int = 0
    site: str = ""


class HeldLine(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one allocation site; ``stacks`` counts its different stacks.

    ``site`` is the user's innermost line, ``file.py(12): function``, or all lines of a function, ``file.py: function``;
    empty where it is unknown. ``called`` are the innermost functions called from it, such as ``linear``, by bytes.
    """

    site: str
    called: tuple[str, ...]
    bytes: int
    blocks: int
    stacks: int


class DeviceReport(Replay, frozen=True, dict=True):
    """One device: its history, and the sums over its blocks, each computed when it is first used."""

    @property
    def has_times(self) -> bool:
        """Whether the events have times."""
        return any(event.time_us is not None for event in self.snapshot.events)

    @property
    def start_us(self) -> int | None:
        """Unix microseconds of the first event; None without times."""
        return self.snapshot.events[0].time_us if self.has_times else None

    @property
    def end_us(self) -> int | None:
        """Unix microseconds of the last event; None without times."""
        return self.snapshot.events[-1].time_us if self.has_times else None

    @property
    def has_stacks(self) -> bool:
        """Whether any block of the history has a stack."""
        return any(life.stack for life in self.lives)

    @cached_property
    def growth(self) -> Growth | None:
        """The function whose blocks pile up step by step, None without one."""
        return piled_growth(self)

    @cached_property
    def lines_at_peak(self) -> tuple[HeldLine, ...]:
        """Requested bytes by allocation site, largest first; they sum to the peak."""
        return held_lines(self.holders_at_peak)

    @cached_property
    def functions_at_peak(self) -> tuple[HeldLine, ...]:
        """The same by function."""
        return held_lines(self.holders_at_peak, _function)


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot; ``missing`` lists its gaps, one sentence each.

    ``form`` is the form of the file: a dictionary, or a bare list of segments. ``settings`` are the allocator settings
    recorded in the file, such as ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    file: Path
    devices: tuple[DeviceReport, ...]
    oom: FailedRequest | None
    missing: tuple[str, ...]
    form: Literal["dict", "list"] = "dict"
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)


def snapshot_report(path: Path) -> SnapshotReport:
    """Read a snapshot, replay its recorded history, and return its report.

    Args:
        path: a pickle, plain or gzip, of what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` returned.

    Raises:
        ArtifactError: the file is missing or damaged, above a limit, no snapshot, or names a global.
    """
    snapshot = read_snapshot(path)
    devices = tuple(map(DeviceReport, snapshot.devices.values()))
    return SnapshotReport(
        file=path,
        devices=devices,
        oom=_failed(devices),
        missing=tuple(_missing(snapshot, devices)),
        form=snapshot.form,
        settings=snapshot.settings,
    )


def _function(site: str) -> str:
    """Return a site without its line."""
    frame = parse_frame(site)
    return f"{frame.filename}: {frame.name}" if frame is not None and frame.is_python else site


def held_lines(holders: Sequence[Holder], place: Callable[[str], str] = str) -> tuple[HeldLine, ...]:
    """Sum holders by allocation site, or by the place that it is in, largest first."""
    held: defaultdict[str, list[Holder]] = defaultdict(list)
    for holder in holders:
        held[place(holder.site)].append(holder)
    lines = []
    for site, alike in held.items():
        called: Counter[str] = Counter()
        for holder in alike:
            inner = parse_frame(holder.stack[0]) if holder.stack else None
            if inner is not None and inner.is_python and place(str(inner)) != site:
                called[inner.name] += holder.bytes
        lines.append(
            HeldLine(
                site=site,
                called=tuple(name for name, _ in called.most_common(_CALLED)),
                bytes=sum(holder.bytes for holder in alike),
                blocks=sum(holder.blocks for holder in alike),
                stacks=len(alike),
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def _failed(rings: Sequence[Replay]) -> FailedRequest | None:
    """Return the last failed allocation of all devices, by time, or by position where there are no times."""
    failed = (
        (event.time_us or 0, i, ring)
        for ring in rings
        for i, event in enumerate(ring.snapshot.events)
        if event.action == "oom"
    )
    last = max(failed, key=lambda entry: entry[:2], default=None)
    if last is None:
        return None
    _, at, ring = last
    event = ring.snapshot.events[at]
    free = free_ranges(ring, at)
    return FailedRequest(
        device=ring.device,
        requested_bytes=event.size,
        device_free_bytes=event.device_free,
        time_us=event.time_us,
        live=ring.live_at(at),
        largest_free_bytes=max((piece.size for piece in free), default=0),
        unused_bytes=sum(piece.size for piece in free),
        site=site_of(ring.snapshot.stacks[event.stack]),
    )


def _missing(snapshot: Snapshot, devices: Sequence[DeviceReport]) -> list[str]:
    if not devices:
        return ["The snapshot has no device memory: it was taken before the first allocation."]
    found = []
    if snapshot.form == "list":
        found.append("The file is a bare list of segments: it has the live blocks of one moment and no events.")
    for device in devices:
        name = f"cuda:{device.device}"
        if not device.events:
            if snapshot.form == "dict":
                found.append(
                    f"{name} has no events because the history was off; the peak is the live bytes at the end."
                )
        elif not device.has_times:
            found.append(f"The events of {name} have no times (torch before 2.2).")
        start_bytes = device.live_at(-1).requested_bytes
        if device.events and start_bytes:
            found.append(
                f"The recorded history of {name} starts with {format_bytes(start_bytes)} already live; earlier "
                "events are not in it."
            )
        unknown = sum(holder.bytes for holder in device.holders_at_peak if not holder.stack)
        if device.has_stacks and unknown > device.peak_requested_bytes / 2:
            found.append(
                f"{percent(unknown / device.peak_requested_bytes)} of the peak of {name} has no stack: record the "
                "history with stacks from the start of the program."
            )
        if not device.has_stacks:
            found.append(f"No block of {name} has a stack: record the history with stacks before the first allocation.")
    return found
