"""The allocator: one device of a CUDA snapshot, whichever program recorded it, and the retries of a run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from lightning_memprof.account.oom.causes import CAUSES, Cause
from lightning_memprof.account.snapshot.replay import GROWS, SHRINKS, free_ranges
from lightning_memprof.account.snapshot.report import DeviceReport, FailedRequest, HeldLine, SnapshotReport, held_lines
from lightning_memprof.artifacts.series import AllocatorRow
from lightning_memprof.judge.byte_rule import ByteDetail, ByteFact, ByteRule, FoundInSnapshot, seen_in
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    EXPANDABLE_SEGMENTS,
    FEW_INPUT_SHAPES,
    FEW_LENGTHS,
    FIND_ALLOCATIONS,
    FREE_MEMORY,
    GROW_SEGMENTS,
    LIMIT_ALL_GATHERS,
    LOOK_AT_LINE,
    NO_EMPTY_CACHE,
    ONE_POOL,
    RETURN_CACHE,
    ROUND_ALLOCATIONS,
    WAIT_FOR_EVENT,
    Remedy,
)
from lightning_memprof.judge.snapshots import FEWER_BYTES, SMALLER, calls, fitting, freed_growth
from lightning_memprof.judge.traces import times
from lightning_memprof.read.run.model import RecordedWindow
from lightning_memprof.read.stacks import user_frame
from lightning_memprof.units import format_bytes, format_count, percent


def _setting(snapshot: SnapshotReport, step: Remedy, setting: str) -> tuple[Remedy, ...]:
    """Return the environment variable with a setting added to those in effect, or nothing if it is one of them.

    Every torch since 2.0 reads the variable; snapshots contain it since torch 2.5.
    """
    found = snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF")
    parts = found.split(",") if isinstance(found, str) else []
    if setting in parts:
        return ()
    kept = [part for part in parts if part and not part.startswith(setting.partition(":")[0])]
    return (step.filled(settings=",".join([*kept, setting])),)


def _grow(snapshot: SnapshotReport, device: DeviceReport) -> tuple[Remedy, ...]:
    return () if device.snapshot.is_expandable else _setting(snapshot, GROW_SEGMENTS, "expandable_segments:True")


def failed_allocation(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:
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
    fact = ByteFact(owner=failed.site, bytes=failed.requested_bytes, whole=failed.requested_bytes)
    return fact, lambda: ByteDetail(
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
    number, size = failed.first
    first = f"{failed.failures} allocations failed in the recorded history; the first was {format_bytes(size)}"
    also = [f"{top.site}{calls(top)} had {format_bytes(top.bytes)} live"] if top is not None else []
    also += [f"{first} on cuda:{number}"] if failed.failures > 1 else []
    further = f" {'; '.join(also)}." if also else ""
    return (
        f"{format_bytes(failed.live.requested_bytes)} were live and {format_bytes(failed.live.reserved_bytes)} "
        f"reserved; {format_bytes(failed.unused_bytes)} were unused in pieces of at most "
        f"{format_bytes(failed.largest_free_bytes)}{device}.{further}"
    )


def _next_for_failed(
    snapshot: SnapshotReport, device: DeviceReport, cause: Cause, top: HeldLine | None
) -> tuple[Remedy, ...]:
    if device.growth is not None and cause != "too large":
        return freed_growth(device, device.growth)
    look = (LOOK_AT_LINE.filled(place=top.site, what="it has the most live bytes"),) if top is not None else ()
    if cause == "fragmented":
        return (*_against_pieces(snapshot, device), *look, *fitting(device, *SMALLER))
    return (*look, *fitting(device, *SMALLER, *FEWER_BYTES))


def _against_pieces(snapshot: SnapshotReport, device: DeviceReport) -> tuple[Remedy, ...]:
    if grow := _grow(snapshot, device):
        return (*grow, FEW_LENGTHS)
    return (FEW_LENGTHS, *_setting(snapshot, ROUND_ALLOCATIONS, "roundup_power2_divisions:8"))


def requested_again(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:
    """Return memory that the allocator returns and requests again, and whether the program asks for that."""
    rounds, again = _churn(device)
    if rounds < POLICY.calls:
        return None
    line = _emptied_by(device)
    span = ""
    if device.start_us is not None and device.end_us is not None and device.end_us > device.start_us:
        span = f" in {(device.end_us - device.start_us) / 1e6:.3g} s"
    whole = max(device.peak_reserved_bytes, 1)
    cause = (
        f"{line} calls torch.cuda.empty_cache()"
        if line
        else "the device is nearly full, and the allocator must return its cache before it gets more"
    )
    share = percent(again / whole)
    fuller = (*fitting(device, *SMALLER), *_grow(snapshot, device))
    return ByteFact(bytes=again, whole=whole), lambda: ByteDetail(
        fields={"rounds": rounds, "span": span},
        measured=f"{format_bytes(again)} ({share} of the reserved memory) were requested again: {cause}",
        why="Each cudaFree waits until the device is idle, collectives included.",
        remedies=(NO_EMPTY_CACHE,) if line else fuller,
        numbers={
            "rounds": rounds,
            "empty_cache": line,
        },
    )


def _churn(device: DeviceReport) -> tuple[int, int]:
    """Return how often memory was returned and some of it requested again, and these bytes."""
    rounds = again = owed = 0
    is_new = False
    for event in device.snapshot.events:
        if event.action in SHRINKS:
            owed += event.size
            is_new = True
        elif event.action in GROWS and owed:
            rounds += is_new
            is_new = False
            again += min(event.size, owed)
            owed = max(0, owed - event.size)
    return rounds, again


def _emptied_by(device: DeviceReport) -> str | None:
    """Return the line that called ``empty_cache``, if the recorded history has the stacks of returned memory."""
    found = device.snapshot
    for event in found.events:
        if event.action in SHRINKS and any(frame.name == "empty_cache" for frame in found.stacks[event.stack]):
            line = user_frame(found.stacks[event.stack])
            return str(line) if line is not None else "a library"
    return None


def unused_pieces(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:
    """Return reserved memory in pieces at the peak, and the segments that these forced from the driver.

    At any other time pieces are normal: after backward the activations are freed. Without a recorded history the
    moment is that of the snapshot, and whole segments without a live block count, too.
    """
    free = free_ranges(device, device.peak_event)
    pieces = [piece.size for piece in free if not piece.is_segment]
    reserved = device.live_at(device.peak_event).reserved_bytes
    unused = sum(pieces) if device.events else sum(piece.size for piece in free)
    return ByteFact(bytes=unused, whole=reserved), lambda: _detail_of_pieces(snapshot, device, pieces, unused, reserved)


def _detail_of_pieces(
    snapshot: SnapshotReport, device: DeviceReport, pieces: Sequence[int], unused: int, reserved: int
) -> ByteDetail:
    split, forced = sum(pieces), _forced(device)
    made = format_count(len(forced), "segment")
    added = f"{made} came from the driver although as many bytes were free in smaller pieces." if forced else ""
    between = "all" if split == unused else f"{percent(split / unused)} of this"
    parts = f"between live blocks, in {len(pieces):,} pieces of at most {format_bytes(max(pieces, default=0))}"
    where = "in unused pieces at the peak" if device.events else f"unused, {between} between live blocks"
    return ByteDetail(
        fields={"where": where},
        measured=(
            f"{format_bytes(split)} of {format_bytes(reserved)} are {parts}; "
            f"{format_bytes(device.peak_requested_bytes)} are live"
        ),
        why=added,
        # Segments that grow already leave no larger pieces.
        saves_bytes=(0 if device.snapshot.is_expandable else sum(forced), unused),
        remedies=_against_pieces(snapshot, device) if split >= POLICY.most * unused else (RETURN_CACHE,),
        is_note=not forced,
        numbers={
            "pieces": len(pieces),
            "forced_segments": len(forced),
        },
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


def waiting_for_streams(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:
    """Return what memory that is freed but waits for another stream adds to the peak.

    It adds nothing where nothing else is allocated meanwhile.
    """
    waiting = _waiting(device)
    at = max(range(len(waiting)), key=waiting.__getitem__) - 1
    if not waiting[at + 1]:
        return None
    others = max(device.live_at(i).requested_bytes - waiting[i + 1] for i in range(-1, device.events))
    reserved = device.live_at(at).reserved_bytes
    fact = ByteFact(bytes=device.peak_requested_bytes - others, whole=device.live_at(device.peak_event).reserved_bytes)
    return fact, lambda: ByteDetail(
        why=(
            f"The program had freed {format_bytes(waiting[at + 1])} of {format_bytes(reserved)}; a stream that also "
            "used them (Tensor.record_stream) had not finished."
        ),
        numbers={"pending_bytes": waiting[at + 1], "reserved_bytes": reserved},
        evidence=(seen_in(snapshot, device, device.snapshot.events[at].time_us if at >= 0 else None),),
    )


def _waiting(device: DeviceReport) -> Sequence[int]:
    """Return by event, from -1 on, the bytes whose free is requested and not completed."""
    deltas = [0] * (device.events + 2)
    for life in device.lives:
        # If no other stream uses the block, both events of its free are adjacent.
        if life.died > life.freed + 1:
            deltas[max(life.freed, life.born) + 1] += life.size
            deltas[life.died + 1] -= life.size
    return tuple(accumulate(deltas[: device.events + 1]))


def unused_in_pools(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:  # noqa: ARG001
    """Return unused memory in private pools, usually of CUDA graphs."""
    # That of all other tensors is (0, 0).
    pools = [pool for pool in device.pools if any(pool.pool)]
    unused = sum(pool.inactive_bytes for pool in pools)
    if not unused:
        return None
    count, reserved = len({pool.pool for pool in pools}), sum(pool.reserved_bytes for pool in pools)
    return ByteFact(bytes=unused, whole=device.snapshot.reserved_bytes), lambda: ByteDetail(
        why=(
            f"{format_bytes(unused)} of {format_bytes(reserved)} in {format_count(count, 'private pool')} are free, "
            "but only their own CUDA graphs may use them."
        ),
        numbers={"pools": count},
    )


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
        remedies=(FREE_MEMORY, EXPANDABLE_SEGMENTS, FEW_LENGTHS, FIND_ALLOCATIONS),
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


OUT_OF_MEMORY: Final = ByteRule(
    id="out_of_memory",
    about=(
        "Memory ran out. In a run the finding has the step, the phase and the autopsy's next steps: see "
        "[Out of memory](../../guides/out-of-memory.md). A snapshot has the failed allocation, and why it failed: "
        "it exceeds the free memory of the device and all that this process reserved; enough was free, but in "
        "pieces; or the device was full."
    ),
    when=(
        "Whenever a run recorded it, or the history of a snapshot has a failed allocation; `warning` if the "
        "program caught the error and continued."
    ),
    trade_off="Smaller batches are less efficient.",
    in_snapshot=failed_allocation,
    says="Allocation of {size} failed on {place}{caught}: {cause}.",
    saves=(1, 1),
    note=1.0,
    at_most=Severity.CRITICAL,
)
ROWS: Final = (
    ByteRule(
        id="fragmentation",
        about=(
            "Much of the reserved memory is in pieces between allocated blocks: torch.cuda.empty_cache() cannot "
            "return them, and a larger allocation needs more memory from the driver. The device seems full too "
            "early."
        ),
        when=(
            "The pieces are those at the peak of requested bytes, smaller than a segment. `warning` if the "
            "history has a segment from the driver although as many bytes were free in smaller pieces: at least "
            "these segments are recovered. Without a history, the pieces are those at the moment of the "
            "snapshot, and empty segments count too."
        ),
        trade_off="None, or padding.",
        of=("fragmentation", "free_segments"),
        in_snapshot=unused_pieces,
        says="{share} of reserved memory of {place} is {where}.",
        saves=(0, 1),
        # Healthy training runs have 2 to 14% of the reserved memory in pieces at their peak.
        note=POLICY.severe,
        least=POLICY.bytes,
        at_most=Severity.WARNING,
    ),
    ByteRule(
        id="private_pools",
        about=(
            "Private pools, usually those of CUDA graphs, have unused memory at the end of the history, which no "
            "other allocation can use. A graph needs its pool for every replay; a shared pool is as large as the "
            "largest graph."
        ),
        trade_off="Graphs of one pool cannot run at the same time.",
        of=("free_segments", "fragmentation"),
        in_snapshot=unused_in_pools,
        says="{share} of the reserved memory of {place} is unused in private pools.",
        remedies=(ONE_POOL, FEW_INPUT_SHAPES),
        saves=(0, 1),
        least=POLICY.bytes,
    ),
    ByteRule(
        id="pending_frees",
        about=(
            "Memory that the program freed cannot be reused yet: another stream may still read it, the effect of "
            "Tensor.record_stream. The next allocation needs other memory meanwhile."
        ),
        when="Counts the peak of requested bytes, minus the highest sum of blocks that do not wait.",
        trade_off="None.",
        of=("requested", "rounding"),
        in_snapshot=waiting_for_streams,
        says="Freed memory that waits for another stream is {share} of the peak of {place}: {size}.",
        remedies=(LIMIT_ALL_GATHERS, WAIT_FOR_EVENT),
        saves=(1, 1),
        least=POLICY.bytes,
        at_most=Severity.WARNING,
    ),
    ByteRule(
        id="allocator_churn",
        about=(
            "The allocator repeatedly returns memory to the driver and requests it again. A cudaMalloc takes about "
            "1 ms per 100 MiB; a cudaFree waits until the device, and all ranks in a collective with it, have finished."
        ),
        when=(
            "At least three rounds: a single round is an empty_cache() between two stages, or one larger batch. "
            "Counts the bytes that were requested again, in all rounds."
        ),
        trade_off="None without empty_cache(); smaller batches are less efficient.",
        in_snapshot=requested_again,
        says="The allocator returned memory of {place} and requested it again {rounds} times{span}.",
        saves=(1, 1),
        note=POLICY.note,
        least=POLICY.bytes,
        at_most=Severity.WARNING,
    ),
)
