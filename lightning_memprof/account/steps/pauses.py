"""GC pauses in a rank's recorded steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from lightning_memprof.artifacts.series import GarbageRow
from lightning_memprof.read.run.model import Rank


class DeadTensors(msgspec.Struct, frozen=True):
    """Tensors of one kind that garbage collection freed: count and bytes; shared storages count each time."""

    type: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


class Pauses(msgspec.Struct, frozen=True):
    """The collections in recorded steps: nanoseconds and freed objects.

    ``generations`` maps each generation to its ``(count, nanoseconds)``. ``tensor_bytes`` are the bytes of freed
    tensors that only a reference cycle kept alive, None where they were not counted; ``tensors`` are those by kind, the
    largest sum first.
    """

    count: int
    total_ns: int
    max_ns: int
    collected: int
    uncollectable: int
    generations: Mapping[int, tuple[int, int]]
    tensor_bytes: int | None
    tensors: tuple[DeadTensors, ...]


def pauses(rank: Rank) -> Pauses | None:
    """Return the pauses of a rank, None where none was recorded.

    Source: the series ``garbage`` of every window.
    """
    rows = rank.recorded(GarbageRow)
    timed = [(row.duration_ns, row) for row in rows if row.duration_ns is not None and row.duration_ns >= 0]
    if not timed:
        return None
    generations: dict[int, list[int]] = defaultdict(list)
    for ns, row in timed:
        generations[row.generation or 0].append(ns)
    freed = [row.tensor_bytes for _, row in timed if row.tensor_bytes is not None]
    return Pauses(
        count=len(timed),
        total_ns=sum(ns for ns, _ in timed),
        max_ns=max(ns for ns, _ in timed),
        collected=sum(row.collected or 0 for _, row in timed),
        uncollectable=sum(row.uncollectable or 0 for _, row in timed),
        generations={number: (len(ns), sum(ns)) for number, ns in sorted(generations.items())},
        tensor_bytes=sum(freed) if freed else None,
        tensors=_tensors([row for _, row in timed]),
    )


def _tensors(rows: Sequence[GarbageRow]) -> tuple[DeadTensors, ...]:
    kinds: dict[tuple[str, tuple[int, ...], str], list[int]] = defaultdict(list)
    for row in rows:
        for tensor in row.tensors:
            kinds[tensor.type or "?", tuple(tensor.shape), tensor.dtype or "?"].append(tensor.bytes or 0)
    found = [
        DeadTensors(type=name, shape=shape, dtype=dtype, count=len(sizes), bytes=sum(sizes))
        for (name, shape, dtype), sizes in kinds.items()
    ]
    return tuple(sorted(found, key=lambda tensors: (-tensors.bytes, tensors.type, tensors.shape, tensors.dtype)))
