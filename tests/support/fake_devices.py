"""Hardware that a machine has not: an asynchronous device's clock, and CUDA's allocator."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal
from unittest import mock

from lightning_memprof.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(eq=False)
class _Moment:
    ns: int = 0


class FakeTimer:
    """The clock of a device that works through a queue; a :class:`~lightning_memprof.capture.clock.DeviceTimer`.

    The test queues work, in nanoseconds of the device's time, and says when the device has done it. A moment is the
    time at which the device will reach it.

    Attributes:
        queued_ns: when the device will have done all that was queued.
        done_ns: how far it is.
        held: moments that were recorded and not given back.

    """

    def __init__(self) -> None:
        self.queued_ns = 0
        self.done_ns = 0
        self.held: list[_Moment] = []

    def work(self, ns: int) -> None:
        """Queue work; the host does not wait for it."""
        self.queued_ns += ns

    def catch_up(self) -> None:
        """Let the device do all that is queued."""
        self.done_ns = self.queued_ns

    def record(self) -> _Moment:
        """Queue a moment."""
        moment = _Moment(self.queued_ns)
        self.held.append(moment)
        return moment

    def reached(self, moment: _Moment) -> bool:
        """Whether the device has come to it."""
        return bool(moment.ns <= self.done_ns)

    def elapsed_ns(self, start: _Moment, end: _Moment) -> int:
        """Nanoseconds between two moments.

        Raises:
            RuntimeError: the device has not reached both; a real one would make the host wait, or raise as here.

        """
        if not (self.reached(start) and self.reached(end)):
            msg = "both moments must be reached before the time between them is known"
            raise RuntimeError(msg)
        return int(end.ns - start.ns)

    def release(self, moment: _Moment) -> None:
        """Take a moment back.

        Raises:
            ValueError: it was given back before, or is none of ours.

        """
        self.held.remove(moment)


class _FakeEvent:
    """``torch.Event`` on the fake device; recorded again, it is another moment."""

    def __init__(self, timer: FakeTimer) -> None:
        self._timer = timer
        self._moment: _Moment | None = None

    def record(self) -> None:
        if self._moment is not None:
            self._timer.release(self._moment)
        self._moment = self._timer.record()

    def query(self) -> bool:
        return self._moment is None or self._timer.reached(self._moment)

    def elapsed_time(self, end: _FakeEvent) -> float:
        return self._timer.elapsed_ns(self._moment or _Moment(), end._moment or _Moment()) / 1e6


_UNITS: Final = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


class FakeCuda:
    """Stands in for what collectors ask of CUDA: events, the allocator's statistics, its history and snapshots.

    ``torch.cuda.synchronize`` and resetting the peak raise: no collector may do either. The history's ring is cleared
    when it is switched off, as torch's is; while it is on each allocation has the Python stack that asked for it.
    :meth:`run_out` is what torch does where memory does not suffice: it calls the observers and raises.

    Args:
        snapshot: an allocator snapshot as torch writes it, real or made up, whose segments, ring and counters the
            device then shows; None shows what is allocated here.
        total_bytes: size of the device.

    Attributes:
        timer: the clock behind ``torch.Event``.
        calls: what the history was asked, in order: ``("on", keywords)``, ``("snapshot", {})`` and ``("off", {})``.
        history: ``"off"`` or ``"on"``.
        allocated_bytes: in live tensors now.
        peak_bytes: the most that it was.
        observers: those that were attached; torch has no way to take one back.
        backend: torch's name of the allocator.

    """

    def __init__(self, snapshot: dict[str, Any] | None = None, *, total_bytes: int = 80 * GIB) -> None:
        self.snapshot = snapshot
        self.total_bytes = total_bytes
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.ooms = 0
        self._blocks: list[dict[str, Any]] = []
        self._next_address = 0x7F00_0000_0000
        self.timer = FakeTimer()
        self.calls: list[tuple[Literal["on", "off", "snapshot"], dict[str, Any]]] = []
        self.history: Literal["on", "off"] = "off"
        self.backend = "native"
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.events_made = 0
        self._ring: list[dict[str, Any]] = []

    def allocate(self, size_bytes: int) -> None:
        """Allocate, or free where negative."""
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        freed = next((block for block in reversed(self._blocks) if block["size"] == -size_bytes), None)
        if size_bytes < 0 and freed is not None:
            self._blocks.remove(freed)
        address = self._next_address if freed is None else freed["address"]
        frames = _frames() if self.history == "on" else []
        if size_bytes >= 0:
            self._next_address += size_bytes
            sizes = {"address": address, "size": size_bytes, "requested_size": size_bytes}
            self._blocks.append({**sizes, "state": "active_allocated", "frames": frames})
        if self.history == "on":
            action = "alloc" if size_bytes >= 0 else "free_completed"
            entry = {"action": action, "addr": address, "size": abs(size_bytes), "stream": 0, "frames": frames}
            self._ring.append({**entry, "time_us": len(self._ring)})

    def run_out(self, asked_bytes: int, *, device: int = 0) -> None:
        """Fail to allocate as torch does: write the ring's event, call the observers, raise.

        Args:
            asked_bytes: what is asked for.
            device: its index.

        Raises:
            torch.OutOfMemoryError: always, with the text of torch.

        """
        torch: Any = sys.modules["torch"]
        self.ooms += 1
        free = max(0, self.total_bytes - self._reserved_bytes())
        if self.history == "on":
            entry = {"action": "oom", "device_free": free, "size": asked_bytes, "stream": 0, "frames": _frames()}
            self._ring.append({**entry, "time_us": len(self._ring)})
        for observer in tuple(self.observers):
            observer(device, asked_bytes, self.total_bytes, free)
        msg = (
            f"CUDA out of memory. Tried to allocate {_torch_size(asked_bytes)}. GPU {device} has a total capacity of "
            f"{_torch_size(self.total_bytes)} of which {_torch_size(free)} is free."
        )
        raise torch.OutOfMemoryError(msg)

    @contextmanager
    def installed(self, record_memory_history: Callable[..., None] | None = None) -> Iterator[FakeCuda]:
        """Stand in while the context is open; torch must have been imported.

        Args:
            record_memory_history: in place of torch's own signature, as older versions of it have fewer keywords.

        """
        torch: Any = sys.modules["torch"]
        record = mock.create_autospec(record_memory_history or torch.cuda.memory._record_memory_history)
        record.side_effect = self._record_memory_history
        forbidden = mock.Mock(side_effect=AssertionError("a collector must neither synchronise nor reset a peak"))
        with ExitStack() as patches:
            # A build without CUDA has no such functions.
            attach: dict[str, Any] = {
                "_cuda_attach_out_of_memory_observer": self.observers.append,
                "_cuda_isHistoryEnabled": lambda: self.history == "on",
            }
            patches.enter_context(mock.patch.multiple(torch._C, create=True, **attach))
            for target, values in (
                (torch, {"Event": self._event}),
                (torch.cuda.memory, {"_record_memory_history": record, "_snapshot": self._snapshot}),
                (
                    torch.cuda,
                    {
                        "is_available": lambda: True,
                        "is_initialized": lambda: True,
                        "current_device": lambda: 0,
                        "get_device_properties": self._properties,
                        "get_allocator_backend": lambda: self.backend,
                        "memory_stats": self._memory_stats,
                        "memory_stats_as_nested_dict": self._nested_stats,
                        "synchronize": forbidden,
                        "reset_peak_memory_stats": forbidden,
                    },
                ),
            ):
                patches.enter_context(mock.patch.multiple(target, **values))
            yield self

    def _event(self, device: Any = None, *, enable_timing: bool = False) -> _FakeEvent:
        self.events_made += 1
        return _FakeEvent(self.timer)

    def _record_memory_history(self, enabled: str | None = "all", *_: Any, **keywords: Any) -> None:
        self.history = "off" if enabled is None else "on"
        self.calls.append((self.history, keywords))
        if enabled is None:
            self._ring.clear()

    def _snapshot(self, device: Any = None) -> dict[str, Any]:
        self.calls.append(("snapshot", {}))
        if self.snapshot is not None:
            return self.snapshot
        return {"segments": self._segments(), "device_traces": [list(self._ring)], "allocator_settings": {}}

    def _segments(self) -> list[dict[str, Any]]:
        if self.snapshot is not None:
            return list(self.snapshot["segments"])
        return [
            {
                "device": 0,
                "address": block["address"],
                "total_size": block["size"],
                "allocated_size": block["size"],
                "active_size": block["size"],
                "requested_size": block["requested_size"],
                "stream": 0,
                "segment_type": "large" if block["size"] > MIB else "small",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [block],
            }
            for block in self._blocks
        ]

    def _reserved_bytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def _properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="Fake", total_memory=self.total_bytes, major=9, minor=0)

    def _nested_stats(self, device: Any = None) -> dict[str, Any]:
        allocated = {"current": self.allocated_bytes, "peak": self.peak_bytes}
        reserved = self._reserved_bytes()
        return {
            "allocated_bytes": {"all": allocated},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
            "num_alloc_retries": self.ooms,
            "num_ooms": self.ooms,
        }

    def _memory_stats(self, device: Any = None) -> dict[str, Any]:
        allocated, peak = self.allocated_bytes, self.peak_bytes
        if self.snapshot is not None:
            allocated = peak = sum(segment["allocated_size"] for segment in self._segments())
        return {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": self._reserved_bytes(),
            "inactive_split_bytes.all.current": _split_bytes(self._segments()),
            "num_alloc_retries": self.ooms,
            "num_ooms": self.ooms,
        }


def _frames() -> list[dict[str, Any]]:
    """Return the Python stack of who called the fake device, innermost first, as torch's ring has it."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found


def _split_bytes(segments: list[dict[str, Any]]) -> int:
    return sum(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive" and len(segment["blocks"]) > 1
    )


def _torch_size(size: int) -> str:
    """Write bytes as torch's message does."""
    for scale, unit in _UNITS:
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"
