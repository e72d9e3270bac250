"""Hardware that a machine has not: an asynchronous device's clock, and CUDA's allocator."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FakeCuda", "FakeTimer"]


@dataclass(eq=False)
class _Moment:
    ns: int = 0


class FakeTimer:
    """The clock of a device that works through a queue; a :class:`~lightning_memprof.capture.base.DeviceTimer`.

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


class FakeCuda:
    """Stands in for what collectors ask of CUDA: events, the allocator's statistics, its history and snapshots.

    ``torch.cuda.synchronize`` and resetting the peak raise: no collector may do either. The history's ring is cleared
    when it is switched off, as torch's is.

    Attributes:
        timer: the clock behind ``torch.Event``.
        calls: what the history was asked, in order: ``("on", keywords)``, ``("snapshot", {})`` and ``("off", {})``.
        history: ``"off"`` or ``"on"``.
        allocated_bytes: in live tensors now.
        peak_bytes: the most that it was.

    """

    def __init__(self) -> None:
        self.timer = FakeTimer()
        self.calls: list[tuple[Literal["on", "off", "snapshot"], dict[str, Any]]] = []
        self.history: Literal["on", "off"] = "off"
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.events_made = 0
        self._ring: list[dict[str, Any]] = []

    def allocate(self, size_bytes: int) -> None:
        """Allocate, or free where negative."""
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        if self.history == "on":
            action = "alloc" if size_bytes >= 0 else "free_completed"
            self._ring.append({"action": action, "addr": 0x7000, "size": abs(size_bytes), "stream": 0, "frames": []})

    @contextmanager
    def installed(self, record_memory_history: Callable[..., None] | None = None) -> Iterator[FakeCuda]:
        """Stand in while the context is open; torch must have been imported.

        Args:
            record_memory_history: in place of torch's own signature, as older versions of it have fewer keywords.

        """
        torch: Any = sys.modules["torch"]
        record = mock.create_autospec(record_memory_history or torch.cuda.memory._record_memory_history)  # noqa: SLF001
        record.side_effect = self._record_memory_history
        forbidden = mock.Mock(side_effect=AssertionError("a collector must neither synchronise nor reset a peak"))
        with ExitStack() as patches:
            for target, values in (
                (torch, {"Event": self._event}),
                (torch.cuda.memory, {"_record_memory_history": record, "_snapshot": self._snapshot}),
                (
                    torch.cuda,
                    {
                        "is_available": lambda: True,
                        "is_initialized": lambda: True,
                        "current_device": lambda: 0,
                        "memory_stats": self._memory_stats,
                        "memory_stats_as_nested_dict": self._nested_stats,
                        "synchronize": forbidden,
                        "reset_peak_memory_stats": forbidden,
                    },
                ),
            ):
                patches.enter_context(mock.patch.multiple(target, **values))
            yield self

    def _event(self, device: Any = None, *, enable_timing: bool = False) -> _FakeEvent:  # noqa: ARG002 torch's
        self.events_made += 1
        return _FakeEvent(self.timer)

    def _record_memory_history(self, enabled: str | None = "all", *_: Any, **keywords: Any) -> None:
        self.history = "off" if enabled is None else "on"
        self.calls.append((self.history, keywords))
        if enabled is None:
            self._ring.clear()

    def _snapshot(self, device: Any = None) -> dict[str, Any]:  # noqa: ARG002 torch's
        self.calls.append(("snapshot", {}))
        return {"segments": [], "device_traces": [list(self._ring)], "allocator_settings": {}}

    def _nested_stats(self, device: Any = None) -> dict[str, Any]:  # noqa: ARG002 torch's
        allocated = {"current": self.allocated_bytes, "peak": self.peak_bytes}
        return {"allocated_bytes": {"all": allocated}, "num_alloc_retries": 0, "num_ooms": 0}

    def _memory_stats(self, device: Any = None) -> dict[str, Any]:  # noqa: ARG002 torch's
        return {
            "allocated_bytes.all.current": self.allocated_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }
