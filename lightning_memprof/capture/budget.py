"""Bounds for the cost of traces, and the contents that the next trace omits if the last one exceeded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from lightning_memprof.errors import ConfigError
from lightning_memprof.units import format_bytes

# Viewers that load a whole trace fail between 200 MB and 600 MB of JSON.
_LARGE_BYTES: Final = 400_000_000
# Of the process group's timeout: a rank that blocks for longer ends the whole training.
_TIMEOUT_SHARE: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bounds for the profiler overhead of one rank; None is unbounded.

    Bounds apply to the next windows: after a window that exceeded one they omit Python stacks, then input shapes, then
    active steps.

    Args:
        max_trace_bytes: size of one window's trace as torch writes it, before compression.
        max_export_seconds: time that the training is blocked at the end of one window.
        keep_windows: number of windows to keep on disk; the oldest are removed first.
        max_collector_seconds: time that one collector may block the training at one mark, or at the start or end of a
            window. One that takes longer is interrupted, if it runs Python code, and disabled.

    Raises:
        ConfigError: a bound is not a positive number.
    """

    max_trace_bytes: int | None = None
    max_export_seconds: float | None = None
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


class Ledger:
    """Cost of one rank's last trace, against the run's budget.

    Args:
        budget: the bounds.
        timeout_seconds: timeout of the process group for an absent rank; None without one.
    """

    def __init__(self, budget: Budget | None = None, timeout_seconds: float | None = None) -> None:
        self.budget = budget or Budget()
        self.level = TraceLevel()
        self._timeout_seconds = timeout_seconds
        self._unchecked: Export | None = None
        self._warned: set[str] = set()

    def charge(self, export: Export) -> list[str]:
        """Add the cost of a trace; return warnings, each kind once per run."""
        self._unchecked = export
        found = {"timeout": self._timeout_warning(export), "size": _size_warning(export)}
        fresh = {kind: text for kind, text in found.items() if text is not None and kind not in self._warned}
        self._warned |= fresh.keys()
        return list(fresh.values())

    def tighten(self) -> tuple[str, str] | None:
        """Check the last trace once; if it exceeded a bound, lower the level and return the change and the reason."""
        last, self._unchecked = self._unchecked, None
        overruns = [] if last is None else list(self._overruns(last))
        if last is None or not overruns:
            return None
        share, reason = min(overruns)
        if last.stack:
            self.level = replace(self.level, stack=False)
            return "no_stack", reason
        if last.shapes:
            self.level = replace(self.level, shapes=False)
            return "no_shapes", reason
        if last.steps > 1:
            steps = max(1, min(last.steps - 1, int(last.steps * share)))
            self.level = replace(self.level, active_steps=steps)
            return "active_steps", reason
        return None

    def _overruns(self, last: Export) -> Iterator[tuple[float, str]]:
        """Yield the bounds that a trace exceeded: the share of it that they allow, and the reason in words."""
        size, seconds = self.budget.max_trace_bytes, self.budget.max_export_seconds
        if size is not None and last.bytes > size:
            words = f"was {format_bytes(last.bytes)}, max_trace_bytes is {format_bytes(size)}"
            yield size / last.bytes, f"the trace of window {last.window} {words}"
        if seconds is not None and last.seconds > seconds:
            words = f"took {last.seconds:.3g} s, max_export_seconds is {seconds:.3g} s"
            yield seconds / last.seconds, f"the export of window {last.window} {words}"

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
