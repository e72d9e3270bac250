"""The allocator: one device of a CUDA snapshot, whichever program recorded it, and the retries of a run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Final

from lightning_memprof.account.oom.causes import CAUSES, Cause
from lightning_memprof.account.snapshot.replay import free_ranges
from lightning_memprof.account.snapshot.report import DeviceReport, FailedRequest, HeldLine, SnapshotReport, held_lines
from lightning_memprof.artifacts.series import AllocatorRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import on_device, seen_in
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Severity
from lightning_memprof.judge.out_of_memory import GROWING_SEGMENTS, HALF_BATCH
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.snapshots import FEWER_BYTES, SMALLER, calls, fitting, on_devices, released
from lightning_memprof.judge.traces import times
from lightning_memprof.read.run.model import RecordedWindow
from lightning_memprof.units import format_bytes, format_count, percent

GROW: Final = "expandable_segments:True"


def _grow(snapshot: SnapshotReport, device: DeviceReport) -> tuple[Remedy, ...]:
    """Return the environment variable with growing segments added to the settings in effect, or nothing if they are.

    Every torch since 2.0 reads the variable; snapshots contain it since torch 2.5.
    """
    found = snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF")
    parts = found.split(",") if isinstance(found, str) else []
    if device.snapshot.is_expandable or GROW in parts:
        return ()
    kept = [part for part in parts if part and not part.startswith(GROW.partition(":")[0])]
    return (do.EXPANDABLE_SEGMENTS.filled(settings=",".join([*kept, GROW])),)


def failed_allocation(snapshot: SnapshotReport, device: DeviceReport) -> Found | None:
    """Return the failed allocation, its cause, and the line with the most live bytes at that time."""
    failed = snapshot.oom
    if failed is None or device.device != failed.device:
        return None
    events = device.snapshot.events
    at = max(i for i, event in enumerate(events) if event.action == "oom")
    continued = any(event.action == "alloc" for event in events[at + 1 :])
    top = next((line for line in held_lines(device.holders_at(at)) if line.site), None)
    cause = _cause(failed)
    # The program lacks all of these bytes.
    fact = on_device(snapshot, device, failed.requested_bytes, failed.requested_bytes, owner=failed.site)
    return fact, lambda: Detail(
        fields={"cause": CAUSES[cause], "caught": " and was caught" if continued else ""},
        why=_why_failed(failed, top),
        remedies=_next_for_failed(snapshot, device, cause, top),
        at_most=Severity.WARNING if continued else None,
        numbers={
            "cause": cause,
            "peak_bytes": device.peak_requested_bytes,
            "share": None,
            "device_free_bytes": failed.device_free_bytes,
            "live_bytes": failed.live.requested_bytes,
            "reserved_bytes": failed.live.reserved_bytes,
            "unused_bytes": failed.unused_bytes,
            "largest_free_bytes": failed.largest_free_bytes,
        },
        evidence=(seen_in(snapshot, device, failed.time_us),),
    )


def _cause(failed: FailedRequest) -> Cause:
    free = failed.device_free_bytes or 0
    if failed.requested_bytes > free + failed.live.reserved_bytes:
        return "too large"
    is_notable = failed.unused_bytes >= POLICY.verdict * failed.live.reserved_bytes
    return "fragmented" if is_notable and failed.requested_bytes <= free + failed.unused_bytes else "full"


def _why_failed(failed: FailedRequest, top: HeldLine | None) -> str:
    free = failed.device_free_bytes
    device = "" if free is None else f"; {format_bytes(free)} were free on the device"
    further = f" {top.site}{calls(top)} had {format_bytes(top.bytes)} live." if top is not None else ""
    return (
        f"{format_bytes(failed.live.requested_bytes)} were live and {format_bytes(failed.live.reserved_bytes)} "
        f"reserved; {format_bytes(failed.unused_bytes)} were unused in pieces of at most "
        f"{format_bytes(failed.largest_free_bytes)}{device}.{further}"
    )


def _next_for_failed(
    snapshot: SnapshotReport, device: DeviceReport, cause: Cause, top: HeldLine | None
) -> tuple[Remedy, ...]:
    if device.growth is not None and cause != "too large":
        return (released(device.growth),)
    look = (do.LOOK_AT_LINE.filled(place=top.site, what="it has the most live bytes"),) if top is not None else ()
    if cause == "fragmented":
        return (*_grow(snapshot, device), do.FEW_SHAPES, *look, *fitting(device, *SMALLER))
    return (*look, *fitting(device, *SMALLER, *FEWER_BYTES))


def unused_pieces(snapshot: SnapshotReport, device: DeviceReport) -> Found | None:
    """Return reserved memory in pieces at the peak, and the segments that these forced from the driver.

    At any other time pieces are normal: after backward the activations are freed. Without a recorded history the
    moment is that of the snapshot, and whole segments without a live block count, too.
    """
    free = free_ranges(device, device.peak_event)
    pieces = [piece.size for piece in free if not piece.is_segment]
    reserved = device.live_at(device.peak_event).reserved_bytes
    unused = sum(pieces) if device.events else sum(piece.size for piece in free)
    fact = on_device(snapshot, device, unused, reserved)
    return fact, lambda: _detail_of_pieces(snapshot, device, pieces, unused, reserved)


def _detail_of_pieces(
    snapshot: SnapshotReport, device: DeviceReport, pieces: Sequence[int], unused: int, reserved: int
) -> Detail:
    split, forced = sum(pieces), _forced(device)
    made = format_count(len(forced), "segment")
    added = f"{made} came from the driver although as many bytes were free in smaller pieces." if forced else ""
    between = "all" if split == unused else f"{percent(split / unused) if split else 'none'} of this"
    parts = f"between live blocks, in {len(pieces):,} pieces of at most {format_bytes(max(pieces, default=0))}"
    where = "in unused pieces at the peak" if device.events else f"unused, {between} between live blocks"
    return Detail(
        fields={"where": where},
        measured=(
            f"{format_bytes(split)} of {format_bytes(reserved)} are {parts}; "
            f"{format_bytes(device.peak_requested_bytes)} are live"
        ),
        why=added,
        # Segments that grow already leave no larger pieces.
        saves=(0 if device.snapshot.is_expandable else sum(forced) / unused, 1),
        remedies=(*_grow(snapshot, device), do.FEW_SHAPES) if split >= POLICY.most * unused else (do.RETURN_CACHE,),
        # Without a history nobody can tell what they force; the cache cannot be emptied of those between live blocks.
        is_note=not forced and (bool(device.events) or split < POLICY.most * unused),
        numbers={"pieces": len(pieces), "forced_segments": len(forced)},
        evidence=(seen_in(snapshot, device, device.peak_time_us),),
    )


def _forced(device: DeviceReport) -> list[int]:
    """Return the sizes of segments that were made although as many bytes were free in pieces, each too small."""
    made = [(event.size, i) for i, event in enumerate(device.snapshot.events) if event.action == "segment_alloc"]
    forced = []
    for size, i in heapq.nlargest(POLICY.segments, made):
        sizes = [piece.size for piece in free_ranges(device, i - 1) if not piece.is_segment]
        forced += [size] if sum(sizes) >= size > max(sizes, default=0) else []
    return forced


def allocator_retries(facts: Facts) -> Finding | None:
    """Find retries of the allocator: device memory is nearly full, and it frees its cache to serve an allocation.

    A retry waits for all kernels of the device, and the other ranks wait in the next collective. The next stage is an
    out-of-memory error.
    """
    found = [
        (max(counts[-1] - counts[0], 0), counts[-1], rank, window)
        for rank in facts.run.in_full.ranks
        for window in rank.windows
        if (counts := _retries(window)) and counts[-1]
    ]
    if not found:
        return None
    grown, total, rank, window = max(found, key=lambda entry: entry[:2])
    steps = max(len(window.steps) + len(window.warmup_steps), 1)
    rows = window.read(AllocatorRow).rows
    device = next((row.device for row in rows if row.device), "the device")
    reserved = max((row.reserved_bytes for row in rows if row.reserved_bytes is not None), default=None)
    held = f" with {format_bytes(reserved)} reserved" if reserved is not None else ""
    where = f"{device}{f' of rank {rank.rank}' if len(facts.run.ranks) > 1 else ''}"
    # In each step, every step waits for all kernels, frees segments and allocates new ones.
    severe = Severity.CRITICAL if grown >= steps else Severity.WARNING
    return Finding(
        rule="allocator_retries",
        severity=severe if grown else Severity.INFO,
        title=(
            f"{where} is nearly full: the allocator emptied its cache {times(grown)} in {steps} steps."
            if grown
            else f"{where} was full {times(total)} before the recorded steps: the allocator emptied its cache."
        ),
        why=(
            f"An allocation failed{held}: the allocator waited for all kernels, freed its cache and retried; other "
            "ranks wait for that in their next collective."
        ),
        remedies=(
            HALF_BATCH,
            GROWING_SEGMENTS,
            do.FEW_SHAPES,
            do.RECORD_FROM_START,
        ),
        evidence=facts.recorded(rank, "allocator", window.steps),
        numbers={
            "rank": rank.rank,
            "device": device,
            "retries": grown,
            "retries_in_all": total,
            "steps": steps,
            "reserved_bytes": reserved,
        },
        weight=min(grown / steps, 1.0),
    )


def _retries(window: RecordedWindow) -> list[int]:
    """Return the counts since the process started, empty where they are damaged."""
    series = window.read(AllocatorRow)
    counts = [row.num_alloc_retries for row in series.rows if row.num_alloc_retries is not None]
    return [] if series.problems else counts


OUT_OF_MEMORY: Final = Rule(
    id="out_of_memory",
    about=(
        "Memory ran out: see [Out of memory](../../guides/out-of-memory.md). A snapshot has the failed allocation, and "
        "why it failed: it exceeds what can be free, enough was free in pieces, or the device was full."
    ),
    when="Whenever it was recorded; `warning` if the program caught the error and continued.",
    trade_off="Smaller batches are less efficient.",
    find=partial(on_devices, failed_allocation),
    says="Allocation of {size} failed on {place}{caught}: {cause}.",
    saves=(1, 1),
    note=1.0,
)
ROWS: Final = (
    Rule(
        id="fragmentation",
        about="Reserved memory is in pieces between allocated blocks, which torch.cuda.empty_cache() cannot return.",
        when=(
            "The pieces are those at the peak of requested bytes, without a history those at the moment of the "
            "snapshot. `warning` if a segment came from the driver although as many bytes were free in smaller pieces, "
            "and without a history if most pieces are between allocated blocks."
        ),
        trade_off="None, or padding.",
        of=("fragmentation", "free_segments"),
        find=partial(on_devices, unused_pieces),
        says="{share} of reserved memory of {place} is {where}.",
        saves=(0, 1),
        # Healthy training runs have 2 to 14% of the reserved memory in pieces at their peak.
        note=POLICY.severe,
        least=POLICY.bytes,
        at_most=Severity.WARNING,
    ),
)
