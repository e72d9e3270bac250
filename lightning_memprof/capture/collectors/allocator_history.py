"""The CUDA allocator's history with Python stacks: the only owner of that switch in this package."""

from __future__ import annotations

import inspect
import logging
import pickle
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch

from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["AllocatorHistory", "memory_history", "start_memory_history", "write_snapshot"]

log = logging.getLogger(__name__)

_MAX_ENTRIES: Final = 100_000
# pytorch.org/memory_viz shows pickles of protocol 5 as a blank page.
_PROTOCOL: Final = 4

# One entry for each context that wants the history on: torch's switch does not count.
_wanted_by: Final[list[object]] = []

Dumps = Literal["last_end", "every_end", "every_start_and_end"]


def start_memory_history(*, max_entries: int = _MAX_ENTRIES, stacks: Literal["python", "all"] = "python") -> None:
    """Record the CUDA allocator's history from now on, before the model is built for instance.

    The first window's :class:`AllocatorHistory` dumps what is in the ring and switches it off.

    Args:
        max_entries: length of the ring of events.
        stacks: ``"python"``, or ``"all"`` for C++ frames too, whose symbols take minutes to resolve.

    Raises:
        ConfigError: there is no CUDA device.

    """
    if not torch.cuda.is_available():
        msg = "start_memory_history(): no CUDA device is available; leave the call out on this machine"
        raise ConfigError(msg)
    wanted: dict[str, Any] = {"enabled": "all", "context": "all", "stacks": stacks, "max_entries": max_entries}
    record = torch.cuda.memory._record_memory_history  # noqa: SLF001 torch documents it under this name
    known = inspect.signature(record).parameters
    record(**{key: value for key, value in wanted.items() if key in known})


@contextmanager
def memory_history(*, max_entries: int = _MAX_ENTRIES, stacks: Literal["python", "all"] = "python") -> Iterator[None]:
    """Keep the CUDA allocator's history on while the context is open.

    Contexts nest and overlap: the first one switches it on, with its own ``max_entries`` and ``stacks``, and the last
    one off, which clears the ring. Dump inside of the context.

    Args:
        max_entries: length of the ring of events.
        stacks: ``"python"``, or ``"all"`` for C++ frames too, whose symbols take minutes to resolve.

    Raises:
        ConfigError: there is no CUDA device.

    """
    if not _wanted_by:
        start_memory_history(max_entries=max_entries, stacks=stacks)
    me = object()
    _wanted_by.append(me)
    try:
        yield
    finally:
        _wanted_by.remove(me)
        if not _wanted_by:
            with suppress(RuntimeError):
                _stop_memory_history()


def _stop_memory_history() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 torch documents it under this name


def write_snapshot(run: RunContext, name: SnapshotName, window: int | None) -> None:
    """Write the allocator's segments and its ring of events as ``name`` into the run directory."""
    snapshot: Any = torch.cuda.memory._snapshot(run.device)  # noqa: SLF001 torch documents it under this name
    path = run.sink.place.directory / str(name)
    with (
        run.sink.file(Artifact(path, "snapshot", AllocatorHistory.name, window)) as temporary,
        temporary.open("wb") as file,
    ):
        pickle.dump(snapshot, file, protocol=_PROTOCOL)
    log.info("saved %s (%s)", path.name, format_bytes(path.stat().st_size))


@dataclass(frozen=True, kw_only=True)
class AllocatorHistory(Collector):
    """Snapshots of the CUDA allocator with the Python stack of every allocation, for pytorch.org/memory_viz.

    Args:
        dumps: at the end of a window's last step, of every recorded step, or at the start and end of each.
        max_entries: length of the ring of events; older events are overwritten.
        stacks: ``"python"``, or ``"all"`` for C++ frames too, whose symbols take minutes to resolve.

    """

    name: ClassVar[str] = "allocator_history"

    dumps: Dumps = "last_end"
    max_entries: int = _MAX_ENTRIES
    stacks: Literal["python", "all"] = "python"

    def unavailable(self, run: RunContext) -> str | None:
        """Only CUDA's allocator keeps a history."""
        if run.device.type == "cuda":
            return None
        return "CUDA is not available" if not torch.cuda.is_available() else f"the model is on {run.device}"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Switch the history on, dump at the marks asked for, and at the end: dump, then off."""
        last: Mark | None = None
        dumped = True

        def dump(mark: Mark, edge: Literal["start", "end"]) -> None:
            write_snapshot(run, SnapshotName(run.rank, run.function, mark.step + 1, edge), window.index)

        def on_mark(mark: Mark) -> None:
            nonlocal last, dumped
            if not mark.recorded:
                return
            last, dumped = mark, False
            if mark.point is Point.STEP_START and self.dumps == "every_start_and_end":
                dump(mark, "start")
            elif mark.point is Point.STEP_END and self.dumps != "last_end":
                dump(mark, "end")
                dumped = True

        with memory_history(max_entries=self.max_entries, stacks=self.stacks):
            try:
                yield on_mark
            finally:
                if last is not None and not dumped:
                    dump(last, "end")
