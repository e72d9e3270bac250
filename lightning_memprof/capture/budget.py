"""What traces may cost a run, and what the next one leaves out where the last one cost too much."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.errors import ConfigError
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Window

__all__ = ["Budget", "Export", "Ledger", "TraceLevel", "plan_trace", "remove_old_windows", "settle"]

log = logging.getLogger(__name__)

# Viewers that load a trace whole fail between 200 MB and 600 MB of JSON.
_LARGE_BYTES: Final = 400_000_000
# Of the process group's timeout: a rank that stands still for longer ends the whole training.
_TIMEOUT_SHARE: Final = 0.5
# What gzip leaves of a trace; used until a trace of this run tells better.
_USUAL_RATIO: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the recording of one rank may cost; None is no bound.

    A bound is kept by the next windows: after a window that cost more they leave out Python stacks, then input shapes,
    then active steps. Where the bound of the whole run is reached, further windows have no trace.

    Args:
        max_trace_bytes: size of one window's trace as torch writes it, before compression.
        max_export_seconds: time for which the training stands still at the end of one window.
        max_run_trace_bytes: size of all traces of the run, as they lie on the disk.
        max_run_export_seconds: time for which the training stands still in the whole run.
        keep_windows: number of windows to keep on the disk; the oldest go first.
        max_collector_seconds: time for which one collector may hold the training at one mark, or at one end of a
            window. One that takes longer hangs: it is interrupted, where Python can be, and switched off.

    Raises:
        ConfigError: a bound is no positive number.

    """

    max_trace_bytes: int | None = None
    max_export_seconds: float | None = None
    max_run_trace_bytes: int | None = None
    max_run_export_seconds: float | None = None
    keep_windows: int | None = None
    max_collector_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        for name, value in vars(self).items():
            kinds = (int, float) if name.endswith("_seconds") else (int,)
            if value is not None and (type(value) not in kinds or not value > 0):
                rule = "a number of seconds above 0" if name.endswith("_seconds") else "an integer of at least 1"
                msg = f"Budget({name}={value!r}): must be {rule}, or None for no bound"
                raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class TraceLevel:
    """What a trace may hold; ``active_steps`` is the number of steps that it records, None is all of the window."""

    stack: bool = True
    shapes: bool = True
    active_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """What one window's trace cost.

    Attributes:
        window: index of the window.
        seconds: time for which the training stood still: torch's stop and save.
        bytes: size of the JSON that torch wrote.
        steps: recorded steps in it.
        stack: whether it holds Python stacks.
        shapes: whether it holds input shapes.

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
    """What the traces of one rank have cost so far, against the run's budget.

    Args:
        budget: the bounds.
        timeout_seconds: after which the process group gives a rank up that does not come; None where there is none.

    """

    def __init__(self, budget: Budget | None = None, timeout_seconds: float | None = None) -> None:
        self.budget = budget or Budget()
        self.level = TraceLevel()
        self._timeout_seconds = timeout_seconds
        self._seconds = 0.0
        self._last: Export | None = None
        self._judged = True
        self._warned: set[str] = set()
        # The background thread tells what compression left of a trace.
        self._lock = threading.Lock()
        self._raw_bytes: dict[int, int] = {}
        self._disk_bytes: dict[int, int] = {}

    def charge(self, export: Export) -> list[str]:
        """Write down what a trace cost; return warnings, each kind once a run."""
        self._last, self._judged = export, False
        self._seconds += export.seconds
        with self._lock:
            self._raw_bytes[export.window] = export.bytes
        found = {"timeout": self._timeout_warning(export), "size": _size_warning(export)}
        fresh = {kind: text for kind, text in found.items() if text is not None and kind not in self._warned}
        self._warned |= fresh.keys()
        return list(fresh.values())

    def wrote(self, window: int, size_bytes: int) -> None:
        """Write down what lies on the disk of a window's trace."""
        with self._lock:
            self._disk_bytes[window] = size_bytes

    def removed(self, window: int) -> None:
        """Forget a window of which nothing lies on the disk any more."""
        with self._lock:
            self._raw_bytes.pop(window, None)
            self._disk_bytes.pop(window, None)

    def tighten(self) -> str | None:
        """Judge the last trace, once; where it was too expensive lower the level and return the reason."""
        last, judged, self._judged = self._last, self._judged, True
        if last is None or judged:
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
        """Return why there is no further trace in this run, or None."""
        budget = self.budget
        on_disk = self._on_disk()
        if budget.max_run_trace_bytes is not None and on_disk >= budget.max_run_trace_bytes:
            size, most = format_bytes(on_disk), format_bytes(budget.max_run_trace_bytes)
            return f"the traces of this run have {size}, max_run_trace_bytes is {most}"
        if budget.max_run_export_seconds is not None and self._seconds >= budget.max_run_export_seconds:
            most_seconds = budget.max_run_export_seconds
            return f"exports took {self._seconds:.3g} s of this run, max_run_export_seconds is {most_seconds:g}"
        return None

    def _overruns(self, last: Export) -> list[_Overrun]:
        budget, name = self.budget, f"the trace of window {last.window}"
        found: list[_Overrun] = []
        if budget.max_trace_bytes is not None and last.bytes > budget.max_trace_bytes:
            text = f"{name} had {format_bytes(last.bytes)}, max_trace_bytes is {format_bytes(budget.max_trace_bytes)}"
            found.append(_Overrun(budget.max_trace_bytes / last.bytes, text))
        if budget.max_export_seconds is not None and last.seconds > budget.max_export_seconds:
            text = f"the export of window {last.window} took {last.seconds:.3g} s, "
            text += f"max_export_seconds is {budget.max_export_seconds:g}"
            found.append(_Overrun(budget.max_export_seconds / last.seconds, text))
        if budget.max_run_trace_bytes is not None:
            size, left = self._size(last.window), budget.max_run_trace_bytes - self._on_disk()
            if size > left:
                text = f"{name} has {format_bytes(size)}, of max_run_trace_bytes {format_bytes(max(left, 0))} are left"
                found.append(_Overrun(max(left, 0) / size, text))
        if budget.max_run_export_seconds is not None:
            left_seconds = max(budget.max_run_export_seconds - self._seconds, 0.0)
            if last.seconds > left_seconds:
                text = f"the export of window {last.window} took {last.seconds:.3g} s, "
                text += f"of max_run_export_seconds {left_seconds:.3g} s are left"
                found.append(_Overrun(left_seconds / last.seconds, text))
        return found

    def _on_disk(self) -> int:
        return sum(map(self._size, list(self._raw_bytes)))

    def _size(self, window: int) -> int:
        """Return the size on the disk; estimated for a trace that is not compressed yet."""
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
            f"the export of window {export.window} took {export.seconds:.3g} s, more than half of the process group's "
            f"timeout of {timeout:g} s, in which the other ranks wait: a longer one ends the training; record fewer "
            f"steps a window, or set Budget(max_export_seconds={timeout / 4:g})"
        )


def _size_warning(export: Export) -> str | None:
    if export.bytes <= _LARGE_BYTES:
        return None
    smaller = [f"fewer steps than {export.steps}"] if export.steps > 1 else []
    smaller += [f"no {option}" for option, on in (("with_stack", export.stack), ("record_shapes", export.shapes)) if on]
    advice = f"record {', '.join(smaller)}" if smaller else "record fewer ranks"
    return (
        f"the trace of window {export.window} has {format_bytes(export.bytes)} uncompressed, more than most viewers "
        f"load: {advice}, or set Budget(max_trace_bytes={_LARGE_BYTES}); a part of this one opens with "
        "`lightning-memprof view RUN --steps 2-3`"
    )


def plan_trace(run: RunContext, window: Window) -> TraceLevel:
    """Return what the trace of this window may hold, and say so in the manifest where that is less than before."""
    ledger = run.ledger
    before = ledger.level
    if (reason := ledger.tighten()) is not None:
        level = ledger.level
        named = "no_stack" if before.stack != level.stack else "no_shapes" if before.shapes != level.shapes else None
        run.sink.manifest.append(
            "budget",
            window=window.index,
            level=named or "active_steps",
            active_steps=level.active_steps,
            reason=reason,
        )
        log.info("window %d: the trace has %s, because %s", window.index, _less(named, level), reason)
    return ledger.level


def settle(run: RunContext, export: Export) -> None:
    """Write down what a trace cost, and warn where that is dangerous."""
    run.sink.manifest.append("export", window=export.window, seconds=round(export.seconds, 6), bytes=export.bytes)
    for message in run.ledger.charge(export):
        run.sink.manifest.append("note", collector="operator_trace", message=message)
        log.warning("rank %d: %s", run.rank, message)


def remove_old_windows(run: RunContext, newest: int) -> None:
    """Remove the files of all windows but the last ``keep_windows`` up to ``newest``; never raises."""
    keep = run.ledger.budget.keep_windows
    if keep is None:
        return
    try:
        held = {artifact.window for artifact in list(run.sink.artifacts) if artifact.window is not None}
        for window in sorted(window for window in held if window <= newest)[:-keep]:
            run.sink.remove_window(window, f"keep_windows is {keep}")
            run.ledger.removed(window)
    except Exception as error:  # noqa: BLE001 nobody hears what a background thread raises
        run.faults.report("keep_windows", "write", newest, error)


def _less(named: str | None, level: TraceLevel) -> str:
    if named is not None:
        return "no Python stacks" if named == "no_stack" else "no input shapes"
    return f"{level.active_steps} active step{'' if level.active_steps == 1 else 's'}"
