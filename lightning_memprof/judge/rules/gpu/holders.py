"""Who allocated the peak of a device, in an allocator snapshot, and the remedy that fits these blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.memory.categories import categories
from lightning_memprof.account.snapshot import frames
from lightning_memprof.account.snapshot.replay import Holder, site_of
from lightning_memprof.account.snapshot.report import DeviceReport, HeldLine, SnapshotReport
from lightning_memprof.judge.finding import NOTHING_FOUND, Evidence, Finding, Severity, titled
from lightning_memprof.judge.remedies import (
    CHECKPOINT_MODULES,
    CLEAR_GRADIENTS,
    FREE_GRADIENTS,
    FUSE_GRADIENTS,
    RECORD_ALLOCATION_STACKS,
    RECORD_STACKS_FROM_START,
    SMALLER_CACHE,
    SMALLER_STATES,
    SMALLER_WEIGHTS,
    START_WITH_SITE,
    WITHOUT_GRADIENTS,
    Remedy,
)
from lightning_memprof.judge.rules.snapshot import (
    SMALLER_BATCH,
    device_name,
    fitting,
    freed_growth,
    recovery_of,
    seen_in,
)
from lightning_memprof.read.stacks import parse_frame
from lightning_memprof.units import GIB, format_bytes, format_count, percent

# A line with half of the peak is the first to change.
NOTABLE_HOLDER: Final = 0.5
# Less of the peak is not worth a change.
NOTABLE_PART: Final = 0.1
MAX_PARTS: Final = 4
# A new gradient of a parameter is often the output of the cast in front of it.
GRADIENTS: Final = ("AccumulateGrad", "ToCopyBackward0")
TORCH_SHARDS: Final = "torch.distributed.fsdp.fully_shard(model)"
_NODE: Final = re.compile(r"\w+Backward\d*")


def peak_holder(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find a line of the program with at least half of the live bytes at the peak.

    Recovers at most its bytes.
    """
    line = next(iter(device.lines_at_peak), None)
    peak = device.peak_requested_bytes
    if line is None or not line.site or line.bytes < max(GIB, NOTABLE_HOLDER * peak):
        return None
    worth = recovery_of(device, 0, line.bytes, "requested")
    alike = [holder for holder in device.holders_at_peak if holder.site == line.site]
    inner, most = _mostly(line, alike)
    whole = "peak" if _has_peak(device) else "live memory"
    reserved = format_bytes(device.peak_reserved_bytes)
    missing = f" The history has no allocation: the peak was not recorded; {reserved} are reserved."
    return Finding(
        rule="peak_holder",
        severity=Severity.INFO,
        title=titled(
            f"{percent(line.bytes / peak)} of the {whole} of {device_name(device)} is allocated by {{site}}.",
            site=line.site,
        ),
        why=(
            f"{format_bytes(line.bytes)} of {format_bytes(peak)}, in {format_count(line.blocks, 'block')}{inner}{most}."
            f"{'' if _has_peak(device) else missing}"
        ),
        remedies=_remedies(device, line.site),
        numbers={
            "device": device.device,
            "line": line.site,
            "bytes": line.bytes,
            "blocks": line.blocks,
            "peak_requested_bytes": peak,
        },
        weight=worth.share if worth else 0.0,
        recovers=worth,
        evidence=seen_in(snapshot, device, device.peak_time_us),
    )


def steady_growth(snapshot: SnapshotReport, device: DeviceReport) -> Finding | None:
    """Find a function whose blocks pile up step by step.

    Recovers those that are live at the peak, at least without the last step's.
    """
    growth = device.growth
    if growth is None:
        return None
    worth = recovery_of(device, growth.peak_bytes - growth.step_bytes, growth.peak_bytes, "requested")
    share = growth.bytes / device.peak_requested_bytes
    return Finding(
        rule="steady_growth",
        severity=Severity.CRITICAL if share >= NOTABLE_HOLDER else Severity.WARNING,
        title=titled(
            f"Memory of {device_name(device)} grows by {format_bytes(growth.step_bytes)} per step: "
            "{site} is not freed.",
            site=growth.site,
        ),
        why=(
            f"{format_bytes(growth.bytes)} in {format_count(growth.blocks, 'block')} of {growth.steps} steps are live "
            f"at the end of the recorded history, {percent(share)} of the peak."
        ),
        remedies=freed_growth(device, growth),
        numbers={
            "device": device.device,
            "line": growth.site,
            "bytes": growth.bytes,
            "blocks": growth.blocks,
            "steps": growth.steps,
            "step_bytes": growth.step_bytes,
            "peak_requested_bytes": device.peak_requested_bytes,
        },
        weight=worth.share if worth else 0.0,
        recovers=worth,
        evidence=seen_in(snapshot, device),
    )


def _has_peak(device: DeviceReport) -> bool:
    return any(event.action == "alloc" for event in device.snapshot.events)


def _mostly(line: HeldLine, alike: Sequence[Holder]) -> tuple[str, str]:
    """Return the function that the line mostly calls, and its part of the bytes where that is not all."""
    if not line.called:
        return "", ""
    called = line.called[0]
    inner = [
        holder
        for holder in alike
        if (frame := parse_frame(holder.stack[0])) is not None and frame.name == called and str(frame) != line.site
    ]
    held, blocks = sum(holder.bytes for holder in inner), sum(holder.blocks for holder in inner)
    if held == line.bytes:
        return f" (in {called})", ""
    if held < line.bytes / 2:
        return "", ""
    return f" (mostly in {called})", f"; {called} has {format_bytes(held)} in {format_count(blocks, 'block')}"


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
        "activation": (CHECKPOINT_MODULES, WITHOUT_GRADIENTS),
        "input": SMALLER_BATCH,
        "temporary": (FUSE_GRADIENTS,) if _NODE.fullmatch(site) else SMALLER_BATCH,
    }
    return fitting(device, *steps.get(category, (START_WITH_SITE.filled(site=site),)))


def of_memory(snapshot: SnapshotReport) -> Finding:
    """Return what a snapshot without a fault says: who allocated its peak, with the remedy for the largest part."""
    device = max(snapshot.devices, key=lambda device: device.peak_requested_bytes)
    peak = device.peak_requested_bytes
    parts = [part for part in device.functions_at_peak if part.bytes >= NOTABLE_PART * peak][:MAX_PARTS]
    held = ", ".join(
        f"{format_bytes(part.bytes)} {f'by {part.site}' if part.site else 'without a stack'}" for part in parts
    )
    name = "peak" if _has_peak(device) else "live"
    return Finding(
        rule=NOTHING_FOUND,
        severity=Severity.NONE,
        title=f"No fault found: {name} memory is {format_bytes(peak)}.",
        why=(
            f"The allocator reserved at most {format_bytes(device.peak_reserved_bytes)} of cuda:{device.device}"
            f"{f'. Allocated: {held}' if held else ''}."
        ),
        remedies=_next_of(device, parts),
        numbers={
            "device": device.device,
            "peak_requested_bytes": peak,
            "peak_reserved_bytes": device.peak_reserved_bytes,
        },
        evidence=(Evidence(artifact=str(snapshot.file)),),
    )


def _next_of(device: DeviceReport, parts: Sequence[HeldLine]) -> tuple[Remedy, ...]:
    if not device.has_stacks:
        return (RECORD_ALLOCATION_STACKS,)
    peak = device.peak_requested_bytes
    unknown = sum(line.bytes for line in device.lines_at_peak if not line.site)
    if unknown > NOTABLE_HOLDER * peak:
        whole = "peak" if _has_peak(device) else "live memory"
        return (RECORD_STACKS_FROM_START.filled(share=percent(unknown / peak), whole=whole),)
    clear = (CLEAR_GRADIENTS,) if _in_forward(device) and any(part.site in GRADIENTS for part in parts) else ()
    line = next((line for line in device.lines_at_peak if line.site and not (clear and line.site in GRADIENTS)), None)
    if line is None or line.bytes < NOTABLE_PART * peak:
        return clear or fitting(device, *SMALLER_BATCH)
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
