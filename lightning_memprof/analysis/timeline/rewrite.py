"""The second reading of a source: every event gets its time, its process, its track and its ids in the merged trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, Final

import msgspec

from lightning_memprof.analysis.timeline.nesting import LEFT_OUT
from lightning_memprof.analysis.timeline.numbering import Places
from lightning_memprof.analysis.timeline.plan import BEGINS, Plan
from lightning_memprof.analysis.timeline.rows import Row
from lightning_memprof.units import AT_ONCE_US, nanoseconds

__all__ = ["Rewrite"]

_LARGEST_ID: Final = 1 << 52
# An instant of one source that would stand across all of them gets a track without a name from the importer.
_EVERYWHERE: Final = msgspec.Raw(b'"g"')
_ON_ITS_TRACK: Final = msgspec.Raw(b'"t"')


class Rewrite:
    """Gives the rows of one source their place in the merged trace.

    Args:
        plan: of the source.
        places: process and track number of each of its tracks and lanes.
        ids: the source's number, and how many there are: what makes its ids its own.
        shift: what is added to its times, in ns.
    """

    def __init__(self, plan: Plan, places: Places, ids: tuple[int, int], shift: int) -> None:
        self._plan = plan
        self._places = places
        self._source, self._sources = ids
        self._shift = shift
        self._odd: dict[Hashable, int] = {}
        self._index = -1
        self._edits = zip(plan.edit_indexes, plan.edits, strict=True)
        self._edit_at, self._edit = next(self._edits, (-1, 0))
        self._numbers: dict[tuple[Any, Any], tuple[int, int]] = {}
        span = plan.reader.source.span_ns
        self._clip = (
            None
            if span is None
            else (span[0] + shift - plan.reader.ts_offset_ns, span[1] + shift - plan.reader.ts_offset_ns)
        )
        self._begun: Counter[tuple[bytes, bytes, int | str]] = Counter()

    def rows(self, rows: list[Row]) -> list[Row]:
        """Change a batch in place, and return what is left of it; batches come in the order of the source."""
        shift, index, numbers, edit_at, clip = self._shift, self._index, self._numbers, self._edit_at, self._clip
        left_out = False
        for row in rows:
            index += 1
            where = numbers.get((row.pid, row.tid))
            if index == edit_at:
                edit = self._edit
                edit_at, self._edit = next(self._edits, (-1, 0))
                if edit == LEFT_OUT:
                    row.ph = ""
                    left_out = True
                    continue
                if edit < 0:
                    where = self._where(row, -edit)
                else:
                    row.dur = edit / 1000
            if where is None:
                where = numbers[row.pid, row.tid] = self._where(row, 0)
            ph = row.ph
            ts: Any = row.ts  # who has none is left out
            start = round(ts * 1000) if -AT_ONCE_US < ts < AT_ONCE_US else nanoseconds(ts)
            row.ts = (start + shift) / 1000
            if ph == "X":
                dur = row.dur
                row.dur = round(dur * 1000) / 1000 if dur and dur > 0 else 0.0
                if clip:
                    _clip(row, clip)
            elif ph not in "iI":
                where = self._other(row, where)
            elif row.s == _EVERYWHERE:
                row.s = _ON_ITS_TRACK
            row.pid, row.tid = where
        self._index, self._edit_at = index, edit_at
        return [row for row in rows if row.ph] if left_out else rows

    def _where(self, row: Row, lane: int) -> tuple[int, int]:
        return self._places[self._plan.key(row.pid, row.tid), lane]

    def _other(self, row: Row, where: tuple[int, int]) -> tuple[int, int]:
        if row.ph in "BE" and BEGINS in self._plan.lanes[self._plan.key(row.pid, row.tid)]:
            return self._where(row, BEGINS)
        if row.ph == "C":
            _numbers_only(row)
        elif row.id is not None:
            row.id = self._id(row, row.id)
        return where

    def _id(self, row: Row, number: int | str) -> int:
        if self._plan.reused:
            key = (bytes(row.cat), bytes(row.name), number)
            if key in self._plan.reused:
                self._begun[key] += row.ph == "s"
                return self._own_id((*key, self._begun[key]))
        if isinstance(number, int) and 0 <= number < _LARGEST_ID // self._sources:
            return number * self._sources + self._source
        return self._own_id(number)

    def _own_id(self, key: Hashable) -> int:
        """A number of its own for an id that is no small number, or begins twice."""
        return _LARGEST_ID + self._odd.setdefault(key, len(self._odd)) * self._sources + self._source


def _clip(row: Row, span: tuple[int, int]) -> None:
    start = nanoseconds(row.ts or 0)
    end = min(start + round((row.dur or 0) * 1000), span[1])
    start = max(start, span[0])
    row.ts, row.dur = start / 1000, max(end - start, 0) / 1000


def _numbers_only(row: Row) -> None:
    args = msgspec.json.decode(row.args)
    kept = {
        key: value for key, value in args.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if len(kept) < len(args):
        row.args = msgspec.Raw(msgspec.json.encode(kept))
