"""Time by phase and memory of each step of a window, and step time statistics of the whole run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lightning_memprof.analysis.steps.phases import exclusive_times, step_span
from lightning_memprof.analysis.steps.typical import (
    Breakdown,
    Clock,
    Timing,
    TypicalSteps,
    device_timing,
    host_timing,
    mean,
)
from lightning_memprof.artifacts.series import PHASES, AllocatorRow, HookRow, HostRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprof.analysis.run.model import Rank, RecordedWindow
    from lightning_memprof.artifacts.series import PulseRow

__all__ = [
    "DeviceMemory",
    "HostMemory",
    "PulseStatistics",
    "StepReport",
    "pulse_statistics",
    "window_steps",
]

# Only training has them; in other stages they are not 0 but do not exist.
TRAINING_PHASES: Final = frozenset({"backward", "optimizer"})


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the process over the marks of one step; None where it was not sampled.

    ``rss_bytes``, ``uss_bytes`` and ``vms_bytes`` are the step's last sample, ``max_rss_bytes`` its largest and
    ``peak_rss_bytes`` the largest of the process so far.
    """

    rss_bytes: int | None
    max_rss_bytes: int | None
    peak_rss_bytes: int | None
    uss_bytes: int | None
    vms_bytes: int | None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the accelerator's allocator over the marks of one step; None where it was not sampled.

    ``allocated_bytes`` and ``reserved_bytes`` are the step's last sample, ``max_allocated_bytes`` its largest and
    ``peak_allocated_bytes`` the largest of the process so far.
    """

    device: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    max_allocated_bytes: int | None
    peak_allocated_bytes: int | None


@dataclass(frozen=True)
class StepReport:
    """One step. ``breakdown_ns`` sums to ``duration_ns``; both are None where nothing timed the step.

    A phase that the clock cannot separate is None; its time is in the enclosing phase.
    """

    step: int
    global_step: int | None
    duration_ns: int | None
    breakdown_ns: Breakdown | None
    clock: Clock | None
    source: Literal["hooks", "pulse"] | None
    host: HostMemory
    device: DeviceMemory | None


@dataclass(frozen=True)
class PulseStatistics:
    """The steps of one rank's pulse. Durations are nanoseconds.

    ``steps`` counts all rows; ``used`` those that the figures rest on, and ``basis`` says which. ``breakdown_ns`` is
    the mean by phase and sums to ``mean_ns``; ``median_shares`` is each phase's median part, 0 to 1, of those steps in
    which it took any time, and does not follow a few unusual steps as the mean does. ``host_callbacks_ns`` is the mean
    time in callbacks on the host's clock, whichever clock the rest is on.
    """

    steps: int
    used: int
    basis: str
    clock: Clock
    median_ns: int
    p90_ns: int
    max_ns: int
    mean_ns: int
    breakdown_ns: Breakdown
    median_shares: Mapping[str, float]
    host_callbacks_ns: int

    @property
    def callbacks_ns(self) -> int:
        """Nanoseconds of the mean step in callbacks; the device's clock has at most its ``other`` for them."""
        known = self.breakdown_ns["callbacks"]
        return min(self.host_callbacks_ns, self.breakdown_ns["other"] or 0) if known is None else known

    @property
    def between_ns(self) -> int:
        """Nanoseconds of the mean step that neither a phase nor a callback takes."""
        other = self.breakdown_ns["other"] or 0
        return other - self.callbacks_ns if self.breakdown_ns["callbacks"] is None else other

    def share(self, phase: str) -> float:
        """Return the part of the mean step that a phase takes, 0 to 1."""
        return (self.breakdown_ns[phase] or 0) / self.mean_ns if self.mean_ns else 0.0


def window_steps(rank: Rank, window: RecordedWindow) -> list[StepReport]:
    """Return the recorded steps of a window.

    The device's clock is preferred where the pulse has it, because a host's times of an asynchronous device are the
    times of its launches; then the pulse's host clock, which keeps the profiler's work at the marks out of the phases;
    then the hook timings.
    """
    hooks, host = window.read(HookRow).by_step, window.read(HostRow).by_step
    allocator = window.read(AllocatorRow).by_step
    pulse = {row["step"]: row for row in rank.pulse if row["step"] in window.steps}
    stage = rank.facts.stage
    reports = []
    for step in window.steps:
        row = pulse.get(step)
        timing = device_timing(row) or host_timing(row) or _hook_timing(hooks.get(step, []), stage)
        duration, breakdown, clock, source = timing or (None, None, None, None)
        breakdown = None if breakdown is None else _of_stage(breakdown, stage)
        marks = host.get(step) or allocator.get(step) or hooks.get(step) or []
        reports.append(
            StepReport(
                step=step,
                global_step=row["global_step"] if row else next((mark.global_step for mark in marks), None),
                duration_ns=duration,
                breakdown_ns=breakdown,
                clock=clock,
                source=source,
                host=_host_memory(host.get(step, []), row),
                device=_device_memory(allocator.get(step, []), row),
            )
        )
    return reports


def pulse_statistics(rank: Rank) -> PulseStatistics | None:
    """Return the statistics of a rank's pulse, or None where it has no timed step."""
    typical = rank.typical_steps
    if typical is None:
        return None
    durations = sorted(duration for _, duration, _ in typical.steps)
    means = {phase: mean([step[phase] for _, _, step in typical.steps]) for phase in PHASES}
    breakdown = _of_stage(means, rank.facts.stage)
    return PulseStatistics(
        steps=len(rank.pulse),
        used=len(typical.steps),
        basis=typical.basis,
        clock=typical.clock,
        median_ns=round(statistics.median(durations)),
        p90_ns=durations[math.ceil(0.9 * len(durations)) - 1],
        max_ns=durations[-1],
        mean_ns=sum(ns or 0 for ns in breakdown.values()),
        breakdown_ns=breakdown,
        median_shares={phase: _median_share(typical, phase) for phase in PHASES},
        host_callbacks_ns=typical.host_callbacks_ns,
    )


def _of_stage(breakdown: Breakdown, stage: str) -> Breakdown:
    """Leave out the phases that a stage does not have, unless something was timed in them after all."""
    if stage == "fit":
        return breakdown
    return {phase: None if phase in TRAINING_PHASES and not ns else ns for phase, ns in breakdown.items()}


def _median_share(typical: TypicalSteps, phase: str) -> float:
    shares = [(breakdown[phase] or 0) / duration for _, duration, breakdown in typical.steps if duration]
    return statistics.median([share for share in shares if share > 0] or [0.0])


def _hook_timing(rows: Sequence[HookRow], stage: str) -> Timing | None:
    place = step_span(rows)
    return None if place is None else (place[1] - place[0], exclusive_times(rows, *place, stage), "host", "hooks")


def _host_memory(marks: Sequence[HostRow], row: PulseRow | None) -> HostMemory:
    rss = _known(mark.rss_bytes for mark in marks) or _known([row["rss_bytes"]] if row else [])
    return HostMemory(
        rss_bytes=_last(rss),
        max_rss_bytes=max(rss, default=None),
        peak_rss_bytes=max(_known(mark.peak_rss_bytes for mark in marks), default=None),
        uss_bytes=_last(_known(mark.uss_bytes for mark in marks)),
        vms_bytes=_last(_known(mark.vms_bytes for mark in marks)),
    )


def _device_memory(marks: Sequence[AllocatorRow], row: PulseRow | None) -> DeviceMemory | None:
    pulse_peak = row["device_peak_bytes"] if row else None
    if not marks and pulse_peak is None:
        return None
    allocated = _known(mark.allocated_bytes for mark in marks)
    return DeviceMemory(
        device=next((mark.device for mark in marks if mark.device), None),
        allocated_bytes=_last(allocated),
        reserved_bytes=_last(_known(mark.reserved_bytes for mark in marks)),
        max_allocated_bytes=max(allocated, default=None),
        peak_allocated_bytes=max(_known(mark.peak_allocated_bytes for mark in marks), default=pulse_peak),
    )


def _known(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _last(values: Sequence[int]) -> int | None:
    return values[-1] if values else None
