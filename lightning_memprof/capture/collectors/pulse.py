"""One row for every step of the whole run, for less than 20 µs of host time per step."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final

from lightning_memprof.artifacts.naming import pulse_name
from lightning_memprof.artifacts.series import PHASES, PULSE_COLUMNS, encode_pulse
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, OnMark, OnRows, OnStep
from lightning_memprof.capture.sources.memory import ResidentSize, peak_allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from lightning_memprof.capture.base import DeviceTimer, RunContext, StepRecord
    from lightning_memprof.schedule import Window

__all__ = ["Pulse", "PulseWriter", "device_columns"]

_CHUNK_ROWS: Final = 64
_CHUNK_NS: Final = 10_000_000_000
# After a training step the caches are cold, and reading memory costs as much as the rest of the pulse.
_MEMORY_NS: Final = 10_000_000
_CALLBACKS: Final = PHASES.index("callbacks")
_NO_DEVICE: Final = (None,) * (1 + len(PHASES))


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


class PulseWriter:
    """Rows of the pulse, buffered until the device has reached their timestamps and written in chunks.

    Args:
        path: the file; must not exist.
        device: device of the model.
        timer: the device's clock; None on a CPU.
        written: called with the rows of each chunk when they are written.

    """

    def __init__(
        self, path: Path, device: torch.device, timer: DeviceTimer | None, written: OnRows = lambda _: None
    ) -> None:
        self._written = written
        self._device = device if timer is not None else None
        self._timer = timer
        self._file = path.open("xb")
        self._resident = ResidentSize()
        self._file.write((",".join(PULSE_COLUMNS) + "\n").encode())
        self._rows: list[tuple[int | None, ...]] = []
        self._waiting: deque[tuple[tuple[int | None, ...], StepRecord]] = deque()
        self._flushed_ns = 0
        self._memory_read_ns = 0

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        row = (
            record.step,
            record.global_step,
            record.epoch,
            record.window,
            record.start_ns,
            record.duration_ns,
            *record.phases_ns,
            *self._memory(record),
        )
        if self._timer is None:
            self._rows.append(row + _NO_DEVICE)
        else:
            self._waiting.append((row, record))
            self._read_device(self._timer)
        if len(self._rows) >= _CHUNK_ROWS or record.start_ns - self._flushed_ns > _CHUNK_NS:
            self.flush()
            self._flushed_ns = record.start_ns

    def flush(self) -> None:
        """Write the complete rows."""
        rows, self._rows = self._rows, []
        if rows:
            # On a full disk these rows are lost; nothing may follow a partial row.
            self._file.write(encode_pulse(rows).encode())
            self._file.flush()
            self._written(rows)

    def close(self) -> None:
        """Write all rows; timestamps that the device has not reached stay empty."""
        try:
            if self._timer is not None:
                self._read_device(self._timer)
            self._rows.extend(row + _NO_DEVICE for row, _ in self._waiting)
            self._waiting.clear()
            self.flush()
        finally:
            self._resident.close()
            # On a full disk closing fails too.
            self._file.close()

    def _memory(self, record: StepRecord) -> tuple[int | None, int | None]:
        """Return RSS and device peak, or None if they were read less than 10 ms ago."""
        end_ns = record.start_ns + record.duration_ns
        if end_ns - self._memory_read_ns < _MEMORY_NS:
            return None, None
        self._memory_read_ns = end_ns
        return self._resident.read(), None if self._device is None else peak_allocated_bytes(self._device)

    def _read_device(self, timer: DeviceTimer) -> None:
        while self._waiting:
            row, record = self._waiting[0]
            if record.moments and not timer.reached(record.moments[-1][1]):
                return
            self._rows.append(row + device_columns(record, timer))
            self._waiting.popleft()


class Pulse(Collector):
    """Phases, data wait, RSS and device peak of every step of the run.

    Memory is read at most every 10 ms; the fields of the steps between are empty. On an accelerator the phases are also
    timed on the device's clock, by events that are read when the device has reached them, without synchronization.
    """

    name: ClassVar[str] = "pulse"
    every_rank: ClassVar[bool] = True
    times_device: ClassVar[bool] = True

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002
        """Record nothing per window: the pulse has its steps already."""
        return nullcontext(None)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Write one row per step."""
        path = run.sink.place.directory / pulse_name(run.rank)
        writer = PulseWriter(path, run.device, run.timer, run.pulse_written)
        try:
            yield writer.add
        finally:
            writer.close()
            run.sink.list_artifact(Artifact(path=path, type="pulse", collector=self.name), columns=list(PULSE_COLUMNS))
