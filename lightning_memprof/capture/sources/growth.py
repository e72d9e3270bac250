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

from lightning_memprof.artifacts.series import OF_LARGER, WITH_GRAPH, HolderRow
from lightning_memprof.capture.census import (
    LEAST_ENTRIES,
    MOST_NODES,
    Census,
    Group,
    containers,
    full_name,
    grouped,
    large_objects,
    largest_graph,
    thawed,
)
from lightning_memprof.capture.sources.assignments import Assignments
from lightning_memprof.capture.sources.holders import (
    Holder,
    HolderSearch,
    bound_of,
    entries_of,
    is_container,
    is_known,
    length_of,
    type_name,
)
from lightning_memprof.capture.sources.objects import tracked_objects
from lightning_memprof.capture.sources.oom_state import tracked_tensors
from lightning_memprof.capture.sources.saved_graph import SavedGraph
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
# A part that is so much smaller than the tensor that it keeps is to be copied.
_PART: Final = 4
# Types of everything, those that own no data, and those that are compared one by one.
_UNCOUNTED: Final = frozenset(
    {"cell", "deque", "dict", "frame", "function", "list", "method", "module", "set", "traceback", "tuple", "type"}
)
_CLOSED: Final = (type, ModuleType, FunctionType, CodeType, torch.nn.Module)
_DEPTH: Final = 12
_MORE: Final = " and others"
_UNHELD: Final = "no Python object"
_GRAPH: Final = "autograd graph"


class _Content:
    """The bytes that new entries of a container own, each once; what existed before is not theirs."""

    def __init__(self, before: Census, storages: Iterable[int], search: HolderSearch) -> None:
        self._before = before.lengths
        self._search = search
        self._graph = SavedGraph()
        self.storages = set(storages)
        self._nodes: set[Any] = set()
        self._seen: set[int] = set()
        self.label = ""
        self._largest = -1

    def mean(self, container: Any, more: int) -> float:
        """Return the mean bytes of the new entries, which dictionaries and lists have at the end, by some of them.

        What the first one shares with the others does not count: it is not what each of them adds.
        """
        entries = entries_of(container)[-more:]
        entries = entries[:: max(1, len(entries) // _ENTRIES)][-_ENTRIES:]
        self._search.ignore(entries)
        sizes = [self.add(entry) for entry in entries]
        return sum(sizes[1:]) / len(sizes[1:]) if len(sizes) > 1 else float(sum(sizes))

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
        held = 0
        for address, storage_bytes in storage_sizes([tensor]).items():
            held += 0 if address in self.storages else storage_bytes
            self.storages.add(address)
        size, saved = _TENSOR_BYTES + held, 0
        with DisableTorchFunction():
            words = _shaped(type_name(tensor), tensor.shape)
            if held >= _PART * tensor.nbytes + _TENSOR_BYTES:
                words += OF_LARGER
            if not tensor.is_leaf:
                saved = self._graph.read(tensor, self.storages, self._nodes, MOST_NODES).held_bytes
        return size + saved, f"{words}{WITH_GRAPH}" if saved else words


def described(value: Any) -> str:
    """Return the class of a value, of an array with its shape and dtype."""
    if issubclass(type(value), np.ndarray):
        return f"{_shaped(type_name(value), value.shape)} {value.dtype}"
    return type_name(value)


def _shaped(name: str, shape: Iterable[int]) -> str:
    return f"{name}[{','.join(map(str, shape))}]"


def _parts(value: Any) -> list[Any]:
    """Return what a value refers to, without the frames that called a frame."""
    if type(value) is FrameType:
        return [part for part in gc.get_referents(value) if type(part) not in (FrameType, dict)]
    return gc.get_referents(value)


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
    least = max(_LEAST_BYTES, round(_LEAST_SHARE * grown))
    rows = _Comparison(before, now, search, set(skip), least).rows(grown)
    rows += _touched(before, now, least)
    rest = grown - _total(rows)
    is_free = 2 * (now.free_bytes - before.free_bytes) >= rest
    # Without time left, the rest may have a holder; freed memory has none.
    if rest >= max(_LEAST_REMAINDER, grown // 4) and (is_free or not search.is_over):
        rows.append(HolderRow(kind="free memory" if is_free else "remainder", added_bytes=rest))
    for row in rows:
        row.step, row.since_step, row.grown_bytes = now.step, before.step, grown
    return rows


def _total(rows: Iterable[HolderRow]) -> int:
    return sum(row.added_bytes or 0 for row in rows)


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

    What grows is a container, the tensors of one shape, the graph of a tensor, the objects of a type, or an array.

    Args:
        before: an earlier moment.
        now: the current moment.
        search: names holders.
        skip: storages of parameters, by address.
        least: bytes that are worth a row.
    """

    def __init__(self, before: Census, now: Census, search: HolderSearch, skip: set[int], least: int) -> None:
        self._before = before
        self._now = now
        self._search = search
        self._skip = skip
        self._least = least
        self._assignments = Assignments()
        self._storages = before.storages()
        self._rows: dict[str, HolderRow] = {}
        # Places with a row of another kind of growth, which has all that they hold.
        self._known: list[str] = []

    def rows(self, grown: int) -> list[HolderRow]:
        """Return the holders of ``grown`` bytes, the largest first."""
        for searched in (self._containers, self._tensors, self._graphs, self._types, self._large):
            # Types and arrays only where the others do not explain the growth.
            if searched == self._types and _total(self._rows.values()) >= grown // 2:
                break
            self._known = [*self._rows]
            searched(grown)
        # A container within another one of them is part of it.
        found = [row for place, row in self._rows.items() if not _is_known(place, self._rows, itself=False)]
        return sorted(found, key=lambda row: -(row.added_bytes or 0))[:_MOST_ROWS]

    def _add(self, row: HolderRow, samples: list[Any], *, is_group: bool = False) -> None:
        """Add the row of objects that have grown, at the place of some of them."""
        self._search.ignore(samples)
        holders: list[Holder] = []
        for sample in samples:
            holder = self._search.find(sample)
            if holder is not None and _is_known(holder.place, self._known):
                return
            holders += [] if holder is None else [holder]
            # Three of one place are enough; without time left, a chain is cut short.
            is_sure = len(holders) >= _ENOUGH and len({holder.place for holder in holders}) == 1
            if is_sure or (holders and self._search.is_over):
                break
        if holders:
            places = Counter(holder.place for holder in holders)
            self._add_held(row, samples[0], max(holders, key=lambda holder: places[holder.place]), is_group=is_group)
        elif is_group and not self._search.is_over:
            # Only autograd or C++ refers to them, or a function that runs.
            row.kind = _UNHELD
            self._rows[row.content or ""] = row

    def _add_held(self, row: HolderRow, value: Any, holder: Holder, *, is_group: bool) -> None:
        kind, place, bound = holder.kind, holder.place, holder.bound
        if is_container(value):
            # An entry of the container; that of a cache has no index.
            place += "" if kind == "lru_cache" or place.endswith("[...]") else "[...]"
            bound = bound if (own := bound_of(value)) is None else own
            kind = "sample cache" if kind == "data set" and _has_indices(value) else kind
        elif is_group and self._before.lengths.get(holder.owner_id) == holder.entries:
            # A container of a fixed size, whose entries are replaced.
            bound = holder.entries
        elif row.kind == _GRAPH:
            # What it saves includes the tensors that no object of Python refers to.
            self._rows = {place: row for place, row in self._rows.items() if row.kind != _UNHELD}
        row.kind, row.place, row.bound = row.kind or kind, place, bound
        row.line, row.source = self._assignments.first(holder.places)
        known = self._rows.setdefault(place, row)
        if known is not row:
            # Several containers, or tensors of several shapes, at one place are one.
            for name in ("count", "added", "added_bytes"):
                setattr(known, name, (getattr(known, name) or 0) + (getattr(row, name) or 0))
            if row.content != known.content:
                known.content = f"{(known.content or '').removesuffix(_MORE)}{_MORE}"

    def _containers(self, _: int) -> None:
        """Add the containers that have more entries, by the mean size of their entries."""
        known = self._before.lengths
        grown = [
            (value, more)
            for value in containers()
            if (more := length_of(value) - known.get(id(value), LEAST_ENTRIES - 1)) > 1
        ]
        # The last is the first: the time may end.
        grown.sort(key=lambda pair: pair[1])
        del grown[:-_MOST_CONTAINERS]
        self._search.ignore(grown, *grown)
        found: list[tuple[HolderRow, list[Any]]] = []
        # A tensor in many lists is one.
        counted = self._storages | self._skip
        while grown and not self._search.is_over:
            container, more = grown.pop()
            row, counted = self._sized(container, more, counted)
            if (row.added_bytes or 0) >= self._least:
                row.added = length_of(container) - known.get(id(container), 0)
                found.append((row, [container]))
                self._search.ignore(found[-1][1])
        found.sort(key=lambda pair: -(pair[0].added_bytes or 0))
        for row, value in found[:_CANDIDATES]:
            self._add(row, value)

    def _sized(self, container: Any, more: int, counted: set[int]) -> tuple[HolderRow, set[int]]:
        """Return the row of a container with more entries, and the storages that are counted by then."""
        content = _Content(self._before, counted, self._search)
        size = round(more * content.mean(container, more))
        row = HolderRow(content=content.label, count=length_of(container), added=more, added_bytes=size)
        return row, content.storages

    def _tensors(self, _: int) -> None:
        """Add the groups of tensors that have more members, by some of the new ones."""
        more = (self._now.tensor_bytes - self._before.tensor_bytes).most_common(_GROUPS)
        members: dict[Group, list[torch.Tensor]] = {group: [] for group, size in more if size >= self._least}
        if not members:
            return
        tensors = tracked_tensors()
        self._search.ignore(tensors, members, *members.values())
        for tensor, group, parts in grouped(tensors):
            if group in members and not self._storages.issuperset(parts):
                members[group].append(tensor)
        tensors.clear()
        for group, size in more[: len(members)]:
            new = members[group]
            added = self._now.tensor_counts[group] - self._before.tensor_counts[group]
            row = HolderRow(content=_shaped(*group[:2]), count=len(new), added=added, added_bytes=size)
            self._add(row, new[:: max(1, len(new) // _SAMPLES)][-_SAMPLES:], is_group=True)
            new.clear()

    def _graphs(self, grown: int) -> None:
        """Add the tensor whose graph keeps the most, if that has grown."""
        tensors = tracked_tensors()
        self._search.ignore(tensors)
        root, largest = largest_graph(tensors, self._skip)
        tensors.clear()
        added = largest.held_bytes - self._before.graph_bytes
        if root is None or added < self._least:
            return
        if largest.is_cut:
            added = max(added, grown - _total(row for row in self._rows.values() if row.kind != _UNHELD))
        words = f"{_shaped(type_name(root), root.shape)}{WITH_GRAPH}"
        self._add(HolderRow(kind=_GRAPH, content=words, added_bytes=added), [root])

    def _types(self, _: int) -> None:
        """Add the types that have more objects, by their last object."""
        more = (self._now.types - self._before.types).most_common()
        more = [(name, number) for name, number in more if number >= LEAST_ENTRIES]
        for name, number in [pair for pair in more if pair[0].rpartition(".")[2] not in _UNCOUNTED][:_CANDIDATES]:
            if self._search.is_over:
                break
            objects = tracked_objects(lambda kind, name=name: full_name(kind) == name)  # type: ignore[misc]
            self._search.ignore(objects)
            if objects and not issubclass(type(objects[0]), torch.Tensor):
                row = self._sized(objects, number, self._storages)[0]
                if (row.added_bytes or 0) >= self._least:
                    self._add(row, objects[-1:])
            objects.clear()

    def _large(self, _: int) -> None:
        """Add the largest new array, if large objects have grown: one that each step replaces."""
        before = self._before.large
        if before is None or self._search.is_over:
            return
        largest, value, total = 0, None, 0
        for found, size in large_objects(self._least):
            total += size
            if size > largest and before.get(id(found)) != size:
                largest, value = size, found
        added = total - sum(before.values())
        if value is not None and added >= self._least:
            self._add(HolderRow(content=described(value), added_bytes=min(added, largest)), [value])


def _has_indices(container: Any) -> bool:
    return type(container) is dict and all(type(key) is int for key in list(container)[:_ENTRIES])


def _is_known(place: str, rows: Iterable[str], *, itself: bool = True) -> bool:
    """Return whether a place, or one that it is within, is among those of rows."""
    return any(place.startswith(known) and (itself or place != known) for known in rows)


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
