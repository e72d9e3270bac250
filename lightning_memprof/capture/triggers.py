"""Windows that nobody planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memprof.capture.anomalies import Anomaly

__all__ = ["Triggers"]


@dataclass(frozen=True, kw_only=True)
class Triggers:
    """What opens a window besides the schedule.

    Args:
        file: look once a step whether ``lightning-memprof trigger`` asks for a window.
        signal: SIGUSR2 opens a window on this rank.
        anomalies: what opens a window on this rank by itself.
        warmup: steps in which collectors run and what they see is thrown away.
        active: steps to record.

    """

    file: bool = True
    signal: bool = True
    anomalies: list[Anomaly] = field(default_factory=list)
    warmup: int = 1
    active: int = 3
