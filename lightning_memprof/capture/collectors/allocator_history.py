"""The CUDA allocator's history with Python stacks; the only owner of that switch in this package."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.sources.memory import NATIVE, NO_CUDA, allocator_backend
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Mark, Window
from lightning_memprof.units import format_bytes

log = logger_of(__name__)

_NAME: Final = "allocator_history"
_MAX_ENTRIES: Final = 100_000
# pytorch.org/memory_viz shows pickles of protocol 5 as a blank page.
_PROTOCOL: Final = 4

# One entry per open context: torch's switch does not count.
_open_contexts: Final[list[object]] = []
# Stands for start_memory_history() among them, until the last context ends.
_EARLY: Final = object()


def start_memory_history(*, max_entries: int = _MAX_ENTRIES) -> None:
    """Record the CUDA allocator's history from now on; call it before the model is built, for instance.

    The first window's :class:`AllocatorHistory` writes the recorded history and stops it.

    Args:
        max_entries: number of events to keep.

    Raises:
        ConfigError: there is no CUDA device, or its allocator keeps no history.
    """
    if not torch.cuda.is_available():
        raise ConfigError("start_memory_history(): no CUDA device is available; remove the call on this machine")
    if reason := _without_history(torch.device("cuda")):
        raise ConfigError(f"start_memory_history(): {reason}; remove the call, or use the native allocator")
    if _EARLY not in _open_contexts:
        _open_contexts.append(_EARLY)
    _start_memory_history(max_entries)


def _without_history(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return NO_CUDA  # the snapshot of a build without a device is empty
    backend = allocator_backend(device)
    return None if backend == NATIVE else f"the {backend} allocator keeps no history"


def _start_memory_history(max_entries: int) -> None:
    from lightning_memprof.capture.torch_internals import _record_memory_history

    # The stack of a free would discard the exception that ends a checkpoint's recomputation: then the training ends
    # with `SystemError: run_backward returned NULL` (torch 2.11 with Python 3.12). The analysis needs none.
    # The symbols of C++ frames take minutes to resolve.
    wanted: dict[str, Any] = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": max_entries}
    known = inspect.signature(_record_memory_history).parameters
    _record_memory_history(**{key: value for key, value in wanted.items() if key in known})


@contextmanager
def memory_history(*, max_entries: int = _MAX_ENTRIES) -> Iterator[None]:
    """Record the CUDA allocator's history while the context is open.

    Contexts may nest and overlap: the first one starts the history, with its ``max_entries``, and the last
    one stops it, which clears it. Write snapshots inside the context. A history that the program itself records is used
    as it is and stays on.

    Args:
        max_entries: number of events to keep.
    """
    from lightning_memprof.capture.torch_internals import _cuda_isHistoryEnabled, _record_memory_history

    # Before CUDA is initialized, torch's question ends the process.
    if torch.cuda.is_initialized() and _cuda_isHistoryEnabled():  # type: ignore[no-untyped-call]
        if not _open_contexts:
            yield
            return
    elif _EARLY in _open_contexts:
        _open_contexts.remove(_EARLY)  # the program has stopped it
    if set(_open_contexts) <= {_EARLY}:
        _start_memory_history(max_entries)
    context = object()
    _open_contexts.append(context)
    try:
        yield
    finally:
        _open_contexts.remove(context)
        if set(_open_contexts) <= {_EARLY}:
            _open_contexts.clear()
            with suppress(RuntimeError):
                _record_memory_history(enabled=None)


def write_snapshot(
    run: RunContext, name: str, window: int | None, device: torch.device | None = None, collector: str = _NAME
) -> Any:
    """Write the segments and recorded history of a device's allocator into the run directory, and return them."""
    from lightning_memprof.capture.torch_internals import _snapshot

    snapshot: Any = _snapshot(device or run.device)
    path = run.sink.place.directory / name
    artifact = ArtifactSpec(path=path, type="snapshot", collector=collector, window=window)
    with run.sink.file(artifact) as temporary, temporary.open("wb") as file:
        pickle.dump(snapshot, file, protocol=_PROTOCOL)
    log.info("saved %s (%s)", path.name, format_bytes(path.stat().st_size))
    return snapshot


@dataclass(frozen=True, kw_only=True)
class AllocatorHistory(Collector):
    """A snapshot of the CUDA allocator with the Python stack of every allocation, for pytorch.org/memory_viz.

    It is written at the end of a window's last step. `FunctionMemory(allocator_snapshots=...)` writes more.

    Args:
        max_entries: number of events to keep; older events are overwritten.
    """

    name: ClassVar[str] = _NAME

    max_entries: int = _MAX_ENTRIES

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason on other devices and with other allocators: only CUDA's native one has a history."""
        if run.device.type == "cuda" or not torch.cuda.is_available():
            return _without_history(run.device)
        return f"the model is on {run.device}"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Start the history, write a snapshot at the end of the last recorded step, and stop it."""
        last: Mark | None = None

        def on_mark(mark: Mark) -> None:
            nonlocal last
            if mark.recorded:
                last = mark

        with memory_history(max_entries=self.max_entries):
            try:
                yield on_mark
            finally:
                if last is not None:
                    name = SnapshotName(rank=run.rank, function=run.function, number=last.step + 1, edge="end")
                    write_snapshot(run, str(name), window.index)
