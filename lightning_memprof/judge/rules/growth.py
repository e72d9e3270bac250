"""Memory that grows: with every step, and from window to window."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs
from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import (
    Growth,
    Holders,
    held_growth,
    steady_growth,
)
from lightning_memprof.account.memory.model import Site, WindowAllocations
from lightning_memprof.account.memory.report import RankMemory
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.artifacts.naming import SnapshotName, holders_name
from lightning_memprof.artifacts.series import ActionMemoryRow, HolderRow, ThroughputRow
from lightning_memprof.judge.causes import Cause, dataset_name, holder_cause
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Severity, recovered, severity_of, titled
from lightning_memprof.judge.measures import sample_method, steps_until_full
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    BOUND_SAMPLES,
    DROP_GRAPH,
    EVEN_LENGTHS,
    FIND_APPENDS,
    RELEASE_NATIVE,
    RELEASE_TENSORS,
    STORE_DETACHED,
    STORE_LESS,
    TRACE_NATIVE,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import GIB, format_bytes, format_count

# Allocations of these phases live across steps in every training run.
PERMANENT: Final = frozenset({"backward", "optimizer"})
# A surviving allocation must be this share of the growth per step.
MIN_PART: Final = 0.1
# The cause adds about the slope: tensors and fetches at least half of it, a hook, which usually adds nothing, a tenth,
# and a graph all saved activations.
MATCHES: Final = (0.5, 2.0)
HOOKED: Final = 0.1
GRAPH: Final = (0.8, 1.3)
# Of the largest batch: what a fetch adds is the next batch.
BATCHES: Final = 1.5
FETCH: Final = ".train_dataloader_next"
RSS: Final = "RSS"
COLUMNS: Final = (("rss_bytes", "Host memory", RSS), ("device_peak_bytes", "Device memory", "device peak"))
ENTRIES: Final = ("Host memory", "memory of its entries")
OUTSIDE: Final = {
    "remainder": (" ", "outside Python objects", "native code keeps it", TRACE_NATIVE),
    "free memory": (": ", "the C allocator keeps freed memory", "the program has freed it", EVEN_LENGTHS),
}


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
        return f"{format_bytes(site.bytes)} allocated by {site.operator}{module}{line} are still live {later} later"

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
    """Find memory that grows with every step, and its cause.

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
    holder, outside = holders.main, _outside(holders)
    survivors = _survivors(facts, rank, growth)
    named = holder_cause(holder) if holder is not None else _cause(facts, rank, growth, survivors, holders)
    # A fetch also adds what the program frees elsewhere.
    is_sure = named is not None and not (named.action or "").endswith(FETCH)
    cause = named if is_sure or outside is None else outside
    sources = {survivor.source.artifact: survivor.source for survivor in survivors if survivor.source.artifact}
    if holder is not None:
        path = f"{facts.run.directory.name}/{holders_name(rank.rank)}"
        sources[path] = Evidence(artifact=path, rank=rank.rank)
    shown = [cause.why] if cause is not None else []
    shown += [survivors[0].shown] if survivors and (holder is not None or cause is None) else []
    shown += [f"memory is full after {full:,} more steps, before the training ends"] if full is not None else []
    text = "; ".join(shown)
    is_explained = cause is not None and cause is not outside
    return Finding(
        rule="memory_growth",
        severity=_severity(rank, growth, source, full, is_free=holders.is_free, is_explained=is_explained),
        title=_title(f"{title} grows by {format_bytes(growth.bytes_per_step)} per step{facts.on_rank(rank)}", cause),
        why=(
            f"The {source} rose steadily by {format_bytes(growth.added_bytes)} in {growth.steps} steps: 1 GiB every "
            f"{GIB / growth.bytes_per_step:,.0f} steps.{f' {text[0].upper()}{text[1:]}.' if text else ''}"
        ),
        remedies=(cause.remedy,) if cause is not None else (STORE_DETACHED, FIND_APPENDS),
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
        weight=growth.share,
        recovers=recovered(facts.byte_ledgers.get(rank.rank), growth.added_bytes, "growth"),
    )


def _title(says: str, cause: Cause | None) -> str:
    """Return a title with its cause, and the line of this one where there is room for it."""
    if cause is None:
        return f"{says}."
    whole = f"{says}{cause.link}{cause.owner}{cause.graph}{cause.line}."
    if len(whole) <= POLICY.title:
        return whole
    return titled("{says}{link}{owner}{graph}.", says=says, link=cause.link, owner=cause.owner, graph=cause.graph)


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
        (growth, rank, *ENTRIES)
        for rank in facts.run.ranks
        if (growth := held_growth(rank.read(HolderRow).rows, rank.pulse)) is not None
    ]


def _severity(
    rank: Rank, growth: Growth, source: str, full: int | None, *, is_free: bool, is_explained: bool
) -> Severity:
    """Return the severity of a slope.

    Where the length of the batches varies, the C allocator's free pieces fit fewer of them: RSS rises for dozens of
    steps without a leak.
    """
    found = severity_of(growth.share)
    if full is not None:
        return max(found, Severity.WARNING)
    lengths = {row.positions for window in rank.windows for row in window.read(ThroughputRow).recorded}
    is_unsure = not is_explained and source == RSS and len(lengths) > 1 and growth.is_short
    return min(found, Severity.INFO) if is_free or is_unsure else found


def _cause(facts: Facts, rank: Rank, growth: Growth, survivors: Sequence[_Survivor], holders: Holders) -> Cause | None:
    """Return the cause of a slope in the recorded steps, None if nothing recorded explains it.

    A hook of the program, or the data set in this process; tensors that outlive their step, which native
    code may keep; or the saved activations of whole steps, which only a live autograd graph keeps.
    """
    # What the allocator counts as free is not what is alive in a window.
    if holders.is_free:
        return None
    native = _outside(holders)
    known = _growing_action(facts, rank, growth) or _piled_up(facts, rank)
    if known is not None:
        return known
    survivor = next((each for each in survivors if each.site.bytes >= MATCHES[0] * growth.bytes_per_step), None)
    if survivor is not None:
        site = survivor.site
        owner, made = (
            site.line or site.module or site.operator,
            site.line or f"the output of {site.module or site.operator}",
        )
        if native is not None:
            return Cause(
                f"tensors of {owner}, {native.owner}",
                f"{survivor.shown}; {native.why}",
                RELEASE_NATIVE.filled(made=made),
            )
        record = "" if site.line else " ExtendedPyTorchProfiler(with_stack=True) records its line."
        return Cause(f"tensors of {owner}", survivor.shown, RELEASE_TENSORS.filled(made=made, record=record))
    memory = _memory(facts, rank)
    saved = memory.activations if memory is not None else None
    if saved is not None and GRAPH[0] * saved.total_bytes <= growth.bytes_per_step <= GRAPH[1] * saved.total_bytes:
        why = f"a step saves {format_bytes(saved.total_bytes)} of activations: a stored loss or output holds its graph"
        return Cause("the saved activations of each step", why, DROP_GRAPH)
    return None


def _piled_up(facts: Facts, rank: Rank) -> Cause | None:
    """Return the function whose blocks pile up step by step in an allocator snapshot of the rank."""
    for snapshot in facts.snapshots:
        name = SnapshotName.parse(snapshot.file.name)
        for device in snapshot.devices if name is None or name.rank == rank.rank else ():
            if (growth := device.growth) is not None:
                why = f"{format_bytes(growth.step_bytes)} of its blocks per step are live at the end of the snapshot"
                return Cause(growth.site, why, RELEASE_TENSORS.filled(made=f"the tensors of {growth.site}", record=""))
    return None


def _outside(holders: Holders) -> Cause | None:
    """Return the cause if no Python object explains the slope."""
    row = holders.outside
    if row is None or row.kind not in OUTSIDE:
        return None
    link, owner, why, remedy = OUTSIDE[row.kind]
    evidence = f"no Python object refers to {format_bytes(row.added_bytes or 0)} of it: {why}"
    return Cause(owner, evidence, remedy, link=link)


def _memory(facts: Facts, rank: Rank) -> RankMemory | None:
    ranks = facts.memory.ranks if facts.memory is not None else ()
    return next((memory for memory in ranks if memory.rank == rank.rank), None)


def _growing_action(facts: Facts, rank: Rank, growth: Growth) -> Cause | None:
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
        ((fits, name) for fits, name in zip(found, ("the heap", "RSS"), strict=True) if fits), ({}, "")
    )
    action = max(fits, key=lambda action: (not action.endswith(FETCH), fits[action]), default=None)
    if action is None or (action.endswith(FETCH) and _is_batch(_memory(facts, rank), fits[action])):
        return None
    why = f"{measured} rises by {format_bytes(fits[action])} over it in each recorded step"
    if not action.endswith(FETCH):
        name = action_name(action)
        return Cause(name, why, STORE_LESS.filled(owner=name), action)
    name = dataset_name(rank) or "the data set"
    method = sample_method(rank.training.dataloaders if rank.training else ())
    return Cause(f"the fetch from {name}", why, BOUND_SAMPLES.filled(sample=f"{name}.{method}"), action)


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
        and (MATCHES[0] if action.endswith(FETCH) else hooked)
        <= (mean := sum(found) / steps) / growth.bytes_per_step
        <= MATCHES[1]
    }


def _is_batch(memory: RankMemory | None, change: float) -> bool:
    """Return whether the size of a batch explains the change of a fetch; the previous batch is freed elsewhere."""
    held = memory.held.values() if memory is not None else ()
    return change < BATCHES * max((sizes.get("input") or 0 for sizes in held), default=0)


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
    return sorted(found, key=lambda survivor: -survivor.site.bytes)[: POLICY.owners]


def _allocations(facts: Facts) -> list[WindowAllocations]:
    return [window for rank in (facts.memory.ranks if facts.memory else ()) for window in rank.allocations]


def _path(facts: Facts, file: os.PathLike[str] | str | None) -> str:
    """Return the path of a file in the manifest, else its own path; an empty string for None."""
    name = os.fspath(file) if file is not None else ""
    return next((artifact.path for artifact in facts.run.artifacts if os.fspath(artifact.file) == name), name)
