"""Time by phase and memory of each step of a window, the typical steps of a run, and their statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.steps.events import exclusive_times, step_span
from lightning_memprof.artifacts.series import PHASES, AllocatorRow, HookRow, HostRow, ProcessRow, PulseRow
from lightning_memprof.read.run.following import RankProgress
from lightning_memprof.read.run.model import Rank, RecordedWindow, once_for_a_rank
from lightning_memprof.read.trace.intervals import length_within, union

Clock = Literal["host", "device"]
Breakdown = Mapping[str, int | None]
# Of one step: nanoseconds, nanoseconds by phase, and where they come from.
Timing = tuple[int, Breakdown, Clock, Literal["hooks", "pulse"]]
_TimedRow = tuple["PulseRow", Timing]

# Only training has them; in other stages they are not 0 but do not exist.
TRAINING_PHASES: Final = frozenset({"backward", "optimizer"})
# A recorded step pays for its recording and the first step for lazy initialisation: neither is a typical step, but
# with fewer others than these the picture would rest on a single step.
OTHERS_TO_DROP_WINDOWS: Final = 5
OTHERS_TO_DROP_FIRST: Final = 3
# Of a step, in the profiler's work on another rank.
HELD_UP: Final = 0.1
MOST_ON_DEVICE: Final = 0.75


class TypicalSteps(msgspec.Struct, frozen=True):
    """The steps that a rank's figures rest on, in order: ``(step, duration_ns, breakdown_ns)``, all on one clock."""

    steps: tuple[tuple[int, int, Breakdown], ...]
    basis: str
    clock: Clock


class HostMemory(msgspec.Struct, frozen=True):
    """Bytes of the process over the marks of one step; None where it was not sampled.

    ``rss_bytes``, ``uss_bytes`` and ``vms_bytes`` are the step's last sample, ``max_rss_bytes`` its largest and
    ``peak_rss_bytes`` the largest of the process so far.
    """

    rss_bytes: int | None
    max_rss_bytes: int | None
    peak_rss_bytes: int | None
    uss_bytes: int | None
    vms_bytes: int | None


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes of the accelerator's allocator over the marks of one step; None where it was not sampled.

    ``allocated_bytes`` and ``reserved_bytes`` are the step's last sample, ``max_allocated_bytes`` its largest and
    ``peak_allocated_bytes`` the largest of the process so far.
    """

    device: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    max_allocated_bytes: int | None
    peak_allocated_bytes: int | None


class StepReport(msgspec.Struct, frozen=True):
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


class PulseStatistics(msgspec.Struct, frozen=True):
    """The steps of one rank's pulse. Durations are nanoseconds.

    ``steps`` counts all rows; ``used`` those that the figures rest on, and ``basis`` says which. ``breakdown_ns`` is
    the mean by phase and sums to ``mean_ns``.
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

    def share(self, phase: str) -> float:
        """Return the part of the mean step that a phase takes, 0 to 1."""
        return (self.breakdown_ns[phase] or 0) / self.mean_ns if self.mean_ns else 0.0


@once_for_a_rank
def typical_steps(rank: Rank) -> TypicalSteps | None:
    """Return the typical steps of a rank's pulse, None where it has no timed step."""
    return typical_in(rank.pulse, held_up(rank))


def held_up(rank: Rank) -> frozenset[int]:
    """Return the steps that are to a tenth or more in the profiler's work on another rank."""
    if not rank.profiler_pauses:
        return frozenset()
    pauses = union(*np.array(rank.profiler_pauses, np.int64).T)
    rows = [(row["step"] or 0, row["start_ns"] or 0, row["duration_ns"] or 0) for row in rank.pulse]
    steps, starts, durations = np.array(rows, np.int64).reshape(-1, 3).T
    waited = length_within(pauses, starts, starts + durations)
    return frozenset(steps[(waited > 0) & (waited >= HELD_UP * durations)].tolist())


@once_for_a_rank
def peak_rss_bytes(rank: Rank) -> int | None:
    """Return the maximum of the high-water mark and all samples of the resident memory; None if there are none."""
    sampled = [row["rss_bytes"] for row in rank.pulse]
    sampled += [row.peak_rss_bytes or row.rss_bytes for row in rank.in_windows(HostRow)]
    sampled += [size for row in rank.read(ProcessRow).rows for size in row.rss_bytes]
    return max((size for size in (rank.high_water_bytes, *sampled) if size is not None), default=None)


@once_for_a_rank
def core_waits(rank: Rank) -> dict[int, float]:
    """Return how long the training thread waits for a core in each step, in ns.

    A reading covers the steps since the previous one, and is shared among them by their duration. The kernel counts a
    wait when it ends: one that began in an earlier step may exceed the step.
    """
    waits: dict[int, float] = {}
    covered: list[PulseRow] = []
    for row in rank.pulse:
        covered.append(row)
        if row.core_wait_ns is not None:
            share = row.core_wait_ns / max(sum(each.duration_ns or 0 for each in covered), 1)
            waits |= {each.step: share * (each.duration_ns or 0) for each in covered if each.step is not None}
            covered = []
    return waits


def mean_parts(rank: RankProgress) -> dict[Part, int]:
    """Return the phases of the mean recent step of a run in progress, as parts, in ns."""
    rows = rank.usual()
    return {
        part: sum(row[f"{phase}_ns"] or 0 for row in rows) // max(len(rows), 1) for phase, part in PHASE_PARTS.items()
    }


def typical_in(pulse: Sequence[PulseRow], held_up: Collection[int] = ()) -> TypicalSteps | None:
    """Return the steps of a pulse that are typical, or None where it has no timed step.

    Args:
        pulse: the rows of one rank.
        held_up: steps in which it waited for the profiler's work on another rank.
    """
    timed = [(row, timing) for row in pulse if (timing := pulse_timing(row, "host")) is not None]
    if not timed:
        return None
    used, left_out = _typical(timed, held_up)
    on_device = [(row["step"], timing) for row, _ in used if (timing := pulse_timing(row, "device")) is not None]
    clock: Clock = "host"
    timings = [(row["step"], timing) for row, timing in used]
    # Of short steps only some have device timestamps: a step that stands out may be one of the others.
    if len(on_device) >= MOST_ON_DEVICE * len(used):
        clock, timings = "device", on_device
        if len(on_device) < len(used):
            left_out.append(f"{len(used) - len(on_device)} without device timestamps")
    basis = "all steps" if len(timed) > 1 else "the only step"
    if left_out:
        *others, last = left_out
        without = f"{', '.join(others)} and {last}" if others else last
        basis = f"{len(timings)} of {len(timed)} steps, without {without}"
    return TypicalSteps(tuple((step or 0, timing[0], timing[1]) for step, timing in timings), basis, clock)


def _typical(timed: list[_TimedRow], held_up: Collection[int]) -> tuple[list[_TimedRow], list[str]]:
    """Leave out the steps that are not typical, as long as enough others remain; say which."""
    used, left_out = timed, []
    outside = [step for step in used if step[0]["window"] is None]
    if len(outside) < len(used) and len(outside) >= OTHERS_TO_DROP_WINDOWS:
        used = outside
        left_out.append("those in windows")
    free = [step for step in used if step[0]["step"] not in held_up]
    if len(free) < len(used) and len(free) >= OTHERS_TO_DROP_WINDOWS:
        used = free
        left_out.append("those that waited for the profiler on another rank")
    if used[0] is timed[0] and len(used) > OTHERS_TO_DROP_FIRST:
        used = used[1:]
        left_out.insert(0, "the first")
    return used, left_out


def pulse_timing(row: PulseRow | None, clock: Clock) -> Timing | None:
    """Return a step's timing on a clock, None where it has none; what the phases leave of the duration is ``other``."""
    prefix = "device_" if clock == "device" else ""
    duration = row[f"{prefix}duration_ns"] if row else None
    if row is None or duration is None:
        return None
    breakdown = {phase: row[f"{prefix}{phase}_ns"] for phase in PHASES}
    breakdown["other"] = duration - sum(ns or 0 for phase, ns in breakdown.items() if phase != "other")
    return duration, breakdown, clock, "pulse"


def mean(values: Iterable[int | None]) -> int | None:
    """Return the rounded mean of the known values, None without one."""
    known = _known(values)
    return round(sum(known) / len(known)) if known else None


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
        timing = pulse_timing(row, "device") or pulse_timing(row, "host") or _hook_timing(hooks.get(step, []), stage)
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
    typical = typical_steps(rank)
    if typical is None:
        return None
    durations = sorted(duration for _, duration, _ in typical.steps)
    means = {phase: mean(step[phase] for _, _, step in typical.steps) for phase in PHASES}
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
    )


def _of_stage(breakdown: Breakdown, stage: str) -> Breakdown:
    """Leave out the phases that a stage does not have, unless something was timed in them after all."""
    if stage == "fit":
        return breakdown
    return {phase: None if phase in TRAINING_PHASES and not ns else ns for phase, ns in breakdown.items()}


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
