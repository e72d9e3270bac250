"""Device memory that grows from window to window, with the lines whose blocks grew."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Evidence, Facts, Finding, Severity
from lightning_memprof.units import MIB, format_bytes, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.memory.model import WindowAllocations
    from lightning_memprof.analysis.run.load import Artifact
    from lightning_memprof.analysis.snapshot.model import DeviceReport

__all__ = ["device_memory_growth"]

# Two windows cannot tell growth from what the first steps make: gradients, the optimizer's state, workspaces.
MIN_WINDOWS: Final = 3
# The allocator's bytes are exact; between steps they differ by a batch that is kept, or a workspace of a library.
MIN_BYTES: Final = 32 * MIB
MIN_SHARE: Final = 0.02
SEVERE_SHARE: Final = 0.5
# A steady leak adds the same between any two windows; what grows once adds nothing in all others.
MIN_OF_MEAN: Final = 0.25
MAX_LINES: Final = 3


@dataclass(frozen=True)
class Level:
    """What was live in a window, as one file of it says: in a snapshot at its end, in a trace as it begins."""

    window: int
    bytes: int
    artifact: str
    report: DeviceReport | None = None


def device_memory_growth(facts: Facts) -> list[Finding]:
    """Say that more is live in each window than in the one before, by which lines, and what to look for."""
    found = [
        _finding(facts, rank, device, levels)
        for (rank, device), levels in sorted(_levels(facts).items())
        if _grows(levels)
    ]
    return sorted(found, key=lambda finding: finding.weight, reverse=True)[:1]


def _levels(facts: Facts) -> Mapping[tuple[int, str], Sequence[Level]]:
    """Return levels by rank and device, in the order of windows: of snapshots, or of whatever has more windows."""
    levels: dict[tuple[int, str], dict[int, Level]] = {}
    for artifact, device in _snapshots(facts):
        name = f"cuda:{device.device}"
        level = Level(artifact.window or 0, device.requested_bytes, artifact.path, device)
        levels.setdefault((artifact.rank, name), {})[level.window] = level
    others: dict[tuple[int, str], dict[int, Level]] = {}
    for window in _allocations(facts):
        for device_memory in window.devices:
            if device_memory.start_bytes is not None and device_memory.device != "cpu" and window.window is not None:
                path = _path(facts, window.trace)
                level = Level(window.window, device_memory.start_bytes, path)
                others.setdefault((window.rank, device_memory.device), {})[level.window] = level
    for key, by_window in others.items():
        if len(by_window) > len(levels.get(key, {})):
            levels[key] = by_window
    return {key: [by_window[window] for window in sorted(by_window)] for key, by_window in levels.items()}


def _allocations(facts: Facts) -> list[WindowAllocations]:
    return (
        [allocation for rank in facts.memory.ranks for allocation in rank.allocations]
        if facts.memory is not None
        else []
    )


def _snapshots(facts: Facts) -> list[tuple[Artifact, DeviceReport]]:
    """Return the devices of the snapshots that windows made, in the order in which they were written."""
    artifacts = {
        str(artifact.file): artifact
        for artifact in facts.run.artifacts
        if artifact.type == "snapshot" and artifact.window is not None
    }
    return [
        (artifact, device)
        for snapshot in facts.snapshots
        if (artifact := artifacts.get(str(snapshot.file))) is not None
        for device in snapshot.devices
    ]


def _path(facts: Facts, file: object) -> str:
    return next((artifact.path for artifact in facts.run.artifacts if artifact.file == file), str(file))


def _grows(levels: Sequence[Level]) -> bool:
    """Whether each window has more than the one before, and all of them together enough."""
    if len(levels) < MIN_WINDOWS:
        return False
    steps = [after.bytes - before.bytes for before, after in pairwise(levels)]
    added = levels[-1].bytes - levels[0].bytes
    least = MIN_OF_MEAN * added / len(steps)
    return added >= max(MIN_BYTES, MIN_SHARE * levels[0].bytes) and min(steps) >= least


def _finding(facts: Facts, rank: int, device: str, levels: Sequence[Level]) -> Finding:
    first, last = levels[0], levels[-1]
    added = last.bytes - first.bytes
    share = added / first.bytes if first.bytes else 1.0
    lines = _grown(levels) or _kept(facts, rank, device, last.window)
    on_rank = f" on rank {rank}" if len(facts.run.ranks) > 1 else ""
    by = f", most of it allocated by {lines[0][0]} ({format_bytes(lines[0][1])})" if lines else ""
    return Finding(
        rule="device_memory_growth",
        severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
        sentence=f"{device}'s memory grows from window to window{on_rank}{by}.",
        why=(
            f"{format_bytes(first.bytes)} were live in window {first.window}, {format_bytes(last.bytes)} in window "
            f"{last.window} at the same point of a step ({percent(share)} more), and each of {len(levels)} windows had "
            "more than the one before."
        ),
        next_steps=(
            *((f"Look at {lines[0][0]}: what it makes outlives its step.",) if lines else ()),
            "Keep loss.item() or loss.detach() instead of the loss, and empty lists of outputs in on_train_epoch_end.",
            *(() if lines else ("Record the stacks: MemProfilerCallback(collectors=[AllocatorHistory()]).",)),
        ),
        numbers={
            "rank": rank,
            "device": device,
            "added_bytes": added,
            "start_bytes": first.bytes,
            "windows": [level.window for level in levels],
            "live_bytes": [level.bytes for level in levels],
            "lines": [{"line": line, "bytes": size} for line, size in lines],
        },
        weight=min(share, 1.0),
        evidence=tuple(Evidence(artifact=level.artifact, rank=rank, window=level.window) for level in (first, last)),
    )


def _grown(levels: Sequence[Level]) -> list[tuple[str, int]]:
    """Return the lines that hold more at the end of the last window than at that of the first, most first."""
    first, last = levels[0].report, levels[-1].report
    if first is None or last is None:
        return []
    more = _lines(last)
    more.subtract(_lines(first))
    return [(line, size) for line, size in more.most_common(MAX_LINES) if line and size >= MIB]


def _lines(device: DeviceReport) -> Counter[str]:
    held: Counter[str] = Counter()
    for holder in device.replay.holders_at(device.events - 1):
        held[holder.site] += holder.bytes
    return held


def _kept(facts: Facts, rank: int, device: str, window: int) -> list[tuple[str, int]]:
    """Return the lines whose blocks outlive their step within a window, as its trace or ring has them, most first."""
    kept: Counter[str] = Counter()
    for allocation in _allocations(facts):
        for found in allocation.devices if (allocation.rank, allocation.window) == (rank, window) else ():
            for site in found.sites if found.device == device else ():
                if site.step is not None and found.peak_step is not None and site.step < found.peak_step:
                    kept[site.line or site.operator] += site.bytes
    return [(line, size) for line, size in kept.most_common(MAX_LINES) if line and size >= MIB]
