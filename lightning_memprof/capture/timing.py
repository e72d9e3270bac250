"""The clocks of a step: what a device's timestamps and a finished step's times offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class DeviceTimer(Protocol):
    """Timestamps on the device's own clock, read when the device has reached them."""

    def record(self) -> Any:
        """Put a timestamp into the device's queue."""

    def reached(self, moment: Any) -> bool:
        """Return whether the device has passed ``moment``; does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the nanoseconds between two reached timestamps."""

    def release(self, moment: Any) -> None:
        """Return a timestamp for reuse."""


class StepTimes(Protocol):
    """Host time of a finished step."""

    @property
    def phases_ns(self) -> Sequence[int]:
        """Self time of each of ``artifacts.series.PHASES``; the sum is the step's duration."""

    @property
    def actions(self) -> tuple[Sequence[int], Sequence[int]]:
        """Self time in nanoseconds by slot of the run's clock, and number of entries by slot."""
