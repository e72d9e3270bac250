"""What each named function changed: the rows at its starts and ends, paired."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.load import Problem
from lightning_memprof.analysis.run.rows import Row, series_rows, text, whole
from lightning_memprof.artifacts.naming import functions_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lightning_memprof.analysis.run.load import Rank

__all__ = ["FUNCTIONS", "FunctionCall", "FunctionReport", "function_memory"]

FUNCTIONS: Final = "functions"
# Their columns in the rows, by the names that they get here: sizes at a moment, and what a whole call adds up to.
SIZES: Final[Mapping[str, str]] = {
    "rss_bytes": "rss",
    "vms_bytes": "vms",
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
}
PEAKS: Final[Mapping[str, str]] = {"peak_allocated_bytes": "allocated_bytes.all.peak"}
AMOUNTS: Final[Mapping[str, str]] = {"forward_rss_bytes": "rss_diff", "saved_bytes": "npp_diff"}


@dataclass(frozen=True)
class FunctionCall:
    """One call: bytes at its start and its end, and what it added up to. ``raised`` is the exception that ended it.

    ``end`` is None where the recording ended inside of the call.
    """

    number: int | None
    step: int | None
    depth: int
    thread: str | None
    raised: str | None
    start: Mapping[str, int]
    end: Mapping[str, int] | None
    amounts: Mapping[str, int]


@dataclass(frozen=True)
class FunctionReport:
    """One function. ``changes`` are the means and maxima over its calls of end less start, by the name of the size."""

    name: str
    calls: tuple[FunctionCall, ...]

    def changes(self, name: str) -> list[int]:
        """Return what each call changed of one size, or its amount; calls that do not know it are left out."""
        found = []
        for call in self.calls:
            if name in call.amounts:
                found.append(call.amounts[name])
            elif call.end is not None and name in call.start and name in call.end:
                found.append(call.end[name] - call.start[name])
        return found


def function_memory(directory: Path, rank: Rank) -> tuple[tuple[FunctionReport, ...], list[Problem]]:
    """Return the functions of one rank in the order of their first call, and which files could not be read."""
    paths = [path for window in rank.windows if (path := window.series.get(FUNCTIONS)) is not None]
    followed = directory / functions_name(rank.rank)
    if followed.exists():
        paths.append(followed)
    calls: dict[str, list[FunctionCall]] = defaultdict(list)
    problems: list[Problem] = []
    for path in paths:
        rows, damage = series_rows(path)
        problems += [Problem(path.name, damage, rank.rank)] if damage else []
        for name, call in _calls([row for row in rows if row.get("recorded") is not False]):
            calls[name].append(call)
    return tuple(FunctionReport(name, tuple(found)) for name, found in calls.items()), problems


def _calls(rows: Sequence[Row]) -> list[tuple[str, FunctionCall]]:
    """Pair starts and ends of one file, in the order of the starts."""
    found: list[tuple[str, Row, Row | None]] = []
    open_calls: dict[tuple[str, str | None, int | None], list[int]] = defaultdict(list)
    for row in rows:
        name = text(row, "function")
        if name is None:
            continue
        key = (name, text(row, "thread"), whole(row, "number"))
        if row.get("point") == "start":
            open_calls[key].append(len(found))
            found.append((name, row, None))
        elif open_calls[key]:
            # A call inside of one with the same number ends first.
            place = open_calls[key].pop()
            found[place] = (name, found[place][1], row)
    return [(name, _call(start, end)) for name, start, end in found]


def _call(start: Row, end: Row | None) -> FunctionCall:
    return FunctionCall(
        number=whole(start, "number"),
        step=whole(start, "step"),
        depth=whole(start, "depth") or 0,
        thread=text(start, "thread"),
        raised=text(end, "raised"),
        start=_named(start, SIZES),
        end=None if end is None else _named(end, {**SIZES, **PEAKS}),
        amounts=_named(end or {}, AMOUNTS),
    )


def _named(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, int]:
    return {name: size for name, column in columns.items() if (size := whole(row, column)) is not None}
