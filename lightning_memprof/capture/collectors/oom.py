"""State of memory when it runs out; the only owner of torch's out-of-memory observer in this package.

The observer is called before torch raises, while all memory is still allocated. It reads the allocator's counters and
recorded history, which allocates nothing on the device, and writes them to disk at once: the process may end before it
can do so later. It never changes what torch raises. The observer can fire each time a program catches the error and
retries: the first few events are written, the others are counted.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch

from lightning_memprof.artifacts.naming import oom_name, oom_snapshot_name
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnException, RunContext
from lightning_memprof.capture.collectors.allocator_history import memory_history, write_snapshot
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.sources.memory import NATIVE, allocator_backend, memory_stats
from lightning_memprof.capture.sources.oom_state import (
    Frame,
    forward_sources,
    frames_of,
    host_memory,
    live_tensors,
    module_of,
    phase_of,
    running_frames,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Point

log = logger_of(__name__)

_MAX_RECORDED: Final = 3
_MAX_STACK: Final = 60
# Marks are also passed while an exception propagates: the phase shows which were reached before it.
_POINTS: Final = {
    "data_wait": Point.STEP_START,
    "forward": Point.BATCH_START,
    "backward": Point.BEFORE_BACKWARD,
    "optimizer": Point.BEFORE_OPTIMIZER_STEP,
}
# The message of c10's allocator if the system refuses memory (c10/core/impl/alloc_cpu.cpp).
_HOST_REFUSED: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes"
)
_DEVICE_REFUSED: Final = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_DEVICE_FREE: Final = re.compile(r"of which ([0-9.]+) (bytes|KiB|MiB|GiB) is free")
_UNITS: Final = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def memory_error(error: BaseException) -> tuple[BaseException, Literal["device", "host"]] | None:
    """Return the out-of-memory exception, ``error`` or one of its causes, and whose memory it was; None without one.

    ``torch.OutOfMemoryError`` is the device's. ``MemoryError`` and the ``RuntimeError`` of torch's CPU allocator, which
    has no separate type, are the host's.
    """
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, torch.OutOfMemoryError):
            return cause, "device"
        if isinstance(cause, MemoryError) or (type(cause) is RuntimeError and _HOST_REFUSED.search(str(cause))):
            return cause, "host"
        cause = None if cause is None else cause.__cause__
    return None


class _Observer:
    """Torch's observer, which cannot be detached: it is registered once and calls the current listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[int, int, int, int], None], ...] = ()
        self._attached_by: object = None
        # Recording may run out of memory, and so may another device in another thread.
        self._busy = threading.Lock()

    def __call__(self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            for listener in self._listeners:
                try:
                    listener(device, asked_bytes, limit_bytes, free_bytes)
                except Exception:
                    log.warning("an out-of-memory event could not be recorded", exc_info=True)
        finally:
            self._busy.release()

    @contextmanager
    def listen(self, listener: Callable[[int, int, int, int], None]) -> Iterator[None]:
        from lightning_memprof.capture.torch_internals import _cuda_attach_out_of_memory_observer as attach

        if attach is not self._attached_by:
            attach(self)
            self._attached_by = attach
        self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            self._listeners = tuple(other for other in self._listeners if other is not listener)


_observer: Final = _Observer()


@dataclass(frozen=True, kw_only=True)
class OOMAutopsy(Collector):
    """State of memory when the device or the host runs out of it: the failed allocation, the live bytes, the place.

    Args:
        history: ``"windows"`` has the Python stacks of allocations made while ``AllocatorHistory`` records;
            ``"always"`` records the CUDA allocator's history during the whole run: about 1 µs per allocation and some
            hundred bytes of host memory per entry.
        max_entries: length of that history; older events are overwritten.

    Raises:
        ConfigError: a value is not usable.
    """

    name: ClassVar[str] = "oom"
    every_rank: ClassVar[bool] = True

    history: Literal["windows", "always"] = "windows"
    max_entries: int = 100_000

    def __post_init__(self) -> None:
        """Validate the values."""
        if self.history not in ("windows", "always"):
            raise ConfigError(f"OOMAutopsy(history={self.history!r}): must be 'windows' or 'always'")
        if type(self.max_entries) is not int or self.max_entries < 1:
            raise ConfigError(f"OOMAutopsy(max_entries={self.max_entries!r}): must be an integer of at least 1")

    @contextmanager
    def guard(self, run: RunContext) -> Iterator[OnException | None]:
        """Watch the run from its setup: the model itself may not fit."""
        with self.watch(run) as watch:
            yield lambda exception: watch.ended_by(exception) is not None

    @contextmanager
    def watch(self, run: RunContext) -> Iterator[OomWatch]:
        """Yield the watch of a run's out-of-memory events."""
        watch = OomWatch(run)
        with ExitStack() as stack:
            # Other allocators have neither history nor observer; the exception tells what it can.
            if run.device.type == "cuda" and allocator_backend(run.device) == NATIVE:
                with run.faults.caught(self.name, "enter"):
                    if self.history == "always":
                        stack.enter_context(memory_history(max_entries=self.max_entries))
                    stack.enter_context(_observer.listen(watch.observed))
            yield watch


class OomWatch:
    """The out-of-memory events of one run.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._events: list[dict[str, Any]] = []
        self._count = 0
        self._last: dict[str, Any] | None = None

    def observed(self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Write an event of torch's observer, before torch raises.

        Args:
            device: index of the device.
            asked_bytes: size of the failed allocation, rounded by the allocator.
            limit_bytes: memory of the device, or the limit of ``set_per_process_memory_fraction``.
            free_bytes: free memory of the driver, for all processes.
        """
        began = time.perf_counter_ns()
        self._count += 1
        numbers = {"asked_bytes": asked_bytes, "asked_source": "allocator", "limit_bytes": limit_bytes}
        try:
            event = self._event("device", running_frames(), f"cuda:{device}")
            event |= {**numbers, "free_bytes": free_bytes, "seen": "observer"}
            event["statistics"] = self._value_or_reason(
                event, "statistics", lambda: memory_stats(torch.device("cuda", device))
            )
            self._last = event
            if len(self._events) < _MAX_RECORDED:
                self._events.append(event)
                self._add_state(event, torch.device("cuda", device))
                self._write(event)
        except Exception as error:  # noqa: BLE001 nothing of ours may raise into the allocator
            self._failed(error)
        self._run.clock.leave_out(time.perf_counter_ns() - began)

    def ended_by(self, exception: BaseException) -> Any | None:
        """Write the exception that ended the run; call it before anything is closed.

        Returns:
            The event if memory ran out; else None.
        """
        try:
            found = memory_error(exception)
            return None if found is None else self._ended(*found, exception)
        except Exception as error:  # noqa: BLE001 the exception that propagates must be the user's
            self._failed(error)
            return None

    def _ended(self, error: BaseException, kind: Literal["device", "host"], arrived: BaseException) -> dict[str, Any]:
        event = self._last if kind == "device" else None
        if event is None:
            event = self._from_exception(error, kind, frames_of(error, arrived))
        if not any(known is event for known in self._events):
            # Events between the first few and the last were only counted.
            self._add_state(event, torch.device(event["device"]))
            self._events.append(event)
        event["ended_run"], event["exception"] = True, describe(error)
        place = self._value_or_reason(event, "module", lambda: module_of(error, self._run.model))
        if place is not None:
            event["module"], event["module_class"] = place
        self._write(event)
        return event

    def _from_exception(
        self, error: BaseException, kind: Literal["device", "host"], frames: list[Frame]
    ) -> dict[str, Any]:
        self._count += 1
        device = str(self._run.device) if kind == "device" else "cpu"
        event = self._event(kind, frames, device)
        event["point"] = _POINTS[event["phase"]].value if event["phase"] in _POINTS else None
        event["asked_bytes"], event["asked_source"] = _failed_allocation(error)
        free = _DEVICE_FREE.search(str(error))
        event["limit_bytes"], event["free_bytes"] = None, None if free is None else _size(free)
        event["seen"] = "exception"
        event["statistics"] = None
        if kind == "device":
            event["statistics"] = self._value_or_reason(event, "statistics", lambda: memory_stats(self._run.device))
        return event

    def _event(self, memory: str, frames: list[Frame], device: str) -> dict[str, Any]:
        run = self._run
        step, global_step, epoch, _ = run.position or (None,) * 4
        phase, function = phase_of(frames)
        return {
            "number": self._count - 1,
            "time_ns": time.time_ns(),
            "memory": memory,
            "device": device,
            "rank": run.rank,
            "thread": threading.current_thread().name,
            "stage": run.stage,
            "step": step,
            "global_step": global_step,
            "epoch": epoch,
            "phase": phase or (None if step is None else run.clock.phase()),
            "point": None if step is None or run.point is None else run.point.value,
            "window": run.window,
            "function": function,
            "stack": [[frame.filename, frame.line, frame.name] for frame in frames[:_MAX_STACK]],
            "module": None,
            "module_class": None,
            "exception": None,
            "ended_run": False,
            "snapshot": None,
            "unavailable": {},
        }

    def _add_state(self, event: dict[str, Any], device: torch.device) -> None:
        """Add the parts that take longer: the host's limits, live tensors, the allocator's history."""
        run = self._run
        event["host"] = self._value_or_reason(event, "host", host_memory)
        event["total_bytes"] = event["host"]["total_bytes"] if event["host"] else None
        if device.type == "cuda":
            event["total_bytes"] = self._value_or_reason(
                event, "total_bytes", lambda: int(torch.cuda.get_device_properties(device).total_memory)
            )
        tensors = self._value_or_reason(
            event, "tensors", lambda: live_tensors(run.model, run.training.optimizers(), device)
        )  # fmt: skip
        event["held"], event["tensors"] = tensors or (None, None)
        event["forwards"] = self._value_or_reason(event, "forwards", lambda: forward_sources(run.model))
        if device.type == "cuda":
            event["snapshot"] = self._value_or_reason(event, "snapshot", lambda: self._write_snapshot(event, device))
        elif event["memory"] == "host":
            event["unavailable"]["snapshot"] = "the host's allocator keeps no history"

    def _value_or_reason(self, event: dict[str, Any], what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 one value that is not available must not hide the others
            event["unavailable"][what] = describe(error)
            return None

    def _write_snapshot(self, event: dict[str, Any], device: torch.device) -> str:
        name = oom_snapshot_name(self._run.rank)
        snapshot = write_snapshot(self._run, name, None, device, OOMAutopsy.name)
        event["history"] = any(snapshot.get("device_traces") or ())
        for earlier in self._events:
            if earlier is not event and earlier["snapshot"] is not None:
                earlier["snapshot"] = None
                earlier["unavailable"]["snapshot"] = "replaced by a later event's"
        return name

    def _write(self, event: dict[str, Any]) -> None:
        run = self._run
        row = {key: value for key, value in event.items() if key not in _ONLY_IN_FILE}
        statistics = event["statistics"] or {}
        for name in ("allocated", "reserved"):
            row[f"{name}_bytes"] = statistics.get(f"{name}_bytes.all.current")
        run.sink.manifest.append("oom", **row)
        path = run.sink.place.directory / oom_name(run.rank)
        document = {"rank": run.rank, "seen": self._count, "events": self._events}
        artifact = ArtifactSpec(path=path, type="blob", collector=OOMAutopsy.name)
        run.sink.write_text(artifact, json.dumps(document, default=str))

    def _failed(self, error: BaseException) -> None:
        with suppress(Exception):
            self._run.faults.report(OOMAutopsy.name, "hook", None, error)


# Too long for a manifest row.
_ONLY_IN_FILE: Final = frozenset({"stack", "statistics", "host", "tensors", "forwards", "held", "unavailable"})


def _failed_allocation(error: BaseException) -> tuple[int | None, str | None]:
    """Return the size of the failed allocation according to an exception, and the source of the number."""
    text = str(error)
    if (match := _HOST_REFUSED.search(text)) is not None:
        return int(match[1]), "message"
    if (match := _DEVICE_REFUSED.search(text)) is not None:
        return _size(match), "message, rounded"
    # numpy's MemoryError has it; Python's own does not.
    size = getattr(error, "_total_size", None)
    return (size, "exception") if isinstance(size, int) else (None, None)


def _size(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])
