"""What there is to know when memory runs out: the only owner of torch's out-of-memory observer in this package.

The observer is called before torch raises, while everything is still held. It reads the allocator's counters and its
ring, which allocates nothing on the device, and writes them to disk at once, for the process may not live to do it
later. It never changes what torch raises. The observer can fire as often as a program catches the error and tries
again: the first few times are written down, the others are counted.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import torch

from lightning_memprof.artifacts.naming import oom_name, oom_snapshot_name
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.collectors.allocator_history import memory_history
from lightning_memprof.capture.collectors.allocator_stats import memory_stats
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.sources.oom_facts import (
    Frame,
    forwards,
    frames_of,
    host_facts,
    live_tensors,
    module_of,
    phase_of,
    running_frames,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.session import Session
    from lightning_memprof.schedule import Window

__all__ = ["OomWatch", "OutOfMemory", "Where", "memory_error", "where_is"]

log = logging.getLogger(__name__)

_PROTOCOL: Final = 4
_MAX_RECORDED: Final = 3
_MAX_STACK: Final = 60
# Marks are passed on the way out of an exception too: the phase says which were reached before it.
_POINTS: Final = {
    "data_wait": Point.STEP_START,
    "forward": Point.BATCH_START,
    "backward": Point.BEFORE_BACKWARD,
    "optimizer": Point.BEFORE_OPTIMIZER_STEP,
}
# What c10's allocator says where the system gives it no memory (c10/core/impl/alloc_cpu.cpp).
_HOST_REFUSED: Final = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes"
)
_DEVICE_REFUSED: Final = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_DEVICE_FREE: Final = re.compile(r"of which ([0-9.]+) (bytes|KiB|MiB|GiB) is free")
_UNITS: Final = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


class Where(NamedTuple):
    """Where a run is; None for what is not known or not begun."""

    step: int | None = None
    global_step: int | None = None
    epoch: int | None = None
    phase: str | None = None
    point: Point | None = None
    window: int | None = None


def where_is(session: Session) -> Where:
    """Return where a session's run is now."""
    position, window = session.position, session.window
    index = None if window is None else window.index
    if position is None:
        return Where(window=index)
    return Where(position.step, position.global_step, position.epoch, session.clock.phase, session.point, index)


def memory_error(error: BaseException) -> tuple[BaseException, Literal["device", "host"]] | None:
    """Return the exception that says that memory ran out, ``error`` or one that it was raised from, and of what.

    ``torch.OutOfMemoryError`` is the device's. ``MemoryError`` and the ``RuntimeError`` of torch's CPU allocator, which
    has no type of its own, are the host's.
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
    """What torch calls: it cannot be taken back, so it is registered once and hands on to who listens now."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[int, int, int, int], None], ...] = ()
        self._attached_by: object = None
        # Recording may itself run out of memory, and another device may in another thread.
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
        # Torch has no other name for it, and a build without CUDA has none at all.
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009,SLF001
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
class OutOfMemory(Collector):
    """An autopsy where the device or the host runs out of memory: what was asked, what held the rest, where.

    Args:
        history: ``"windows"`` knows the Python stacks of what is allocated while ``AllocatorHistory`` records;
            ``"always"`` keeps the CUDA allocator's ring on for the whole run: about 1 us for each allocation and some
            hundred bytes of host memory for each entry.
        max_entries: length of that ring; older events are overwritten.

    Raises:
        ConfigError: a value is not usable.

    """

    name: ClassVar[str] = "oom"
    every_rank: ClassVar[bool] = True

    history: Literal["windows", "always"] = "windows"
    max_entries: int = 100_000

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.history not in ("windows", "always"):
            msg = f"OutOfMemory(history={self.history!r}): must be 'windows' or 'always'"
            raise ConfigError(msg)
        if type(self.max_entries) is not int or self.max_entries < 1:
            msg = f"OutOfMemory(max_entries={self.max_entries!r}): must be an integer of at least 1"
            raise ConfigError(msg)

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002 Collector's
        """Record nothing by window: memory runs out when it will; see :meth:`watch`."""
        return nullcontext(None)

    @contextmanager
    def watch(self, run: RunContext, session: Session) -> Iterator[OomWatch]:
        """Watch a run from its setup to its end, for the model may not even fit.

        Args:
            run: the run.
            session: its session, which knows where it is when memory runs out.

        """
        watch = OomWatch(run, session)
        with ExitStack() as held:
            if run.device.type == "cuda":
                try:
                    if self.history == "always":
                        held.enter_context(memory_history(max_entries=self.max_entries))
                    held.enter_context(_observer.listen(watch.observed))
                except Exception as error:  # noqa: BLE001 cudaMallocAsync's allocator has neither ring nor observer
                    run.faults.report(self.name, "enter", None, error)
            yield watch


class OomWatch:
    """The out-of-memory events of one run.

    Args:
        run: the run.
        session: its session.

    """

    def __init__(self, run: RunContext, session: Session) -> None:
        self._run = run
        self._session = session
        self._events: list[dict[str, Any]] = []
        self._count = 0
        self._last: dict[str, Any] | None = None

    def observed(self, device: int, asked_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Write down what torch's observer says, before torch raises.

        Args:
            device: index of the device.
            asked_bytes: what was asked of the driver, rounded as the allocator rounds.
            limit_bytes: all of the device, or what ``set_per_process_memory_fraction`` allows.
            free_bytes: what the driver has left, for all processes.

        """
        began = time.perf_counter_ns()
        self._count += 1
        numbers = {"asked_bytes": asked_bytes, "asked_source": "allocator", "limit_bytes": limit_bytes}
        try:
            event = self._event("device", running_frames(), f"cuda:{device}")
            event |= {**numbers, "free_bytes": free_bytes, "seen": "observer"}
            event["statistics"] = self._or_why(event, "statistics", lambda: memory_stats(torch.device("cuda", device)))
            self._last = event
            if len(self._events) < _MAX_RECORDED:
                self._events.append(event)
                self._look_around(event, torch.device("cuda", device))
                self._write(event)
        except Exception as error:  # noqa: BLE001 nothing of ours may raise into the allocator
            self._failed(error)
        self._session.clock.leave_out(time.perf_counter_ns() - began)

    def ended_by(self, exception: BaseException) -> Any | None:
        """Write down that a run ended, by an exception; call it before anything is closed.

        Returns:
            The facts, where memory ran out; else None.

        """
        try:
            found = memory_error(exception)
            return None if found is None else self._ended(*found, exception)
        except Exception as error:  # noqa: BLE001 the exception that goes on must be the user's
            self._failed(error)
            return None

    def _ended(self, error: BaseException, kind: Literal["device", "host"], arrived: BaseException) -> dict[str, Any]:
        event = self._last if kind == "device" else None
        if event is None:
            event = self._from_exception(error, kind, frames_of(error, arrived))
        if not any(known is event for known in self._events):
            # What lies between the first few and the last was only counted.
            self._look_around(event, torch.device(event["device"]))
            self._events.append(event)
        event["ended_run"], event["exception"] = True, describe(error)
        place = self._or_why(event, "module", lambda: module_of(error, self._run.model))
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
        event["asked_bytes"], event["asked_source"] = _asked(error)
        free = _DEVICE_FREE.search(str(error))
        event["limit_bytes"], event["free_bytes"] = None, None if free is None else _size(free)
        event["seen"] = "exception"
        event["statistics"] = None
        if kind == "device":
            event["statistics"] = self._or_why(event, "statistics", lambda: memory_stats(self._run.device))
        return event

    def _event(self, memory: str, frames: list[Frame], device: str) -> dict[str, Any]:
        where = where_is(self._session)
        phase, function = phase_of(frames)
        return {
            "number": self._count - 1,
            "time_ns": time.time_ns(),
            "memory": memory,
            "device": device,
            "rank": self._run.rank,
            "thread": threading.current_thread().name,
            "stage": self._run.stage,
            "step": where.step,
            "global_step": where.global_step,
            "epoch": where.epoch,
            "phase": phase or where.phase,
            "function": function,
            "point": None if where.point is None else where.point.value,
            "window": where.window,
            "stack": [[frame.filename, frame.line, frame.name] for frame in frames[:_MAX_STACK]],
            "module": None,
            "module_class": None,
            "exception": None,
            "ended_run": False,
            "snapshot": None,
            "unavailable": {},
        }

    def _look_around(self, event: dict[str, Any], device: torch.device) -> None:
        """Add what takes longer: who holds what, the host's limits, the ring."""
        run = self._run
        event["host"] = self._or_why(event, "host", host_facts)
        event["total_bytes"] = event["host"]["total_bytes"] if event["host"] else None
        if device.type == "cuda":
            event["total_bytes"] = self._or_why(
                event, "total_bytes", lambda: int(torch.cuda.get_device_properties(device).total_memory)
            )
        tensors = self._or_why(
            event, "tensors", lambda: live_tensors(run.model, run.training.optimizers(), device)
        )  # fmt: skip
        event["held"], event["tensors"] = tensors or (None, None)
        event["forwards"] = self._or_why(event, "forwards", lambda: forwards(run.model))
        if device.type == "cuda":
            event["snapshot"] = self._or_why(event, "snapshot", lambda: self._write_snapshot(event, device))
        elif event["memory"] == "host":
            event["unavailable"]["snapshot"] = "the host's allocator keeps no history"

    def _or_why(self, event: dict[str, Any], what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 one fact that cannot be had must not hide the others
            event["unavailable"][what] = describe(error)
            return None

    def _write_snapshot(self, event: dict[str, Any], device: torch.device) -> str:
        snapshot: Any = torch.cuda.memory._snapshot(device)  # noqa: SLF001 torch documents it under this name
        event["history"] = any(snapshot.get("device_traces") or ())
        place = self._run.sink.place
        artifact = Artifact(place.directory / oom_snapshot_name(self._run.rank), "snapshot", OutOfMemory.name)
        with self._run.sink.file(artifact) as temporary, temporary.open("wb") as file:
            pickle.dump(snapshot, file, protocol=_PROTOCOL)
        for earlier in self._events:
            if earlier is not event and earlier["snapshot"] is not None:
                earlier["snapshot"] = None
                earlier["unavailable"]["snapshot"] = "a later event's took its place"
        return artifact.path.name

    def _write(self, event: dict[str, Any]) -> None:
        run = self._run
        row = {key: value for key, value in event.items() if key not in _ONLY_IN_FILE}
        statistics = event["statistics"] or {}
        for name in ("allocated", "reserved"):
            row[f"{name}_bytes"] = statistics.get(f"{name}_bytes.all.current")
        run.sink.manifest.append("oom", **row)
        path = run.sink.place.directory / oom_name(run.rank)
        document = {"rank": run.rank, "seen": self._count, "events": self._events}
        with run.sink.file(Artifact(path, "blob", OutOfMemory.name)) as temporary:
            temporary.write_text(json.dumps(document, default=str), encoding="utf-8")

    def _failed(self, error: BaseException) -> None:
        with suppress(Exception):
            self._run.faults.report(OutOfMemory.name, "hook", None, error)


# Too long for a line of the manifest.
_ONLY_IN_FILE: Final = frozenset({"stack", "statistics", "host", "tensors", "forwards", "held", "unavailable"})


def _asked(error: BaseException) -> tuple[int | None, str | None]:
    """Return how many bytes an exception says were asked for, and how exactly it says so."""
    text = str(error)
    if (match := _HOST_REFUSED.search(text)) is not None:
        return int(match[1]), "message"
    if (match := _DEVICE_REFUSED.search(text)) is not None:
        return _size(match), "message, rounded"
    # numpy's MemoryError knows; Python's own does not.
    size = getattr(error, "_total_size", None)
    return (size, "exception") if isinstance(size, int) else (None, None)


def _size(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])
