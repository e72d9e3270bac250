"""Whether a few steps hold most of a phase's time, and which."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.run.load import Rank

__all__ = ["Rhythm", "few_steps", "rhythm", "severity"]

# A step stands out where a phase takes this many times its median.
STANDS_OUT: Final = 4
# More steps than this part are no longer few: the phase is simply slow.
FEW: Final = 1 / 3
# A phase is a matter of few steps where they hold this part of its time.
MOST: Final = 0.5
# This part of the distances must be the same one: a validation at the end of an epoch breaks the count.
REGULAR: Final = 0.6
# Of the places of a rhythm this part must be slow: chance does not hit so many.
EACH: Final = 0.8
# Its first slow steps tell a rhythm; to look at the pairs of all takes long.
LOOKED_AT: Final = 12
# Half of the excess lies in steps above some excess; what has less than this part of that one is another matter.
OF_THE_USUAL: Final = 0.5
# In all, a run of a few seconds loses as much to the first of anything: an epoch, a checkpoint, a validation.
HICCUPS_NS: Final = 500_000_000
# Single steps without a rhythm are held up for as long by whatever else a machine does, one or two of them for longer.
HICCUP_NS: Final = 100_000_000
LONG_HICCUP_NS: Final = 1_000_000_000
MIN_STEPS: Final = 3
ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}


@dataclass(frozen=True)
class Rhythm:
    """The few of ``seen`` steps that hold most of a phase's time, and what that phase takes in one of them.

    ``period`` is the regular distance between them in steps, None where there is none; ``ends_epochs`` says that each
    is the last of its epoch, ``starts_epochs`` that each is the first one.
    """

    steps: tuple[int, ...]
    seen: int
    mean_ns: int
    period: int | None
    ends_epochs: bool
    starts_epochs: bool = False

    @property
    def is_hiccup(self) -> bool:
        """Whether a machine that does something else meanwhile holds up a run like this, with nothing wrong in it."""
        if self.mean_ns * len(self.steps) < HICCUPS_NS:
            return True
        if self.period is not None or ((self.ends_epochs or self.starts_epochs) and len(self.steps) > 1):
            return False
        return self.mean_ns < (LONG_HICCUP_NS if len(self.steps) < MIN_STEPS else HICCUP_NS)

    @property
    def subject(self) -> str:
        """Who takes that long: ``Every 10th step``, ``The last step of each epoch``, ``2 of 56 steps``."""
        count = len(self.steps)
        if self.ends_epochs:
            return "The last step of each epoch" if count > 1 else "The last step of the epoch"
        if self.starts_epochs and count > 1:
            return "The first step of each epoch"
        if self.period is not None:
            return f"Every {_ordinal(self.period)} step"
        return f"{count} of {self.seen} steps" if count > 1 else f"1 of {self.seen} steps (step {self.steps[0]})"

    @property
    def verb(self) -> str:
        """``takes`` or ``take``, as the subject asks for."""
        named = self.period is not None or self.ends_epochs or self.starts_epochs
        return "take" if len(self.steps) > 1 and not named else "takes"


def rhythm(rank: Rank, phase: str) -> Rhythm | None:
    """Return the few steps that hold most of a phase's time, or None where it is spread over all."""
    typical = rank.typical_steps
    if typical is None:
        return None
    spent = [(step, breakdown[phase] or 0) for step, _, breakdown in typical.steps]
    found = few_steps(rank, spent, stands_out=STANDS_OUT)
    held = found.mean_ns * len(found.steps) if found is not None else 0
    return found if held >= MOST * sum(ns for _, ns in spent) else None


def severity(share: float, severe_share: float, few: Rhythm | None) -> Severity:
    """Return how much it matters that a phase takes a share of the time, in each step or in a few."""
    if few is not None and few.is_hiccup:
        return Severity.INFO
    return Severity.CRITICAL if share >= severe_share else Severity.WARNING


def few_steps(rank: Rank, spent: Sequence[tuple[int, int]], *, stands_out: float) -> Rhythm | None:
    """Return those of ``(step, nanoseconds)`` that take so many times the median, or None where they are not few.

    A machine that is busy holds up some step in every run: what is small beside the others that stand out is left out.
    """
    if not spent:
        return None
    median = statistics.median(ns for _, ns in spent)
    standing_out = [(step, ns) for step, ns in spent if ns > stands_out * median]
    least = OF_THE_USUAL * _weighted_median([ns - median for _, ns in standing_out])
    large = [(step, ns) for step, ns in standing_out if ns - median >= least]
    if not large or len(large) > FEW * len(spent):
        return None
    steps = tuple(step for step, _ in large)
    mean_ns = round(sum(ns for _, ns in large) / len(large))
    period = _period(steps) or _period_of_places(steps, [step for step, _ in spent])
    return Rhythm(steps, len(spent), mean_ns, period, *_in_epochs(rank, steps))


def _weighted_median(values: Sequence[float]) -> float:
    """Return the value up to which half of the sum lies."""
    half, total = sum(values) / 2, 0.0
    for value in sorted(values):
        total += value
        if total >= half:
            return value
    return 0.0


def _period(steps: Sequence[int]) -> int | None:
    gaps = Counter(after - before for before, after in itertools.pairwise(steps))
    if sum(gaps.values()) < 2:  # two steps have one distance: it cannot repeat
        return None
    gap, count = gaps.most_common(1)[0]
    return gap if gap > 1 and count >= REGULAR * sum(gaps.values()) else None


def _period_of_places(steps: Sequence[int], seen: Sequence[int]) -> int | None:
    """Return the distance at which nearly each step is slow, where odd ones between them break the count."""
    slow, known, found = set(steps), set(seen), Counter[int]()
    first, last = min(known), max(known)
    for before, after in itertools.combinations(steps[:LOOKED_AT], 2):
        period = after - before
        places = [step for step in range(first + (before - first) % period, last + 1, period) if step in known]
        hits = sum(step in slow for step in places)
        if period > 1 and len(places) > MIN_STEPS and hits >= max(EACH * len(places), REGULAR * len(slow)):
            found[period] = max(found[period], hits)
    # Of 7 and 14 the shorter one has more of the slow steps.
    return found.most_common(1)[0][0] if found else None


def _in_epochs(rank: Rank, steps: Sequence[int]) -> tuple[bool, bool]:
    """Say whether each of some steps is the last, and whether each is the first one of its epoch."""
    last = {row["epoch"]: row["step"] for row in rank.pulse}
    first = {row["epoch"]: row["step"] for row in reversed(rank.pulse)}
    return set(steps) <= set(last.values()), set(steps) <= set(first.values())


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ENDINGS.get(number % 10, 'th')}"
