"""The allocator: one device of a CUDA snapshot, whichever program recorded it, and the retries of a run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

import msgspec

from lightning_memprof.account.ledger.memory import snapshot_bytes
from lightning_memprof.artifacts.naming import SnapshotName, series_path
from lightning_memprof.artifacts.series import AllocatorRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity
from lightning_memprof.judge.remedies import (
    FEW_INPUT_SHAPES,
    FEW_LENGTHS,
    FIND_ALLOCATIONS,
    FREE_GROWTH,
    FREE_MEMORY,
    GROW_SEGMENTS,
    HALF_THE_BYTES,
    LESS_FRAGMENTATION,
    LIMIT_ALL_GATHERS,
    LOOK_AT_SITE,
    NAME_HOLDER,
    NO_EMPTY_CACHE,
    ONE_POOL,
    RETURN_CACHE,
    ROUND_ALLOCATIONS,
    SMALLER_BATCHES,
    SMALLER_INPUT,
    SMALLER_WEIGHTS_OR_CACHE,
    WAIT_FOR_EVENT,
    Need,
    Remedy,
    applicable,
)
from lightning_memprof.judge.traces import times
from lightning_memprof.read.run.model import Rank, RecordedWindow
from lightning_memprof.read.snapshot.frames import is_lightning, is_training
from lightning_memprof.read.snapshot.growth import Growth
from lightning_memprof.read.snapshot.replay import GROWS, SHRINKS, free_ranges
from lightning_memprof.read.snapshot.report import DeviceReport, FailedRequest, HeldLine, SnapshotReport, held_lines
from lightning_memprof.read.stacks import user_frame
from lightning_memprof.units import MIB, format_bytes, format_count, percent

# Fewer bytes do not decide whether another batch fits.
MIN_BYTES: Final = 512 * MIB
# A larger batch would need 10% of the memory.
NOTABLE_UNUSABLE: Final = 0.10


def device_name(device: DeviceReport) -> str:
    """Return a device as torch names it."""
    return f"cuda:{device.device}"


def seen_in(snapshot: SnapshotReport, device: DeviceReport, moment_us: int | None = None) -> tuple[Evidence, ...]:
    """Return a snapshot as evidence, narrowed to the recorded history of a device, or to one moment of it."""
    name = SnapshotName.parse(snapshot.file.name)
    start, end = (device.start_us, device.end_us) if moment_us is None else (moment_us, moment_us)
    return (
        Evidence(
            artifact=str(snapshot.file),
            rank=name.rank if name is not None else None,
            start_ns=None if start is None else start * 1000,
            end_ns=None if end is None else end * 1000,
        ),
    )


def recovery_of(device: DeviceReport, least: float, most: float, *categories: str) -> Recovery | None:
    """Return bytes of the memory reserved at the peak, at most those of its lines; None if these have none."""
    ledger = snapshot_bytes(device)
    most = min(most, sum(map(ledger.bytes, categories)))
    return Recovery(unit="bytes", min=min(least, most), max=most, whole=ledger.peak_bytes) if most > 0 else None


def _shown(line: HeldLine) -> str:
    """Return a line of code with the function that it called."""
    return f"{line.site or 'unknown code'}{f' (in {line.called[0]})' if line.called else ''}"


# Of these, one applies to each program.
SMALLER_BATCH: Final = (SMALLER_BATCHES, SMALLER_INPUT)
FEWER_BYTES: Final = (HALF_THE_BYTES, SMALLER_WEIGHTS_OR_CACHE)


def fitting(device: DeviceReport, *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the remedies that apply to the program of a snapshot."""
    lightning: Need = "lightning" if is_lightning(device.snapshot) else "other program"
    training: Need = "training" if is_training(device.snapshot) else "inference"
    return applicable({lightning, training}, *choices)


def freed_growth(device: DeviceReport, growth: Growth) -> tuple[Remedy, ...]:
    """Return how to free blocks that pile up."""
    return fitting(device, FREE_GROWTH.filled(site=growth.site), NAME_HOLDER)


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


Cause = Literal["too large", "fragmented", "full"]
CAUSES: Final[dict[Cause, str]] = {
    "too large": "more than this process can ever have",
    "fragmented": "enough was free, but not in one piece",
    "full": "the device was full",
}


def failed_request(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find the failed allocation, its cause, and the line with the most live bytes at that time."""
    failed = snapshot.oom
    if failed is None or device.device != failed.device:
        return None
    events = device.snapshot.events
    at = max(i for i, event in enumerate(events) if event.action == "oom")
    continued = any(event.action == "alloc" for event in events[at + 1 :])
    top = next((line for line in held_lines(device.holders_at(at)) if line.site), None)
    cause = _cause(failed)
    return Finding(
        rule="failed_request",
        severity=Severity.WARNING if continued else Severity.CRITICAL,
        title=(
            f"Allocation of {format_bytes(failed.requested_bytes)} failed on {device_name(device)}"
            f"{' and was caught' if continued else ''}: {CAUSES[cause]}."
        ),
        why=_why_failed(failed, top),
        remedies=_next_for_failed(snapshot, device, cause, top),
        numbers={
            "device": failed.device,
            "cause": cause,
            "requested_bytes": failed.requested_bytes,
            "device_free_bytes": failed.device_free_bytes,
            "live_bytes": failed.live.requested_bytes,
            "reserved_bytes": failed.live.reserved_bytes,
            "unused_bytes": failed.unused_bytes,
            "largest_free_bytes": failed.largest_free_bytes,
        },
        weight=1.0,
        evidence=seen_in(snapshot, device, failed.time_us),
    )


def _cause(failed: FailedRequest) -> Cause:
    free = failed.device_free_bytes or 0
    if failed.requested_bytes > free + failed.live.reserved_bytes:
        return "too large"
    is_notable = failed.unused_bytes >= NOTABLE_UNUSABLE * failed.live.reserved_bytes
    return "fragmented" if is_notable and failed.requested_bytes <= free + failed.unused_bytes else "full"


def _why_failed(failed: FailedRequest, top: HeldLine | None) -> str:
    free = failed.device_free_bytes
    device = "" if free is None else f"; {format_bytes(free)} were free on the device"
    number, size = failed.first
    first = f"; the first was {format_bytes(size)} on cuda:{number}"
    also = [
        *([f"{_shown(top)} had {format_bytes(top.bytes)} live"] if top is not None else []),
        *([f"{failed.failures} allocations failed in the recorded history{first}"] if failed.failures > 1 else []),
    ]
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
    look = (LOOK_AT_SITE.filled(site=top.site),) if top is not None else ()
    if cause == "fragmented":
        return (*_against_pieces(snapshot, device), *look, *fitting(device, *SMALLER_BATCH))
    return (*look, *fitting(device, *SMALLER_BATCH, *FEWER_BYTES))


def _against_pieces(snapshot: SnapshotReport, device: DeviceReport) -> tuple[Remedy, ...]:
    if grow := _grow(snapshot, device):
        return (*grow, FEW_LENGTHS)
    return (FEW_LENGTHS, *_setting(snapshot, ROUND_ALLOCATIONS, "roundup_power2_divisions:8"))


# A single round is an empty_cache() between two stages, or one batch that is larger than all before.
MIN_ROUNDS: Final = 2
# A cudaMalloc takes about 1 ms per 100 MiB, and a cudaFree waits for the device: less is not noticeable.
MIN_CHURN: Final = 256 * MIB
MIN_CHURN_SHARE: Final = 0.05
EMPTY_CACHE: Final = "empty_cache"


class _Churn(NamedTuple):
    """How often memory was returned and requested again, and the bytes that were requested again."""

    rounds: int
    bytes: int


def allocator_churn(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find memory that the allocator returns and requests again, and whether the program asks for that."""
    churn = _churn(device)
    if churn.rounds < MIN_ROUNDS or churn.bytes < max(MIN_CHURN, MIN_CHURN_SHARE * device.peak_reserved_bytes):
        return None
    line = _emptied_by(device)
    share = churn.bytes / max(device.peak_reserved_bytes, 1)
    span = ""
    if device.start_us is not None and device.end_us is not None and device.end_us > device.start_us:
        span = f" in {(device.end_us - device.start_us) / 1e6:.3g} s"
    cause = (
        f"{line} calls torch.cuda.empty_cache()"
        if line
        else "the device is nearly full, and the allocator must return its cache before it gets more"
    )
    return Finding(
        rule="allocator_churn",
        severity=Severity.WARNING,
        title=(
            f"The allocator returned memory of {device_name(device)} and requested it again {churn.rounds} times{span}."
        ),
        why=(
            f"{format_bytes(churn.bytes)} ({percent(share)} of the reserved memory) were requested again: {cause}. "
            "Each cudaFree waits until the device is idle, collectives included."
        ),
        remedies=_next_for_churn(snapshot, device, line),
        numbers={
            "device": device.device,
            "rounds": churn.rounds,
            "again_bytes": churn.bytes,
            "segments_made": device.segments_made[0],
            "segments_returned": device.segments_returned[0],
            "peak_reserved_bytes": device.peak_reserved_bytes,
            "empty_cache": line,
        },
        weight=min(share, 1.0),
        evidence=seen_in(snapshot, device),
    )


def _churn(device: DeviceReport) -> _Churn:
    """Count rounds: memory is returned, and then some of it is requested again."""
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
    return _Churn(rounds, again)


def _emptied_by(device: DeviceReport) -> str | None:
    """Return the line that called ``empty_cache``, if the recorded history has the stacks of returned memory."""
    found = device.snapshot
    for event in found.events:
        if event.action in SHRINKS and any(frame.name == EMPTY_CACHE for frame in found.stacks[event.stack]):
            line = user_frame(found.stacks[event.stack])
            return str(line) if line is not None else "a library"
    return None


def _next_for_churn(snapshot: SnapshotReport, device: DeviceReport, line: str | None) -> tuple[Remedy, ...]:
    if line:
        return (NO_EMPTY_CACHE,)
    return (*fitting(device, *SMALLER_BATCH), *_grow(snapshot, device))


# Healthy training runs have 2 to 14% of the reserved memory in pieces at their peak.
NOTABLE_PIECES: Final = 0.25
# Each check sorts the live blocks: pieces force the largest segments.
MAX_CHECKS: Final = 8


def fragmentation(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find reserved memory in pieces at the peak; a warning if that forced requests to the driver.

    At any other time pieces are normal: after backward the activations are freed. Recovers at least the segments that
    the pieces forced, at most all pieces; nothing for sure where segments grow already. Without a recorded history the
    moment is that of the snapshot, and whole segments without a live block count, too.
    """
    free = free_ranges(device, device.peak_event)
    pieces = [piece.size for piece in free if not piece.is_segment]
    split, reserved = sum(pieces), device.live_at(device.peak_event).reserved_bytes
    unused = split if device.events else sum(piece.size for piece in free)
    if unused < MIN_BYTES or unused < NOTABLE_PIECES * reserved:
        return None
    forced = _forced(device)
    least = 0 if device.snapshot.is_expandable else sum(forced)
    worth = recovery_of(device, least, unused, "fragmentation", *(() if device.events else ("free_segments",)))
    made = format_count(len(forced), "segment")
    added = f" {made} came from the driver although as many bytes were free in smaller pieces." if forced else ""
    between = "all" if split == unused else percent(split / unused)
    parts = f"between live blocks, in {len(pieces):,} pieces of at most {format_bytes(max(pieces, default=0))}"
    return Finding(
        rule="fragmentation",
        severity=Severity.WARNING if forced else Severity.INFO,
        title=(
            f"{percent(unused / reserved)} of reserved memory of {device_name(device)} is "
            f"{'in unused pieces at the peak' if device.events else f'unused, {between} of it between live blocks'}."
        ),
        why=(
            f"{format_bytes(split)} of {format_bytes(reserved)} are {parts}; "
            f"{format_bytes(device.peak_requested_bytes)} are live.{added}"
        ),
        remedies=_against_pieces(snapshot, device) if 2 * split >= unused else (RETURN_CACHE,),
        numbers={
            "device": device.device,
            "split_bytes": split,
            "unused_bytes": unused,
            "reserved_bytes": reserved,
            "split_share": split / reserved,
            "pieces": len(pieces),
            "largest_piece_bytes": max(pieces, default=0),
            "peak_requested_bytes": device.peak_requested_bytes,
            "forced_segments": len(forced),
        },
        weight=worth.share if worth else 0.0,
        recovers=worth,
        evidence=seen_in(snapshot, device, device.peak_time_us),
    )


def _forced(device: DeviceReport) -> list[int]:
    """Return the sizes of segments that were made although as many bytes were free in pieces, each too small."""
    made = [(event.size, i) for i, event in enumerate(device.snapshot.events) if event.action == "segment_alloc"]
    forced = []
    for size, i in heapq.nlargest(MAX_CHECKS, made):
        sizes = [piece.size for piece in free_ranges(device, i - 1) if not piece.is_segment]
        forced += [size] if sum(sizes) >= size > max(sizes, default=0) else []
    return forced


SEVERE_PENDING: Final = 0.25


def pending_frees(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find memory that is freed but waits for another stream, at the time of its maximum.

    Recovers what the peak of requested bytes is above the one without such blocks; they raise no peak where nothing
    else is allocated meanwhile.
    """
    waiting = _waiting(device)
    at = max(range(len(waiting)), key=waiting.__getitem__) - 1
    most, reserved = waiting[at + 1], device.live_at(at).reserved_bytes
    share = most / reserved if reserved else 0.0
    if most < MIN_BYTES or share < NOTABLE_UNUSABLE:
        return None
    others = max(device.live_at(i).requested_bytes - waiting[i + 1] for i in range(-1, device.events))
    less = device.peak_requested_bytes - others
    worth = recovery_of(device, less, less, "requested", "rounding") if less >= MIN_BYTES else None
    return Finding(
        rule="pending_frees",
        severity=Severity.WARNING if share >= SEVERE_PENDING and worth else Severity.INFO,
        title=(
            f"{percent(share)} of the reserved memory of {device_name(device)} was freed but waits for another stream."
        ),
        why=(
            f"The program had freed {format_bytes(most)} of {format_bytes(reserved)}; a stream that also used them "
            "(Tensor.record_stream) had not finished."
        ),
        remedies=(LIMIT_ALL_GATHERS, WAIT_FOR_EVENT),
        numbers={"device": device.device, "pending_bytes": most, "reserved_bytes": reserved},
        weight=worth.share if worth else 0.0,
        recovers=worth,
        evidence=seen_in(snapshot, device, device.snapshot.events[at].time_us if at >= 0 else None),
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


SHARED_POOL: Final = (0, 0)


def private_pools(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find unused memory in private pools, usually of CUDA graphs.

    Recovers at most the unused bytes: a shared pool is as large as its largest graph needs.
    """
    pools = [pool for pool in device.pools if pool.pool != SHARED_POOL]
    unused = sum(pool.inactive_bytes for pool in pools)
    share = unused / device.snapshot.reserved_bytes if device.snapshot.reserved_bytes else 0.0
    if unused < MIN_BYTES or share < NOTABLE_UNUSABLE:
        return None
    count = len({pool.pool for pool in pools})
    worth = recovery_of(device, 0, unused, "free_segments", "fragmentation")
    return Finding(
        rule="private_pools",
        severity=Severity.INFO,
        title=f"{percent(share)} of the reserved memory of {device_name(device)} is unused in private pools.",
        why=(
            f"{format_bytes(unused)} of {format_bytes(sum(pool.reserved_bytes for pool in pools))} in "
            f"{format_count(count, 'private pool')} are free, but only their own CUDA graphs may use them."
        ),
        remedies=(ONE_POOL, FEW_INPUT_SHAPES),
        numbers={"device": device.device, "unused_bytes": unused, "pools": count},
        weight=worth.share if worth else 0.0,
        recovers=worth,
        evidence=seen_in(snapshot, device),
    )


# Ranks of one job are equally full: these many represent all.
MAX_RANKS: Final = 32
MAX_WINDOWS: Final = 16
# A retry waits for all kernels, frees segments and allocates new ones: at one per step, every step pays for it.
SEVERE_PER_STEP: Final = 1.0


class _Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Counts in a window's rows: ``grown`` within the window, ``total`` since the process started."""

    rank: int
    window: RecordedWindow
    device: str
    grown: int
    total: int
    reserved_bytes: int | None


def allocator_retries(facts: Facts) -> Finding | None:
    """Find retries of the allocator, in the recorded steps or before them."""
    found = [
        retries
        for rank in facts.run.ranks[:MAX_RANKS]
        for window in rank.windows[-MAX_WINDOWS:]
        if (retries := _retries(rank, window)) is not None
    ]
    if not found:
        return None
    worst = max(found, key=lambda retries: (retries.grown, retries.total))
    steps = max(len(worst.window.steps) + len(worst.window.warmup_steps), 1)
    rate = worst.grown / steps
    severe = Severity.CRITICAL if rate >= SEVERE_PER_STEP else Severity.WARNING
    device = f"{worst.device}{f' of rank {worst.rank}' if len(facts.run.ranks) > 1 else ''}"
    reserved = f" with {format_bytes(worst.reserved_bytes)} reserved" if worst.reserved_bytes is not None else ""
    return Finding(
        rule="allocator_retries",
        severity=severe if worst.grown else Severity.INFO,
        title=(
            f"{device} is nearly full: the allocator emptied its cache {times(worst.grown)} in {steps} steps."
            if worst.grown
            else f"{device} was full {times(worst.total)} before the recorded steps: the allocator emptied its cache."
        ),
        why=(
            f"An allocation failed{reserved}: the allocator waited for all kernels, freed its cache and retried; "
            "other ranks wait for that in their next collective."
        ),
        remedies=(FREE_MEMORY, LESS_FRAGMENTATION, FIND_ALLOCATIONS),
        evidence=(
            Evidence(
                artifact=f"{facts.run.directory.name}/{series_path(worst.window.index, worst.rank, 'allocator')}",
                rank=worst.rank,
                window=worst.window.index,
                steps=(min(worst.window.steps), max(worst.window.steps)) if worst.window.steps else None,
            ),
        ),
        numbers={
            "rank": worst.rank,
            "device": worst.device,
            "retries": worst.grown,
            "retries_in_all": worst.total,
            "steps": steps,
            "reserved_bytes": worst.reserved_bytes,
        },
        weight=min(rate, 1.0),
    )


def _retries(rank: Rank, window: RecordedWindow) -> _Retries | None:
    series = window.read(AllocatorRow)
    rows = series.rows
    counts = [row.num_alloc_retries for row in rows if row.num_alloc_retries is not None]
    if series.problems or not counts or counts[-1] <= 0:
        return None
    reserved = [row.reserved_bytes for row in rows if row.reserved_bytes is not None]
    return _Retries(
        rank=rank.rank,
        window=window,
        device=next((row.device for row in rows if row.device), "the device"),
        grown=max(counts[-1] - counts[0], 0),
        total=counts[-1],
        reserved_bytes=max(reserved, default=None),
    )
