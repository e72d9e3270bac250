"""One row for every step of the whole run and the totals of its actions."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import ClassVar, Final

import torch

from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.artifacts.naming import actions_name, pulse_name
from lightning_memprof.artifacts.pulse import encode_pulse
from lightning_memprof.artifacts.series import (
    PHASES,
    PULSE_COLUMNS,
    PYTHON_PROFILER,
    TORCH_PROFILER,
    ActionTotalRow,
    PulseRow,
    StallRow,
    columns_of,
    encode_rows,
)
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnStep, RunContext, StepRecord
from lightning_memprof.capture.clock import DeviceTimer, LoggedTimes, RecentMedian, compilations, gc_pauses
from lightning_memprof.capture.collectors.hook_timings import timed_parts
from lightning_memprof.capture.sources.memory import ResidentSize, peak_allocated_bytes, without_statistics
from lightning_memprof.capture.threads import CoreWait
from lightning_memprof.capture.torch_internals import _profiler_enabled, _profiler_type

_CHUNK_ROWS: Final = 64
# What a killed run loses; a write takes about 50 µs.
_CHUNK_NS: Final = 2_000_000_000
# After a training step the caches are cold, and reading memory costs as much as the rest of the pulse.
_MEMORY_NS: Final = 10_000_000
_CALLBACKS: Final = PHASES.index("callbacks")
_OTHER: Final = PHASES.index("other")
_UNREAD: Final = (None, None, None)
# torch counts markers for Nsight and VTune as profilers too; they cost little.
_RECORDS: Final = ("ActiveProfilerType.KINETO", "ActiveProfilerType.LEGACY")
_NO_DEVICE: Final = (None,) * (1 + len(PHASES))
_ACTIONS_NS: Final = 60_000_000_000
# The typical step is the median of the last ones.
_RECENT: Final = 65
_LEAST_RECENT: Final = 9
_STALL_FACTOR: Final = 2
_STALLS: Final = 1000


def device_columns(record: StepRecord, timer: DeviceTimer) -> tuple[int | None, ...]:
    """Return a step's duration and phases in nanoseconds on the device's clock, in the order of ``PULSE_COLUMNS``.

    On this clock, time in callbacks belongs to the phase around it and that column is None. The timestamps are returned
    to the timer.
    """
    moments = record.moments or []
    spent = [0] * len(PHASES)
    for (phase, start, excluded_ns), (_, end, _) in pairwise(moments):
        spent[phase] += max(timer.elapsed_ns(start, end) - excluded_ns, 0)
    for _, moment, _ in moments:
        timer.release(moment)
    return (sum(spent), *(None if index == _CALLBACKS else ns for index, ns in enumerate(spent)))


def other_profiler() -> int | None:
    """Return the key in ``PROFILERS`` of the profiler that records now; call it outside windows, where ours is off."""
    if _profiler_enabled() and str(_profiler_type()) in _RECORDS:
        return TORCH_PROFILER
    if sys.version_info >= (3, 12):
        is_python = sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None or sys.getprofile() is not None
    else:
        is_python = sys.getprofile() is not None
    return PYTHON_PROFILER if is_python else None


class PulseWriter:
    """Rows of the pulse, buffered until the device has reached their timestamps and written in chunks.

    Args:
        path: the file; must not exist.
        device: device of the model.
        timer: the device's clock; None on a CPU.
        resident: reads the RSS.
        written: called with the rows and the records of each chunk when they are written.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        timer: DeviceTimer | None,
        resident: ResidentSize,
        written: Callable[[list[PulseRow], list[StepRecord]], None] = lambda _rows, _records: None,
    ) -> None:
        self._written = written
        self._device = device if without_statistics(device) is None else None
        self._timer = timer
        self._file = path.open("xb")
        self._resident = resident
        self._core_wait = CoreWait()
        self._file.write((",".join(PULSE_COLUMNS) + "\n").encode())
        # A step, another profiler, and RSS, device peak and wait for a core where they were read.
        self._waiting: deque[tuple[StepRecord, int | None, tuple[int | None, int | None, int | None]]] = deque()
        self._complete: list[tuple[StepRecord, tuple[int | None, ...]]] = []
        self._added = 0
        # The first chunks are shorter: a run that soon hangs has most of its steps on disk.
        self._chunk = 1
        self._flushed_ns = 0
        self._memory_due_ns = 0

    def add(self, record: StepRecord) -> None:
        """Add one step; its row is made with those of the chunk: after a training step the caches are cold."""
        end_ns = record.start_ns + record.duration_ns
        profiler = other_profiler() if record.window is None else None
        if end_ns < self._memory_due_ns:
            self._waiting.append((record, profiler, _UNREAD))
        else:
            self._memory_due_ns = end_ns + _MEMORY_NS
            peak = None if self._device is None else peak_allocated_bytes(self._device)
            self._waiting.append(
                (record, profiler, (self._resident.after_step(record.step), peak, self._core_wait.read()))
            )
        if self._timer is not None:
            self._complete_steps()
        self._added += 1
        if self._added >= self._chunk or record.start_ns - self._flushed_ns > _CHUNK_NS:
            self._added, self._flushed_ns = 0, record.start_ns
            self._chunk = min(2 * self._chunk, _CHUNK_ROWS)
            self.flush()

    def flush(self) -> None:
        """Write the complete rows."""
        self._complete_steps()
        complete, self._complete = self._complete, []
        if complete:
            records = [record for record, _ in complete]
            LoggedTimes.compute(record.times for record in records)
            rows = [PulseRow(*record[:6], *record.times.phases_ns, *rest) for record, rest in complete]
            # On a full disk these rows are lost; nothing may follow a partial row.
            self._file.write(encode_pulse(rows).encode())
            self._file.flush()
            self._written(rows, records)

    def close(self) -> None:
        """Write all rows; timestamps that the device has not reached stay empty."""
        try:
            self._complete_steps()
            self._timer = None
            self.flush()
        finally:
            self._core_wait.close()
            # On a full disk closing fails too.
            self._file.close()

    def _complete_steps(self) -> None:
        timer, waiting = self._timer, self._waiting
        while waiting:
            record, profiler, (*memory, core_wait_ns) = waiting[0]
            if timer is not None and record.moments and not timer.reached(record.moments[-1][1]):
                return
            device = device_columns(record, timer) if timer is not None and record.moments else _NO_DEVICE
            self._complete.append((record, (*memory, *device, core_wait_ns, profiler)))
            waiting.popleft()


class ActionTotals:
    """Self time of each action over the steps of a run, and the steps that stalled.

    The first step of the run is not counted: it contains the start of everything. The file is replaced once a minute,
    so that a killed run has it too.

    Args:
        path: the file.
        actions: name and index of the phase of each slot of the clock; may grow.
    """

    def __init__(self, path: Path, actions: Sequence[tuple[str, int]]) -> None:
        self._path = path
        self._written_ns: int | None = None
        self._actions = actions
        self._is_first = True
        self._outside = _Totals()
        self._inside = _Totals()
        self._durations = RecentMedian(_RECENT, _LEAST_RECENT)
        # A heap by duration: the shortest stall is dropped first.
        self._stalls: list[tuple[int, int, StallRow]] = []

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add steps; many at once: one step alone costs three times as much."""
        counted = records[1:] if self._is_first else records
        self._is_first = False
        outside = [record for record in counted if record.window is None]
        self._outside.add(outside)
        self._inside.add([record for record in counted if record.window is not None])
        # That the means include a stall does not change the action that exceeds its mean by the most.
        for record in outside:
            self._add_stall(record)
        if self._written_ns is None:
            self._written_ns = records[0].start_ns
        if records[-1].start_ns - self._written_ns > _ACTIONS_NS:
            self._written_ns = records[-1].start_ns
            self.write()

    def write(self) -> bool:
        """Replace the file; return whether there was something to write."""
        rows = self.rows()
        if rows:
            temporary = own_temporary(self._path)
            temporary.write_text(encode_rows(map(columns_of, rows)), encoding="utf-8")
            temporary.replace(self._path)
        return bool(rows)

    def rows(self) -> list[ActionTotalRow | StallRow]:
        """Return the totals of steps outside windows and of those inside, largest first, and the stalls in order."""
        totals = [
            ActionTotalRow(
                kind="total",
                action=self._actions[slot][0],
                phase=PHASES[self._actions[slot][1]],
                in_window=in_window,
                steps=tier.steps,
                count=count,
                total_ns=total_ns,
                max_ns=max_ns,
                max_step=max_step,
            )
            for in_window, tier in ((False, self._outside), (True, self._inside))
            for slot, (count, total_ns, max_ns, max_step) in sorted(tier.of.items(), key=lambda item: -item[1][1])
        ]
        return [*totals, *(row for _, _, row in sorted(self._stalls, key=lambda stall: stall[1]))]

    def _add_stall(self, record: StepRecord) -> None:
        """Add the step if it stalled."""
        median_ns = self._durations.add(record.duration_ns)
        if median_ns is None or record.duration_ns <= _STALL_FACTOR * median_ns:
            return
        spent, _ = record.times.actions
        slot = max(range(len(spent)), key=lambda slot: spent[slot] - self._outside.mean_ns(slot))
        action, phase = self._actions[slot]
        row = StallRow(
            kind="stall",
            step=record.step,
            duration_ns=record.duration_ns,
            median_ns=median_ns,
            action=action,
            phase=PHASES[phase],
            action_ns=spent[slot],
        )
        entry = (record.duration_ns, record.step, row)
        if len(self._stalls) < _STALLS:
            heapq.heappush(self._stalls, entry)
        elif entry[:2] > self._stalls[0][:2]:
            heapq.heapreplace(self._stalls, entry)


class _Totals:
    """Sums over some steps: by slot the count of entries, the total and the maximum of a step in ns, and that step."""

    def __init__(self) -> None:
        self.steps = 0
        self.of: dict[int, list[int]] = {}

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add steps, all of them action by action."""
        self.steps += len(records)
        spent, entries = zip(*(record.times.actions for record in records), strict=True) if records else ((), ())
        # Later steps may have more slots.
        by_slot = zip(zip_longest(*spent, fillvalue=0), zip_longest(*entries, fillvalue=0), strict=True)
        for slot, (times, counts) in enumerate(by_slot):
            if count := sum(counts):
                total = self.of.setdefault(slot, [0, 0, -1, 0])
                total[0] += count
                total[1] += sum(times)
                if (most := max(times)) > total[2]:
                    total[2], total[3] = most, records[times.index(most)].step

    def mean_ns(self, slot: int) -> float:
        return self.of[slot][1] / self.steps if slot in self.of else 0.0


class Pulse(Collector):
    """Phases, data wait, RSS, device peak and wait for a core of every step of the run, and the totals of each action.

    Memory and that wait are read at most every 10 ms; the fields of the steps between are empty. On an accelerator the
    phases of a step are also timed on the device's clock at most every 4 ms, by events that are read when the device
    has reached them, without synchronization.
    """

    name: ClassVar[str] = "pulse"
    every_rank: ClassVar[bool] = True
    times_device: ClassVar[bool] = True

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Write one row per step, and the totals."""
        path = run.sink.place.directory / pulse_name(run.rank)
        pulse = ArtifactSpec(path=path, type="pulse", collector=self.name)
        with _followed_actions(run) as actions, ExitStack() as end:

            def written(rows: list[PulseRow], records: list[StepRecord]) -> None:
                actions.add(records)
                run.pulse_written(rows)

            writer = PulseWriter(path, run.device, run.timer, run.resident, written)
            end.callback(run.sink.list_artifact, pulse)
            end.callback(writer.close)
            yield writer.add


@contextmanager
def _followed_actions(run: RunContext) -> Iterator[ActionTotals]:
    """Time also what is not an action of the Trainer; write the totals at the end."""
    clock = run.clock
    path = run.sink.place.directory / actions_name(run.rank)
    totals = ActionTotals(path, clock.actions)
    parts = [part for part in run.parts() if part.always]
    meeting = {part.action: clock.slot(part.action, _OTHER) for part in parts if part.meets}

    def enter(action: str) -> None:
        if (slot := meeting.get(action)) is None:
            clock.enter_within(action)
        else:
            clock.enter(slot)

    try:
        with timed_parts(parts, enter, lambda _: clock.leave()), gc_pauses(clock), compilations(clock):
            yield totals
    finally:
        if totals.write():
            run.sink.list_artifact(ArtifactSpec(path=path, type="series", collector="actions"))
