"""Snapshots of the CUDA allocator: reserved bytes, the peak over time, and allocation sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lightning_memprof.account.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.report.document import Cell, Chart, Facts, Item, Paragraph, Section, Stack, Table, Words, phrase
from lightning_memprof.report.sections.labels import BEFORE_RECORDING, PEAKS, bars, called, peak_note, reserved_parts
from lightning_memprof.report.sections.tables import Field, filled, rest

# A run may have hundreds of snapshots.
MAX_SHOWN: Final = 16
CURVE_POINTS: Final = 640


def snapshots_section(snapshots: Sequence[SnapshotReport]) -> Section | None:
    """Return the snapshots, of several first those with the highest peaks; None where there are none."""
    if not snapshots:
        return None
    ordered = sorted(snapshots, key=snapshot_peak, reverse=True)
    parts: list[Item] = list(_overview(ordered)) if len(snapshots) > 1 else []
    for number, snapshot in enumerate(ordered[:MAX_SHOWN]):
        parts += _snapshot(number, snapshot, several=len(snapshots) > 1)
    parts += map(Paragraph, rest(snapshots, MAX_SHOWN, "more snapshots"))
    lead = f"{len(snapshots)} snapshots" if len(snapshots) > 1 else "A snapshot"
    return Section("snapshots", "Snapshots", f"{lead} of the CUDA allocator.", parts)


def snapshot_peak(snapshot: SnapshotReport) -> int:
    """Return the highest peak of requested bytes over the devices."""
    return max((device.peak_requested_bytes for device in snapshot.devices), default=0)


def _overview(snapshots: Sequence[SnapshotReport]) -> Iterator[Table]:
    return filled(
        Table("snapshots-table", "Snapshots", top=MAX_SHOWN),
        [(snapshot.file, device) for snapshot in snapshots for device in snapshot.devices],
        Field("file", "code", lambda row: row[0].name),
        Field("device", "index", lambda row: row[1].device),
        Field("reserved", "bytes", lambda row: row[1].snapshot.reserved_bytes),
        Field("allocated", "bytes", lambda row: row[1].snapshot.allocated_bytes),
        Field(PEAKS["requested"].label, "bytes", lambda row: row[1].peak_requested_bytes),
        Field("events", "count", lambda row: row[1].events, priority=1),
        most=None,
    )


def _snapshot(number: int, snapshot: SnapshotReport, *, several: bool) -> Iterator[Item]:
    name = f", snapshot {number + 1}" if several else ""
    rows: list[tuple[str, Cell | Words]] = [
        ("file", Cell(str(snapshot.file), "path")),
        ("devices", ", ".join(f"cuda:{device.device}" for device in snapshot.devices) or "none"),
        ("events", Cell(sum(device.events for device in snapshot.devices), "count")),
    ]
    if (failed := snapshot.oom) is not None:
        rows += [
            ("failed allocation", phrase("{bytes} on device {index}", failed.requested_bytes, failed.device)),
            *([("requested by", Cell(_short(failed.site), "code"))] if failed.site else []),
            ("free on the device", Cell(failed.device_free_bytes, "bytes")),
            ("allocated", Cell(failed.live.allocated_bytes, "bytes")),
            ("reserved", Cell(failed.live.reserved_bytes, "bytes")),
            ("largest free block", Cell(failed.largest_free_bytes, "bytes")),
        ]
    yield Facts(f"Snapshot {number + 1}" if several else "Snapshot", rows, snapshot.missing, is_wide=True)
    for device in snapshot.devices:
        on = f", device {device.device}" if len(snapshot.devices) > 1 else ""
        yield Chart(f"allocations-{number}-{device.device}")
        yield reserved_stack(device, f"{on}{name}")
        yield from _over_time(number, device, f"{on}{name}")
        yield Chart(f"sites-{number}-{device.device}")
        yield from _sites(number, device, f"{on}{name}")


def reserved_stack(device: DeviceReport, name: str) -> Stack:
    """Return the parts of the bytes that the allocator holds."""
    found = device.snapshot
    notes: list[Words] = [
        phrase("{}: {bytes}", peak_note("requested"), device.peak_requested_bytes),
        phrase("{}: {bytes}", peak_note("reserved"), device.peak_reserved_bytes),
        phrase("{} segments, largest free block {bytes}", len(found.segments), found.largest_free_block),
    ]
    if found.inactive_bytes:
        notes.append(
            f"empty_cache() returns {called('free_segments')}; {called('inactive_split')} is free between "
            "allocated blocks"
        )
    parts = bars(reserved_parts(device), found.reserved_bytes, "bytes")
    return Stack(f"Reserved bytes at the end{name}", Cell(found.reserved_bytes, "bytes"), parts, notes=notes)


def _over_time(number: int, device: DeviceReport, name: str) -> Iterator[Chart]:
    if device.events < 2:
        return
    # Of a history of 100,000 events only the largest values can be seen.
    every = max(1, device.events // CURVE_POINTS)
    values = [
        max(device.live_at(event).requested_bytes for event in range(start, min(start + every, device.events)))
        for start in range(-1, device.events, every)
    ]
    words: Words = phrase("{} events", device.events)
    if device.start_us is not None and device.end_us is not None:
        words = phrase("{} events in {ns}", device.events, (device.end_us - device.start_us) * 1000)
    yield Chart(f"requested-{number}-{device.device}", f"Requested bytes{name}", values, words)


def _sites(number: int, device: DeviceReport, name: str) -> Iterator[Table]:
    if whole := device.peak_requested_bytes:
        title = f"Allocation sites at the {PEAKS['requested'].label}"
        for place, words, sites in (
            ("line", title, device.lines_at_peak),
            ("function", f"{title} by function", device.functions_at_peak),
        ):
            yield from filled(
                Table(f"{place}s-{number}-{device.device}", f"{words}{name}", top=8),
                sites,
                Field(place, "code", lambda site: _short(site.site) if site.site else BEFORE_RECORDING),
                Field("bytes", "bytes", lambda site: site.bytes, bar=True),
                Field("share", "share", lambda site: site.bytes / whole),
                Field("blocks", "count", lambda site: site.blocks),
            )


def _frame(frame: str) -> str:
    """Return a frame with the last two parts of its path: they are more specific than the place of an installation."""
    parts = frame.split("/")
    return frame if len(parts) < 3 else "/".join(parts[-2:])


def _short(site: str) -> str:
    """Return the last two folders of a line, its number and its function: the front of a path is the same for all."""
    path, separator, function = site.rpartition(": ")
    return f"{_frame(path)} {function}" if separator else site
