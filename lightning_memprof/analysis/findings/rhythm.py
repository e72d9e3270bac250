"""Whether a few steps hold most of a phase's time, and which."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.steps import typical_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.run import Rank

__all__ = ["Rhythm", "rhythm"]

# A step stands out where a phase takes this many times its median.
STANDS_OUT: Final = 4
# More steps than this part are no longer few: the phase is simply slow.
FEW: Final = 1 / 3
# A phase is a matter of few steps where they hold this part of its time.
MOST: Final = 0.5
# This part of the distances must be the same one: a validation at the end of an epoch breaks the count.
REGULAR: Final = 0.6
ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}


@dataclass(frozen=True)
class Rhythm:
    """The few of ``seen`` steps that hold most of a phase's time, and what that phase takes in one of them.

    ``period`` is the regular distance between them in steps, None where there is none; ``ends_epochs`` says that each
    is the last of its epoch.
    """

    steps: tuple[int, ...]
    seen: int
    mean_ns: int
    period: int | None
    ends_epochs: bool

    @property
    def subject(self) -> str:
        """Who takes that long: ``Every 10th step``, ``The last step of each epoch``, ``2 of 56 steps``."""
        count = len(self.steps)
        if self.ends_epochs:
            return "The last step of each epoch" if count > 1 else "The last step of the epoch"
        if self.period is not None:
            return f"Every {_ordinal(self.period)} step"
        return f"{count} of {self.seen} steps" if count > 1 else f"1 of {self.seen} steps (step {self.steps[0]})"

    @property
    def verb(self) -> str:
        """``takes`` or ``take``, as the subject asks for."""
        return "take" if len(self.steps) > 1 and self.period is None and not self.ends_epochs else "takes"


def rhythm(rank: Rank, phase: str) -> Rhythm | None:
    """Return the few steps that hold most of a phase's time, or None where it is spread over all."""
    typical = typical_steps(rank)
    if typical is None:
        return None
    spent = [(step, breakdown[phase] or 0) for step, _, breakdown in typical.steps]
    median = statistics.median(ns for _, ns in spent)
    large = [(step, ns) for step, ns in spent if ns > STANDS_OUT * median]
    held = sum(ns for _, ns in large)
    if not large or len(large) > FEW * len(spent) or held < MOST * sum(ns for _, ns in spent):
        return None
    steps = tuple(step for step, _ in large)
    return Rhythm(steps, len(spent), round(held / len(large)), _period(steps), _ends_epochs(rank, steps))


def _period(steps: Sequence[int]) -> int | None:
    gaps = Counter(after - before for before, after in itertools.pairwise(steps))
    if sum(gaps.values()) < 2:  # two steps have one distance: it cannot repeat
        return None
    gap, count = gaps.most_common(1)[0]
    return gap if gap > 1 and count >= REGULAR * sum(gaps.values()) else None


def _ends_epochs(rank: Rank, steps: Sequence[int]) -> bool:
    last = {row["epoch"]: row["step"] for row in rank.pulse}
    return set(steps) <= set(last.values())


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ENDINGS.get(number % 10, 'th')}"
