"""Memory that grows: with every step, and from window to window."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import Evidence, Facts, Finding, Severity
from lightning_memprof.units import GIB, MIB, format_bytes, format_count, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.memory.model import Site, WindowAllocations
    from lightning_memprof.analysis.run.model import ArtifactFile, Rank
    from lightning_memprof.analysis.snapshot.report import DeviceReport
    from lightning_memprof.artifacts.series import PulseRow

__all__ = ["Growth", "device_memory_growth", "left_by_windows", "memory_growth", "steady_growth"]

Point = tuple[int, int]

# Four quarters of at least four steps: fewer do not tell a slope from a jump.
MIN_STEPS: Final = 16
# Caches, lazy initialization and the allocators' first growth are in the first tenth, at least five steps.
WARMUP_SHARE: Final = 0.1
WARMUP_STEPS: Final = 5
# The C allocator's drift in a steady run is well below both. Between steps, live device memory varies by a batch.
MIN_BYTES: Final = 32 * MIB
MIN_SHARE: Final = 0.05
# In fewer steps the allocator's pools may still fill: only a leak that soon ends the run counts.
SHORT_RUN_STEPS: Final = 100
SHORT_RUN_MIN_SHARE: Final = 0.1
# In the first steps after a window, memory that the window's data displaced is touched again.
SETTLING_STEPS: Final = 5
SEVERE_SHARE: Final = 0.5
# Between two quarters a steady slope adds a third of the total; a jump or a cache that fills adds next to nothing once.
MIN_QUARTER: Final = 1 / 9
# Pairs grow with the square: 200 points are 20,000 pairs, a few milliseconds.
MAX_POINTS: Final = 200
MAX_SEGMENTS: Final = 50
# The level beside a window is the median of this many steps.
EDGE_STEPS: Final = 5
# The first step allocates permanent memory: gradients and optimizer state.
FIRST_STEPS: Final = 1
# Fewer steps show no level.
MIN_EDGE_STEPS: Final = 3
# The C allocator's jumps are smaller.
MIN_LEFT_BYTES: Final = 8 * MIB
# Allocations of these phases live across steps in every training.
PERMANENT: Final = frozenset({"backward", "optimizer"})
# A surviving allocation must be this share of the growth per step.
LEAST_PART: Final = 0.1
MAX_SURVIVORS: Final = 5
COLUMNS: Final = (("rss_bytes", "Host memory", "RSS"), ("device_peak_bytes", "Device memory", "device peak"))
DETACH: Final = "Store loss.item() or loss.detach(), not the loss, and clear lists of outputs in on_train_epoch_end."
APPENDS: Final = "Find callbacks and metrics that append to a list in each batch."


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A steady slope: bytes per step, and the bytes that it added to ``start_bytes`` in ``steps`` steps."""

    bytes_per_step: float
    added_bytes: int
    start_bytes: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Survivor:
    """Allocations of a step that are live ``age`` steps later, at the peak of a window."""

    site: Site
    age: int
    source: Evidence

    @property
    def shown(self) -> str:
        site = self.site
        module = f" in module {site.module}" if site.module else ""
        line = f" at {site.line}" if site.line else ""
        later = format_count(self.age, "step")
        return f"{format_bytes(site.bytes)} allocated by {site.operator}{module}{line} are still live {later} later."

    @property
    def numbers(self) -> dict[str, Any]:
        site = self.site
        return {
            "operator": site.operator,
            "module": site.module,
            "line": site.line,
            "stack": list(site.stack),
            "bytes": site.bytes,
            "blocks": site.blocks,
            "steps_later": self.age,
        }


def memory_growth(facts: Facts) -> list[Finding]:
    """Find memory that grows with every step, and allocations that outlive their step."""
    found = [
        (growth, rank, title, source)
        for rank in facts.run.ranks
        for column, title, source in COLUMNS
        if (growth := steady_growth(rank.pulse, column)) is not None
    ]
    if not found:
        return []
    growth, rank, title, source = max(found, key=lambda entry: entry[0].added_bytes)
    share = growth.added_bytes / growth.start_bytes if growth.start_bytes else 1.0
    survivors = _survivors(facts, rank, growth)
    sources = {survivor.source.artifact: survivor.source for survivor in survivors if survivor.source.artifact}
    return [
        Finding(
            rule="memory_growth",
            severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
            sentence=f"{title} grows by {format_bytes(growth.bytes_per_step)} per step{facts.on_rank(rank)}.",
            why=(
                f"The {source} rose steadily by {format_bytes(growth.added_bytes)} ({percent(share)}) in "
                f"{growth.steps} steps: 1 GiB more every {GIB / growth.bytes_per_step:,.0f} steps."
                + (f" {survivors[0].shown}" if survivors else "")
            ),
            next_steps=(DETACH, APPENDS) if facts.is_fit else (APPENDS,),
            evidence=(facts.pulse(rank), *sources.values()),
            numbers={
                "rank": rank.rank,
                "column": source,
                "bytes_per_step": round(growth.bytes_per_step),
                "added_bytes": growth.added_bytes,
                "start_bytes": growth.start_bytes,
                "steps": growth.steps,
                "kept": [survivor.numbers for survivor in survivors],
            },
            weight=share,
        )
    ]


def _survivors(facts: Facts, rank: Rank, growth: Growth) -> list[_Survivor]:
    """Return the allocations of earlier steps that are live at the peak of a window, the largest first.

    Gradients and optimizer state survive in every training: allocations of backward and optimizer do not count, nor
    those that are too small for the slope.
    """
    found = []
    for window in _allocations(facts):
        for device in window.devices if window.rank == rank.rank else ():
            for site in device.sites:
                age = 0 if site.step is None or device.peak_step is None else device.peak_step - site.step
                if age > 0 and site.phase not in PERMANENT and site.bytes >= LEAST_PART * growth.bytes_per_step:
                    at = facts.pulse(rank, (site.step or 0, device.peak_step or 0))
                    source = replace(at, artifact=_path(facts, window.trace), window=window.window)
                    found.append(_Survivor(site=site, age=age, source=source))
    return sorted(found, key=lambda survivor: -survivor.site.bytes)[:MAX_SURVIVORS]


def _allocations(facts: Facts) -> list[WindowAllocations]:
    ranks = facts.memory.ranks if facts.memory is not None else ()
    return [allocation for rank in ranks for allocation in rank.allocations]


def _path(facts: Facts, file: os.PathLike[str] | str | None) -> str:
    """Return the path of a file in the manifest, else its own path; an empty string for None."""
    name = os.fspath(file) if file is not None else ""
    return next((artifact.path for artifact in facts.run.artifacts if os.fspath(artifact.file) == name), name)


def steady_growth(rows: Sequence[PulseRow], column: str) -> Growth | None:
    """Return the slope of a column of bytes if it rises steadily after the warmup, else None.

    Steps in windows are excluded, and so is memory that a window leaves behind. The slope is the Theil-Sen median over
    pairs of steps with no window between them; steady means that the medians of the four quarters rise one after the
    other.
    """
    segments = _segments(rows, column, max(WARMUP_STEPS, round(WARMUP_SHARE * len(rows))))
    if sum(map(len, segments)) < MIN_STEPS:
        return None
    slope = _median_slope(segments)
    points = _joined(segments, slope)
    quarter = len(points) / 4
    medians = [
        statistics.median(value for _, value in points[round(index * quarter) : round((index + 1) * quarter)])
        for index in range(4)
    ]
    risen = medians[-1] - medians[0]
    least = min(after - before for before, after in itertools.pairwise(medians))
    steps = points[-1][0] - points[0][0]
    start = segments[0][0][1]
    added = round(slope * steps)
    min_share = MIN_SHARE if len(points) >= SHORT_RUN_STEPS else SHORT_RUN_MIN_SHARE
    if risen <= 0 or least < MIN_QUARTER * risen or added < MIN_BYTES or added < min_share * start:
        return None
    return Growth(bytes_per_step=slope, added_bytes=added, start_bytes=start, steps=steps)


def left_by_windows(rows: Sequence[PulseRow], column: str) -> int | None:
    """Return the bytes that windows added permanently, or None if no window has enough steps on both sides.

    Compares the five steps before a window, or before several that are close together, with five after it has settled,
    minus the training's own slope. A difference within their spread counts as 0.
    """
    segments = [segment for segment in _segments(rows, column, FIRST_STEPS) if len(segment) >= MIN_EDGE_STEPS]
    edges = [(before[-EDGE_STEPS:], after[:EDGE_STEPS]) for before, after in itertools.pairwise(segments)]
    if not edges:
        return None
    slope = _median_slope(segments)
    left = 0
    for before, after in edges:
        level = [value - slope * step for step, value in before], [value - slope * step for step, value in after]
        if min(level[1]) > max(level[0]) or max(level[1]) < min(level[0]):
            left += round(statistics.median(level[1]) - statistics.median(level[0]))
    return left if left >= MIN_LEFT_BYTES else 0


def _segments(rows: Sequence[PulseRow], column: str, skip: int) -> list[list[Point]]:
    """Return ``(step, bytes)`` after ``skip`` rows, split at windows, without the steps that settle after a window."""
    segments: list[list[Point]] = []
    split = True
    settling = 0
    for row in rows[skip:]:
        step, value = row["step"], row[column]
        if row["window"] is not None:
            split, settling = True, SETTLING_STEPS
        elif settling:
            settling -= 1
        elif step is not None and value is not None:
            if split:
                segments.append([])
                split = False
            segments[-1].append((step, value))
    return segments


def _joined(segments: Sequence[Sequence[Point]], slope: float) -> list[tuple[int, float]]:
    """Concatenate the segments, each shifted so that only the slope remains of the difference across its window."""
    points: list[tuple[int, float]] = []
    for segment in segments:
        shift = 0.0
        if points:
            before, after = points[-EDGE_STEPS:], segment[:EDGE_STEPS]
            gap = statistics.mean(step for step, _ in after) - statistics.mean(step for step, _ in before)
            across = statistics.median(value for _, value in after) - statistics.median(value for _, value in before)
            shift = across - slope * gap
        points += [(step, value - shift) for step, value in segment]
    return points


def _median_slope(segments: Sequence[Sequence[Point]]) -> float:
    longest = sorted(segments, key=len, reverse=True)[:MAX_SEGMENTS]
    most = max(MAX_POINTS // len(longest), MIN_STEPS)
    slopes = [
        (later - earlier) / (after - before)
        for segment in longest
        for (before, earlier), (after, later) in itertools.combinations(segment[:: -(-len(segment) // most)], 2)
        if after > before
    ]
    return statistics.median(slopes) if slopes else 0.0


# Two windows do not tell growth from the first steps' gradients, optimizer state and workspaces.
MIN_WINDOWS: Final = 3
# The allocator's bytes are exact.
MIN_LIVE_SHARE: Final = 0.02
# A steady leak adds the same between any two windows; a single jump adds nothing in all others.
MIN_OF_MEAN: Final = 0.25
MAX_LINES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Level:
    """Live bytes of a window in one of its files: a snapshot has them at its end, a trace at its start."""

    window: int
    bytes: int
    artifact: str
    report: DeviceReport | None = None


def device_memory_growth(facts: Facts) -> list[Finding]:
    """Find live device memory that grows in each window, and the lines that allocated it."""
    found = [
        _device_growth(facts, rank, device, levels)
        for (rank, device), levels in sorted(_levels(facts).items())
        if _grows(levels)
    ]
    return sorted(found, key=lambda finding: finding.weight, reverse=True)[:1]


def _levels(facts: Facts) -> Mapping[tuple[int, str], Sequence[Level]]:
    """Return levels by rank and device, in the order of windows: from snapshots, or from traces if they cover more."""
    levels: dict[tuple[int, str], dict[int, Level]] = {}
    for artifact, device in _snapshots(facts):
        window = artifact.window or 0
        level = Level(window=window, bytes=device.snapshot.requested_bytes, artifact=artifact.path, report=device)
        levels.setdefault((artifact.rank, f"cuda:{device.device}"), {})[window] = level
    others: dict[tuple[int, str], dict[int, Level]] = {}
    for allocations in _allocations(facts):
        for memory in allocations.devices:
            if memory.start_bytes is not None and memory.device != "cpu" and allocations.window is not None:
                path = _path(facts, allocations.trace)
                level = Level(window=allocations.window, bytes=memory.start_bytes, artifact=path)
                others.setdefault((allocations.rank, memory.device), {})[level.window] = level
    for key, by_window in others.items():
        if len(by_window) > len(levels.get(key, {})):
            levels[key] = by_window
    return {key: [by_window[window] for window in sorted(by_window)] for key, by_window in levels.items()}


def _snapshots(facts: Facts) -> list[tuple[ArtifactFile, DeviceReport]]:
    """Return the devices of the windows' snapshots, in the order in which they were written."""
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


def _grows(levels: Sequence[Level]) -> bool:
    """Return whether each window has more than the previous one, and the total increase is large enough."""
    if len(levels) < MIN_WINDOWS:
        return False
    steps = [after.bytes - before.bytes for before, after in itertools.pairwise(levels)]
    added = levels[-1].bytes - levels[0].bytes
    least = MIN_OF_MEAN * added / len(steps)
    return added >= max(MIN_BYTES, MIN_LIVE_SHARE * levels[0].bytes) and min(steps) >= least


def _device_growth(facts: Facts, rank: int, device: str, levels: Sequence[Level]) -> Finding:
    first, last = levels[0], levels[-1]
    added = last.bytes - first.bytes
    share = added / first.bytes if first.bytes else 1.0
    lines = _grown(levels) or _kept(facts, rank, device, last.window)
    mostly = f", mostly from {lines[0][0]} ({format_bytes(lines[0][1])})" if lines else ""
    if lines:
        next_steps = (f"Look at {lines[0][0]}: its allocations outlive their step.", DETACH)
    else:
        next_steps = (DETACH, "Record the stacks: MemProfilerCallback(collectors=[AllocatorHistory()]).")
    return Finding(
        rule="device_memory_growth",
        severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
        sentence=f"Memory of {device} grows from window to window{facts.on_rank(rank)}{mostly}.",
        why=(
            f"Live bytes at the same point of a step: {format_bytes(first.bytes)} in window {first.window}, "
            f"{format_bytes(last.bytes)} in window {last.window} ({percent(share)} more); each of "
            f"{len(levels)} windows has more than the previous one."
        ),
        next_steps=next_steps,
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
    """Return the lines with more live bytes at the end of the last window than of the first, the largest first."""
    first, last = levels[0].report, levels[-1].report
    if first is None or last is None:
        return []
    more = _lines(last)
    more.subtract(_lines(first))
    return [(line, size) for line, size in more.most_common(MAX_LINES) if line and size >= MIB]


def _lines(device: DeviceReport) -> Counter[str]:
    live: Counter[str] = Counter()
    for holder in device.holders_at(device.events - 1):
        live[holder.site] += holder.bytes
    return live


def _kept(facts: Facts, rank: int, device: str, window: int) -> list[tuple[str, int]]:
    """Return the lines whose blocks outlive their step in a window, the largest first."""
    kept: Counter[str] = Counter()
    for allocation in _allocations(facts):
        for found in allocation.devices if (allocation.rank, allocation.window) == (rank, window) else ():
            for site in found.sites if found.device == device else ():
                if site.step is not None and found.peak_step is not None and site.step < found.peak_step:
                    kept[site.line or site.operator] += site.bytes
    return [(line, size) for line, size in kept.most_common(MAX_LINES) if line and size >= MIB]
