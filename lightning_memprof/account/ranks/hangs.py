"""Where each rank of a training run is that does not continue, and which of them the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from lightning_memprof.artifacts.series import CollectiveRow, HangRow
from lightning_memprof.read.run.model import Rank

COLLECTIVE: Final = "torch.distributed."
# Ranks may pass tensors of different sizes to the others.
SAME_TENSORS: Final = ("all_reduce", "broadcast", "reduce", "all_gather_base", "reduce_scatter_base", "barrier")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is, or was when it ended; ``row`` is its last report, or None if it has none.

    ``state`` is ``hang``, ``raised``, ``finished``, ``ended`` by an exception elsewhere, ``running``, and of processes
    of which another rank reports it ``stopped`` or ``gone``. ``beat`` is its last heartbeat as another rank saw it.
    """

    rank: int
    state: str
    row: HangRow | None = None
    beat: HangRow | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in a collective; those of DistributedDataParallel run inside backward."""
        row = self.row
        return row is not None and (
            (row.function or "").startswith(COLLECTIVE) or (row.phase == "backward" and row.place is None)
        )


def places(ranks: Iterable[Rank]) -> list[Place]:
    """Return the place of each rank; empty if no rank has a step that does not end, and none has failed alone."""
    # Also of ranks that are not read in full: of thousands each may be the one.
    ranks = list(ranks)
    rows = {rank.rank: rank.read(HangRow).rows for rank in ranks}
    others = {row.peer: row for found in rows.values() for row in found if row.kind == "other" and row.peer is not None}
    found = [_place(rank, rows[rank.rank], others.get(rank.rank)) for rank in ranks]
    failed = [place for place in found if place.state == "raised"]
    alone = [place for place in failed if not place.waits]
    is_hanging = any(place.row is not None and place.row.kind == "hang" for place in found)
    return found if is_hanging or (failed and len(alone) < len(found)) else []


def first_exception(ranks: Iterable[Rank]) -> str | None:
    """Return the exception that ended a run: of several ranks the first one, before those in a collective."""
    ranks = list(ranks)
    failed = [
        Place(rank=rank.rank, state="raised", row=row)
        for rank in ranks
        for row in rank.read(HangRow).rows
        if row.kind == "exception"
    ]
    if failed:
        first = min(failed, key=lambda place: (place.waits, place.row.time_ns or 0 if place.row else 0))
        return f"{first.row.error if first.row else ''} (rank {first.rank})"
    return next((rank.exception for rank in ranks if rank.exception), None)


def _place(rank: Rank, rows: Sequence[HangRow], beat: HangRow | None) -> Place:
    own = [row for row in rows if row.kind in ("hang", "asked", "exception", "end")]
    row = own[-1] if own and rank.status != "finished" else None
    row = next((failed for failed in own if failed.kind == "exception"), row)
    if row is not None and row.kind == "end":
        # An exception also ends a step.
        continued = bool(rank.pulse) and (rank.pulse[-1]["step"] or 0) > (row.step or 0)
        row = None if rank.exception is None or continued or len(own) == 1 else own[-2]
    if row is not None:
        state = "raised" if row.kind == "exception" else "hang"
    elif rank.status == "finished":
        state = "finished"
    elif rank.exception is not None:
        state = "ended"
    else:
        state = "running" if beat is None else beat.state or "running"
    return Place(rank=rank.rank, state=state, row=row, beat=beat)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that the ranks of a group call differently; ``odd`` is the rank that differs, None if unknown."""

    number: int
    calls: Mapping[int, CollectiveRow]
    odd: int | None


def difference(ranks: Iterable[Rank]) -> Difference | None:
    """Return the first collective of a process group that two ranks call differently."""
    groups: dict[str, dict[int, dict[int, CollectiveRow]]] = {}
    for rank in ranks:
        for row in rank.read(CollectiveRow).rows:
            groups.setdefault(row.group or "", {}).setdefault(rank.rank, {})[row.number or 0] = row
    for calls in groups.values():
        first, last = max(map(min, calls.values())), min(map(max, calls.values()))
        for number in range(first, last + 1):
            found = {rank: rows[number] for rank, rows in calls.items() if number in rows}
            if len({call(row) for row in found.values()}) > 1:
                return Difference(number=number, calls=found, odd=_odd(calls, found, number))
    return None


def last_calls(ranks: Iterable[Rank]) -> dict[int, CollectiveRow]:
    """Return the last collective of each rank that has reported any."""
    found = {}
    for rank in ranks:
        if rows := rank.read(CollectiveRow).rows:
            waiting = [row for row in rows if row.state == "waiting"]
            found[rank.rank] = waiting[0] if waiting else max(rows, key=lambda row: row.time_ns or 0)
    return found


def call(row: CollectiveRow) -> tuple[str, str]:
    """Return the name of a collective, and the tensors that all ranks must pass to it."""
    operation = (row.operation or "?").strip("_")
    return operation.removesuffix("_base"), (row.tensors or "") if operation in SAME_TENSORS else ""


def usual_call(rows: Sequence[CollectiveRow]) -> CollectiveRow | None:
    """Return what a rank called before after the same collective as the last call; None if it is that call."""
    rows = [row for row in rows if row.group == rows[-1].group]
    followed = [after for before, after in pairwise(rows[:-1]) if call(before) == call(rows[-2])]
    return followed[-1] if followed and call(rows[-1]) not in map(call, followed) else None


def _odd(
    calls: Mapping[int, Mapping[int, CollectiveRow]], found: Mapping[int, CollectiveRow], number: int
) -> int | None:
    """Return the rank that differs from most ranks, or the only one that differs from its own earlier calls."""
    (usual, most), *rest = Counter(map(call, found.values())).most_common()
    if most > max((times for _, times in rest), default=0):
        return next((rank for rank, row in sorted(found.items()) if call(row) != usual), None)
    odd = [rank for rank in found if usual_call([row for at, row in sorted(calls[rank].items()) if at <= number])]
    return odd[0] if len(odd) == 1 else None
