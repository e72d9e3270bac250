"""Memory that outlives its step: it grows with every step, or the graph of a step is kept into the next one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from lightning_memprof.account.ledger.growth import Growth, steady_growth
from lightning_memprof.account.ledger.holders import Holders, held_growth, is_compiled
from lightning_memprof.account.memory.model import DeviceAllocations, Site
from lightning_memprof.account.memory.report import RankMemory
from lightning_memprof.account.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.account.steps.events import action_name
from lightning_memprof.artifacts.naming import SnapshotName, holders_name
from lightning_memprof.artifacts.series import ActionMemoryRow, HolderRow, ThroughputRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.causes import Cause, dataset_name, file_of, growth_text, holder_cause, rank_memory
from lightning_memprof.judge.fact import ByteFact, on_device
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Severity
from lightning_memprof.judge.loading import sample_method
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.snapshots import on_devices, released
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, percent, sentence

# Allocations of these phases live across steps in every training run.
PERMANENT: Final = frozenset({"backward", "optimizer"})
FETCH: Final = ".train_dataloader_next"
RSS: Final = "RSS"
COLUMNS: Final = (("rss_bytes", "Host memory", RSS), ("device_peak_bytes", "Device memory", "device peak"))
ENTRIES: Final = ("Host memory", "memory of its entries")
OUTSIDE: Final = {
    "remainder": (" ", "outside Python objects", "native code keeps it", do.TRACE_NATIVE),
    "free memory": (": ", "the C allocator keeps freed memory", "the program has freed it", do.EVEN_LENGTHS),
}


class _Survivor(NamedTuple):
    """Allocations of a step that are live ``age`` steps later, at the peak of a window."""

    site: Site
    age: int

    @property
    def shown(self) -> str:
        site = self.site
        module = f" in module {site.module}" if site.module else ""
        line = f" at {site.line}" if site.line else ""
        later = format_count(self.age, "step")
        return f"{format_bytes(site.bytes)} allocated by {site.operator}{module}{line} are still live {later} later"


SAYS: Final = "{memory} grows by {rate} per step{rank}{link}{owner}{graph}{line}."


def growing(facts: Facts) -> Iterator[Found]:
    """Yield memory that grows with every step, and its cause: all that the slope added to the peak."""
    found = _slopes(facts)
    if not found:
        return
    growth, rank, memory, source = max(found, key=lambda entry: entry[0].added)
    holders = Holders(_bounded(rank.read(HolderRow).rows, rank), growth)
    full = steps_until_full(facts, rank, growth.per_step, on_host=source == RSS)
    if holders.ends or (growth.is_settling(is_fatal=full is not None) and holders.is_free):
        return
    holder, outside = holders.main, _outside(holders)
    survivors = _survivors(facts, rank, growth)
    named = _held(holder) if holder is not None else _cause(facts, rank, growth, survivors, holders)
    # A fetch also adds what the program frees elsewhere.
    is_sure = named is not None and not (named.action or "").endswith(FETCH)
    cause = named if is_sure or outside is None else outside
    steps = [each.site.step for each in survivors if each.site.step is not None]
    seen = [facts.pulse(rank), *(facts.recorded(rank, "operator_trace", steps) if steps else ())]
    if holder is not None:
        seen.append(file_of(facts, rank, holders_name(rank.rank)))
    shown = [cause.why] if cause is not None else []
    shown += [survivors[0].shown] if survivors and (holder is not None or cause is None) else []
    shown += [f"memory is full after {full:,} more steps, before the training ends"] if full is not None else []
    fact = ByteFact(
        owner=cause.owner if cause is not None else "",
        bytes=growth.added,
        whole=growth.start + growth.added,
        # The ledger of an accelerator does not know what grew there.
        ledger=facts.resident_ledgers.get(rank.rank, facts.byte_ledgers.get(rank.rank)) if source == RSS else None,
        source=rank,
        evidence=tuple(seen),
    )
    is_explained = cause is not None and cause is not outside
    is_note = holders.is_free or not (is_explained or source != RSS or _is_steady(rank, growth))
    is_note |= holder is not None and is_compiled(holder)
    detail = Detail(
        fields=_fields(memory, format_bytes(growth.per_step), facts.on_rank(rank), cause),
        measured=f"The {source} {growth_text(growth)}",
        why=sentence(*shown),
        remedies=(cause.remedy if cause is not None else do.RELEASE_TENSORS.filled(made="data of each batch"),),
        is_note=is_note and full is None,
        at_least=Severity.WARNING if full is not None else Severity.NONE,
        numbers={
            "bytes_per_step": round(growth.per_step),
            "steps": growth.steps,
            "action": cause.action if cause else None,
            "holder": {"place": holder.place, "line": holder.line, "content": holder.content} if holder else None,
            "survivors": [{**structs.asdict(each.site), "steps_later": each.age} for each in survivors],
        },
    )
    yield fact, detail


def _fields(memory: str, rate: str, rank: str, cause: Cause | None) -> dict[str, str]:
    """Return the fields of a title; the line of the cause is left out where there is no room for it."""
    found = {"memory": memory, "rate": rate, "rank": rank, "link": "", "graph": "", "line": ""}
    if cause is None:
        return found
    found |= {"link": cause.link, "graph": cause.graph, "line": cause.line}
    return found if len(SAYS.format(owner=cause.owner, **found)) <= POLICY.title else {**found, "line": ""}


def growing_blocks(snapshot: SnapshotReport, device: DeviceReport) -> Found | None:
    """Return the blocks of a function that pile up; freeing them recovers those of the peak, or all but a step's."""
    growth, peak = device.growth, device.peak_requested_bytes
    if growth is None:
        return None
    return on_device(snapshot, device, growth.added, peak, owner=growth.owner), lambda: Detail(
        fields=_fields(f"Memory of cuda:{device.device}", format_bytes(growth.per_step), "", None) | {"link": " in "},
        why=(
            f"{format_bytes(growth.added)} in {format_count(growth.blocks, 'block')} of {growth.steps} steps are "
            f"live at the end of the recorded history, {percent(growth.added / peak)} of the peak."
        ),
        saves=((growth.peak_bytes - growth.per_step) / growth.added, growth.peak_bytes / growth.added),
        remedies=(released(growth),),
        numbers={"bytes_per_step": round(growth.per_step), "steps": growth.steps, "blocks": growth.blocks},
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
        (growth, rank, *ENTRIES)
        for rank in facts.run.ranks
        if (growth := held_growth(rank.read(HolderRow).rows, rank.pulse)) is not None
    ]


def _held(holder: HolderRow) -> Cause:
    """Return the cause of memory that a variable holds; the compiler holds until its limit of recompilations."""
    cause = holder_cause(holder)
    if not is_compiled(holder):
        return cause
    why = f"{cause.why}: a graph for each new shape"
    return cause._replace(owner="graphs of torch.compile", why=why, remedy=do.DYNAMIC_SHAPES, graph="", line="")


def _is_steady(rank: Rank, growth: Growth) -> bool:
    """Return whether varying lengths cannot explain a slope.

    The C allocator's free pieces fit fewer batches of varying length: RSS rises for dozens of steps without a leak.
    """
    lengths = {row.positions for window in rank.windows for row in window.read(ThroughputRow).recorded}
    return len(lengths) <= 1 or not growth.is_short


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
    survivor = next((each for each in survivors if each.site.bytes >= POLICY.most * growth.per_step), None)
    if survivor is not None:
        site = survivor.site
        owner = site.line or site.module or site.operator
        made = site.line or f"the output of {owner}"
        if native is not None:
            return Cause(f"tensors of {owner}, {native.owner}", f"{survivor.shown}; {native.why}", native.remedy)
        return Cause(f"tensors of {owner}", survivor.shown, do.RELEASE_TENSORS.filled(made=made))
    memory = rank_memory(facts, rank)
    saved = memory.activations if memory is not None else None
    sizes = sorted((saved.total_bytes, growth.per_step)) if saved is not None else (0, math.inf)
    if saved is not None and sizes[1] < POLICY.alike * sizes[0]:
        why = f"a step saves {format_bytes(saved.total_bytes)} of activations: a stored loss or output holds its graph"
        return Cause("the saved activations of each step", why, do.DROP_GRAPH)
    return None


def _piled_up(facts: Facts, rank: Rank) -> Cause | None:
    """Return the function whose blocks pile up step by step in an allocator snapshot of the rank."""
    for snapshot in facts.snapshots:
        name = SnapshotName.parse(snapshot.file.name)
        for device in snapshot.devices if name is None or name.rank == rank.rank else ():
            if (growth := device.growth) is not None:
                why = f"{format_bytes(growth.per_step)} of its blocks per step are live at the end of the snapshot"
                return Cause(growth.owner, why, released(growth))
    return None


def _outside(holders: Holders) -> Cause | None:
    """Return the cause if no Python object explains the slope."""
    row = holders.outside
    if row is None or row.kind not in OUTSIDE:
        return None
    link, owner, why, remedy = OUTSIDE[row.kind]
    evidence = f"no Python object refers to {format_bytes(row.added_bytes or 0)}: {why}"
    return Cause(owner, evidence, remedy, link=link)


def _growing_action(facts: Facts, rank: Rank, growth: Growth) -> Cause | None:
    """Return the program's hook that adds about the slope in the recorded steps, or the fetch.

    Measured by the bytes of the C allocator, else by RSS. In the first steps RSS also reuses freed memory, and a hook
    adds less than later.
    """
    rows = rank.recorded(ActionMemoryRow)
    found = (
        _fitting([(row.action, row.heap_change_bytes) for row in rows], rank, growth, POLICY.most),
        _fitting([(row.action, row.rss_change_bytes) for row in rows], rank, growth, POLICY.verdict),
    )
    fits, measured = next(
        ((fits, name) for fits, name in zip(found, ("the heap", "RSS"), strict=True) if fits), ({}, "")
    )
    action = max(fits, key=lambda action: (not action.endswith(FETCH), fits[action]), default=None)
    if action is None or (action.endswith(FETCH) and _is_batch(rank_memory(facts, rank), fits[action])):
        return None
    why = f"{measured} rises by {format_bytes(fits[action])} over it in each recorded step"
    if not action.endswith(FETCH):
        name = action_name(action)
        return Cause(name, why, do.RELEASE_TENSORS.filled(made=f"data of {name}"), action)
    name = dataset_name(rank) or "the data set"
    method = sample_method(rank.training.dataloaders if rank.training else ())
    return Cause(f"the fetch from {name}", why, do.BOUND_WORKER_CACHE.filled(sample=f"{name}.{method}"), action)


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
        and (POLICY.most if action.endswith(FETCH) else hooked)
        <= (mean := sum(found) / steps) / growth.per_step
        <= 1 / POLICY.most
    }


def _is_batch(memory: RankMemory | None, change: float) -> bool:
    """Return whether the size of a batch explains the change of a fetch; the previous batch is freed elsewhere."""
    held = memory.held.values() if memory is not None else ()
    return change < POLICY.alike * max((sizes.get("input") or 0 for sizes in held), default=0)


def _survivors(facts: Facts, rank: Rank, growth: Growth) -> list[_Survivor]:
    """Return the allocations of earlier steps that are live at the peak of a window, the largest first.

    Gradients and optimizer state survive in every training run: allocations of backward and optimizer do not count, nor
    those that are too small for the slope.
    """
    memory = rank_memory(facts, rank)
    found = [
        _Survivor(site, device.peak_step - site.step)
        for window in (memory.allocations if memory is not None else ())
        for device in window.devices
        for site in device.sites
        if site.step is not None and device.peak_step is not None and site.step < device.peak_step
        if site.phase not in PERMANENT and site.bytes >= POLICY.verdict * growth.per_step
    ]
    return sorted(found, key=lambda survivor: -survivor.site.bytes)[: POLICY.owners]


def outliving_graph(facts: Facts) -> Iterator[Found]:
    """Yield saved activations of a step that are live at the peak of a later one: backward did not free its graph.

    They recover one to two times these bytes. With retain_graph=True the step's own graph, too, stays whole until its
    backward ends, instead of being freed on the way; on a host, the C allocator also keeps free blocks between the two
    graphs. The ledger's activations are those of one step; the earlier graph is among the unattributed bytes.
    """
    for memory in facts.memory.ranks if facts.memory is not None else ():
        rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
        saved, ledger = memory.activations, facts.byte_ledgers.get(rank.rank)
        kept = max((_outliving(device) for window in memory.allocations for device in window.devices), default=0)
        columns = ("rss_bytes", "device_peak_bytes")
        is_growth = any(steady_growth(rank.pulse, column) for column in columns)
        if saved is None or ledger is None or not kept or kept < POLICY.most * saved.total_bytes or is_growth:
            continue
        once = min(kept, saved.total_bytes, ledger.bytes("activation"))
        fact = ByteFact(
            bytes=once, whole=ledger.peak_bytes, place=ledger.place, ledger=ledger, source=rank,
            evidence=facts.pulse_and_trace(rank),
        )  # fmt: skip
        detail = Detail(
            measured=(
                f"A step saves {format_bytes(saved.total_bytes)} of activations; at the peak, {format_bytes(kept)} "
                f"from the previous forward are live, {percent(fact.share)} of {format_bytes(ledger.peak_bytes)}"
            ),
            why="retain_graph=True or a stored loss or output keeps its graph.",
            numbers={"retained_bytes": kept, "activation_bytes": saved.total_bytes},
        )
        yield fact, detail
        return


def _outliving(device: DeviceAllocations) -> int:
    """Return the bytes at the peak of a window that the forward of an earlier step allocated."""
    peak = device.peak_step or 0
    return sum(site.bytes for site in device.sites if site.phase == "forward" and (site.step or peak) < peak)


def steps_until_full(facts: Facts, rank: Rank, bytes_per_step: float, *, on_host: bool) -> int | None:
    """Return how many more steps growing memory lasts; None if longer than the training, or if either is unknown."""
    ledger, training = facts.byte_ledgers.get(rank.rank), rank.training
    if ledger is None or training is None or (ledger.place == "host") != on_host or not ledger.limit_bytes:
        return None
    steps = (training.max_steps or 0) * (training.accumulate_grad_batches or 1)
    ends = min((end for end in (steps, (training.num_batches or 0) * (training.max_epochs or 0)) if end > 0), default=0)
    free = (ledger.limit_bytes - ledger.outside_bytes) / ledger.sharing - ledger.peak_bytes
    left = max(free, 0) / bytes_per_step
    return round(left) if left < ends - len(rank.pulse) else None


ROWS: Final = (
    Rule(
        id="memory_growth",
        about=(
            "Memory grows with every step, on the host (RSS), on the device (peak), or in a snapshot in the blocks of "
            "one function. The finding names the variable that keeps the memory, if the search for holders found it; "
            "otherwise the hook or fetch that adds it, or the function whose blocks outlive their steps."
        ),
        when=(
            "In a run, over at least 16 steps outside windows, the medians of the four quarters rise one after the "
            "other, by 32 MiB and 5% (10% below 100 steps); in a snapshot, blocks of one function come from at least "
            "five steps and stay. At least `warning` if memory is full before the training ends. Not reported for "
            "growth that ends; `info` for memory that the C allocator keeps, and for batches of varying length."
        ),
        trade_off="None.",
        of=("growth", "requested"),
        find=lambda facts: (*growing(facts), *on_devices(growing_blocks, facts)),
        says=SAYS,
        unnamed="{memory} grows by {rate} per step{rank}.",
        saves=(1, 1),
    ),
    Rule(
        id="retained_graph",
        about="A backward did not free the graph of its step: two graphs at once need twice the memory.",
        when=(
            "The trace needs allocations: at the peak of a window, the forward of an earlier step holds half of the "
            "saved activations or more. Memory that grows with every step does not count."
        ),
        trade_off="None.",
        of=("activation", "unattributed"),
        find=outliving_graph,
        says="Graphs outlive their step: {size} of saved activations are live in the next one{rank}.",
        remedies=(do.DROP_GRAPH,),
        saves=(1, 2),
    ),
)  # fmt: skip
