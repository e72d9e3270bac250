"""From raw fits to figures: ratios of each step to the bare one beside it, medians, spreads, and the targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.benchmarks.workload import Fit, Times

BARE: Final = "bare"
# The first steps allocate.
FIRST: Final = 3
# After the window: the step in which it is saved, and one more in which caches are cold.
SETTLE: Final = 2
# CPU time of a bare step on the machine that the targets were set on.
REFERENCE_STEP: Final = 0.018


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
    """Figures of one configuration, one of each a round."""

    waiting: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    fit_cpu: list[float] = field(default_factory=list)
    fit_wall: list[float] = field(default_factory=list)
    start_ms: list[float] = field(default_factory=list)
    opening_ms: list[float] = field(default_factory=list)
    closing_ms: list[float] = field(default_factory=list)
    end_ms: list[float] = field(default_factory=list)
    children_ms: list[float] = field(default_factory=list)
    pulse_us: list[float] = field(default_factory=list)
    size_bytes: list[float] = field(default_factory=list)

    def add(self, fit: Fit, bare: Fit, stretches: Stretches, *, has_window: bool) -> None:
        """Compare a fit with the bare one that it took turns with."""
        ours, theirs = fit.wall, bare.wall
        self.waiting.append(ratio(fit, bare, stretches.waiting))
        self.after.append(ratio(fit, bare, stretches.after(fit.cpu)))
        self.fit_cpu.append(fit.all_cpu / bare.all_cpu)
        self.fit_wall.append(ours.fit / theirs.fit)
        self.start_ms.append(1000 * (ours.start - theirs.start))
        self.end_ms.append(1000 * (ours.end - theirs.end))
        self.children_ms.append(1000 * fit.children)
        self.size_bytes.append(fit.size_bytes)
        if has_window:
            self.active.append(ratio(fit, bare, stretches.recording))
            self.opening_ms.append(1000 * sum(ours.steps[index] - theirs.steps[index] for index in stretches.opening))
            last = stretches.closing
            self.closing_ms.append(1000 * (ours.steps[last] - self.active[-1] * theirs.steps[last]))
        if fit.pulse_us is not None:
            self.pulse_us.append(fit.pulse_us)


def ratio(fit: Fit, bare: Fit, steps: Iterable[int]) -> float:
    """Give the median over some steps of the CPU time of a step by that of the bare one beside it."""
    return median(fit.cpu.steps[index] / bare.cpu.steps[index] for index in steps)


def added(fit: Fit, bare: Fit, *, turn: int) -> float:
    """Give the median over the turns of the seconds of CPU time by which a step of ``fit`` is longer.

    The first step of a turn finds the other process's data in the caches and is left out.
    """
    turns = range(turn, min(len(fit.cpu.steps), len(bare.cpu.steps)) - turn + 1, turn)
    return median(
        median(fit.cpu.steps[first + 1 : first + turn]) - median(bare.cpu.steps[first + 1 : first + turn])
        for first in turns
    )


def rows(rounds: Iterable[Sequence[tuple[Fit, Fit]]], stretches: Stretches, windowed: Iterable[str]) -> dict[str, Row]:
    """Give the figures of every configuration by name; of ``bare``, that of the null pair."""
    with_window = frozenset(windowed)
    found: dict[str, Row] = {}
    for pairs in rounds:
        for fit, bare in pairs:
            found.setdefault(fit.name, Row()).add(fit, bare, stretches, has_window=fit.name in with_window)
    return found


@dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it is met; None where it was not measured."""

    target: str
    measured: str
    met: bool | None


@dataclass(frozen=True)
class Apart:
    """What is measured apart from the fits.

    Attributes:
        import_ms: of ``import lightning_memprof``, one a fresh process.
        import_loads: what of torch and lightning it loaded.
        added_us: by configuration, CPU time that it adds to a step of a small model, one a pair of fits.

    """

    import_ms: Sequence[float]
    import_loads: Sequence[str]
    added_us: Mapping[str, Sequence[float]]


def spread(values: Sequence[float]) -> float:
    """Half of the range."""
    return (max(values) - min(values)) / 2


def noise(found: Mapping[str, Row]) -> float:
    """Give the largest distance of the null pair from 1, over the rounds: what a ratio of one round can be off by."""
    null = found.get(BARE)
    return max((abs(value - 1) for value in [*null.waiting, *null.after]), default=0.0) if null else 0.0


def verdicts(found: Mapping[str, Row], apart: Apart, *, steps: int, bare_step: float) -> list[Verdict]:
    """Compare with what was set out to reach.

    Args:
        found: figures by configuration.
        apart: figures that no ratio is made of.
        steps: of a fit.
        bare_step: seconds of CPU time that a bare step takes here.

    """
    loads = ", ".join(apart.import_loads) or "neither"
    return [
        *(_outside(found, name) for name in ("pulse", "idle", "window", "memory-idle")),
        _pulse(apart, bare_step),
        _active(found, "trace", 1.05),
        _active(found, "trace-names", 1.12),
        _active(found, "window", 1.12),
        _active_alone(found, "memory", 1.15),
        _active_alone(found, "memory-rss", 1.25),
        *_whole_fit(found, steps),
        Verdict(
            "import lightning_memprof < 50 ms, neither torch nor lightning",
            f"{median(apart.import_ms):.1f} ms (+-{spread(apart.import_ms):.1f}), {loads}",
            median(apart.import_ms) < 50 and not apart.import_loads,
        ),
    ]


def _outside(found: Mapping[str, Row], name: str) -> Verdict:
    target = f"outside windows, {name}: 1.00 within the null pair's spread"
    if name not in found or BARE not in found:
        return Verdict(target, "not measured", None)
    value, off = median([*found[name].waiting, *found[name].after]), noise(found)
    return Verdict(target, f"{value:.3f} (null pair: within {off:.3f})", value - 1 <= off)


def _pulse(apart: Apart, bare_step: float) -> Verdict:
    pulse, null, empty = (apart.added_us[name] for name in ("pulse", BARE, "callback"))
    cost = median(pulse)
    measured = (
        f"{cost:.0f} us (+-{spread(pulse):.0f}; {cost * REFERENCE_STEP / bare_step:.0f} where a bare step takes 18 ms;"
        f" null pair {median(null):.0f}, empty callback {median(empty):.0f})"
    )
    return Verdict("pulse: adds <= 20 us to a small model's step", measured, cost <= 20)


def _active(found: Mapping[str, Row], name: str, limit: float) -> Verdict:
    target = f"active steps, {name}: <= {limit:.2f} x torch.profiler by hand"
    hands = [found[hand].active for hand in ("hand-json", "hand-gz") if hand in found]
    if name not in found or not hands:
        return Verdict(target, "not measured", None)
    ratios = [ours / mean(theirs) for ours, *theirs in zip(found[name].active, *hands, strict=True)]
    return Verdict(target, f"{median(ratios):.3f} (+-{spread(ratios):.3f})", median(ratios) <= limit)


def _active_alone(found: Mapping[str, Row], name: str, limit: float) -> Verdict:
    target = f"active steps, {name}: <= {limit:.2f} x bare"
    if name not in found:
        return Verdict(target, "not measured", None)
    ratios = found[name].active
    return Verdict(target, f"{median(ratios):.3f} (+-{spread(ratios):.3f})", median(ratios) <= limit)


def _whole_fit(found: Mapping[str, Row], steps: int) -> Iterable[Verdict]:
    target = "60-step fit with one window: <= 1.20 x bare"
    if "window" not in found or steps != 60:
        yield Verdict(target, "not measured", None)
        return
    row = found["window"]
    for clock, ratios in (("CPU, child processes included", row.fit_cpu), ("wall", row.fit_wall)):
        measured = f"{median(ratios):.2f} (+-{spread(ratios):.2f})"
        yield Verdict(f"{target}, {clock}", measured, median(ratios) <= 1.20)
