"""Steps that stand out, and whether they return at equal distances."""

from __future__ import annotations

import itertools
import statistics as stats
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.read.run.model import Rank

ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}


class Rhythm(msgspec.Struct, frozen=True, kw_only=True):
    """The few of ``seen`` steps that hold most of a phase's time, and the phase's mean in them.

    ``period`` is the regular distance between them in steps, None if there is none.
    """

    steps: tuple[int, ...]
    seen: int
    mean_ns: int
    period: int | None

    @property
    def is_hiccup(self) -> bool:
        """Whether a busy machine explains these steps."""
        if self.mean_ns * len(self.steps) < POLICY.hiccups_ns:
            return True
        if self.period is not None:
            return False
        return self.mean_ns < (POLICY.long_hiccup_ns if len(self.steps) < POLICY.calls else POLICY.hiccup_ns)

    @property
    def subject(self) -> str:
        """The steps as the subject of a sentence: ``Every 10th step``, ``2 of 56 steps``."""
        count = len(self.steps)
        if self.period is not None:
            return f"Every {_ordinal(self.period)} step"
        return f"{count} of {self.seen} steps" if count > 1 else f"1 of {self.seen} steps (step {self.steps[0]})"

    @property
    def verb(self) -> str:
        """``takes`` or ``take``, to agree with the subject."""
        return "take" if len(self.steps) > 1 and self.period is None else "takes"


def rhythm(rank: Rank, phase: str) -> Rhythm | None:
    """Return the few steps that hold most of a phase's time, or None if it is spread over all steps."""
    typical = typical_steps(rank)
    if typical is None:
        return None
    spent = [(step, breakdown[phase] or 0) for step, _, breakdown in typical.steps]
    found = few_steps(spent, stands_out=POLICY.stands_out)
    held = found.mean_ns * len(found.steps) if found is not None else 0
    return found if held >= POLICY.most * sum(ns for _, ns in spent) else None


def few_steps(spent: Sequence[tuple[int, int]], *, stands_out: float) -> Rhythm | None:
    """Return the steps that take ``stands_out`` times the median, or None if they are not few.

    A busy machine delays some step in every run: steps that stand out by little beside the others are ignored.

    Args:
        spent: ``(step, nanoseconds)``.
        stands_out: multiple of the median.
    """
    if not spent:
        return None
    median = stats.median(ns for _, ns in spent)
    standing_out = [(step, ns) for step, ns in spent if ns > stands_out * median]
    least = POLICY.most * _weighted_median([ns - median for _, ns in standing_out])
    large = [(step, ns) for step, ns in standing_out if ns - median >= least]
    if not large or len(large) > POLICY.few * len(spent):
        return None
    steps = tuple(step for step, _ in large)
    return Rhythm(
        steps=steps,
        seen=len(spent),
        mean_ns=round(sum(ns for _, ns in large) / len(large)),
        period=_period(steps),
    )


def _weighted_median(values: Sequence[float]) -> float:
    """Return the value up to which the sorted values hold half of the sum."""
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
    return gap if gap > 1 and count >= POLICY.regular * sum(gaps.values()) else None


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ENDINGS.get(number % 10, 'th')}"
