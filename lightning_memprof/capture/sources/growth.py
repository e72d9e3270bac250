"""Holders of memory that has grown between two moments: containers, groups of tensors, graphs, objects by type."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.capture.census import (
    LEAST_ENTRIES,
    MOST_NODES,
    Census,
    Group,
    full_name,
    graphs,
    grouped,
    large_objects,
    thawed,
)
from lightning_memprof.capture.sources.assignments import Assignments
from lightning_memprof.capture.sources.holders import (
    Holder,
    HolderSearch,
    bound_of,
    entries_of,
    is_container,
    is_container_type,
    is_known,
    length_of,
    type_name,
)
from lightning_memprof.capture.sources.objects import tracked_objects
from lightning_memprof.capture.sources.oom_state import tracked_tensors
from lightning_memprof.capture.sources.saved_graph import SavedGraph, SavedStorages, can_read
from lightning_memprof.capture.sources.tensors import storage_sizes
from lightning_memprof.capture.torch_internals import DisableTorchFunction
from lightning_memprof.units import MIB, format_bytes

_MOST_CONTAINERS: Final = 400
# A holder below both is not worth a row.
_LEAST_BYTES: Final = MIB
_LEAST_SHARE: Final = 0.05
_MOST_ROWS: Final = 8
# Of RSS: the C allocator's own.
_LEAST_REMAINDER: Final = 16 * MIB
_CANDIDATES: Final = 12
_GROUPS: Final = 4
_SAMPLES: Final = 6
_ENOUGH: Final = 3
_ENTRIES: Final = 9
_PARTS: Final = 400
_NESTED: Final = 64
# Of a tensor without its data: the objects of Python and C++.
_TENSOR_BYTES: Final = 440
# Types of everything, those that own no data, and those that are compared one by one.
_UNCOUNTED: Final = frozenset(
    {"cell", "deque", "dict", "frame", "function", "list", "method", "module", "set", "traceback", "tuple", "type"}
)
_CLOSED: Final = (type, ModuleType, FunctionType, CodeType, torch.nn.Module)
_DEPTH: Final = 12
_MORE: Final = " and others"


class _Content:
    """The bytes that new entries of a container own, each once; what existed before is not theirs."""

    def __init__(self, before: Census, storages: Iterable[int]) -> None:
        self._before = before.lengths
        self._graph = SavedGraph() if can_read() else None
        self.storages = set(storages)
        self._nodes: set[Any] = set()
        self._seen: set[int] = set()
        self.label = ""
        self._largest = -1

    def add(self, entry: Any) -> int:
        """Return the bytes that an entry adds; what an earlier one has too is not added.

        Of a container with many parts, the first ones stand for all.
        """
        total = 0.0
        pending: list[tuple[Any, int, float]] = [(entry, 0, 1.0)]
        for _ in range(_PARTS):
            if not pending:
                break
            value, depth, times = pending.pop()
            kind = type(value)
            old = id(value) in self._before and is_container(value)
            if old or id(value) in self._seen or issubclass(kind, _CLOSED) or is_known(kind):
                continue
            self._seen.add(id(value))
            size, words = self._own(value)
            total += size * times
            if size > self._largest and words:
                self._largest = size
                self.label = words if depth == 0 else f"{type_name(entry)} with {words}"
            if depth < _DEPTH and not issubclass(kind, (torch.Tensor, np.ndarray)):
                parts = _parts(value)
                times *= max(len(parts) / _NESTED, 1.0)
                pending += [(part, depth + 1, times) for part in parts[:_NESTED]]
        return round(total)

    def _own(self, value: Any) -> tuple[int, str]:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if issubclass(kind, np.ndarray):
            base = value
            while type(base.base) is np.ndarray:
                base = base.base
            if id(base) in self._seen and base is not value:
                return 0, ""
            self._seen.add(id(base))
            return int(base.nbytes), described(value)
        if kind in (bytes, bytearray, str, list, dict, set, frozenset, tuple, deque, int, float, complex):
            return sys.getsizeof(value), kind.__name__
        # Not __sizeof__: it may be the program's, and that of a generator is undefined.
        return kind.__basicsize__, kind.__name__

    def _tensor(self, tensor: torch.Tensor) -> tuple[int, str]:
        size = _TENSOR_BYTES
        for address, storage_bytes in storage_sizes([tensor]).items():
            size += 0 if address in self.storages else storage_bytes
            self.storages.add(address)
        saved = 0
        with DisableTorchFunction():
            shape = ",".join(map(str, tensor.shape))
            if self._graph is not None and not tensor.is_leaf:
                saved = self._graph.read(tensor, self.storages, self._nodes, MOST_NODES).held_bytes
        words = f"{type_name(tensor)}[{shape}]"
        return size + saved, f"{words} with its graph" if saved else words


def described(value: Any) -> str:
    """Return the class of a value, of an array with its shape and dtype."""
    if issubclass(type(value), np.ndarray):
        return f"{type_name(value)}[{','.join(map(str, value.shape))}] {value.dtype}"
    return type_name(value)


def _parts(value: Any) -> list[Any]:
    """Return what a value refers to, without the frames that called a frame."""
    if type(value) is FrameType:
        return [part for part in gc.get_referents(value) if type(part) not in (FrameType, dict)]
    return gc.get_referents(value)


def _mean_bytes(container: Any, more: int, content: _Content, search: HolderSearch) -> float:
    """Return the mean bytes of a new entry.

    What the first entry shares with the others does not count: it is not what each of them adds.
    """
    # Dictionaries and lists have the new ones at the end.
    entries = entries_of(container)[-more:]
    entries = entries[:: max(1, len(entries) // _ENTRIES)][-_ENTRIES:]
    search.ignore(entries)
    sizes = [content.add(entry) for entry in entries]
    return sum(sizes[1:]) / len(sizes[1:]) if len(sizes) > 1 else float(sum(sizes))


def grown_holders(
    before: Census, now: Census, model: nn.Module, seconds: float, skip: Iterable[int]
) -> list[HolderRow]:
    """Return the holders of memory that has grown between two moments, the largest first; keeps nothing alive.

    Args:
        before: an earlier moment.
        now: the current moment.
        model: the LightningModule.
        seconds: limit of the search, of processor time.
        skip: storages of parameters, by address.
    """
    device = (now.device_bytes or 0) - (before.device_bytes or 0)
    grown = max(now.rss_bytes - before.rss_bytes, device, 0)
    search = HolderSearch(model, seconds)
    compared = _Comparison(before, now, search, max(_LEAST_BYTES, round(_LEAST_SHARE * grown)))
    rows = compared.rows(set(skip), grown)
    rows += _touched(before, now, compared.least)
    rest = grown - sum(row.added_bytes or 0 for row in rows)
    is_free = 2 * (now.free_bytes - before.free_bytes) >= rest
    # Without time left, the rest may have a holder; freed memory has none.
    if rest >= max(_LEAST_REMAINDER, grown // 4) and (is_free or not search.is_over):
        rows.append(HolderRow(kind="free memory" if is_free else "remainder", added_bytes=rest))
    for row in rows:
        row.step, row.since_step, row.grown_bytes = now.step, before.step, grown
    return rows


def _touched(before: Census, now: Census, least: int) -> list[HolderRow]:
    """Return the mapped files and the blocks, allocated before, of which more is resident: both end with their size."""
    rows = []
    for key, size in now.mapped.items():
        added = size - before.mapped.get(key, size)
        if added >= least and key.startswith("/"):
            rows.append(HolderRow(kind="mapped file", place=key, content="pages of the file", added_bytes=added))
        elif added >= least:
            words = f"block of {format_bytes(int(key.partition('+')[2], 16))}"
            rows.append(HolderRow(kind="first touch", content=words, added_bytes=added))
    return rows


class _Comparison:
    """Two moments of a program, and the search for the holders of the difference; kept no longer than that.

    Args:
        before: an earlier moment.
        now: the current moment.
        search: names holders.
        least: bytes that are worth a row.
    """

    def __init__(self, before: Census, now: Census, search: HolderSearch, least: int) -> None:
        self._before = before
        self._now = now
        self._search = search
        self.least = least
        self._assignments = Assignments()
        self._storages = before.storages()
        self._rows: dict[str, HolderRow] = {}
        # Places whose row has all that they hold; another one may have tensors of several shapes.
        self._whole: frozenset[str] = frozenset()

    def rows(self, skip: set[int], grown: int) -> list[HolderRow]:
        """Return the holders, the largest first."""
        self._containers(skip)
        self._whole = frozenset(self._rows)
        self._tensors()
        self._graphs(skip, grown)
        if sum(row.added_bytes or 0 for row in self._rows.values()) < grown // 2:
            self._types()
            self._large()
        # A container within another one of them is part of it.
        found = [row for place, row in self._rows.items() if not any(_is_within(place, other) for other in self._rows)]
        return sorted(found, key=lambda row: -(row.added_bytes or 0))[:_MOST_ROWS]

    def _add(self, holder: Holder, place: str, row: HolderRow) -> None:
        """Add a holder; several containers at one place are one."""
        row.kind, row.place = row.kind or holder.kind, place
        row.line, row.source = self._assignments.first(holder.places)
        row.bound = holder.bound if row.bound is None else row.bound
        known = self._rows.setdefault(place, row)
        if known is not row:
            for name in ("count", "added", "added_bytes"):
                setattr(known, name, (getattr(known, name) or 0) + (getattr(row, name) or 0))
            if row.content != known.content:
                known.content = f"{(known.content or '').removesuffix(_MORE)}{_MORE}"

    def _containers(self, skip: set[int]) -> None:
        """Add the containers that have more entries, by the mean size of their entries."""
        known = self._before.lengths
        grown = [
            (value, more)
            for value in tracked_objects(is_container_type)
            if (more := length_of(value) - known.get(id(value), LEAST_ENTRIES - 1)) > 1
        ]
        # The last is the first: the time may end.
        grown.sort(key=lambda pair: pair[1])
        del grown[:-_MOST_CONTAINERS]
        self._search.ignore(grown, *grown)
        sized: list[tuple[float, str, Any]] = []
        self._search.ignore(sized)
        # A tensor in many lists is one.
        counted = self._storages | skip
        while grown and not self._search.is_over:
            container, more = grown.pop()
            content = _Content(self._before, counted)
            size = more * _mean_bytes(container, more, content, self._search)
            counted = content.storages
            if size >= self.least:
                entry = size, content.label, container
                self._search.ignore(entry)
                sized.append(entry)
        sized.sort(key=lambda entry: -entry[0])
        for size, label, container in sized[:_CANDIDATES]:
            holder = self._search.find(container)
            if holder is None:
                continue
            # An entry of the container; that of a cache has no index.
            is_named = holder.kind == "lru_cache" or holder.place.endswith("[...]")
            place = holder.place if is_named else f"{holder.place}[...]"
            entries = length_of(container)
            added = entries - known.get(id(container), 0)
            row = HolderRow(content=label, count=entries, added=added, added_bytes=round(size))
            row.bound = bound_of(container)
            if holder.kind == "data set" and _has_indices(container):
                row.kind = "sample cache"
            self._add(holder, place, row)

    def _tensors(self) -> None:
        """Add the holders of the groups of tensors that have more members, by some of the new ones."""
        before = self._before.groups
        more = {
            group: (number - before.get(group, (0, 0))[0], size - before.get(group, (0, 0))[1])
            for group, (number, size) in self._now.groups.items()
        }
        groups = [group for group in more if more[group][1] >= self.least]
        groups = sorted(groups, key=lambda group: -more[group][1])[:_GROUPS]
        if not groups:
            return
        tensors = tracked_tensors()
        self._search.ignore(tensors)
        members: dict[Group, list[torch.Tensor]] = {group: [] for group in groups}
        for tensor, group, parts in grouped(tensors):
            if group in members and not self._storages.issuperset(parts):
                members[group].append(tensor)
        tensors.clear()
        self._search.ignore(members, *members.values())
        for group, found in members.items():
            self._group(group, found, more[group])
            found.clear()

    def _group(self, group: Group, members: list[torch.Tensor], more: tuple[int, int]) -> None:
        chosen = members[:: max(1, len(members) // _SAMPLES)][-_SAMPLES:]
        self._search.ignore(chosen)
        holders: list[Holder] = []
        for tensor in chosen:
            holder = self._search.find(tensor)
            if holder is not None and _is_known(holder.place, self._whole):
                return
            if holder is not None:
                holders.append(holder)
            # Three of one place are enough; without time left, a chain is cut short.
            if len(holders) >= _ENOUGH and len({other.place for other in holders}) == 1:
                break
            if holders and self._search.is_over:
                break
        words = f"{group[0]}[{','.join(map(str, group[1]))}]"
        row = HolderRow(content=words, count=len(members), added=more[0], added_bytes=more[1])
        if holders and self._before.lengths.get(holders[0].owner_id) == holders[0].entries:
            # A container of a fixed size, whose entries are replaced.
            row.bound = holders[0].entries
        if not holders:
            # Only autograd or C++ refers to them, or a function that runs.
            row.kind = "no Python object"
            if not self._search.is_over:
                self._rows[words] = row
            return
        place, _ = Counter(holder.place for holder in holders).most_common(1)[0]
        self._add(next(holder for holder in holders if holder.place == place), place, row)

    def _graphs(self, skip: set[int], grown: int) -> None:
        """Add the holder of the tensor whose graph keeps the most, if that has grown."""
        tensors = tracked_tensors()
        self._search.ignore(tensors)
        largest, root = SavedStorages(), None
        for tensor, graph in graphs(tensors, skip):
            if graph.held_bytes > largest.held_bytes:
                largest, root = graph, tensor
        tensors.clear()
        added = largest.held_bytes - self._before.graph_bytes
        if root is None or added < self.least:
            return
        holder = self._search.find(root)
        if holder is not None and not _is_known(holder.place, self._rows):
            shape = ",".join(map(str, root.shape))
            words = f"{type_name(root)}[{shape}] with its graph"
            # What it saves includes the tensors that no object of Python refers to.
            for name in [name for name, row in self._rows.items() if row.kind == "no Python object"]:
                del self._rows[name]
            if largest.is_cut:
                added = max(added, grown - sum(row.added_bytes or 0 for row in self._rows.values()))
            self._add(holder, holder.place, HolderRow(kind="autograd graph", content=words, added_bytes=added))

    def _large(self) -> None:
        """Add the holder of the largest new array, if large objects have grown: one that each step replaces."""
        before = self._before.large
        if before is None or self._search.is_over:
            return
        largest, value, total = 0, None, 0
        for found, size in large_objects(self.least):
            total += size
            if size > largest and before.get(id(found)) != size:
                largest, value = size, found
        added = total - sum(before.values())
        if value is not None and added >= self.least and (holder := self._search.find(value)) is not None:
            self._add(holder, holder.place, HolderRow(content=described(value), added_bytes=min(added, largest)))

    def _types(self) -> None:
        """Add the holders of the types that have more objects, by some of their objects."""
        before = self._before.types
        more = {name: number - before.get(name, 0) for name, number in self._now.types.items()}
        names = [name for name in sorted(more, key=lambda name: -more[name]) if more[name] >= LEAST_ENTRIES]
        names = [name for name in names if name.rpartition(".")[2] not in _UNCOUNTED]
        for name in names[:_CANDIDATES]:
            if self._search.is_over:
                break
            objects = tracked_objects(lambda kind, name=name: full_name(kind) == name)  # type: ignore[misc]
            if not objects or issubclass(type(objects[0]), torch.Tensor):
                continue
            self._search.ignore(objects)
            content = _Content(self._before, self._storages)
            size = more[name] * _mean_bytes(objects, more[name], content, self._search)
            if size >= self.least and (holder := self._search.find(objects[-1])) is not None:
                row = HolderRow(content=content.label, count=len(objects), added=more[name])
                row.added_bytes = round(size)
                if not _is_known(holder.place, self._rows):
                    self._add(holder, holder.place, row)
            objects.clear()


def _has_indices(container: Any) -> bool:
    return type(container) is dict and all(type(key) is int for key in list(container)[:_ENTRIES])


def _is_known(place: str, rows: Iterable[str]) -> bool:
    return any(place == known or _is_within(place, known) for known in rows)


def _is_within(place: str, other: str) -> bool:
    return place != other and place.startswith(other)


@thawed()
def holders_of(wanted: Any, model: nn.Module | None, seconds: float = 2.0) -> list[str]:
    """Return the holders of an object, or of the objects of a type, in words.

    Args:
        wanted: a tensor or another object; or a type, of which the garbage collector tracks the objects.
        model: the LightningModule.
        seconds: limit of the search, of processor time.
    """
    search = HolderSearch(model, seconds)
    if not issubclass(type(wanted), type):
        values = [wanted]
        total = 1
    else:
        values = tracked_objects(lambda kind: issubclass(kind, wanted))
        total = len(values)
        values = values[:: max(1, total // (4 * _SAMPLES))][: 4 * _SAMPLES]
    search.ignore(values)
    assignments = Assignments()
    found: Counter[str] = Counter()
    for value in values:
        holder = search.find(value)
        if holder is not None:
            line, _ = assignments.first(holder.places)
            found[f"{holder.place if total > 1 else holder.chain}{f' ({line})' if line else ''}"] += 1
    values.clear()
    return [words for words, _ in found.most_common()]
