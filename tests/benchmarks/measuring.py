"""The parts of the benchmark of fits: rounds of pairs, the import, the pulse on a small model, resident sizes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import figures
import peaks
from aims import Apart
from configurations import Configuration
from pair import Pair
from workload import Fit, Job

if TYPE_CHECKING:
    from rich.progress import Progress

SMALL_STEPS = 500
SMALL_TURN = 20
IMPORTS = 10
IMPORT_PROGRAM = """
import sys, time
began = time.perf_counter()
import lightning_memprof
took = time.perf_counter() - began
print(1000 * took, *(name for name in ("torch", "lightning") if name in sys.modules))
"""
PEAKS = ("bare", "trace", "default", "everything", "lightning", "fts-profiler", "fts-memory", "hand-gz")
# Of a workload's one round no target could be told from noise, where the machine has any.
FEWEST = 2


def bar(drawn: Progress, name: str, total: int) -> Callable[..., None]:
    """Draw a line for a part, between fits only: drawing takes time on the core that is measured."""
    return partial(drawn.update, drawn.add_task(name, total=total), refresh=True)


@dataclass
class Rounds:
    """What was fitted of one workload.

    Attributes:
        pairs: each fit with the one beside it, round after round.
        count: complete rounds.
        failed: by configuration, the last line of what it raised; its fits are not in ``pairs``.
        first_window_ms: what the first window of the process took to open, beyond the steps around it.

    """

    pairs: list[tuple[Fit, Fit]] = field(default_factory=list)
    count: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    first_window_ms: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What to fit of one workload.

    Attributes:
        workload: its name.
        ranks: of it.
        names: configurations, the one that records nothing first.
        steps: of a fit.
        rounds: at most.
        deadline: on the monotonic clock; no round begins that would end later.

    """

    workload: str
    ranks: int
    names: Sequence[str]
    steps: int
    rounds: int
    deadline: float


class Bench:
    """Fits in pairs of one workload; a fit that fails costs its configuration, and new processes go on."""

    def __init__(self, plan: Plan, known: dict[str, Configuration]) -> None:
        self._plan = plan
        self._known = known
        self._pair = Pair(plan.ranks)
        self.found = Rounds()

    def close(self) -> None:
        self._pair.close()

    def fit(self, name: str, *, steps: int, swapped: bool = False) -> tuple[Fit, Fit] | None:
        """Fit a configuration beside the one that records nothing; None where it failed."""
        jobs = [Job(each, self._plan.workload, steps) for each in (name, figures.BARE)]
        try:
            first, second = self._pair.fit(*(jobs[::-1] if swapped else jobs))
        except RuntimeError as error:
            self.found.failed[name] = str(error).strip().splitlines()[-1]
            self._pair = Pair(self._plan.ranks)
            return None
        return (second, first) if swapped else (first, second)

    def warm_up(self, stretches: figures.Stretches) -> None:
        """Pay what is paid once in a process."""
        name = "default" if "default" in self._plan.names else self._plan.names[-1]
        fits = self.fit(name, steps=max(32, stretches.closing + 4))
        self.found.failed.pop(name, None)
        if fits is not None:
            steps = fits[0].wall.steps
            usual = median(steps[index] for index in stretches.waiting)
            self.found.first_window_ms = 1000 * sum(steps[index] - usual for index in stretches.opening)

    def rounds(self, tick: Callable[..., None]) -> None:
        """Fit each configuration against the one that records nothing, round after round, while there is time."""
        for number in range(self._plan.rounds):
            began = time.monotonic()
            for name in self._plan.names:
                tick(description=f"{self._plan.workload} {number + 1}: {name}")
                if name not in self.found.failed:
                    fits = self.fit(name, steps=self._plan.steps, swapped=number % 2 == 1)
                    self.found.pairs += [fits] if fits is not None else []
                tick(advance=1)
            self.found.count += 1
            if 2 * time.monotonic() - began > self._plan.deadline and self.found.count >= FEWEST:
                break
        self.found.pairs = [pair for pair in self.found.pairs if pair[0].name not in self.found.failed]


def measure_import(drawn: Progress) -> Apart:
    """Import the package in fresh processes; give milliseconds and what of torch and lightning came with it."""
    tick = bar(drawn, "import", IMPORTS)
    times, loads = [], set()
    for _ in range(IMPORTS):
        # Not in the repository's root: the installed package is meant.
        done = subprocess.run(
            [sys.executable, "-c", IMPORT_PROGRAM],
            check=True,
            capture_output=True,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        took, *loaded = done.stdout.split()
        times.append(float(took))
        loads.update(loaded)
        tick(advance=1)
    return Apart(times, sorted(loads))


def measure_pulse(drawn: Progress, *, pairs: int) -> dict[str, list[float]]:
    """Give microseconds that the pulse adds to a step that is nearly nothing; so does a callback without methods."""
    costs: dict[str, list[float]] = {"pulse": [], "callback": [], figures.BARE: []}
    tick = bar(drawn, "pulse on a small model", len(costs) * pairs)
    with Pair() as workers:
        for number in range(pairs):
            for name, found in costs.items():
                jobs = [Job(each, "small", SMALL_STEPS, SMALL_TURN) for each in (name, figures.BARE)]
                swapped = number % 2 == 1
                fits = workers.fit(*(jobs[::-1] if swapped else jobs))
                fit, bare = fits[::-1] if swapped else fits
                found.append(1e6 * figures.added(fit, bare, turn=SMALL_TURN))
                tick(advance=1)
    return costs


def measure_peaks(
    drawn: Progress, names: Sequence[str], repeats: int
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Give bytes of the largest resident size by configuration, and those of the largest child process."""
    tick = bar(drawn, "resident size", repeats * len(names))
    own: dict[str, list[int]] = {name: [] for name in names}
    children: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            tick(description=f"resident size: {name}")
            found, largest = peaks.measure(name)
            own[name].append(found)
            children[name].append(largest)
            tick(advance=1)
    return own, children
