"""Rows of function calls, and the file of them that finetuning-scheduler's users know."""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil
import yaml

from lightning_memprof.artifacts.naming import Edge, SnapshotName, StatsFormat, memory_stats_name
from lightning_memprof.artifacts.series import FunctionRow, columns_of
from lightning_memprof.artifacts.sink import ArtifactSpec, Sink
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.allocator_history import write_snapshot
from lightning_memprof.capture.sources.memory import memory_stats
from lightning_memprof.schedule import Window

if TYPE_CHECKING:
    from lightning_memprof.capture.sources.call_memory import CallMemory
    from lightning_memprof.capture.sources.methods import MethodCall
    from lightning_memprof.capture.sources.module_calls import Forwards

# The newest protocol that every Python supported by torch can read.
_PROTOCOL: Final = 4

Stats = dict[str, dict[str, Any]]


class CallNumber(NamedTuple):
    """A call's number in file names, from 1, and its place in the run; None if unknown."""

    number: int
    step: int | None
    global_step: int | None


@dataclass(frozen=True)
class Counting:
    """Which calls are recorded, and under which number.

    Attributes:
        number: called with the function's name at each start; None omits the call.
        has_snapshots: whether allocator snapshots are written at a function's start and end.
        ended: called with the function's name and number after each recorded end.
    """

    number: Callable[[str], CallNumber | None]
    has_snapshots: Callable[[str], bool]
    ended: Callable[[str, int], None] = lambda _function, _number: None


@dataclass(eq=False)
class _Call:
    function: str
    number: CallNumber
    depth: int
    thread: int
    thread_name: str | None
    is_named: bool = False
    measured: Forwards | None = None


class FunctionRows:
    """Collects a row for each start and each end of a call; a ``MethodListener``.

    Args:
        run: of the collector.
        memory: measurements inside a call.
        counting: which calls are recorded.
        guard: wraps a function so that it cannot raise into the user's code.
        window: of the collector; None for the whole run.

    Attributes:
        rows: of every call, in order.
        stats: the same values by the key of the stats file, for the first call under each number.
    """

    def __init__(
        self,
        run: RunContext,
        memory: CallMemory,
        counting: Counting,
        guard: Callable[[Callable[..., None]], Any],
        window: Window | None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.stats: dict[str, dict[str, Any]] = {}
        self._run = run
        self._memory = memory
        self._counting = counting
        self._window = None if window is None else window.index
        self._process = psutil.Process()
        self._thread = threading.get_ident()
        self._depths: dict[int, int] = {}
        self._open: dict[_Call, None] = {}
        self._named: dict[tuple[str, int], _Call] = {}
        self._is_finished = False
        self._guarded_start = guard(self._start)
        self._guarded_end = guard(self._end)

    def start(self, call: MethodCall, /) -> None:
        """Handle the start of a call."""
        self._guarded_start(call)

    def end(self, call: MethodCall, /) -> None:
        """Handle its end."""
        if call.note is not None:
            self._guarded_end(call.note, call.raised)

    def finish(self) -> None:
        """End the open calls and record no further ones."""
        self._is_finished = True
        for call in reversed(list(self._open)):
            self._end(call, None)

    def _start(self, call: MethodCall) -> None:
        if self._is_finished or (number := self._counting.number(call.function)) is None:
            return
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        name = None if thread == self._thread else threading.current_thread().name
        entry = _Call(function=call.function, number=number, depth=depth, thread=thread, thread_name=name)
        entry.is_named = self._named.setdefault((call.function, number.number), entry) is entry
        self._snapshot(entry, "start")
        entry.measured = self._memory.start(call)
        try:
            self._add(entry, "start")
        except BaseException:
            self._memory.end(entry.measured)
            raise
        self._depths[thread] = depth + 1
        self._open[entry] = None
        call.note = entry

    def _end(self, entry: _Call, raised: str | None) -> None:
        if entry not in self._open:
            return
        del self._open[entry]
        self._depths[entry.thread] -= 1
        self._memory.end(entry.measured)
        self._add(entry, "end", raised)
        self._memory.reset()
        self._snapshot(entry, "end")
        self._counting.ended(entry.function, entry.number.number)

    def _add(self, entry: _Call, edge: Edge, raised: str | None = None) -> None:
        size = self._process.memory_info()
        values = memory_stats(self._run.device)
        values |= {"rss": size.rss, "vms": size.vms, **self._memory.values(entry.measured)}
        row = FunctionRow(
            step=entry.number.step,
            global_step=entry.number.global_step,
            point=edge,
            recorded=True,
            time_ns=time.perf_counter_ns() + self._run.unix_offset_ns,
            function=entry.function,
            number=entry.number.number,
            depth=entry.depth,
            thread=entry.thread_name,
            raised=raised,
        )
        self.rows.append(columns_of(row) | values)
        if entry.is_named:
            self.stats[stats_key(self._run.rank, entry.function, entry.number.number, edge)] = values

    def _snapshot(self, entry: _Call, edge: Edge) -> None:
        if entry.is_named and self._counting.has_snapshots(entry.function):
            name = SnapshotName(rank=self._run.rank, function=entry.function, number=entry.number.number, edge=edge)
            write_snapshot(self._run, str(name), self._window)


def stats_key(rank: int, function: str, number: int, edge: Edge) -> str:
    """Return the key of one start or end: ``{rank}.{function}.{number}.{start|end}``."""
    return f"{rank}.{function}.{number}.{edge}"


def write_memory_stats(
    sink: Sink, collector: str, stats: Mapping[str, Mapping[str, Any]], forms: Sequence[StatsFormat]
) -> None:
    """Add entries to the rank's files in the run directory, each written atomically.

    Args:
        sink: of the run.
        collector: the collector under which the files are listed, as artifacts of type ``blob``.
        stats: plain values by name, by :func:`stats_key`; they replace entries of the file.
        forms: ``"yaml"`` for plain mappings that ``yaml.safe_load`` reads, ``"pickle"`` for a dict of dicts.
    """
    for form in forms:
        path = sink.place.directory / memory_stats_name(sink.rank, form)
        new: Stats = {key: dict(values) for key, values in stats.items()}
        add = _add_yaml if form == "yaml" else _add_pickle
        with sink.file(ArtifactSpec(path=path, type="blob", collector=collector)) as temporary:
            add(path, temporary, new)


def _add_yaml(before: Path, target: Path, new: Stats) -> None:
    # Consecutive mappings in block style are one mapping: the existing file need not be parsed.
    if before.exists():
        shutil.copyfile(before, target)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    with target.open("ab") as file:
        file.write(yaml.dump(new, Dumper=dumper, sort_keys=False, allow_unicode=True, encoding="utf-8"))


class _Plain(pickle.Unpickler):
    """Reads plain values only: others may be able to write into the run directory."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"the memory stats file refers to {module}.{name}, which is not allowed; remove the file"
        )


def _add_pickle(before: Path, target: Path, new: Stats) -> None:
    known: Stats = {}
    if before.exists():
        with before.open("rb") as file:
            known = _Plain(file).load()
    target.write_bytes(pickle.dumps(known | new, protocol=_PROTOCOL))
