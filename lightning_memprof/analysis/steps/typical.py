"""The steps of a rank's pulse that its figures rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from lightning_memprof.artifacts.series import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.artifacts.series import PulseRow

__all__ = ["Breakdown", "Clock", "Timing", "TypicalSteps", "device_timing", "host_timing", "mean", "typical_steps"]

Clock = Literal["host", "device"]
Breakdown = Mapping[str, int | None]
# Of one step: nanoseconds, nanoseconds by phase, and where they come from.
Timing = tuple[int, Breakdown, Clock, Literal["hooks", "pulse"]]
_TimedRow = tuple["PulseRow", Timing]

# A recorded step pays for its recording and the first step for lazy initialisation: neither is a typical step, but
# with fewer others than these the picture would rest on a single step.
OTHERS_TO_DROP_WINDOWS: Final = 5
OTHERS_TO_DROP_FIRST: Final = 3


@dataclass(frozen=True)
class TypicalSteps:
    """The steps that a rank's figures rest on, in order: ``(step, duration_ns, breakdown_ns)``, all on one clock."""

    steps: tuple[tuple[int, int, Breakdown], ...]
    basis: str
    clock: Clock
    host_callbacks_ns: int


def typical_steps(pulse: Sequence[PulseRow]) -> TypicalSteps | None:
    """Return the steps of a pulse that are typical, or None where it has no timed step."""
    timed = [(row, timing) for row in pulse if (timing := host_timing(row)) is not None]
    if not timed:
        return None
    used, basis = _typical(timed)
    on_host = [(row["step"], timing) for row, timing in used]
    on_device = [(row["step"], timing) for row, _ in used if (timing := device_timing(row)) is not None]
    clock: Clock = "host"
    timings = on_host
    if 2 * len(on_device) >= len(used):
        clock, timings = "device", on_device
        if len(on_device) < len(used):
            basis += f", of which {len(on_device)} have the device's clock"
    return TypicalSteps(
        tuple((step or 0, timing[0], timing[1]) for step, timing in timings),
        basis,
        clock,
        mean([timing[1]["callbacks"] for _, timing in on_host]) or 0,
    )


def _typical(timed: list[_TimedRow]) -> tuple[list[_TimedRow], str]:
    """Leave out the steps that are not typical, as long as enough others remain; say which are used."""
    used, left_out = timed, []
    outside = [step for step in used if step[0]["window"] is None]
    if len(outside) < len(used) and len(outside) >= OTHERS_TO_DROP_WINDOWS:
        used = outside
        left_out.append("those in windows")
    if used[0] is timed[0] and len(used) > OTHERS_TO_DROP_FIRST:
        used = used[1:]
        left_out.insert(0, "the first")
    if not left_out:
        return used, "all steps" if len(used) > 1 else "the only step"
    return used, f"{len(used)} of {len(timed)} steps, without {' and '.join(left_out)}"


def host_timing(row: PulseRow | None) -> Timing | None:
    """Return a step's timing on the host's clock, or None where it has none."""
    return _pulse_timing(row, "", "host")


def device_timing(row: PulseRow | None) -> Timing | None:
    """Return a step's timing on the device's clock, or None where it has none."""
    return _pulse_timing(row, "device_", "device")


def _pulse_timing(row: PulseRow | None, prefix: str, clock: Clock) -> Timing | None:
    """Return the timing of one clock; what the phases leave of the duration is ``other``."""
    duration = row[f"{prefix}duration_ns"] if row else None
    if row is None or duration is None:
        return None
    breakdown = {phase: row[f"{prefix}{phase}_ns"] for phase in PHASES}
    breakdown["other"] = duration - sum(ns or 0 for phase, ns in breakdown.items() if phase != "other")
    return duration, breakdown, clock, "pulse"


def mean(values: Sequence[int | None]) -> int | None:
    """Return the mean of the values that are known, rounded, or None where none is."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known)) if known else None
