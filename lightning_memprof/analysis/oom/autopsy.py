"""Autopsies of out-of-memory errors: the failed allocation, its cause, the live bytes by holder, and remedies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.oom.advice import HOST_REST, OTHER_TENSORS, SETUP, UNHELD, Situation, next_steps
from lightning_memprof.analysis.oom.causes import (
    Cause,
    Memory,
    SnapshotMemory,
    device_cause,
    device_memory,
    host_cause,
    host_memory,
    snapshot_memory,
)
from lightning_memprof.analysis.oom.module_stacks import ModuleStacks
from lightning_memprof.analysis.run.rows import mapping, text, whole
from lightning_memprof.analysis.stacks import Frame, parse_frame, user_frame
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.analysis.oom.events import OomEvent
    from lightning_memprof.analysis.run.model import Run

__all__ = ["Autopsy", "Holder", "autopsies", "autopsy"]

TOP: Final = 10
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
HELD: Final = (
    ("parameter", "parameters"),
    ("gradient", "gradients"),
    ("optimizer_state", "optimizer state"),
    ("buffer", "buffers"),
    ("other", OTHER_TENSORS),
)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Live bytes at the failed allocation, by the line or module that allocated them."""

    name: str
    detail: str | None = None
    bytes: int
    blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Autopsy:
    """One out-of-memory error with its cause, holders and remedies.

    ``place`` has step, global_step, epoch, phase, point, function, stage, window, thread, module and module_class
    where known. A list of holders that is not available is empty, and its note has the reason.
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
    by_module_note: str | None
    next_steps: tuple[str, ...]
    unavailable: Mapping[str, Any]


def autopsies(run: Run, *, max_bytes: int | None = None) -> tuple[Autopsy, ...]:
    """Return an autopsy for each out-of-memory event of a run, by rank and time.

    Args:
        run: the run.
        max_bytes: skip snapshots larger than this; None reads all, at about 20 MB/s.

    """
    training = {
        rank.rank: {**(rank.training.fields if rank.training else {}), "world_size": rank.facts.world_size}
        for rank in run.ranks
    }
    return tuple(autopsy(event, training.get(event.rank), max_bytes=max_bytes) for event in run.ooms)


def autopsy(event: OomEvent, training: Mapping[str, Any] | None = None, *, max_bytes: int | None = None) -> Autopsy:
    """Return the autopsy of one event.

    Args:
        event: the recorded event.
        training: the ``training`` row of the manifest with ``world_size``; remedies depend on it.
        max_bytes: skip a snapshot larger than this; None reads it.

    """
    facts = event.facts
    is_host = facts.get("memory") == "host"
    device = text(facts, "device") or ("cpu" if is_host else "?")
    snapshot, trouble = _snapshot(event, device, max_bytes)
    memory = host_memory(facts) if is_host else device_memory(facts, snapshot)
    asked = whole(facts, "asked_bytes")
    cause, why = host_cause(asked, facts, memory) if is_host else device_cause(asked, facts, memory, snapshot)
    stacks = ModuleStacks(mapping(facts, "forwards") or {})
    by_stack, by_module = _by_stack(snapshot), _by_module(snapshot, stacks)
    note = trouble or (None if snapshot is not None and snapshot.has_stacks else _no_stacks(facts, is_host=is_host))
    frames = _frames(facts)
    user = user_frame(frames)
    module = text(facts, "module")
    if module is None and (module := stacks.name_of(frames)) is not None:
        facts = {**facts, "module": module}
    held = _held(facts, memory, is_host=is_host)
    situation = Situation(
        cause=cause,
        is_host=is_host,
        phase=text(facts, "phase") or (SETUP if whole(facts, "step") is None else None),
        function=text(facts, "function"),
        modules=tuple(holder.name for holder in by_module[:2] if holder.name not in (OUTSIDE, NO_STACK)),
        largest=max(held, key=lambda holder: holder.bytes).name if held else None,
        is_expandable=snapshot is not None and snapshot.is_expandable,
        training=training or {},
    )
    return Autopsy(
        rank=event.rank,
        number=event.number,
        device=device,
        is_host=is_host,
        ended_run=facts.get("ended_run") is True,
        exception=text(facts, "exception"),
        time_ns=whole(facts, "time_ns"),
        seen=text(facts, "seen") or "?",
        place={key: facts.get(key) for key in PLACE},
        line=None if user is None else str(user),
        asked_bytes=asked,
        asked_source=text(facts, "asked_source"),
        cause=cause,
        why=why,
        memory=memory,
        held=held,
        tensors=_tensors(facts),
        by_stack=tuple(by_stack[:TOP]),
        by_stack_note=note,
        by_module=tuple(by_module[:TOP]),
        by_module_note=note,
        next_steps=next_steps(situation),
        unavailable=mapping(facts, "unavailable") or {},
    )


def _snapshot(event: OomEvent, device: str, max_bytes: int | None) -> tuple[SnapshotMemory | None, str | None]:
    if event.snapshot is None:
        return None, None
    if max_bytes is not None and event.snapshot.stat().st_size > max_bytes:
        return None, "the snapshot is too large for this page; lightning-memprof show reads it"
    _, _, index = device.partition(":")
    try:
        return snapshot_memory(event.snapshot, int(index or 0)), None
    except (ArtifactError, ValueError) as error:
        return None, str(error)


def _no_stacks(facts: Mapping[str, Any], *, is_host: bool) -> str:
    if is_host:
        return "the host allocator has no history"
    unavailable = mapping(facts, "unavailable") or {}
    return text(unavailable, "snapshot") or NO_HISTORY


def _by_stack(snapshot: SnapshotMemory | None) -> list[Holder]:
    """Return live bytes by allocation site in the user's program, largest first."""
    found = []
    for holder in snapshot.holders if snapshot is not None and snapshot.has_stacks else ():
        inner = parse_frame(holder.stack[0]) if holder.stack else None
        called = inner is not None and inner.is_python and str(inner) != holder.site
        detail = f"in {inner.name}" if inner is not None and called else None
        found.append(Holder(name=holder.site or NO_STACK, detail=detail, bytes=holder.bytes, blocks=holder.blocks))
    return _summed(found)


def _by_module(snapshot: SnapshotMemory | None, stacks: ModuleStacks) -> list[Holder]:
    """Return live bytes by the module whose forward allocated them, largest first."""
    found = []
    for holder in snapshot.holders if snapshot is not None and snapshot.has_stacks else ():
        frames = [frame for line in holder.stack if (frame := parse_frame(line)) is not None]
        name = stacks.name_of(frames) or OUTSIDE if frames else NO_STACK
        found.append(Holder(name=name, bytes=holder.bytes, blocks=holder.blocks))
    return _summed(found)


def _summed(holders: Iterable[Holder]) -> list[Holder]:
    """Sum holders of the same name and detail, largest first."""
    sums: dict[tuple[str, str | None], Holder] = {}
    for holder in holders:
        known = sums.get((holder.name, holder.detail))
        size, blocks = (known.bytes, known.blocks) if known is not None else (0, 0)
        sums[holder.name, holder.detail] = replace(holder, bytes=size + holder.bytes, blocks=blocks + holder.blocks)
    return sorted(sums.values(), key=lambda holder: (-holder.bytes, holder.name))


def _held(facts: Mapping[str, Any], memory: Memory, *, is_host: bool) -> tuple[Holder, ...]:
    held = mapping(facts, "held")
    if held is None:
        return ()
    found = [Holder(name=label, bytes=size) for key, label in HELD if (size := whole(held, f"{key}_bytes"))]
    rest = (memory.allocated_bytes or 0) - sum(holder.bytes for holder in found)
    if rest > 0:
        found.append(Holder(name=HOST_REST if is_host else UNHELD, bytes=rest))
    return tuple(found)


def _tensors(facts: Mapping[str, Any]) -> tuple[Holder, ...]:
    rows = facts.get("tensors")
    found = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            shape = f"{text(row, 'dtype')} {row.get('shape')}"
            name = text(row, "name")
            size = whole(row, "bytes") or 0
            found.append(Holder(name=name or shape, detail=shape if name else None, bytes=size, blocks=1))
    return tuple(_summed(found)[:TOP])


def _frames(facts: Mapping[str, Any]) -> list[Frame]:
    rows = facts.get("stack")
    found = []
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str() as file, int() as line, str() as name]:
                found.append(Frame(file, line, name))
    return found
