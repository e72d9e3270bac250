"""Curves of the pulse: in the Trainer's loggers, and in TensorBoard event files of ranks without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_memprof.artifacts.naming import curves_directory
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

    from lightning_memprof.integration.settings import Settings

log = logger_of(__name__)

_MS: Final = 1_000_000
_OF_PULSE: Final = (
    ("step_time_ms", "duration_ns", _MS),
    ("data_wait_ms", "data_wait_ns", _MS),
    ("rss_mib", "rss_bytes", MIB),
    ("peak_allocated_mib", "device_peak_bytes", MIB),
)
_GROUP: Final = "memprof"

LAYOUT: Final = {
    "lightning-memprof": {
        title: ["Multiline", [f"^{_GROUP}/{name}$" for name in names]]
        for title, names in (
            ("longest step, ms", ("step_time_ms",)),
            ("longest data wait, ms", ("data_wait_ms",)),
            ("memory, MiB", ("peak_allocated_mib", "peak_reserved_mib", "rss_mib")),
        )
    }
}

# TensorBoard keeps a thousand random points of a curve. After the first points, each further batch of points covers
# twice as many steps: 3 million steps make a thousand.
_FIRST: Final = 256
_DOUBLED: Final = 48
# Share of the run's time for loggers, beside a start: a logger that calls a server takes as long as some steps.
_SHARE: Final = 0.002
_START_SECONDS: Final = 0.5


def curves_of(trainer: Trainer, stage: str, settings: Settings, sink: Sink) -> Curves | None:
    """Return the curves of this rank, or None where there are none.

    Only a fit has curves, if they are requested, on the ranks whose windows have every collector. Rank 0 logs them to
    the Trainer's loggers, and to a file if none is a TensorBoard logger.
    """
    if stage != "fit" or not settings.output.curves:
        return None
    if not settings.every_collector and not trainer.is_global_zero:
        return None
    loggers: list[Any] = []
    if trainer.is_global_zero and trainer.log_every_n_steps:  # type: ignore[attr-defined]
        loggers = [logger for logger in trainer.loggers if not lightning_class(logger, "DummyLogger")]
    if not any(lightning_class(logger, "TensorBoardLogger") for logger in loggers):
        # Takes 0.2 s if no logger has imported it: before the first step, not during one.
        import_module("torch.utils.tensorboard")
        loggers.append(EventFile(sink))
    return Curves(trainer, loggers)


class EventFile:
    """A rank's TensorBoard event file, as a logger; TensorBoard's own writer makes it at the first point.

    Args:
        sink: of the rank; lists the file.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._directory = sink.place.directory / curves_directory(sink.rank)
        self._writer: Any = None

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Add one point to each of several curves; a thread of the writer's writes them.

        Raises:
            OSError: the directory cannot be written.
        """
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), max_queue=1000, flush_secs=10)
            # TensorBoard shows a chart that several ranks lay out once.
            self._writer.add_custom_scalars(LAYOUT)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the file and list it."""
        if self._writer is not None:
            self._writer.close()
            for path in sorted(self._directory.glob("*.tfevents.*")):
                self._sink.list_artifact(ArtifactSpec(path=path, type="blob", collector=Curves.name))


class Curves:
    """Draws maxima, never samples: a slow step, or one with much memory, determines the value of its point.

    The training thread passes on the pulse rows just written, some dozens of steps at a time, and calls the loggers.
    They get one point per call, at most every ``log_every_n_steps`` of the Trainer, and none while a window is open: it
    would be part of the recorded times.

    Args:
        trainer: the Trainer of a fit.
        loggers: those of the Trainer on rank 0, and :class:`EventFile`.
    """

    name: Final = "curves"

    def __init__(self, trainer: Trainer, loggers: Sequence[Any]) -> None:
        self._trainer = trainer
        self._loggers = list(loggers)
        self._every: int = trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        self._values: dict[str, float] = {}
        self._place = self._logged = -1
        self._drawn = 0
        self._spent_seconds = 0.0
        self._began = time.perf_counter()

    def add_rows(self, rows: Sequence[PulseRow], device: torch.device | None, *, in_window: bool) -> None:
        """Add the pulse rows that were just written.

        Args:
            rows: rows of the pulse.
            device: the device of the allocator statistics; None on a CPU.
            in_window: whether a window is open.
        """
        if not rows or not self._loggers:
            return
        # The axis of Lightning's own metrics: batches after which an optimizer stepped. With one optimizer these are
        # the optimizer steps, which the rows have; several step more than once per batch.
        stepped, steps = self._trainer.fit_loop.epoch_loop._batches_that_stepped, self._trainer.global_step
        self._place = (rows[-1].global_step or 0) * stepped // (steps or 1)
        values = {}
        for curve, column, scale in _OF_PULSE:
            if found := [value for row in rows if (value := row[column]) is not None]:
                values[curve] = max(found) / scale
        if device is not None:
            values["peak_reserved_mib"] = peak_reserved_bytes(device) / MIB
        self._values |= {name: max(value, self._values.get(name, value)) for name, value in values.items()}
        width = self._every << max(0, (self._drawn - _FIRST) // _DOUBLED + 1)
        if self._place - self._logged >= width and not in_window and self._has_time():
            self._log()

    def end(self) -> None:
        """Draw the last points and close the file."""
        self._log()
        for logger in tuple(self._loggers):
            self._ask(logger, logger.close if isinstance(logger, EventFile) else partial(save_rows, logger))

    def _has_time(self) -> bool:
        return self._spent_seconds < _START_SECONDS + _SHARE * (time.perf_counter() - self._began)

    def _log(self) -> None:
        if not self._values or self._place <= self._logged:
            return
        began = time.perf_counter()
        values = {f"{_GROUP}/{name}": value for name, value in self._values.items()}
        self._logged, self._values = self._place, {}
        self._drawn += 1
        for logger in tuple(self._loggers):
            self._ask(logger, partial(logger.log_metrics, values, self._place))
        self._spent_seconds += time.perf_counter() - began

    def _ask(self, logger: Any, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            discard(self._loggers, logger)
            log.warning("%s failed to log curves and gets no more of them", type(logger).__name__, exc_info=True)
            with suppress(Exception):
                remove_rows(logger, f"{_GROUP}/")
