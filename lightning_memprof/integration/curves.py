"""Curves of the whole run: in the Trainer's loggers, and in TensorBoard event files of ranks without one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_memprof.artifacts.naming import curves_path
from lightning_memprof.artifacts.series import PulseRow
from lightning_memprof.artifacts.sink import ArtifactSpec, Sink
from lightning_memprof.capture.observe import discard
from lightning_memprof.capture.sources.memory import peak_reserved_bytes
from lightning_memprof.integration.loggers import remove_rows, save_rows
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_memprof.artifacts.tfevents import EventFile, Layout
    from lightning_memprof.capture.faults import Faults
    from lightning_memprof.integration.settings import Settings

log = logger_of(__name__)

_Values = dict[str, float]
_Point = tuple[int, _Values]

_MS: Final = 1_000_000
_OF_PULSE: Final = (
    ("step_time_ms", "duration_ns", _MS),
    ("data_wait_ms", "data_wait_ns", _MS),
    ("rss_mib", "rss_bytes", MIB),
    ("peak_allocated_mib", "device_peak_bytes", MIB),
)
# By collector, the curves of its columns.
_OF_SERIES: Final = {
    "host": (("rss_mib", "rss_bytes"),),
    "allocator": (
        ("peak_allocated_mib", "allocated_bytes.all.peak"),
        ("peak_reserved_mib", "reserved_bytes.all.peak"),
    ),
    "saved_tensors": (("activation_mib", "activation_bytes"),),
}
_STEPS, _WINDOWS = "memprof", "memprof_windows"
_SIZES: Final = ("peak_allocated_mib", "peak_reserved_mib", "rss_mib")

LAYOUT: Final[Layout] = {
    "lightning-memprof": {
        "longest step, ms": [f"^{_STEPS}/step_time_ms$"],
        "longest data wait, ms": [f"^{_STEPS}/data_wait_ms$"],
        "memory, MiB": [f"^{_STEPS}/{name}$" for name in _SIZES],
        "windows: longest step, ms": [f"^{_WINDOWS}/step_time_ms$"],
        "windows: longest data wait, ms": [f"^{_WINDOWS}/data_wait_ms$"],
        "windows: memory, MiB": [f"^{_WINDOWS}/{name}$" for name in (*_SIZES, "activation_mib")],
    }
}

# TensorBoard keeps a thousand random points of a curve: a file has fewer. The first points are single steps; after each
# further batch of points, a point covers twice as many steps. 3 million steps make a thousand points.
_SINGLE: Final = 256
_DOUBLED: Final = 48
# The training thread runs in the pauses; without them it would wait for all points of a chunk.
_AT_ONCE: Final = 4
_PAUSE_SECONDS: Final = 0.001
# Share of the run's time for loggers, beside a start: a logger that calls a server takes as long as some steps.
_SHARE: Final = 0.002
_START_SECONDS: Final = 0.5


def curves_of(trainer: Trainer, stage: str, settings: Settings, sink: Sink, faults: Faults) -> Curves | None:
    """Return the curves of this rank, or None where there are none.

    Only a fit has curves, if they are requested, on the ranks whose windows have every collector. Rank 0 logs them to
    the Trainer's loggers, and to a file if none is a TensorBoard logger.
    """
    if stage != "fit" or not settings.output.curves:
        return None
    if not settings.every_collector and not trainer.is_global_zero:
        return None
    loggers = []
    if trainer.is_global_zero and trainer.log_every_n_steps:  # type: ignore[attr-defined]
        loggers = [logger for logger in trainer.loggers if not lightning_class(logger, "DummyLogger")]
    has_file = not any(lightning_class(logger, "TensorBoardLogger") for logger in loggers)
    if has_file:
        # Takes 0.2 s if no logger has imported tensorboard: before the first step, not during one.
        import_module("lightning_memprof.artifacts.tfevents")
    return Curves(trainer, loggers, sink, faults, has_file=has_file)


class Curves:
    """Draws maxima, never samples: a slow step, or one with much memory, determines the value of its point.

    The training thread passes on the pulse rows just written, some dozens of steps at a time, and calls the loggers;
    everything else runs in the background. Loggers get one point per call, at most every ``log_every_n_steps`` of the
    Trainer, and none while a window is open: it would be part of the recorded times.

    Args:
        trainer: the Trainer of a fit.
        loggers: the loggers that get points; none on ranks other than 0.
        sink: where the event file goes; passes on the series that collectors write.
        faults: the policy for failures.
        has_file: whether the points go to an event file of this rank.
    """

    name: Final = "curves"

    def __init__(
        self, trainer: Trainer, loggers: Sequence[Any], sink: Sink, faults: Faults, *, has_file: bool = True
    ) -> None:
        self._trainer = trainer
        self._sink = sink
        self._windows = _Windows()
        self._file = _RankFile(sink) if has_file else None
        sink.on_series = self._add_series
        self._faults = faults
        self._loggers = list(loggers)
        self._every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # The points of windows for the loggers.
        self._points: deque[_Point] = deque()
        self._steps = _Maxima(_STEPS)
        self._axis = _Axis()
        self._logged = -1
        self._spent_seconds = 0.0
        self._began = time.perf_counter()
        self._ended = False

    def add_rows(self, rows: Sequence[PulseRow], device: torch.device | None, *, in_window: bool) -> None:
        """Add the pulse rows that were just written.

        Args:
            rows: rows of the pulse.
            device: the device of the allocator statistics; None on a CPU.
            in_window: whether a window is open.
        """
        reserved = None if device is None else peak_reserved_bytes(device) / MIB
        stepped = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        places = self._axis.places(rows, self._trainer.global_step, stepped)
        if self._loggers and rows:
            self._steps.add(places[-1], _values(rows) | ({} if reserved is None else {"peak_reserved_mib": reserved}))
            if self._steps.place - self._logged >= self._every and not in_window and self._has_time():
                self._log()
        # Last: from here on the background thread competes for the interpreter.
        self._sink.in_background(lambda: self._draw(places, rows, reserved))

    def window_closed(self, window: int, steps: Sequence[int]) -> None:
        """Set the recorded steps of a window; the pulse has its warmup steps too."""
        self._windows.recorded[window] = frozenset(steps)

    def end(self) -> None:
        """Draw the last points and close the file; called after all background work."""
        if self._ended:
            return
        self._ended = True
        points = list(self._windows.end())
        self._points.extend(points)
        try:
            if self._file is not None:
                self._file.end(points)
        finally:
            self._log()
            for logger in tuple(self._loggers):
                self._ask(logger, save_rows, logger)

    def _add_series(self, window: int, collector: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the maxima of the recorded rows of a series."""
        for name, column in _OF_SERIES.get(collector, ()):
            found = [row[column] for row in rows if row.get("recorded") and isinstance(row.get(column), int)]
            if found:
                self._windows.maxima.setdefault(window, {})[name] = max(found) / MIB

    def _has_time(self) -> bool:
        return self._spent_seconds < _START_SECONDS + _SHARE * (time.perf_counter() - self._began)

    def _draw(self, places: Sequence[int], rows: Sequence[PulseRow], reserved: float | None) -> None:
        if self.name not in self._faults.disabled:
            # An exception in a background thread would be lost.
            with self._faults.caught(self.name, "write"):
                points = list(self._windows.add(places, rows))
                self._points.extend(points)
                if self._file is not None:
                    self._file.draw(places, rows, reserved, points)

    def _log(self) -> None:
        began = time.perf_counter()
        points = [self._points.popleft() for _ in range(len(self._points))]
        if (values := self._steps.take()) and self._steps.place > self._logged:
            points.append((self._steps.place, values))
            self._logged = self._steps.place
        for place, values in points:
            for logger in tuple(self._loggers):
                self._ask(logger, logger.log_metrics, values, place)
        self._spent_seconds += time.perf_counter() - began

    def _ask(self, logger: Any, call: Callable[..., object], *values: Any) -> None:
        try:
            call(*values)
        except Exception:
            discard(self._loggers, logger)
            log.warning("%s failed to log curves and gets no more of them", type(logger).__name__, exc_info=True)
            with suppress(Exception):
                remove_rows(logger, (f"{_STEPS}/", f"{_WINDOWS}/"))


class _Axis:
    """Places rows on the axis of Lightning's own metrics: batches after which an optimizer stepped.

    With one optimizer these are the optimizer steps, which the rows have; several step more than once per batch.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def places(self, rows: Sequence[PulseRow], global_step: int, stepped: int) -> list[int]:
        """Return each row's place.

        Args:
            rows: rows of the pulse.
            global_step: optimizer steps so far.
            stepped: batches so far after which an optimizer stepped.
        """
        counts = [row.global_step or 0 for row in rows]
        if global_step == stepped:
            self._last = (global_step, stepped)
            return counts
        first_count, first_place = self._last or (0, 0)
        steps, batches = global_step - first_count, stepped - first_place
        self._last = (global_step, stepped) if steps else self._last
        return [first_place + (count - first_count) * batches // (steps or 1) for count in counts]


class _Maxima:
    """Maxima since the last :meth:`take`."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._values: _Values = {}
        self.place = -1

    def add(self, place: int, values: Mapping[str, float]) -> None:
        """Add values at ``place``."""
        self.place = place
        for name, value in values.items():
            if value > self._values.get(name, -1.0):
                self._values[name] = value

    def take(self) -> _Values:
        """Return the maxima by the full tag of the curve, and reset them."""
        values, self._values = self._values, {}
        return {f"{self._group}/{name}": value for name, value in values.items()}


class _Windows:
    """The points of windows; one thread at a time may use it.

    Attributes:
        recorded: by window, its recorded steps; set by another thread before the row of the next step arrives.
        maxima: by window, the maxima of the series that collectors wrote; set like ``recorded``.
    """

    def __init__(self) -> None:
        self.recorded: dict[int, frozenset[int]] = {}
        self.maxima: dict[int, _Values] = {}
        # The window of the last rows, and its rows.
        self._window: int | None = None
        self._rows: list[PulseRow] = []
        self._place = 0

    def add(self, places: Sequence[int], rows: Sequence[PulseRow]) -> Iterator[_Point]:
        """Yield the points of the windows that the rows complete."""
        for place, row in zip(places, rows, strict=True):
            if row.window != self._window:
                yield from self.end()
                self._window = row.window
            if self._window is not None:
                self._rows.append(row)
                self._place = place

    def end(self) -> Iterator[_Point]:
        """Yield the point of the last window."""
        window, rows = self._window, self._rows
        self._window, self._rows = None, []
        if window is None:
            return
        steps = self.recorded.pop(window, frozenset())
        values = _values([row for row in rows if row.step in steps]) | self.maxima.pop(window, {})
        if values:
            yield self._place, {f"{_WINDOWS}/{name}": value for name, value in values.items()}


class _RankFile:
    """The event file of a rank; one thread at a time may use it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._path = sink.place.directory / curves_path(sink.rank)
        self._file: EventFile | None = None
        self._steps = _Maxima(_STEPS)
        self._begun_at: int | None = None
        self._drawn = 0

    def draw(
        self, places: Sequence[int], rows: Sequence[PulseRow], reserved: float | None, windows: Sequence[_Point]
    ) -> None:
        """Draw the points of windows, and those that the rows complete.

        Raises:
            OSError: the file cannot be written.
        """
        file = self._opened()
        _add(file, windows)
        begin = 0
        for index, place in enumerate(places):
            if self._begun_at is None:
                self._begun_at = place
            # Batches of one gradient accumulation share a place.
            if place - self._begun_at >= self._width():
                self._take_in(places, rows, begin, index)
                self._draw_steps(file)
                begin, self._begun_at = index, place
        self._take_in(places, rows, begin, len(rows))
        if reserved is not None:
            self._steps.add(self._steps.place, {"peak_reserved_mib": reserved})
        file.flush()

    def end(self, windows: Sequence[_Point]) -> None:
        """Draw the last points and list the file."""
        if self._file is None:
            return
        try:
            _add(self._file, windows)
            self._draw_steps(self._file)
        finally:
            self._file.close()
            self._sink.list_artifact(ArtifactSpec(path=self._path, type="blob", collector=Curves.name))

    def _opened(self) -> EventFile:
        from lightning_memprof.artifacts.tfevents import EventFile

        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = EventFile(self._path, time.time())
            # TensorBoard shows a chart that several ranks lay out once.
            self._file.add_layout(LAYOUT, time.time())
        return self._file

    def _take_in(self, places: Sequence[int], rows: Sequence[PulseRow], begin: int, end: int) -> None:
        if begin < end:
            self._steps.add(places[end - 1], _values(rows[begin:end]))

    def _width(self) -> int:
        return 1 << max(0, (self._drawn - _SINGLE) // _DOUBLED + 1)

    def _draw_steps(self, file: EventFile) -> None:
        self._begun_at = None
        if values := self._steps.take():
            self._drawn += 1
            file.add(self._steps.place, time.time(), values)
            if self._drawn % _AT_ONCE == 0:
                time.sleep(_PAUSE_SECONDS)


def _add(file: EventFile, points: Sequence[_Point]) -> None:
    for place, values in points:
        file.add(place, time.time(), values)


def _values(rows: Sequence[PulseRow]) -> _Values:
    values = {}
    for curve, column, scale in _OF_PULSE:
        found = [value for row in rows if (value := row[column]) is not None]
        if found:
            values[curve] = max(found) / scale
    return values
