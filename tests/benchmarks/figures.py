"""From raw fits to figures: ratios of each step to the bare one beside it, medians and spreads."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from workload import Fit, Times

BARE: Final = "bare"
# The first steps allocate.
FIRST: Final = 3
# After the window: the step in which it is saved, and one more in which caches are cold.
SETTLE: Final = 2


@dataclass(frozen=True)
class Stretches:
    """Steps by what happens in them, as positions in ``Times.steps``.

    A window opens in the turn that ends with its first warm-up batch, and is saved in that of its last active batch.
    """

    wait: int
    warmup: int
    active: int

    @property
    def waiting(self) -> range:
        return range(FIRST, self.wait - 1)

    @property
    def opening(self) -> range:
        return range(self.wait - 1, self.wait + self.warmup)

    @property
    def recording(self) -> range:
        return range(self.wait + self.warmup, self.closing)

    @property
    def closing(self) -> int:
        return self.wait + self.warmup + self.active - 1

    def after(self, times: Times) -> range:
        return range(self.closing + SETTLE, len(times.steps))


@dataclass
class Row:
    """Figures of one configuration on one workload, one of each a round.

    ``..._wall`` are ratios of wall time, ``..._ms`` milliseconds of wall time that bare does not take. Of
    ``closing_ms``, the stall at the end of the window, ``stop_ms`` are in torch's own ``stop_trace``.
    """

    waiting: list[float] = field(default_factory=list)
    waiting_wall: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    active_wall: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    after_wall: list[float] = field(default_factory=list)
    fit_cpu: list[float] = field(default_factory=list)
    fit_wall: list[float] = field(default_factory=list)
    opening_ms: list[float] = field(default_factory=list)
    closing_ms: list[float] = field(default_factory=list)
    stop_ms: list[float] = field(default_factory=list)
    end_ms: list[float] = field(default_factory=list)
    children_ms: list[float] = field(default_factory=list)
    size_bytes: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, fit: Fit, bare: Fit, stretches: Stretches, *, has_window: bool) -> None:
        """Compare a fit with the bare one that it took turns with."""
        ours, theirs = fit.wall, bare.wall
        after = stretches.after(fit.cpu)
        self.waiting.append(ratio(fit.cpu, bare.cpu, stretches.waiting))
        self.waiting_wall.append(ratio(ours, theirs, stretches.waiting))
        self.after.append(ratio(fit.cpu, bare.cpu, after))
        self.after_wall.append(ratio(ours, theirs, after))
        self.fit_cpu.append(fit.all_cpu / bare.all_cpu)
        self.fit_wall.append(ours.fit / theirs.fit)
        self.end_ms.append(1000 * (ours.end - theirs.end))
        self.children_ms.append(1000 * (fit.children - bare.children))
        self.size_bytes.append(fit.size_bytes)
        self.faults += (fault for fault in fit.faults if fault not in self.faults)
        if has_window:
            self.active.append(ratio(fit.cpu, bare.cpu, stretches.recording))
            self.active_wall.append(ratio(ours, theirs, stretches.recording))
            self.opening_ms.append(1000 * sum(ours.steps[index] - theirs.steps[index] for index in stretches.opening))
            # Not the bare step beside it: with two ranks that one waits for a counterpart that is being saved.
            usual = median(ours.steps[index] for index in stretches.recording)
            self.closing_ms.append(1000 * (ours.steps[stretches.closing] - usual))
            self.stop_ms.append(1000 * fit.stop)

    @property
    def saving_ms(self) -> list[float]:
        """The stall without what torch's ``stop_trace`` takes of it."""
        return [stall - stop for stall, stop in zip(self.closing_ms, self.stop_ms, strict=True)]


def ratio(fit: Times, bare: Times, steps: Iterable[int]) -> float:
    """Give the median over some steps of the time of a step by that of the bare one beside it."""
    return median(fit.steps[index] / bare.steps[index] for index in steps)


def added(fit: Fit, bare: Fit, *, turn: int) -> float:
    """Give the median over the turns of the seconds of CPU time by which a step of ``fit`` is longer.

    The first step of a turn finds the other process's data in the caches and is left out.
    """
    turns = range(turn, min(len(fit.cpu.steps), len(bare.cpu.steps)) - turn + 1, turn)
    return median(
        median(fit.cpu.steps[first + 1 : first + turn]) - median(bare.cpu.steps[first + 1 : first + turn])
        for first in turns
    )


def rows(rounds: Iterable[tuple[Fit, Fit]], stretches: Stretches, windowed: Iterable[str]) -> dict[str, Row]:
    """Give the figures of every configuration by name; of the one that records nothing, those of the null pair."""
    with_window = frozenset(windowed)
    found: dict[str, Row] = {}
    for fit, bare in rounds:
        found.setdefault(fit.name, Row()).add(fit, bare, stretches, has_window=fit.name in with_window)
    return found


def spread(values: Sequence[float]) -> float:
    """Half of the range."""
    return (max(values) - min(values)) / 2


def is_lost(values: Sequence[float]) -> bool:
    """Say whether a difference of two times is smaller than its own spread, or below zero."""
    return median(values) < spread(values)


def noise(found: Mapping[str, Row]) -> float:
    """Give the largest distance of the null pair from 1, over the rounds: what a ratio of one round can be off by."""
    null = found.get(BARE)
    return max((abs(value - 1) for value in [*null.waiting, *null.after]), default=0.0) if null else 0.0
