"""What fits were set out to reach, as ratios of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from figures import BARE, Row, is_lost, noise, spread
from part import Target

# CPU time of a bare step on the machine that the targets were set on.
REFERENCE_STEP: Final = 0.018
LIGHTNING: Final = "lightning"
HAND_GZ: Final = "hand-gz"
HANDS: Final = ("hand-json", HAND_GZ)


@dataclass(frozen=True)
class Apart:
    """What is measured apart from the rounds.

    Attributes:
        import_ms: of ``import lightning_memprof``, one a fresh process.
        import_loads: what of torch and lightning it loaded.
        added_us: by configuration, CPU time that it adds to a step of a small model, one a pair of fits.
        rss_bytes: by configuration, the largest resident size of a fresh process, one each.
        children_bytes: the same of the largest process that it started.

    """

    import_ms: Sequence[float] = ()
    import_loads: Sequence[str] = ()
    added_us: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rss_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    children_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def growth(self, name: str) -> float | None:
        """Give by how many bytes a process that records has grown beyond one that does not: medians."""
        ours, bare = self.rss_bytes.get(name), self.rss_bytes.get(BARE)
        return median(ours) - median(bare) if ours and bare else None


def of_workload(workload: str, found: Mapping[str, Row]) -> Iterator[Target]:
    """Give the targets that speak of every workload."""
    for name in ("pulse", "default-idle", "default", "everything-idle", "everything", "memory-idle"):
        if name in found and BARE in found:
            yield from _outside(workload, found, name)
    for name, limit in (("trace", 1.05), ("trace-names", 1.12), ("default", 1.10)):
        if name in found and (workload == "network" or name == "trace"):
            yield _active(workload, found, name, limit)
    if "memory" in found:
        yield _active_alone(workload, found, "memory", 1.12)
    for name in ("trace", "default"):
        if name in found and HAND_GZ in found:
            yield from _window_end(workload, found, name)
    if "default" in found and LIGHTNING in found:
        yield _fit_end(workload, found)


def of_whole_fits(found: Mapping[str, Row], steps: int) -> Iterator[Target]:
    """Give the targets of a fit of 60 steps on the network."""
    if "default" not in found or steps != 60:
        return
    row = found["default"]
    for clock, ratios in (("CPU, child processes included", row.fit_cpu), ("wall", row.fit_wall)):
        target = f"a fit of 60 steps with one window: <= 1.25 x bare, {clock}"
        measured = f"{_measured(ratios)}; {median(row.children_ms):.0f} ms of CPU time in child processes"
        yield Target(target, measured, median(ratios) <= 1.25)


def of_apart(apart: Apart, bare_step: float) -> Iterator[Target]:
    """Give the targets of what is measured apart; a bare step of the network takes ``bare_step`` seconds here."""
    if apart.added_us:
        yield _pulse(apart, bare_step)
    if apart.import_ms:
        loads = ", ".join(apart.import_loads) or "neither"
        yield Target(
            "`import lightning_memprof`: < 50 ms, neither torch nor Lightning",
            f"{_measured(apart.import_ms, '.1f')} ms, {loads}",
            median(apart.import_ms) < 50 and not apart.import_loads,
        )
    theirs = apart.growth(LIGHTNING)
    for name in ("default", "trace"):
        ours = apart.growth(name)
        if ours is not None and theirs is not None:
            yield Target(
                f"peak rss growth, `{name}`: <= 0.5 x Lightning's PyTorchProfiler",
                f"{ours / theirs:.2f} ({ours / 2**20:.0f} of {theirs / 2**20:.0f} MiB)",
                ours <= 0.5 * theirs,
            )


def _outside(workload: str, found: Mapping[str, Row], name: str) -> Iterator[Target]:
    row, off = found[name], noise(found)
    for stretch, ratios in (("waiting", row.waiting), ("after", row.after)):
        value = median(ratios)
        yield Target(
            f"{workload}: {stretch}, `{name}`: 1.00 within the null pair's distance",
            f"{_measured(ratios, '.3f')} (null pair within {off:.3f})",
            value - 1 <= off,
        )


def _active(workload: str, found: Mapping[str, Row], name: str, limit: float) -> Target:
    target = f"{workload}: active steps, `{name}`: <= {limit:.2f} x `torch.profiler` by hand"
    hands = [found[hand].active for hand in HANDS if hand in found]
    ratios = [ours / median(theirs) for ours, *theirs in zip(found[name].active, *hands, strict=False)] if hands else []
    return _at_most(target, ratios, limit)


def _active_alone(workload: str, found: Mapping[str, Row], name: str, limit: float) -> Target:
    target = f"{workload}: active steps, `{name}`: <= {limit:.2f} x bare"
    return _at_most(target, found[name].active, limit)


def _window_end(workload: str, found: Mapping[str, Row], name: str) -> Iterator[Target]:
    ours, theirs = found[name], found[HAND_GZ]
    for limit, what, mine, hand in (
        (0.25, "without `stop_trace`", ours.saving_ms, theirs.saving_ms),
        (0.50, "`stop_trace` counted in both", ours.closing_ms, theirs.closing_ms),
    ):
        target = f"{workload}: window end, `{name}`, {what}: <= {limit:.2f} x `torch.profiler` by hand to `.gz`"
        if is_lost(mine) or is_lost(hand):
            shown = f"{_measured(mine, '.0f')} ms, by hand {_measured(hand, '.0f')} ms"
            yield Target(target, shown, None, otherwise="not measurable")
        else:
            yield _at_most(target, [us / them for us, them in zip(mine, hand, strict=False)], limit)


def _fit_end(workload: str, found: Mapping[str, Row]) -> Target:
    ratios = [us / them for us, them in zip(found["default"].end_ms, found[LIGHTNING].end_ms, strict=False)]
    target = f"{workload}: end of fit, `default`: <= 0.10 x Lightning's PyTorchProfiler"
    return _at_most(target, ratios, 0.10)


def _at_most(target: str, ratios: Sequence[float], limit: float) -> Target:
    return Target(target, _measured(ratios, ".3f"), median(ratios) <= limit) if ratios else Target(target, "", None)


def _pulse(apart: Apart, bare_step: float) -> Target:
    pulse, null, empty = (apart.added_us[name] for name in ("pulse", BARE, "callback"))
    cost = median(pulse)
    measured = (
        f"{cost:.0f} ± {spread(pulse):.0f} us ({cost * REFERENCE_STEP / bare_step:.0f} where a bare step takes 18 ms;"
        f" null pair {median(null):.0f}, empty callback {median(empty):.0f})"
    )
    return Target("the pulse: adds <= 20 us to a small model's step", measured, cost <= 20)


def _measured(values: Sequence[float], form: str = ".2f") -> str:
    text = format(median(values), form)
    return f"{text} ± {format(spread(values), form)}" if len(values) > 1 else text
