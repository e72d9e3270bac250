"""Who allocated the peak of a device, in an allocator snapshot, and the remedy that fits these blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.memory.categories import categories
from lightning_memprof.account.snapshot import frames
from lightning_memprof.account.snapshot.replay import site_of
from lightning_memprof.account.snapshot.report import DeviceReport, HeldLine, SnapshotReport
from lightning_memprof.judge.byte_rule import ByteDetail, ByteFact, ByteRule, FoundInSnapshot, seen_in
from lightning_memprof.judge.finding import NOTHING_FOUND, Finding, Severity
from lightning_memprof.judge.out_of_memory import MOST_SAVED
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    CHECKPOINT_BLOCKS,
    CLEAR_GRADIENTS,
    FIND_ALLOCATIONS,
    FREE_GRADIENTS,
    FUSE_GRADIENTS,
    LOOK_AT_LINE,
    RECORD_STACKS_FROM_START,
    SMALLER_CACHE,
    SMALLER_STATES,
    SMALLER_WEIGHTS,
    WITHOUT_GRADIENTS,
    Remedy,
)
from lightning_memprof.judge.snapshots import (
    SMALLER,
    calls,
    fitting,
    freed_growth,
)
from lightning_memprof.units import format_bytes, format_count, percent

# A new gradient of a parameter is often the output of the cast in front of it.
GRADIENTS: Final = ("AccumulateGrad", "ToCopyBackward0")
TORCH_SHARDS: Final = "torch.distributed.fsdp.fully_shard(model)"
_NODE: Final = re.compile(r"\w+Backward\d*")


def largest_line(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:
    """Return the line of the program with the most live bytes at the peak."""
    line = next(iter(device.lines_at_peak), None)
    if line is None or not line.site:
        return None
    fact = ByteFact(owner=line.site, bytes=line.bytes, whole=device.peak_requested_bytes)
    return fact, lambda: _detail_of_line(snapshot, device, line)


def _detail_of_line(snapshot: SnapshotReport, device: DeviceReport, line: HeldLine) -> ByteDetail:
    peak, has_peak = format_bytes(device.peak_requested_bytes), _has_peak(device)
    reserved = format_bytes(device.peak_reserved_bytes)
    missing = f"The history has no allocation, so the peak was not recorded; {reserved} are reserved."
    return ByteDetail(
        fields={"whole": "peak" if has_peak else "live memory"},
        measured=f"{format_bytes(line.bytes)} of {peak}, in {format_count(line.blocks, 'block')}{calls(line)}",
        why="" if has_peak else missing,
        remedies=_remedies(device, line.site),
        numbers={"blocks": line.blocks},
        evidence=(seen_in(snapshot, device, device.peak_time_us),),
    )


def _has_peak(device: DeviceReport) -> bool:
    return any(event.action == "alloc" for event in device.snapshot.events)


def _remedies(device: DeviceReport, site: str) -> tuple[Remedy, ...]:
    """Return what makes the blocks of a site smaller, by the category of most of them at the peak."""
    if device.growth is not None and device.growth.site == site:
        return freed_growth(device, device.growth)
    stacks = [holder.stack for holder in device.holders_at_peak if holder.site == site]
    if any(frames.CACHE.search(frame) for frame in stacks[0]):
        return (SMALLER_CACHE,)
    held: Counter[str] = Counter()
    for life, category in zip(device.lives, categories(device), strict=True):
        if life.born <= device.peak_event < life.died and site_of(device.snapshot.stacks[life.stack]) == site:
            held[category] += life.requested_size
    category = held.most_common(1)[0][0]
    if category == "gradient" and _NODE.fullmatch(site) and site not in GRADIENTS:
        category = "temporary"
    how = "Trainer(strategy='fsdp')" if frames.is_lightning(device.snapshot) else TORCH_SHARDS
    steps: dict[str, tuple[Remedy, ...]] = {
        "parameter": (SMALLER_WEIGHTS,),
        "gradient": (FREE_GRADIENTS.filled(sharded=how),),
        "optimizer_state": (SMALLER_STATES.filled(sharded=how),),
        "activation": (
            CHECKPOINT_BLOCKS.filled(blocks=MOST_SAVED),
            WITHOUT_GRADIENTS,
        ),
        "input": SMALLER,
        "temporary": (FUSE_GRADIENTS,) if _NODE.fullmatch(site) else SMALLER,
    }
    return fitting(device, *steps.get(category, (LOOK_AT_LINE.filled(place=site, what="it has the most live bytes"),)))


def whole_peak(snapshot: SnapshotReport, device: DeviceReport) -> FoundInSnapshot | None:  # noqa: ARG001
    """Return the peak, who allocated it, and the remedy for the largest part."""
    peak = device.peak_requested_bytes
    parts = [part for part in device.functions_at_peak if part.bytes >= POLICY.verdict * peak]
    held = ", ".join(
        f"{format_bytes(part.bytes)} {f'by {part.site}' if part.site else 'without a stack'}" for part in parts
    )
    return ByteFact(bytes=peak, whole=peak), lambda: ByteDetail(
        fields={"whole": "peak" if _has_peak(device) else "live"},
        why=(
            f"The allocator reserved at most {format_bytes(device.peak_reserved_bytes)} of cuda:{device.device}"
            f"{f'. Allocated: {held}' if held else ''}."
        ),
        remedies=_next_of(device, parts),
        numbers={"peak_reserved_bytes": device.peak_reserved_bytes},
    )


def _next_of(device: DeviceReport, parts: Sequence[HeldLine]) -> tuple[Remedy, ...]:
    if not device.has_stacks:
        return fitting(device, FIND_ALLOCATIONS)
    peak = device.peak_requested_bytes
    unknown = sum(line.bytes for line in device.lines_at_peak if not line.site)
    if unknown > POLICY.bound * peak:
        whole = "peak" if _has_peak(device) else "live memory"
        return (RECORD_STACKS_FROM_START.filled(share=percent(unknown / peak), whole=whole),)
    clear = (CLEAR_GRADIENTS,) if _in_forward(device) and any(part.site in GRADIENTS for part in parts) else ()
    line = next((line for line in device.lines_at_peak if line.site and not (clear and line.site in GRADIENTS)), None)
    if line is None or line.bytes < POLICY.verdict * peak:
        return clear or fitting(device, *SMALLER)
    where = "" if _NODE.fullmatch(line.site) or line.site in GRADIENTS else f"At {line.site}: "
    return (*clear, *(replace(step, text=f"{where}{step.text}") for step in _remedies(device, line.site)))


def _in_forward(device: DeviceReport) -> bool:
    """Return whether the peak is reached in a forward pass that is not repeated by backward."""
    if device.peak_event < 0:
        return False
    found = device.snapshot
    files = [frame.filename for frame in found.stacks[found.events[device.peak_event].stack] if frame.is_python]
    return any(frames.MODULES in file for file in files) and not any(
        part in file for file in files for part in (frames.OPTIMIZER, *frames.BACKWARD)
    )


def nothing_in_snapshot(snapshot: SnapshotReport) -> Finding:
    """Return what a snapshot without a fault shows: the device with the highest peak."""
    return next(NO_FAULT.on_device(snapshot, max(snapshot.devices, key=lambda device: device.peak_requested_bytes)))


NO_FAULT: Final = ByteRule(
    id=NOTHING_FOUND,
    in_snapshot=whole_peak,
    says="No fault found: {whole} memory is {size}.",
    saves=(0, 0),
    note=0.0,
    at_most=Severity.NONE,
)
ROWS: Final = (
    ByteRule(
        id="peak_holder",
        about=(
            "One line of the program allocated at least half of the peak: no other change can save as much. It "
            "is the innermost line of user code; in backward's threads, which have no Python stack, the autograd "
            "node. Without a recorded allocation the peak is unknown, and the live memory replaces it. The "
            "remedy depends on the category of most of its blocks."
        ),
        trade_off="Depends on the category.",
        of=("requested",),
        in_snapshot=largest_line,
        says="{share} of the {whole} of {place} is allocated by {owner}.",
        saves=(0, 1),
        # The first line to change.
        note=POLICY.bound,
        least=POLICY.bytes,
    ),
)  # fmt: skip
