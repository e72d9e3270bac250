"""The sizes of a program's objects at one moment: containers, groups of tensors, types, graphs, mappings."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Any, Final
from weakref import ref

import numpy as np
import torch

from lightning_memprof.capture.base import SkipWindow
from lightning_memprof.capture.sources.holders import is_container_type, length_of, type_name
from lightning_memprof.capture.sources.memory import HeapSize, mapped_sizes
from lightning_memprof.capture.sources.objects import tracked_objects, tracked_types, untracked_referents
from lightning_memprof.capture.sources.oom_state import tracked_tensors
from lightning_memprof.capture.sources.saved_graph import SavedGraph, SavedStorages
from lightning_memprof.capture.sources.tensors import storage_sizes
from lightning_memprof.capture.torch_internals import DisableTorchFunction
from lightning_memprof.units import GIB

LEAST_ENTRIES: Final = 4
"""Shorter containers are arguments and attributes."""
# With more, a single question to the garbage collector takes longer than a search may.
_MOST_OBJECTS: Final = 4_000_000
# The kernel takes 40 to 70 ms per GiB to list what is resident.
_MOST_MAPPED: Final = 8 * GIB
MOST_NODES: Final = 250_000
"""Of a graph, 2 µs each."""
_GRAPHS_NS: Final = 500_000_000
_UNTRACKED: Final = (np.ndarray, bytes, bytearray, str)

Group = tuple[str, tuple[int, ...], str, str]


@dataclass(frozen=True, kw_only=True)
class Census:
    """Sizes at one moment; keeps no object of the program alive.

    Attributes:
        step: of the run.
        rss_bytes: RSS.
        device_bytes: allocated on the device, None without one.
        free_bytes: freed, but kept by the C allocator.
        lengths: entries of each container, by its ``id``.
        tensors: all tensors that the garbage collector tracks, with the addresses of their storages.
        tensor_counts: number of storages by class, shape, dtype and device of a tensor.
        tensor_bytes: their bytes.
        types: number of objects by type.
        graph_bytes: the most that the graph of a live tensor keeps.
        large: bytes of each large object that is not tracked, by its ``id``; None where they were not read.
        mapped: resident bytes of mapped files and of large blocks; empty in a process too large to read them.
    """

    step: int
    rss_bytes: int
    device_bytes: int | None = None
    free_bytes: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    tensors: tuple[tuple[ref[torch.Tensor], tuple[int, ...]], ...] = ()
    tensor_counts: Counter[Group] = field(default_factory=Counter)
    tensor_bytes: Counter[Group] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)
    graph_bytes: int = 0
    mapped: dict[str, int] = field(default_factory=dict)
    large: dict[int, int] | None = None

    def storages(self) -> set[int]:
        """Return the addresses of the storages whose tensors still live: a new storage may have that of a freed one."""
        return {address for tensor, addresses in self.tensors if tensor() is not None for address in addresses}


@contextmanager
def thawed() -> Iterator[None]:
    """Show a search what the program has exempted from garbage collection with ``gc.freeze()``.

    Frozen objects are neither listed nor asked for what they refer to. Afterwards all are frozen again, and with them
    what is alive by then; garbage is collected before, because it would stay for ever.
    """
    if not gc.get_freeze_count():
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()


def take_census(step: int, rss_bytes: int, device_bytes: int | None = None, skip: Iterable[int] = ()) -> Census:
    """Count what the garbage collector tracks; about 0.1 s per 300,000 objects, and 5 µs per tensor.

    Args:
        step: of the run.
        rss_bytes: RSS.
        device_bytes: allocated on the device.
        skip: storages of parameters, by address.

    Raises:
        SkipWindow: the program has too many objects.
    """
    number = sum(number for _, number in tracked_types())
    if number > _MOST_OBJECTS:
        raise SkipWindow(f"the program has {number:,} objects: a search for holders would take too long")
    # Reading the graphs makes objects of what they save: before these are counted, and not between two counts.
    graph_bytes = largest_graph(tracked_tensors(), skip)[1].held_bytes
    counts = tracked_types()
    lengths = {id(value): length_of(value) for value in containers()}
    tensors = tracked_tensors()
    tensor_counts, tensor_bytes = Counter[Group](), Counter[Group]()
    seen: set[int] = set()
    known = []
    for tensor, group, parts in grouped(tensors):
        known.append((ref(tensor), tuple(parts)))
        for address, size in parts.items():
            if address not in seen:
                seen.add(address)
                tensor_counts[group] += 1
                tensor_bytes[group] += size
    types = Counter[str]()
    for kind, number in counts:
        types[full_name(kind)] += number
    return Census(
        step=step,
        rss_bytes=rss_bytes,
        device_bytes=device_bytes,
        free_bytes=HeapSize().free(),
        lengths={key: length for key, length in lengths.items() if length >= LEAST_ENTRIES},
        tensors=tuple(known),
        tensor_counts=tensor_counts,
        tensor_bytes=tensor_bytes,
        types=types,
        graph_bytes=graph_bytes,
        mapped=mapped_sizes() if rss_bytes <= _MOST_MAPPED else {},
    )


def containers() -> list[Any]:
    """Return all lists, dicts, sets and deques.

    Before Python 3.14 the garbage collector does not track dicts of numbers, texts and bytes; it tracks their owners.
    """
    # Neither list nor dictionary of this function may be among them.
    found = tracked_objects(is_container_type)
    loose = {id(value): value for value in untracked_referents((dict,)) if not gc.is_tracked(value)}
    found += loose.values()
    return found


def grouped(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Group, dict[int, int]]]:
    """Yield each tensor with a storage, its group, and the bytes of its storages by address."""
    with DisableTorchFunction():
        for tensor in tensors:
            try:
                shape = tuple(tensor.shape)
                # Reading a symbolic size would specialize it to a number.
                if any(type(size) is not int for size in shape):
                    continue
                sizes = storage_sizes([tensor])
                yield tensor, (type_name(tensor), shape, str(tensor.dtype)[6:], str(tensor.device)), sizes
            except (NotImplementedError, RuntimeError, TypeError):
                continue


def largest_graph(tensors: Sequence[torch.Tensor], skip: Iterable[int]) -> tuple[torch.Tensor | None, SavedStorages]:
    """Return the tensor whose graph keeps the most that no graph of a later tensor does, and what it keeps."""
    graph, excluded = SavedGraph(), set(skip)
    largest, root = SavedStorages(), None
    seen: set[Any] = set()
    roots: dict[int, torch.Tensor] = {}
    with DisableTorchFunction():
        for tensor in tensors:
            if not tensor.is_leaf and tensor.grad_fn is not None:
                roots[tensor.grad_fn._sequence_nr()] = tensor  # noqa: SLF001 torch has no public one
        # Later ones contain earlier ones. Those of views of a parameter are numbered anew after each optimizer step.
        until = thread_time_ns() + _GRAPHS_NS
        for number in sorted(roots, reverse=True):
            if thread_time_ns() > until:
                break
            found = graph.read(roots[number], excluded, seen, MOST_NODES)
            if found.held_bytes > largest.held_bytes:
                largest, root = found, roots[number]
    return root, largest


def large_objects(least: int) -> Iterator[tuple[Any, int]]:
    """Yield the arrays, bytes and texts of at least ``least`` bytes that an object refers to, and their size.

    The garbage collector does not track them: the referents of all objects are read, 0.4 s per million objects.
    """
    seen: set[int] = set()
    for value in untracked_referents(_UNTRACKED):
        if id(value) not in seen:
            size = value.nbytes if type(value) is np.ndarray else sys.getsizeof(value)
            if size >= least and getattr(value, "base", None) is None:
                seen.add(id(value))
                yield value, size


def full_name(kind: type) -> str:
    """Return the module and the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
