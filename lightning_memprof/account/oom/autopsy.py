"""Autopsies of out-of-memory errors: the failed allocation, its cause, the live bytes by holder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.memory import UNATTRIBUTED, ByteLedger, ByteLine
from lightning_memprof.account.memory.activations import checkpointing, paths_around, read_saved_steps
from lightning_memprof.account.oom.causes import (
    HOST_REST,
    OTHER_TENSORS,
    REST,
    SETUP,
    UNHELD,
    Cause,
    Memory,
    device_cause,
    device_memory,
    host_cause,
    host_memory,
)
from lightning_memprof.account.snapshot.replay import Replay, replay
from lightning_memprof.artifacts.manifest import OomForwards, OomHeld, OomRow, TrainingFacts
from lightning_memprof.artifacts.series import ProcessRow
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.ooms import OomEvent
from lightning_memprof.read.snapshot.reader import read_snapshot
from lightning_memprof.read.stacks import Frame, parse_frame, user_frame
from lightning_memprof.units import format_bytes, format_count

TOP: Final = 10
# Checkpointing less of the saved activations helps little.
MIN_BLOCKS_SHARE: Final = 0.1
NO_HISTORY: Final = 'the allocator history was off; OOMAutopsy(history="always") records it for the whole run'
NO_STACK: Final = "no Python stack: allocated by autograd threads, or while the history was off"
PLACE: Final = (
    "step",
    "global_step",
    "epoch",
    "phase",
    "point",
    "function",
    "stage",
    "window",
    "thread",
    "module",
    "module_class",
)
OUTSIDE: Final = "outside module forwards"
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
HELD: Final = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "buffer": "buffers",
    "other_tensors": OTHER_TENSORS,
}


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes at the failed allocation, by the line or module that allocated them."""

    name: str
    detail: str | None = None
    bytes: int
    blocks: int = 0


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """One out-of-memory error with its cause and holders.

    ``place`` has step, global_step, epoch, phase, point, function, stage, window, thread, module and module_class
    where known. Holders that are not available are empty, and the note has the reason. ``blocks`` saved the most
    activations; ``training`` is the manifest's row.
    """

    rank: int
    number: int
    device: str
    is_host: bool
    ended_run: bool
    exception: str | None
    time_ns: int | None
    seen: str
    place: Mapping[str, Any]
    line: str | None
    asked_bytes: int | None
    asked_source: str | None
    cause: Cause
    why: str
    memory: Memory
    held: tuple[Holder, ...]
    tensors: tuple[Holder, ...]
    by_stack: tuple[Holder, ...]
    by_stack_note: str | None
    by_module: tuple[Holder, ...]
    unavailable: Mapping[str, Any]
    blocks: tuple[str, ...]
    is_expandable: bool
    training: TrainingFacts
    world_size: int | None

    @property
    def phase(self) -> str | None:
        """The phase of the step; :data:`SETUP` before the first step."""
        return self.place["phase"] or (SETUP if self.place["step"] is None else None)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that allocated most, largest first; where no stack tells, the blocks that saved most."""
        named = (holder.name for holder in self.by_module[:2] if holder.name not in (OUTSIDE, NO_STACK))
        return tuple(named) or self.blocks

    @property
    def largest(self) -> str | None:
        """The label of the largest holder, None where unknown."""
        return max(self.held, key=lambda holder: holder.bytes).name if self.held else None


def autopsies(run: Run, *, max_bytes: int | None = None) -> tuple[Autopsy, ...]:
    """Return an autopsy for each out-of-memory event of a run, by rank and time.

    Args:
        run: the run.
        max_bytes: skip snapshots larger than this; None reads all, at about 20 MB/s.
    """
    ranks = {rank.rank: rank for rank in run.ranks if any(event.rank == rank.rank for event in run.ooms)}
    blocks = {number: _largest_blocks(rank) for number, rank in ranks.items()}
    found = (
        autopsy(
            event,
            ranks[event.rank].training,
            ranks[event.rank].facts.world_size,
            blocks=blocks[event.rank],
            max_bytes=max_bytes,
        )
        for event in run.ooms
    )
    return tuple(_with_workers(event, ranks[event.rank]) for event in found)


def _with_workers(found: Autopsy, rank: Rank) -> Autopsy:
    """Add what the DataLoader workers had when host memory ran out: it is not part of the process's."""
    last = [row for row in rank.read(ProcessRow).rows if row.kind == "workers" and row.private_bytes][-1:]
    if not found.is_host or not last:
        return found
    held = f"{format_count(last[0].workers or 0, 'DataLoader worker')} had {format_bytes(last[0].private_bytes or 0)}"
    return replace(found, why=f"{found.why} {held} of private memory in step {last[0].step}.")


def _largest_blocks(rank: Rank) -> tuple[str, ...]:
    """Return the repeated blocks, else the two modules, that saved the most activations in the recorded steps."""
    backwards = read_saved_steps(rank).backwards
    if not backwards:
        return ()
    largest = max(backwards, key=lambda backward: backward.total_bytes)
    groups = checkpointing(largest, backwards)
    if groups and groups[0].saved_bytes >= MIN_BLOCKS_SHARE * largest.total_bytes:
        return (groups[0].name,)
    modules = [module for module in largest.modules if module.name and module.own_activation_bytes]
    return tuple(module.name for module in nlargest(2, modules, key=lambda module: module.own_activation_bytes))


def autopsy(
    event: OomEvent,
    training: TrainingFacts | None = None,
    world_size: int | None = None,
    *,
    blocks: tuple[str, ...] = (),
    max_bytes: int | None = None,
) -> Autopsy:
    """Return the autopsy of one event.

    Args:
        event: the recorded event.
        training: the ``training`` row of the manifest; remedies depend on it.
        world_size: number of ranks.
        blocks: modules that saved the most activations in recorded steps; used if the event does not name any.
        max_bytes: skip a snapshot larger than this; None reads it.
    """
    facts = event.facts
    is_host = facts.memory == "host"
    device = facts.device or ("cpu" if is_host else "?")
    ring, trouble = _replay(event, device, max_bytes)
    snapshot = None if ring is None else ring.snapshot
    memory = host_memory(facts) if is_host else device_memory(facts, snapshot)
    held = _held(facts, memory, is_host=is_host)
    cause, why = host_cause(facts, memory) if is_host else device_cause(facts, memory, snapshot, _largest(held))
    stacks = ModuleStacks(facts.forwards)
    by_stack, by_module = _sites(ring, stacks)
    no_stack = "the host allocator has no history" if is_host else facts.unavailable.get("snapshot") or NO_HISTORY
    frames = [Frame(*place) for place in facts.stack]
    user = user_frame(frames)
    place = {key: getattr(facts, key) for key in PLACE}
    place |= {"module": stacks.name_of(frames) if facts.module is None else facts.module}
    return Autopsy(
        rank=event.rank,
        number=event.number,
        device=device,
        is_host=is_host,
        ended_run=facts.ended_run,
        exception=facts.exception,
        time_ns=facts.time_ns,
        seen=facts.seen or "?",
        place=place,
        line=None if user is None else str(user),
        asked_bytes=facts.asked_bytes,
        asked_source=facts.asked_source,
        cause=cause,
        why=why,
        memory=memory,
        held=held,
        tensors=_tensors(facts),
        by_stack=tuple(by_stack[:TOP]),
        by_stack_note=trouble or (None if by_stack else no_stack),
        by_module=tuple(by_module[:TOP]),
        unavailable=facts.unavailable,
        blocks=blocks or stacks.blocks_around(place["module"]),
        is_expandable=snapshot is not None and snapshot.is_expandable,
        training=training or TrainingFacts(),
        world_size=world_size,
    )


def _replay(event: OomEvent, device: str, max_bytes: int | None) -> tuple[Replay | None, str | None]:
    if event.snapshot is None:
        return None, None
    if max_bytes is not None and event.snapshot.stat().st_size > max_bytes:
        return None, "the snapshot is too large for this page; lightning-memprof show reads it"
    _, _, index = device.partition(":")
    try:
        return replay(read_snapshot(event.snapshot), int(index or 0)), None
    except (ArtifactError, ValueError) as error:
        return None, str(error)


def _sites(ring: Replay | None, stacks: ModuleStacks) -> tuple[list[Holder], list[Holder]]:
    """Return live bytes by allocation site in the user's program, and by module; none where nothing has a stack."""
    holders = () if ring is None else ring.holders_at(ring.events - 1)
    by_stack, by_module = [], []
    for holder in holders if any(holder.stack for holder in holders) else ():
        frames = [frame for line in holder.stack if (frame := parse_frame(line)) is not None]
        inner = parse_frame(holder.stack[0]) if holder.stack else None
        called = inner is not None and inner.is_python and str(inner) != holder.site
        detail = f"in {inner.name}" if inner is not None and called else None
        module = stacks.name_of(frames) or OUTSIDE if frames else NO_STACK
        by_stack.append(Holder(name=holder.site or NO_STACK, detail=detail, bytes=holder.bytes, blocks=holder.blocks))
        by_module.append(Holder(name=module, bytes=holder.bytes, blocks=holder.blocks))
    return _summed(by_stack), _summed(by_module)


def _summed(holders: Iterable[Holder]) -> list[Holder]:
    """Sum holders of the same name and detail, largest first."""
    sums: dict[tuple[str, str | None], Holder] = {}
    for holder in holders:
        known = sums.get((holder.name, holder.detail))
        size, blocks = (known.bytes, known.blocks) if known is not None else (0, 0)
        sums[holder.name, holder.detail] = replace(holder, bytes=size + holder.bytes, blocks=blocks + holder.blocks)
    return sorted(sums.values(), key=lambda holder: (-holder.bytes, holder.name))


def _held(facts: OomRow, memory: Memory, *, is_host: bool) -> tuple[Holder, ...]:
    if facts.held is None:
        return ()
    found = [Holder(name=HELD[category], bytes=size) for category, size in _held_bytes(facts.held).items() if size]
    rest = (memory.allocated_bytes or 0) - sum(holder.bytes for holder in found)
    if rest > 0:
        found.append(Holder(name=HOST_REST if is_host else UNHELD, bytes=rest))
    return tuple(found)


def _held_bytes(held: OomHeld) -> dict[str, int]:
    """Return the bytes of the categories in ``HELD``."""
    return {name: getattr(held, f"{name.removesuffix('_tensors')}_bytes") or 0 for name in HELD}


def _largest(held: tuple[Holder, ...]) -> str:
    if not held:
        return ""
    largest = max(held, key=lambda holder: holder.bytes)
    return f" ({largest.name.removeprefix(REST)} {format_bytes(largest.bytes)})"


def owned_at_failure(ledger: ByteLedger, events: Iterable[OomEvent]) -> ByteLedger:
    """Return a rank's ledger whose unattributed bytes have the owners of its last failed allocation on that device.

    Categories are ``other_tensors``, which Python holds, ``activation_and_temporary``, which it does not, and those of
    the model and its optimizers.
    """
    failed = [event.facts for event in events if event.facts.device == ledger.place and event.facts.memory != "host"]
    held = failed[-1].held if failed else None
    allocated = (failed[-1].statistics or {}).get("allocated_bytes.all.current") if failed else None
    if held is None or allocated is None:
        return ledger
    sizes = _held_bytes(held)
    recorded = sum(map(ledger.bytes, ("activation", "temporary", "input")))
    sizes["activation_and_temporary"] = allocated - sum(sizes.values()) - recorded
    rest, found = ledger.bytes(UNATTRIBUTED), []
    for category, size in sizes.items():
        added = min(rest, size - ledger.bytes(category))
        if added > 0:
            found.append(ByteLine(category=category, bytes=added))
            rest -= added
    lines = [*(line for line in ledger.lines if line.category != UNATTRIBUTED), *found]
    lines.sort(key=lambda line: -line.bytes)
    if rest:
        lines.append(ByteLine(category=UNATTRIBUTED, bytes=rest))
    return replace(ledger, lines=tuple(lines), basis=f"{ledger.basis}, with the owners of the failed allocation")


def _tensors(facts: OomRow) -> tuple[Holder, ...]:
    found = []
    for row in facts.tensors or ():
        shape = f"{row.dtype} {row.shape}"
        detail = shape if row.name else (f"held by {row.holder}" if row.holder else None)
        found.append(Holder(name=row.name or shape, detail=detail, bytes=row.bytes, blocks=1))
    return tuple(_summed(found)[:TOP])


class ModuleStacks:
    """Maps Python stacks to module paths by the source lines of the modules' forwards.

    A stack has no objects: modules that share class and callers are indistinguishable, and the result then is the
    pattern that their paths share.

    Args:
        forwards: the lines, and the modules by path.
    """

    def __init__(self, forwards: OomForwards) -> None:
        self._classes = {path: name for path, (name, _) in forwards.modules.items()}
        self._sources = {path: source for path, (_, source) in forwards.modules.items()}
        self._lines: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for index, place in enumerate(forwards.sources):
            if place is not None:
                file, first, last = place
                self._lines[file].append((first, last, index))
        self._paths: dict[int | None, list[str]] = defaultdict(list)
        for path, source in self._sources.items():
            self._paths[source].append(path)
        self._known: dict[tuple[int, ...], str | None] = {}

    def name_of(self, stack: Iterable[Frame]) -> str | None:
        """Return the module whose forward a stack (innermost frame first) was in, or None.

        ``"blocks.3.attention"`` where it is unique; ``"blocks.*.attention (Attention)"`` for one of several.
        """
        chain = tuple(source for frame in reversed([*stack]) if (source := self._source_of(frame)) is not None)
        if chain not in self._known:
            self._known[chain] = self._named(chain)
        return self._known[chain]

    def blocks_around(self, name: str | None) -> tuple[str, ...]:
        """Return the repeated blocks, such as ``blocks.* (Block)``, that a module is in; none if they are not alike."""
        parts = (name or "").partition(" ")[0].split(".")
        depth = next((depth for depth, part in enumerate(parts) if part == "*" or part.isdigit()), 0)
        parent = ".".join(parts[:depth])
        classes = {
            path: kind
            for path, kind in self._classes.items()
            if path.rpartition(".")[0] == parent and any(inner.startswith(f"{path}.") for inner in self._classes)
        }
        is_repeated = depth > 0 and len(classes) > 1 and len({*classes.values()}) == 1
        return (f"{parent}.* ({next(iter(classes.values()))})",) if is_repeated else ()

    def _source_of(self, frame: Frame) -> int | None:
        file, line, _ = frame
        found = [(last - first, index) for first, last, index in self._lines.get(file, ()) if first <= line <= last]
        return min(found)[1] if found else None

    def _named(self, chain: tuple[int, ...]) -> str | None:
        if not chain:
            return None
        # A forward that is not a child of its caller is a base class's, called by the override.
        candidates = (self._candidates(chain[:length]) for length in range(len(chain), 0, -1))
        paths = next((paths for paths in candidates if paths), self._paths[chain[-1]])
        classes = sorted({self._classes[path] for path in paths})
        if len(paths) == 1:
            return paths[0] or classes[0]
        patterns = {_NUMBER.sub("*", path) for path in paths}
        name = patterns.pop() if len(patterns) == 1 else f"{len(paths)} modules"
        return f"{name} ({', '.join(classes[:3])})"

    def _candidates(self, chain: tuple[int, ...]) -> list[str]:
        """Return the modules in which a chain of forwards can end.

        A module is usually called through all of its parents: the candidates are those with the fewest missing ones.
        """
        found: dict[int, list[str]] = defaultdict(list)
        for path in self._paths[chain[-1]]:
            above = map(self._sources.get, paths_around(path))
            parents = [source for source in above if source is not None]
            rest = iter(parents)
            if all(caller in rest for caller in chain[:-1]):
                found[len(parents)].append(path)
        return found[min(found)] if found else []
