"""Bounds for the cost of traces, and the contents that the next trace omits if the last one exceeded them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

from lightning_memprof.errors import ConfigError
from lightning_memprof.units import format_bytes

# Viewers that load a whole trace fail between 200 MB and 600 MB of JSON.
_LARGE_BYTES: Final = 400_000_000
# Of the process group's timeout: a rank that blocks for longer ends the whole training.
_TIMEOUT_SHARE: Final = 0.5
# Compression ratio of gzip; used until this run has a compressed trace.
_USUAL_RATIO: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bounds for the profiler overhead of one rank; None is unbounded.

    Bounds apply to the next windows: after a window that exceeded one they omit Python stacks, then input shapes, then
    active steps. After a bound of the whole run is reached, windows have no trace.

    Args:
        max_trace_bytes: size of one window's trace as torch writes it, before compression.
        max_export_seconds: time that the training is blocked at the end of one window.
        max_run_trace_bytes: size of all traces of the run on disk.
        max_run_export_seconds: time that the training is blocked by exports during the whole run.
        keep_windows: number of windows to keep on disk; the oldest are removed first.
        max_collector_seconds: time that one collector may block the training at one mark, or at the start or end of a
            window. One that takes longer is interrupted, if it runs Python code, and disabled.

    Raises:
        ConfigError: a bound is not a positive number.
    """

    max_trace_bytes: int | None = None
    max_export_seconds: float | None = None
    max_run_trace_bytes: int | None = None
    max_run_export_seconds: float | None = None
    keep_windows: int | None = None
    max_collector_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        """Validate the bounds."""
        for name, value in vars(self).items():
            kinds = (int, float) if name.endswith("_seconds") else (int,)
            if value is not None and (type(value) not in kinds or not value > 0):
                rule = "a number of seconds above 0" if name.endswith("_seconds") else "an integer of at least 1"
                raise ConfigError(f"Budget({name}={value!r}): must be {rule}, or None for no bound")


@dataclass(frozen=True, kw_only=True)
class TraceLevel:
    """Contents of a trace; ``active_steps`` is its number of recorded steps, None is all of the window."""

    stack: bool = True
    shapes: bool = True
    active_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """Cost of one window's trace.

    Attributes:
        window: index of the window.
        seconds: time that the training was blocked by torch's stop and save.
        bytes: size of torch's JSON.
        steps: its recorded steps.
        stack: whether it contains Python stacks.
        shapes: whether it contains input shapes.
    """

    window: int
    seconds: float
    bytes: int
    steps: int
    stack: bool = False
    shapes: bool = False


@dataclass(frozen=True)
class _Overrun:
    share: float
    reason: str


class Ledger:
    """Cost of one rank's traces so far, against the run's budget.

    Args:
        budget: the bounds.
        timeout_seconds: timeout of the process group for an absent rank; None without one.
    """

    def __init__(self, budget: Budget | None = None, timeout_seconds: float | None = None) -> None:
        self.budget = budget or Budget()
        self.level = TraceLevel()
        self._timeout_seconds = timeout_seconds
        self._seconds = 0.0
        self._last: Export | None = None
        self._checked = True
        self._warned: set[str] = set()
        # The background thread reports the compressed size.
        self._lock = threading.Lock()
        self._raw_bytes: dict[int, int] = {}
        self._disk_bytes: dict[int, int] = {}

    def charge(self, export: Export) -> list[str]:
        """Add the cost of a trace; return warnings, each kind once per run."""
        self._last, self._checked = export, False
        self._seconds += export.seconds
        with self._lock:
            self._raw_bytes[export.window] = export.bytes
        found = {"timeout": self._timeout_warning(export), "size": _size_warning(export)}
        fresh = {kind: text for kind, text in found.items() if text is not None and kind not in self._warned}
        self._warned |= fresh.keys()
        return list(fresh.values())

    def wrote(self, window: int, size_bytes: int) -> None:
        """Set the size of a window's trace on disk."""
        with self._lock:
            self._disk_bytes[window] = size_bytes

    def removed(self, window: int) -> None:
        """Remove a window whose files were deleted."""
        with self._lock:
            self._raw_bytes.pop(window, None)
            self._disk_bytes.pop(window, None)

    def tighten(self) -> str | None:
        """Check the last trace once; if it exceeded a bound, lower the level and return the reason."""
        last, checked, self._checked = self._last, self._checked, True
        if last is None or checked:
            return None
        overruns = self._overruns(last)
        if not overruns:
            return None
        worst = min(overruns, key=lambda overrun: overrun.share)
        if last.stack:
            self.level = replace(self.level, stack=False)
        elif last.shapes:
            self.level = replace(self.level, shapes=False)
        elif last.steps > 1:
            steps = max(1, min(last.steps - 1, int(last.steps * worst.share)))
            self.level = replace(self.level, active_steps=steps)
        else:
            return None
        return worst.reason

    def refusal(self) -> str | None:
        """Return why this run has no further traces, or None."""
        budget = self.budget
        on_disk = self._on_disk()
        if budget.max_run_trace_bytes is not None and on_disk >= budget.max_run_trace_bytes:
            size, most = format_bytes(on_disk), format_bytes(budget.max_run_trace_bytes)
            return f"the traces of this run take {size}, max_run_trace_bytes is {most}"
        if budget.max_run_export_seconds is not None and self._seconds >= budget.max_run_export_seconds:
            most_seconds = budget.max_run_export_seconds
            return f"exports took {self._seconds:.3g} s of this run, max_run_export_seconds is {most_seconds:g}"
        return None

    def _overruns(self, last: Export) -> list[_Overrun]:
        budget, name = self.budget, f"the trace of window {last.window}"
        found: list[_Overrun] = []
        if budget.max_trace_bytes is not None and last.bytes > budget.max_trace_bytes:
            text = f"{name} was {format_bytes(last.bytes)}, max_trace_bytes is {format_bytes(budget.max_trace_bytes)}"
            found.append(_Overrun(budget.max_trace_bytes / last.bytes, text))
        if budget.max_export_seconds is not None and last.seconds > budget.max_export_seconds:
            text = f"the export of window {last.window} took {last.seconds:.3g} s, "
            text += f"max_export_seconds is {budget.max_export_seconds:g}"
            found.append(_Overrun(budget.max_export_seconds / last.seconds, text))
        if budget.max_run_trace_bytes is not None:
            size, left = self._size(last.window), budget.max_run_trace_bytes - self._on_disk()
            if size > left:
                text = (
                    f"{name} takes {format_bytes(size)}, {format_bytes(max(left, 0))} of max_run_trace_bytes are left"
                )
                found.append(_Overrun(max(left, 0) / size, text))
        if budget.max_run_export_seconds is not None:
            left_seconds = max(budget.max_run_export_seconds - self._seconds, 0.0)
            if last.seconds > left_seconds:
                text = f"the export of window {last.window} took {last.seconds:.3g} s, "
                text += f"{left_seconds:.3g} s of max_run_export_seconds are left"
                found.append(_Overrun(left_seconds / last.seconds, text))
        return found

    def _on_disk(self) -> int:
        return sum(map(self._size, list(self._raw_bytes)))

    def _size(self, window: int) -> int:
        """Return the size on disk; estimated for a trace that is not compressed yet."""
        with self._lock:
            known = self._disk_bytes.get(window)
            if known is not None:
                return known
            raw = sum(
                self._raw_bytes[path] for path, size in self._disk_bytes.items() if size and path in self._raw_bytes
            )
            ratio = sum(self._disk_bytes.values()) / raw if raw else _USUAL_RATIO
            return int(self._raw_bytes.get(window, 0) * ratio)

    def _timeout_warning(self, export: Export) -> str | None:
        timeout = self._timeout_seconds
        if timeout is None or export.seconds <= timeout * _TIMEOUT_SHARE:
            return None
        return (
            f"the export of window {export.window} took {export.seconds:.3g} s while the other ranks waited, more than "
            f"half of the process group's timeout of {timeout:g} s: a longer export ends the training; record fewer "
            f"steps per window, or set Budget(max_export_seconds={timeout / 4:g})"
        )


def _size_warning(export: Export) -> str | None:
    if export.bytes <= _LARGE_BYTES:
        return None
    smaller = [f"fewer steps than {export.steps}"] if export.steps > 1 else []
    smaller += [f"no {option}" for option, on in (("with_stack", export.stack), ("record_shapes", export.shapes)) if on]
    advice = f"record {', '.join(smaller)}" if smaller else "record fewer ranks"
    return (
        f"the trace of window {export.window} is {format_bytes(export.bytes)} uncompressed, more than most viewers "
        f"can load: {advice}, or set Budget(max_trace_bytes={_LARGE_BYTES}); open a part of this one with "
        "`lightning-memprof view RUN --steps 2-3`"
    )
