"""Memory that grows: with every step, and from window to window."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs
from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import (
    MIN_BYTES,
    Growth,
    Holders,
    assigned_in,
    held_growth,
    steady_growth,
    who_holds,
)
from lightning_memprof.account.memory.model import Site, WindowAllocations
from lightning_memprof.account.memory.report import RankMemory
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.artifacts.naming import holders_name
from lightning_memprof.artifacts.series import ActionMemoryRow, HolderRow, HookRow, ThroughputRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Severity, recovered
from lightning_memprof.judge.measures import sample_method, steps_until_full
from lightning_memprof.read.run.model import ArtifactFile, Rank
from lightning_memprof.read.snapshot.report import DeviceReport
from lightning_memprof.units import GIB, MIB, format_bytes, format_count, percent

SEVERE_SHARE: Final = 0.5
# Allocations of these phases live across steps in every training run.
PERMANENT: Final = frozenset({"backward", "optimizer"})
# A surviving allocation must be this share of the growth per step.
MIN_PART: Final = 0.1
MAX_SURVIVORS: Final = 5
# The cause adds about the slope: tensors and fetches at least half of it, a hook, which usually adds nothing, a tenth,
# and a graph all saved activations.
MATCHES: Final = (0.5, 2.0)
FETCHED: Final = 0.5
HOOKED: Final = 0.1
GRAPH: Final = (0.8, 1.3)
RETAINED: Final = "Remove retain_graph=True, and keep loss.detach(), not the loss: a graph holds its activations."
BATCHES: Final = 1.5
FETCH: Final = ".train_dataloader_next"
LOADER: Final = "[DataLoader]"
RSS: Final = "RSS"
ENTRIES: Final = "memory of its entries"
COLUMNS: Final = (("rss_bytes", "Host memory", RSS), ("device_peak_bytes", "Device memory", "device peak"))
DETACH: Final = "Store loss.item() or loss.detach(), not the loss, and clear lists of outputs in on_train_epoch_end."
LINE: Final = "ExtendedPyTorchProfiler(with_stack=True) records its line."
NATIVE: Final = "Look for a library that keeps buffers: python -m memray run --native, then memray flamegraph --leaks."
OUTSIDE: Final = {
    "remainder": (" outside Python objects", "native code keeps it.", NATIVE),
    "free memory": (
        ": the C allocator keeps freed memory",
        "the program has freed it.",
        "Pad batches to a few lengths, or set MALLOC_ARENA_MAX=2 before the training.",
    ),
}
APPENDS: Final = "Find callbacks and metrics that append to a list in each batch."


class _Survivor(msgspec.Struct, frozen=True, kw_only=True):
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


def memory_growth(facts: Facts) -> Finding | None:
    """Find memory that grows with every step, its cause, and allocations that outlive their step.

    Recovers the line ``growth`` of the byte ledger: all that the slope added to the peak.
    """
    found = _slopes(facts)
    if not found:
        return None
    growth, rank, title, source = max(found, key=lambda entry: entry[0].added_bytes)
    holders = Holders(_bounded(rank.read(HolderRow).rows, rank), growth)
    full = steps_until_full(facts, rank, growth.bytes_per_step, on_host=source == RSS)
    if holders.ends or (growth.is_settling(is_fatal=full is not None) and holders.is_free):
        return None
    holder = holders.main
    share = growth.added_bytes / growth.start_bytes if growth.start_bytes else 1.0
    survivors = _survivors(facts, rank, growth)
    sources = {survivor.source.artifact: survivor.source for survivor in survivors if survivor.source.artifact}
    outside = _outside(holders)
    named = _held(holder) if holder is not None else _cause(facts, rank, growth, survivors, holders)
    # A fetch also adds what the program frees elsewhere.
    is_sure = named is not None and not (named.action or "").endswith(FETCH)
    cause = named if is_sure or outside is None else outside
    if holder is not None:
        path = f"{facts.run.directory.name}/{holders_name(rank.rank)}"
        sources[path] = Evidence(artifact=path, rank=rank.rank)
    shown = [cause.why] if cause is not None else []
    if survivors and (holder is not None or cause is None):
        shown.append(survivors[0].shown)
    shown += (
        [] if full is None else [f"At this rate memory is full after {full:,} more steps, before the training ends."]
    )
    return Finding(
        rule="memory_growth",
        severity=Severity.INFO
        if holders.is_free and full is None
        else _severity(rank, growth, source, is_explained=cause is not None and cause is not outside),
        title=(
            f"{title} grows by {format_bytes(growth.bytes_per_step)} per step{facts.on_rank(rank)}"
            f"{cause.where if cause else ''}."
        ),
        why=(
            f"The {source} rose steadily by {format_bytes(growth.added_bytes)} ({percent(share)}) in "
            f"{growth.steps} steps: 1 GiB more every {GIB / growth.bytes_per_step:,.0f} steps. {' '.join(shown)}"
        ).rstrip(),
        remedies=(*((cause.next,) if cause else ()), *((DETACH, APPENDS) if facts.is_fit else (APPENDS,))),
        evidence=(facts.pulse(rank), *sources.values()),
        numbers={
            "rank": rank.rank,
            "column": source,
            "bytes_per_step": round(growth.bytes_per_step),
            "added_bytes": growth.added_bytes,
            "start_bytes": growth.start_bytes,
            "steps": growth.steps,
            "action": cause.action if cause else None,
            "holder": {"place": holder.place, "line": holder.line, "content": holder.content} if holder else None,
            "survivors": [survivor.numbers for survivor in survivors],
        },
        weight=share,
        recovers=recovered(facts.byte_ledgers.get(rank.rank), growth.added_bytes, "growth"),
    )


def _bounded(rows: Iterable[HolderRow], rank: Rank) -> list[HolderRow]:
    """Return the holders; a dictionary of a data set by index is full after an epoch."""
    training = rank.training
    loader = training.dataloaders[0] if training is not None and training.dataloaders else None
    samples = (training.num_batches or 0) * (loader.batch_size or 1) if training is not None and loader else 0
    return [
        structs.replace(row, bound=samples) if row.kind == "sample cache" and (row.count or 0) <= samples else row
        for row in rows
    ]


def _slopes(facts: Facts) -> list[tuple[Growth, Rank, str, str]]:
    """Return each slope with its rank, and the words for the memory and its source."""
    return [
        (growth, rank, title, source)
        for rank in facts.run.ranks
        for column, title, source in COLUMNS
        if (growth := steady_growth(rank.pulse, column)) is not None
    ] or [
        (growth, rank, COLUMNS[0][1], ENTRIES)
        for rank in facts.run.ranks
        if (growth := held_growth(rank.read(HolderRow).rows, rank.pulse)) is not None
    ]


def _severity(rank: Rank, growth: Growth, source: str, *, is_explained: bool) -> Severity:
    """Return the severity of a slope.

    Where the length of the batches varies, the C allocator's free pieces fit fewer of them: RSS rises for dozens of
    steps without a leak.
    """
    lengths = {row.positions for window in rank.windows for row in window.read(ThroughputRow).recorded}
    if not is_explained and source == RSS and len(lengths) > 1 and growth.is_short:
        return Severity.INFO
    return Severity.CRITICAL if growth.added_bytes >= SEVERE_SHARE * growth.start_bytes else Severity.WARNING


class _Cause(NamedTuple):
    """The cause of a growth: end of the sentence, evidence and remedy; ``action`` is the Trainer's."""

    where: str
    why: str
    next: str
    action: str | None = None


def _cause(facts: Facts, rank: Rank, growth: Growth, survivors: Sequence[_Survivor], holders: Holders) -> _Cause | None:
    """Return the cause of a slope in the recorded steps, None if nothing recorded explains it.

    A hook of the program, or the data set in this process; tensors that outlive their step, which native
    code may keep; or the saved activations of whole steps, which only a live autograd graph keeps.
    """
    # What the allocator counts as free is not what is alive in a window.
    if holders.is_free:
        return None
    native = _outside(holders)
    action = _growing_action(facts, rank, growth)
    if action is not None:
        return action
    survivor = next((each for each in survivors if each.site.bytes >= MATCHES[0] * growth.bytes_per_step), None)
    if survivor is not None:
        site = survivor.site
        made = site.line or f"the output of {site.module or site.operator}"
        record = "" if site.line else f" {LINE}"
        where = f" in tensors of {site.line or site.module or site.operator}"
        if native is not None:
            advice = f"Find the extension or scripted module that keeps {made} after its step."
            return _Cause(f"{native.where},{where}", f"{survivor.shown} {native.why}", advice)
        advice = f"Find what keeps {made} after its step: detach it, and clear its list or dict.{record}"
        return _Cause(where, survivor.shown, advice)
    memory = _memory(facts, rank)
    saved = memory.activations if memory is not None else None
    if saved is not None and GRAPH[0] * saved.total_bytes <= growth.bytes_per_step <= GRAPH[1] * saved.total_bytes:
        why = f"A step saves {format_bytes(saved.total_bytes)} of activations: a stored loss or output holds its graph."
        return _Cause(" with the saved activations of each step", why, RETAINED)
    return None


def _held(holder: HolderRow) -> _Cause:
    place = (holder.place or "").removesuffix("[...]")
    line = f" ({holder.line})" if holder.line else ""
    count = f"{holder.added:,} " if holder.added else ""
    size = format_bytes(holder.added_bytes or 0)
    why = f"{place} gained {count}{holder.content} ({size}) since step {holder.since_step}."
    advice = f"Clear or bound {place}{assigned_in(holder)}"
    if "Tensor" in (holder.content or ""):
        advice += "; store .detach() or .item() where the tensor is not needed"
    graph = ", which keeps its graph" if "with its graph" in (holder.content or "") else ""
    return _Cause(f" in {place}{graph}{line}", why, f"{advice}.")


def _outside(holders: Holders) -> _Cause | None:
    """Return the cause if no Python object explains the slope."""
    row = holders.outside
    if row is None or row.kind not in OUTSIDE:
        return None
    where, why, advice = OUTSIDE[row.kind]
    return _Cause(where, f"No Python object refers to {format_bytes(row.added_bytes or 0)} of it: {why}", advice)


def _memory(facts: Facts, rank: Rank) -> RankMemory | None:
    ranks = facts.memory.ranks if facts.memory is not None else ()
    return next((memory for memory in ranks if memory.rank == rank.rank), None)


def _growing_action(facts: Facts, rank: Rank, growth: Growth) -> _Cause | None:
    """Return the program's hook that adds about the slope in the recorded steps, or the fetch.

    Measured by the bytes of the C allocator, else by RSS. In the first steps RSS also reuses freed memory, and a hook
    adds less than later.
    """
    rows = rank.recorded(ActionMemoryRow)
    found = (
        _fitting([(row.action, row.heap_change_bytes) for row in rows], rank, growth, MATCHES[0]),
        _fitting([(row.action, row.rss_change_bytes) for row in rows], rank, growth, HOOKED),
    )
    fits, measured = next(
        ((fits, name) for fits, name in zip(found, ("The heap", "RSS"), strict=True) if fits), ({}, "")
    )
    action = max(fits, key=lambda action: (not action.endswith(FETCH), fits[action]), default=None)
    if action is None or (action.endswith(FETCH) and _is_batch(_memory(facts, rank), fits[action])):
        return None
    measured = f"{measured} rises by {format_bytes(fits[action])} over it in each recorded step."
    if not action.endswith(FETCH):
        name = action_name(action)
        advice = f"Look for data that {name} stores in each batch: store a number instead, or clear its list or dict."
        return _Cause(f" in {name}", measured, advice, action)
    name = dataset_name(rank) or "the data set"
    method = sample_method(rank.training.dataloaders if rank.training else ())
    advice = f"Do not keep samples in {name}.{method}, or bound its cache: functools.lru_cache(maxsize=...)."
    return _Cause(f" in the fetch from {name}", measured, advice, action)


def _fitting(
    rows: Iterable[tuple[str | None, int | None]], rank: Rank, growth: Growth, hooked: float
) -> dict[str, float]:
    """Return the actions that add memory in each recorded step, and their mean, if it is about the slope."""
    changes: dict[str, list[int]] = defaultdict(list)
    for action, change in rows:
        if action is not None and change is not None:
            changes[action].append(change)
    steps = sum(len(window.steps) for window in rank.windows)
    return {
        action: mean
        for action, found in changes.items()
        if steps
        and min(found) > 0
        and (FETCHED if action.endswith(FETCH) else hooked)
        <= (mean := sum(found) / steps) / growth.bytes_per_step
        <= MATCHES[1]
    }


def _is_batch(memory: RankMemory | None, change: float) -> bool:
    """Return whether the size of a batch explains the change of a fetch; the previous batch is freed elsewhere."""
    held = memory.held.values() if memory is not None else ()
    return change < BATCHES * max((sizes.get("input") or 0 for sizes in held), default=0)


def dataset_name(rank: Rank) -> str | None:
    """Return the class of the data set of the recorded fetches, None if there are none."""
    actions = (row.action or "" for row in rank.recorded(HookRow))
    found = next((action for action in actions if action.startswith(LOADER)), None)
    return found.removeprefix(LOADER).rpartition(".")[0] if found is not None else None


def _survivors(facts: Facts, rank: Rank, growth: Growth) -> list[_Survivor]:
    """Return the allocations of earlier steps that are live at the peak of a window, the largest first.

    Gradients and optimizer state survive in every training run: allocations of backward and optimizer do not count, nor
    those that are too small for the slope.
    """
    found = []
    for window in _allocations(facts):
        for device in window.devices if window.rank == rank.rank else ():
            for site in device.sites:
                age = 0 if site.step is None or device.peak_step is None else device.peak_step - site.step
                if age > 0 and site.phase not in PERMANENT and site.bytes >= MIN_PART * growth.bytes_per_step:
                    at = facts.pulse(rank, (site.step or 0, device.peak_step or 0))
                    source = replace(at, artifact=_path(facts, window.trace), window=window.window)
                    found.append(_Survivor(site=site, age=age, source=source))
    return sorted(found, key=lambda survivor: -survivor.site.bytes)[:MAX_SURVIVORS]


def _allocations(facts: Facts) -> list[WindowAllocations]:
    return [window for rank in (facts.memory.ranks if facts.memory else ()) for window in rank.allocations]


def _path(facts: Facts, file: os.PathLike[str] | str | None) -> str:
    """Return the path of a file in the manifest, else its own path; an empty string for None."""
    name = os.fspath(file) if file is not None else ""
    return next((artifact.path for artifact in facts.run.artifacts if os.fspath(artifact.file) == name), name)


# Two windows do not tell growth from the first steps' gradients, optimizer state and workspaces.
MIN_WINDOWS: Final = 3
# The allocator's bytes are exact.
MIN_LIVE_SHARE: Final = 0.02
# A steady leak adds the same between any two windows; a single jump adds nothing in the others.
MIN_OF_MEAN: Final = 0.25
MAX_LINES: Final = 3


class Level(msgspec.Struct, frozen=True, kw_only=True):
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
    min_step = MIN_OF_MEAN * added / len(steps)
    return added >= max(MIN_BYTES, MIN_LIVE_SHARE * levels[0].bytes) and min(steps) >= min_step


def _device_growth(facts: Facts, rank: int, device: str, levels: Sequence[Level]) -> Finding:
    first, last = levels[0], levels[-1]
    added = last.bytes - first.bytes
    share = added / first.bytes if first.bytes else 1.0
    lines = _grown(levels) or _outliving(facts, rank, device, last.window)
    mostly = f", mostly from {lines[0][0]} ({format_bytes(lines[0][1])})" if lines else ""
    held = _device_holder(facts, rank)
    if held is not None:
        next_steps: tuple[str, ...] = (held.next, DETACH)
    elif lines:
        next_steps = (f"Look at {lines[0][0]}: its allocations outlive their step.", DETACH)
    else:
        next_steps = (DETACH, "Record the stacks: MemProfilerCallback(collectors=[AllocatorHistory()]).")
    return Finding(
        rule="device_memory_growth",
        severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
        title=f"Memory of {device} grows from window to window{facts.on_rank(rank)}{mostly}.",
        why=(
            f"Live bytes at the same point of a step: {format_bytes(first.bytes)} in window {first.window}, "
            f"{format_bytes(last.bytes)} in window {last.window} ({percent(share)} more); each of "
            f"{len(levels)} windows has more than the previous one.{f' {held.why}' if held else ''}"
        ),
        remedies=next_steps,
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


def _device_holder(facts: Facts, number: int) -> _Cause | None:
    """Return the variable that keeps tensors, if a search of this rank found one without a limit."""
    rank = next(rank for rank in facts.run.ranks if rank.rank == number)
    rows = [row for row in who_holds(rank.read(HolderRow).rows) if row.place and "Tensor" in (row.content or "")]
    return next((_held(row) for row in rows if not row.bound), None)


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


def _outliving(facts: Facts, rank: int, device: str, window: int) -> list[tuple[str, int]]:
    """Return the lines whose blocks outlive their step in a window, the largest first."""
    live: Counter[str] = Counter()
    for allocation in _allocations(facts):
        for found in allocation.devices if (allocation.rank, allocation.window) == (rank, window) else ():
            for site in found.sites if found.device == device else ():
                if site.step is not None and found.peak_step is not None and site.step < found.peak_step:
                    live[site.line or site.operator] += site.bytes
    return [(line, size) for line, size in live.most_common(MAX_LINES) if line and size >= MIB]
