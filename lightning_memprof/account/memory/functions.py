"""Memory of named functions: the rows at the start and end of each call, paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lightning_memprof.artifacts.series import FunctionRow
from lightning_memprof.read.run.model import Rank

FUNCTIONS: Final = "functions"
# Fields of the rows by quantity: sizes at one time, and amounts over a call.
SIZES: Final[dict[str, str]] = {
    "rss_bytes": "rss",
    "vms_bytes": "vms",
    "allocated_bytes": "allocated_bytes",
    "reserved_bytes": "reserved_bytes",
}
AMOUNTS: Final[Mapping[str, str]] = {"forward_rss_bytes": "rss_diff", "saved_bytes": "npp_diff"}


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a function.

    Attributes:
        number: number of the call.
        step: training step.
        depth: count of enclosing calls.
        thread: name of the thread.
        raised: exception that ended the call; None if it returned.
        start: bytes at the start, by quantity.
        end: bytes at the end, by quantity; None if the recording ended inside the call.
        amounts: bytes added over the call, by quantity.
    """

    number: int | None
    step: int | None
    depth: int
    thread: str | None
    raised: str | None
    start: Mapping[str, int]
    end: Mapping[str, int] | None
    amounts: Mapping[str, int]


class FunctionReport(msgspec.Struct, frozen=True):
    """One function and its calls, by start."""

    name: str
    calls: tuple[FunctionCall, ...]

    def changes(self, name: str) -> list[int]:
        """Return the change of one quantity, or its amount, in bytes by call; calls without it are omitted."""
        found = []
        for call in self.calls:
            if name in call.amounts:
                found.append(call.amounts[name])
            elif call.end is not None and name in call.start and name in call.end:
                found.append(call.end[name] - call.start[name])
        return found


def function_memory(rank: Rank) -> tuple[FunctionReport, ...]:
    """Return the functions of one rank by first call."""
    calls: dict[str, list[FunctionCall]] = defaultdict(list)
    for file in (*(window.read(FunctionRow) for window in rank.windows), rank.read(FunctionRow)):
        for name, call in _calls(file.recorded):
            calls[name].append(call)
    return tuple(FunctionReport(name, tuple(found)) for name, found in calls.items())


def _calls(rows: Sequence[FunctionRow]) -> list[tuple[str, FunctionCall]]:
    """Pair starts and ends of one file, in the order of the starts."""
    found: list[tuple[str, FunctionRow, FunctionRow | None]] = []
    open_calls: dict[tuple[str, str | None, int | None], list[int]] = defaultdict(list)
    for row in rows:
        name = row.function
        if name is None:
            continue
        key = (name, row.thread, row.number)
        if row.point == "start":
            open_calls[key].append(len(found))
            found.append((name, row, None))
        elif open_calls[key]:
            # A call inside of one with the same number ends first.
            place = open_calls[key].pop()
            found[place] = (name, found[place][1], row)
    return [(name, _call(start, end)) for name, start, end in found]


def _call(start: FunctionRow, end: FunctionRow | None) -> FunctionCall:
    return FunctionCall(
        number=start.number,
        step=start.step,
        depth=start.depth or 0,
        thread=start.thread,
        raised=end.raised if end is not None else None,
        start=_named(start, SIZES),
        end=None if end is None else _named(end, SIZES | {"peak_allocated_bytes": "peak_allocated_bytes"}),
        amounts={} if end is None else _named(end, AMOUNTS),
    )


def _named(row: FunctionRow, fields: Mapping[str, str]) -> dict[str, int]:
    return {name: size for name, field in fields.items() if (size := getattr(row, field)) is not None}
