"""Calls for the recorded program: snapshots, regions, triggers, holders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lightning_memprof.artifacts.trace_rewriting import range_name
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.named_snapshots import NamedSnapshots, encodable
from lightning_memprof.capture.sources.growth import holders_of
from lightning_memprof.capture.triggers.watch import check_steps
from lightning_memprof.integration.live_run import LiveRun
from lightning_memprof.logs import logger_of

log = logger_of(__name__)


class ProgramCalls:
    """Methods of the objects that the program holds."""

    def __init__(self) -> None:
        self._named = NamedSnapshots()

    @property
    @abstractmethod
    def _live(self) -> LiveRun | None:
        """The run that is recorded now."""

    def snapshot(self, name: str) -> None:
        """Record the current memory under ``name``, at any point of the program."""
        self._named.take(encodable(name), "snapshot", self._position())

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Record the memory at the start and the end of the body; in a window the trace has a range of this name."""
        name = encodable(name)
        in_window = self._live is not None and self._live.run.window is not None
        self._named.take(name, "start", self._position())
        try:
            with torch.profiler.record_function(range_name(name)) if in_window else nullcontext():
                yield
        finally:
            self._named.take(name, "end", self._position())

    def trigger(self, active: int | None = None, *, leaks: bool = False) -> None:
        """Record a window now, at any point of a training program; call it on one rank or on all ranks.

        With several ranks all of them open it at one step, at least 20 steps from now; alone it opens at the next.
        Without a live run, or on a rank that records nothing, nothing happens.

        Args:
            active: steps to record; None is what :class:`Triggers` says.
            leaks: search for the holders of memory that grows in the window, see :class:`Holders`.

        Raises:
            ConfigError: ``active`` is not a number of steps.
        """
        if active is not None:
            check_steps("trigger", "active", active, 1)
        if self._live is None:
            log.warning("trigger() has no effect: no run is being recorded")
            return
        self._live.triggers.call(active, leaks=leaks)

    def holders(self, wanted: Any) -> list[str]:
        """Return the holders of a tensor or another object, or of the objects of a type, with the source line.

        At any point of the program; takes up to 2 s and keeps nothing alive.

        Args:
            wanted: an object, or a type such as ``torch.Tensor``: then the most frequent holders come first.
        """
        return holders_of(wanted, None if self._live is None else self._live.run.model)

    def _position(self) -> Position | None:
        return None if self._live is None else self._live.run.position
