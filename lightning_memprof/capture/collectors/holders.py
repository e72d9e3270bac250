"""Holders of growing memory, searched for when memory has grown, or on request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, Final

from lightning_memprof.artifacts.naming import holders_name
from lightning_memprof.artifacts.series import HolderRow, columns_of, encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext, SkipWindow, StepRecord
from lightning_memprof.capture.census import Census, large_objects, take_census, thawed
from lightning_memprof.capture.sources.growth import grown_holders
from lightning_memprof.capture.sources.memory import memory_stats, without_statistics
from lightning_memprof.capture.sources.tensors import storage_sizes
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from lightning_memprof.schedule import Mark, Window

# Reading RSS takes 4 µs, an allocator's statistics about 100 µs.
_HOST_NS: Final = 10_000_000
_DEVICE_NS: Final = 500_000_000
# In the first steps, and in those after a window, memory rises without a leak.
_SETTLING: Final = 5
# Growth at which objects are counted, and further growth at which they are compared: bytes, and share of the level.
_COUNTED: Final = (8 * MIB, 0.01)
_SEARCHED: Final = (32 * MIB, 0.05)
_SEARCHED_AT_END: Final = (16 * MIB, 0.02)
_MOST_SEARCHES: Final = 6
_LARGE: Final = MIB
_AGAIN: Final = 4


class Holders(Collector):
    """The holders of memory that grows: the chain of references from a variable of the program, and its source line.

    Over the whole run RSS, and on an accelerator the allocated bytes, are read at most every 10 ms. Once they have
    grown by 8 MiB and 1%, the objects of the program are counted, about 0.1 s; once they have grown by another 32 MiB
    and 5%, and at the end of the run, their holders are searched for, about ``seconds`` at most, and again each time
    that the growth is four times as large. A window that ``lightning-memprof trigger --leaks`` requests compares its
    start and its end. Without growth and without a request nothing is counted.

    The search runs no code of the program, keeps no object alive, and does not collect garbage.

    Args:
        seconds: limit of a search, of processor time.
    """

    name: ClassVar[str] = "holders"

    def __init__(self, *, seconds: float = 2.0) -> None:
        self._seconds = seconds

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 its steps are marked
        """Compare the start and the end of a window that asks for it."""
        asked, run.holders_asked = run.holders_asked, False
        if not asked:
            yield None
            return
        counts: list[Census | None] = []
        last = 0

        def mark(mark: Mark) -> None:
            nonlocal last
            last = mark.step
            if mark.recorded and not counts:
                counts.append(_census(run, mark.step))

        yield mark
        _search(run, next(iter(counts), None), last, self._seconds, asked=True)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Search when growth is seen, and at the end of a run with growth."""
        growth = _Growth(run, self._seconds)
        yield growth.step
        # The frames of an exception would hold tensors.
        if sys.exc_info()[0] is None:
            growth.end()


class _Growth:
    """Follows the memory of one run."""

    def __init__(self, run: RunContext, seconds: float) -> None:
        self._run = run
        self._seconds = seconds
        self._every_ns = _HOST_NS if without_statistics(run.device) is not None else _DEVICE_NS
        self._due_ns = 0
        self._settling = _SETTLING
        self._step = 0
        self._last: int | None = None
        # What windows added.
        self._shift = 0
        self._level: int | None = None
        self._before: Census | None = None
        self._counted = 0
        self._searched = 0
        self._searches = 0

    def step(self, record: StepRecord) -> None:
        """Compare the memory after a step with the level."""
        if record.window is not None:
            self._settling = _SETTLING
            return
        if self._settling > 0:
            self._settling -= 1
            if self._settling == 0 and self._last is not None:
                self._shift = self._read(record.step) - self._last
            return
        if record.start_ns < self._due_ns:
            return
        self._due_ns = record.start_ns + self._every_ns
        self._step = record.step
        used = self._last = self._read(record.step) - self._shift
        if self._level is None or used < self._level < sys.maxsize:
            self._level = used
        elif self._before is None:
            if used - self._level >= _most(_COUNTED, self._level):
                self._count(used)
        elif used - self._counted >= max(_most(_SEARCHED, self._level), _AGAIN * self._searched):
            with self._charged():
                self._search(used)

    def end(self) -> None:
        """Search at the end of a run whose memory has grown since the last search."""
        if self._before is None or self._level is None or self._last is None:
            return
        least = max(_most(_SEARCHED_AT_END, self._level), round(1.25 * self._searched))
        if self._last - self._counted >= least or self._searches:
            self._search(self._last)

    def _read(self, step: int) -> int:
        return self._run.resident.after_step(step) + (_device_bytes(self._run) or 0)

    def _count(self, used: int) -> None:
        with self._charged():
            self._counted = used
            self._before = _census(self._run, self._step)
            if self._before is None:
                # Not again in this run.
                self._level = sys.maxsize

    @thawed()
    def _search(self, used: int) -> None:
        if self._searches < _MOST_SEARCHES:
            self._searched = used - self._counted
            self._searches += 1
            rows = _search(self._run, self._before, self._step, self._seconds, asked=False)
            is_explained = not any(row.kind in ("remainder", "free memory") for row in rows)
            if self._before is not None and self._before.large is None and not is_explained:
                large = {id(value): size for value, size in large_objects(_LARGE)}
                self._before = replace(self._before, large=large)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Charge the body to the collector: it is between two steps, in the time of the pulse."""
        began = perf_counter_ns()
        try:
            yield
        finally:
            spent_ns = perf_counter_ns() - began
            self._run.charge(Holders.name, spent_ns)
            self._run.note_pause(spent_ns)


def _most(limit: tuple[int, float], level: int) -> int:
    least, share = limit
    return max(least, round(share * level))


def _device_bytes(run: RunContext) -> int | None:
    if without_statistics(run.device) is not None:
        return None
    found: int | None = memory_stats(run.device).get("allocated_bytes.all.current")
    return found


def _parameters(run: RunContext) -> set[int]:
    return set(storage_sizes([*run.model.parameters(), *run.model.buffers()]))


@thawed()
def _census(run: RunContext, step: int) -> Census | None:
    """Count the objects; None in a program with too many, which is noted."""
    try:
        return take_census(step, run.resident.read(), _device_bytes(run), _parameters(run))
    except SkipWindow as reason:
        run.note_unavailable(Holders.name, str(reason))
        return None


@thawed()
def _search(run: RunContext, before: Census | None, step: int, seconds: float, *, asked: bool) -> list[HolderRow]:
    now = _census(run, step) if before is not None else None
    if before is None or now is None:
        return []
    rows = grown_holders(before, now, run.model, seconds, _parameters(run))
    path = run.sink.place.directory / holders_name(run.rank)
    # Also where nothing was found: it replaces an earlier result.
    for row in rows or [HolderRow(kind="nothing", step=step)]:
        row.asked = asked or None
        with path.open("a", encoding="utf-8") as file:
            file.write(encode_rows([columns_of(row)]))
    run.sink.list_artifact(ArtifactSpec(path=path, type="series", collector=Holders.name))
    return rows
