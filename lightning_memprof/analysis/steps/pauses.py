"""The pauses of Python's garbage collector in a rank's recorded steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_memprof.analysis.run.load import Problem
from lightning_memprof.analysis.run.rows import series_rows, text, whole

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank

__all__ = ["DeadTensors", "Pauses", "pauses"]


@dataclass(frozen=True)
class DeadTensors:
    """Tensors of one kind that collections found dead: how many, and their bytes, shared storages counted each time."""

    type: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Pauses:
    """The collections in recorded steps, in nanoseconds, and what they found.

    ``generations`` maps each generation to its ``(count, nanoseconds)``. ``tensor_bytes`` is what tensors that only a
    reference cycle kept alive have given back, None where nobody looked; ``tensors`` are those by kind, the largest
    sum first.
    """

    count: int
    total_ns: int
    max_ns: int
    collected: int
    uncollectable: int
    generations: Mapping[int, tuple[int, int]]
    tensor_bytes: int | None
    tensors: tuple[DeadTensors, ...]


def pauses(rank: Rank) -> tuple[Pauses | None, list[Problem]]:
    """Return the pauses of a rank, None where nobody listened or none came, and what is wrong with their files.

    Source: the series ``garbage`` of every window.
    """
    problems: list[Problem] = []
    recorded: list[dict[str, Any]] = []
    for window in rank.windows:
        path = window.series.get("garbage")
        if path is not None:
            rows, damage = series_rows(path)
            problems += [Problem(path.name, damage, rank.rank)] if damage else []
            recorded += [row for row in rows if row.get("recorded") is not False]
    timed = [(ns, row) for row in recorded if (ns := whole(row, "duration_ns")) is not None and ns >= 0]
    if not timed:
        return None, problems
    generations: dict[int, list[int]] = defaultdict(list)
    for ns, row in timed:
        generations[whole(row, "generation") or 0].append(ns)
    freed = [size for _, row in timed if (size := whole(row, "tensor_bytes")) is not None]
    found = Pauses(
        count=len(timed),
        total_ns=sum(ns for ns, _ in timed),
        max_ns=max(ns for ns, _ in timed),
        collected=sum(whole(row, "collected") or 0 for _, row in timed),
        uncollectable=sum(whole(row, "uncollectable") or 0 for _, row in timed),
        generations={number: (len(ns), sum(ns)) for number, ns in sorted(generations.items())},
        tensor_bytes=sum(freed) if freed else None,
        tensors=_tensors([row for _, row in timed]),
    )
    return found, problems


def _tensors(rows: list[dict[str, Any]]) -> tuple[DeadTensors, ...]:
    kinds: dict[tuple[str, tuple[int, ...], str], list[int]] = defaultdict(list)
    for row in rows:
        listed = row.get("tensors")
        for tensor in listed if isinstance(listed, list) else ():
            if isinstance(tensor, dict):
                shape = tensor.get("shape")
                sizes = tuple(size for size in shape if isinstance(size, int)) if isinstance(shape, list) else ()
                kind = text(tensor, "type") or "?", sizes, text(tensor, "dtype") or "?"
                kinds[kind].append(whole(tensor, "bytes") or 0)
    found = [DeadTensors(*kind, len(sizes), sum(sizes)) for kind, sizes in kinds.items()]
    return tuple(sorted(found, key=lambda tensors: (-tensors.bytes, tensors.type, tensors.shape, tensors.dtype)))
