"""Who allocated the peak of a device, in an allocator snapshot, and the remedy that fits these blocks."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.memory.blocks import categories
from lightning_memprof.account.snapshot import frames
from lightning_memprof.account.snapshot.replay import site_of
from lightning_memprof.account.snapshot.report import DeviceReport, HeldLine, SnapshotReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import on_device, seen_in
from lightning_memprof.judge.facts import facts_of_files
from lightning_memprof.judge.finding import NOTHING_FOUND, Finding, Severity
from lightning_memprof.judge.out_of_memory import MOST_SAVED
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.snapshots import SMALLER, calls, fitting, on_devices, released
from lightning_memprof.units import format_bytes, format_count

# Half of the bytes a number, of the samples, or of their length.
HALVES: Final = frozenset(remedy.id for remedy in (do.SMALLER_WEIGHTS, *SMALLER))
_NODE: Final = re.compile(r"\w+Backward\d*")


def largest_line(snapshot: SnapshotReport, device: DeviceReport) -> Found | None:
    """Return the line of the program with the most live bytes at the peak."""
    line = next(iter(device.lines_at_peak), None)
    if line is None or not line.site:
        return None
    fact = on_device(snapshot, device, line.bytes, device.peak_requested_bytes, owner=line.site)
    return fact, lambda: _detail_of_line(snapshot, device, line)


def _detail_of_line(snapshot: SnapshotReport, device: DeviceReport, line: HeldLine) -> Detail:
    peak, has_peak = format_bytes(device.peak_requested_bytes), _has_peak(device)
    reserved = format_bytes(device.peak_reserved_bytes)
    remedies = _remedies(device, line.site)
    missing = f"The history has no allocation, so the peak was not recorded; {reserved} are reserved."
    return Detail(
        fields={"whole": "peak" if has_peak else "live memory"},
        measured=f"{format_bytes(line.bytes)} of {peak}, in {format_count(line.blocks, 'block')}{calls(line)}",
        why="" if has_peak else missing,
        remedies=remedies,
        saves=(0, 0.5) if remedies[0].id in HALVES else None,
        numbers={"blocks": line.blocks},
        evidence=(seen_in(snapshot, device, device.peak_time_us),),
    )


def _has_peak(device: DeviceReport) -> bool:
    return any(event.action == "alloc" for event in device.snapshot.events)


def _remedies(device: DeviceReport, site: str) -> tuple[Remedy, ...]:
    """Return what makes the blocks of a site smaller, by the category of most of them at the peak."""
    if device.growth is not None and device.growth.owner == site:
        return (released(device.growth),)
    stacks = [holder.stack for holder in device.holders_at_peak if holder.site == site]
    if any(frames.CACHE.search(frame) for frame in stacks[0]):
        return (do.SMALLER_CACHE,)
    held: Counter[str] = Counter()
    for life, category in zip(device.lives, categories(device), strict=True):
        if life.born <= device.peak_event < life.died and site_of(device.snapshot.stacks[life.stack]) == site:
            held[category] += life.requested_size
    category = held.most_common(1)[0][0]
    steps: dict[str, tuple[Remedy, ...]] = {
        "parameter": (do.SMALLER_WEIGHTS, do.SHARD_MODEL),
        "gradient": (do.FREE_GRADIENTS, do.SHARD_MODEL),
        "optimizer_state": (do.LESS_OPTIMIZER_STATE, do.SHARD_MODEL),
        "activation": (do.CHECKPOINTING.filled(blocks=MOST_SAVED), do.NO_GRAD.filled(name="the model")),
        "input": SMALLER,
        "temporary": SMALLER,
    }
    return fitting(
        device, *steps.get(category, (do.LOOK_AT_LINE.filled(place=site, what="it has the most live bytes"),))
    )


def whole_peak(snapshot: SnapshotReport, device: DeviceReport) -> Found:
    """Return the peak, who allocated it, and the remedy for the largest part."""
    peak = device.peak_requested_bytes
    parts = [part for part in device.functions_at_peak if part.bytes >= POLICY.verdict * peak]
    held = ", ".join(
        f"{format_bytes(part.bytes)} {f'by {part.site}' if part.site else 'without a stack'}" for part in parts
    )
    return on_device(snapshot, device, peak, peak), lambda: Detail(
        fields={"whole": "peak" if _has_peak(device) else "live"},
        why=(
            f"The allocator reserved at most {format_bytes(device.peak_reserved_bytes)} of cuda:{device.device}"
            f"{f'. Allocated: {held}' if held else ''}."
        ),
        remedies=_next_of(device),
        numbers={"peak_reserved_bytes": device.peak_reserved_bytes},
    )


def _next_of(device: DeviceReport) -> tuple[Remedy, ...]:
    peak = device.peak_requested_bytes
    unknown = sum(line.bytes for line in device.lines_at_peak if not line.site)
    if not device.has_stacks or unknown > POLICY.bound * peak:
        return fitting(device, do.RECORD_FROM_START)
    line = next((line for line in device.lines_at_peak if line.site), None)
    if line is None or line.bytes < POLICY.verdict * peak:
        return fitting(device, *SMALLER)
    where = "" if _NODE.fullmatch(line.site) or line.site in frames.GRADIENTS else f"At {line.site}: "
    return tuple(replace(step, text=f"{where}{step.text}") for step in _remedies(device, line.site))


def nothing_in_snapshot(snapshot: SnapshotReport) -> Finding:
    """Return what a snapshot without a fault shows: the device with the highest peak."""
    device = max(snapshot.devices, key=lambda device: device.peak_requested_bytes)
    return NO_FAULT.finding(facts_of_files(snapshots=(snapshot,)), *whole_peak(snapshot, device))


NO_FAULT: Final = Rule(
    id=NOTHING_FOUND,
    says="No fault found: {whole} memory is {size}.",
    saves=(0, 0),
    at_most=Severity.NONE,
)
ROWS: Final = (
    Rule(
        id="peak_holder",
        about="The line of user code, or the autograd node, that allocated half of the peak, or of the live memory.",
        trade_off="Depends on the category.",
        of=("requested",),
        find=partial(on_devices, largest_line),
        says="{share} of the {whole} of {place} is allocated by {owner}.",
        saves=(0, 1),
        # The first line to change.
        note=POLICY.bound,
        least=POLICY.bytes,
        at_most=Severity.INFO,
    ),
)  # fmt: skip
