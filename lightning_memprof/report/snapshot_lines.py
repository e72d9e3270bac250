"""Snapshots in lines of styled text, for whoever draws them: how full the memory was, and who held it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.labels import BEFORE_RECORDING, PEAKS, called, reserved_parts
from lightning_memprof.report.memory_tables import Line, bar, cut, notes, over_time, sparkline, table
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.snapshot.model import DeviceReport, FailedRequest, SnapshotReport

__all__ = ["snapshot_sections"]

LABEL: Final = 10
NAME: Final = 18
NARROWEST: Final = 40
MAX_IN_FULL: Final = 2
MAX_LISTED: Final = 16
MAX_DEVICES: Final = 8
MAX_HOLDERS: Final = 8
MAX_POOLS: Final = 4
STYLES: Final = {
    "requested": "cyan",
    "rounding": "blue",
    "pending": "magenta",
    "inactive_split": "yellow",
    "free_segments": "bright_black",
}


def snapshot_sections(snapshots: Sequence[SnapshotReport], width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    """Yield the sections of snapshots, each in lines of at most ``width`` characters (at least 40).

    Of several there is a table, and in full are those with the highest peaks.
    """
    width = max(width, NARROWEST)
    if len(snapshots) > 1:
        yield _beside_each_other(snapshots, width)
    for snapshot in sorted(snapshots, key=_peak, reverse=True)[:MAX_IN_FULL]:
        yield from _sections(snapshot, width, ascii_only=ascii_only)


def _sections(snapshot: SnapshotReport, width: int, *, ascii_only: bool) -> Iterator[list[Line]]:
    events = sum(device.events for device in snapshot.devices)
    words = f"{_count(len(snapshot.devices), 'device')} · {_count(events, 'event')} in its history"
    lines: list[Line] = [((f"{'snapshot':<{LABEL}}", "bold"), (cut(clean(snapshot.file.name), width - LABEL), ""))]
    lines += notes(words, width, LABEL)
    for text in snapshot.missing:
        lines += notes(text, width, LABEL)
    if snapshot.oom is not None:
        lines += _oom(snapshot.oom, width)
    yield lines
    for device in snapshot.devices[:MAX_DEVICES]:
        yield _device(device, width, ascii_only=ascii_only)
        holders = _holders(device, width)
        if holders:
            yield holders
        pools = _pools(device, width)
        if pools:
            yield pools


def _peak(snapshot: SnapshotReport) -> int:
    return max((device.peak_requested_bytes for device in snapshot.devices), default=0)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _heading(label: str, words: str, width: int) -> list[Line]:
    first, *more = textwrap.wrap(clean(words), max(width - LABEL, 20)) or [""]
    return [((f"{label:<{LABEL}}", "bold"), (first, "")), *(((f"{'':<{LABEL}}{text}", ""),) for text in more)]


def _beside_each_other(snapshots: Sequence[SnapshotReport], width: int) -> list[Line]:
    rows = [
        (
            snapshot.file.name,
            str(device.device),
            format_bytes(device.reserved_bytes),
            format_bytes(device.allocated_bytes),
            format_bytes(device.peak_requested_bytes),
            f"{device.events:,}",
        )
        for snapshot in snapshots
        for device in snapshot.devices
    ]
    lines = _heading("snapshots", f"{len(snapshots)} of them", width)
    if rows:
        heads = ("file", "device", "reserved", "allocated", PEAKS["requested"].label, "events")
        lines += table(heads, rows[:MAX_LISTED], width)
    if len(rows) > MAX_LISTED:
        lines += notes(f"{len(rows) - MAX_LISTED} more: --format json", width)
    return lines


def _oom(oom: FailedRequest, width: int) -> list[Line]:
    free = "" if oom.device_free_bytes is None else f", {format_bytes(oom.device_free_bytes)} were free on the device"
    words = (
        f"device {oom.device}: {format_bytes(oom.requested_bytes)} could not be had{free}; "
        f"{format_bytes(oom.live.allocated_bytes)} were allocated, {format_bytes(oom.live.reserved_bytes)} reserved, "
        f"and the largest free piece was {format_bytes(oom.largest_free_bytes)}"
    )
    lines = textwrap.wrap(words, max(width - LABEL, 20))
    return [
        ((f"{'' if index else 'failed':<{LABEL}}", "bold"), (line, "" if index else "bold red"))
        for index, line in enumerate(lines)
    ]


def _device(device: DeviceReport, width: int, *, ascii_only: bool) -> list[Line]:
    reserved = device.reserved_bytes
    heading = f"{format_bytes(reserved)} reserved in {_count(device.segments, 'segment')} at the end"
    lines = _heading(f"device {device.device}", heading, width)
    room = max(width - 2 - NAME - 9 - 7, 8)
    for name, size in reserved_parts(device).items():
        if not size:
            continue
        share = size / reserved if reserved else 0.0
        drawn = bar(share, room, ascii_only=ascii_only)
        words = f"  {called(name):<{NAME}}{format_bytes(size):>9}{percent(share):>6} "
        lines.append(((words, ""), (drawn, STYLES[name])))
    free = device.fragmentation
    if device.inactive_bytes:
        words = (
            f"{called('free_segments')} are what empty_cache() gives back, {called('inactive_split')} lies between "
            f"allocated blocks; the largest free block has {format_bytes(free.largest_free_block)}"
        )
        lines += notes(words, width)
    for name, size in (("requested", device.peak_requested_bytes), ("reserved", device.peak_reserved_bytes)):
        lines.append(((f"  {PEAKS[name].label:<{NAME}}{format_bytes(size):>9}", "bold"),))
        lines += notes(f"{PEAKS[name].counts}; {PEAKS[name].span}", width, 4)
    return [*lines, *_over_time(device, width, ascii_only=ascii_only), *_churn(device, width)]


def _over_time(device: DeviceReport, width: int, *, ascii_only: bool) -> list[Line]:
    replay = device.replay
    if replay.events < 2:
        return []
    room = width - 2
    # At most four values a character: of a ring of 100,000 events only their largest can be seen.
    every = max(1, replay.events // (4 * room))
    curve: list[tuple[int, int]] = []
    for start in range(-1, replay.events, every):
        most = max(replay.live_at(event).requested_bytes for event in range(start, min(start + every, replay.events)))
        curve.append((start, most))
    drawn = sparkline(over_time(curve, room), ascii_only=ascii_only)
    span = ""
    if device.start_us is not None and device.end_us is not None:
        span = f", {format_ns((device.end_us - device.start_us) * 1000)}"
    words = f"{called('requested')}, from 0 to its peak, over the {_count(replay.events, 'event')} of the history{span}"
    return [((f"  {drawn}", "cyan"),), *notes(words, width)]


def _churn(device: DeviceReport, width: int) -> list[Line]:
    made, returned = device.segments_made, device.segments_returned
    if not made[0] and not returned[0]:
        return []
    words = (
        f"the history has {_count(made[0], 'segment')} made ({format_bytes(made[1])}) and {returned[0]:,} given back "
        f"({format_bytes(returned[1])})"
    )
    return notes(words, width)


def _holders(device: DeviceReport, width: int) -> list[Line]:
    whole = device.peak_requested_bytes
    lines = device.lines_at_peak
    if not lines or not whole:
        return []
    shown = lines if len(lines) == MAX_HOLDERS + 1 else lines[:MAX_HOLDERS]
    rows = [
        (
            _place(line.site) if line.site else BEFORE_RECORDING,
            format_bytes(line.bytes),
            percent(line.bytes / whole),
            f"{line.blocks:,}",
        )
        for line in shown
    ]
    others = lines[len(shown) :]
    if others:
        size = sum(line.bytes for line in others)
        blocks = sum(line.blocks for line in others)
        rows.append((f"{len(others):,} others", format_bytes(size), percent(size / whole), f"{blocks:,}"))
    words = f"who held the {format_bytes(whole)} at the {PEAKS['requested'].label} of device {device.device}"
    head = _heading("holders", words, width)
    return [*head, *table(("line", "bytes", "share", "blocks"), rows, width, dim=bool(others))]


def _place(site: str) -> str:
    """Return a line's last two folders, its number and its function: the front of a path is the same for all."""
    path, separator, function = site.rpartition(": ")
    if not separator:
        return site
    return f"{'/'.join(path.split('/')[-2:])} {function}"


def _pools(device: DeviceReport, width: int) -> list[Line]:
    if len({pool.pool for pool in device.pools}) < 2:
        return []
    rows = [
        (
            "(outside graphs)" if pool.pool == (0, 0) else f"pool {pool.pool[0]}, {pool.pool[1]}",
            str(pool.stream),
            f"{pool.segments:,}",
            format_bytes(pool.reserved_bytes),
            format_bytes(pool.allocated_bytes),
        )
        for pool in device.pools[:MAX_POOLS]
    ]
    lines = _heading("pools", f"memory of one serves no other; {len(device.pools)} in all", width)
    return [*lines, *table(("pool", "stream", "segments", "reserved", "allocated"), rows, width)]
