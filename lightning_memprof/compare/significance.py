"""Rank test of the steps of two sides, the drift within one side, and the change of paired measurements."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

# A change of steps is reported from this confidence on: the usual one, and four steps of each side can reach it.
CONFIDENCE: Final = 0.95
# Share of the pairs of steps in which the change shows. Two runs of one program differ by a part of the spread of their
# steps, which a thousand steps prove beyond doubt; a shift by one standard deviation shows in 76% of the pairs.
_LEAST_SUPERIORITY: Final = 0.76
# The exact distribution takes 20 ms for 10 and 10 steps; the normal one is within 0.1% from there on.
_MOST_EXACT_PAIRS: Final = 100
# More steps cannot change the result; sorting a million takes a second.
_MOST_STEPS: Final = 4096
# A shared machine is slower at times: two runs differ as much as the halves of one run.
_LEAST_HALF: Final = 10

FEWEST_PAIRS: Final = 3
# 97.5% quantile of Student's t for 2, 3, ... degrees of freedom.
_STUDENT: Final = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
_RESAMPLES: Final = 4000


class RankTest(msgspec.Struct, frozen=True, kw_only=True):
    """Two-sided Mann-Whitney test of the steps of A and B.

    ``confidence`` is 1 - p, None where no steps of these numbers could reach ``CONFIDENCE``. ``higher_share`` is the
    share of the pairs of a step of A and one of B in which B is higher; ties count half.
    """

    confidence: float | None
    higher_share: float

    def confirms(self, change: float) -> bool:
        """Whether a change in this direction is above the chance and above the spread of the steps."""
        share = self.higher_share if change > 0 else 1 - self.higher_share
        return self.confidence is not None and self.confidence >= CONFIDENCE and share >= _LEAST_SUPERIORITY


def rank_test(a: Sequence[float], b: Sequence[float]) -> RankTest:
    """Test whether the steps of B are higher or lower than those of A; neither may be empty.

    Exact, also with ties, up to 100 pairs; above, the normal approximation with corrections for ties and continuity.
    """
    a, b = _thinned(a), _thinned(b)
    pairs, total = len(a) * len(b), len(a) + len(b)
    doubled = _doubled_ranks([*a, *b])
    doubled_sum = sum(doubled[: len(a)])
    # The sum of the ranks of A, less that of the lowest ranks, counts the pairs in which A is higher.
    share = 1 - (doubled_sum / 2 - len(a) * (len(a) + 1) / 2) / pairs
    if pairs <= _MOST_EXACT_PAIRS:
        least, chance = 2 / math.comb(total, len(a)), _exact(doubled, len(a))
    else:
        least = _normal(pairs / 2, pairs * (total + 1) / 12)
        chance = _normal(pairs * abs(share - 0.5), _variance(pairs, total, doubled))
    return RankTest(confidence=1 - chance if least <= 1 - CONFIDENCE else None, higher_share=share)


def drift(samples: Sequence[float]) -> float:
    """Return the difference between the medians of the halves of samples in time order; 0 for fewer than 20."""
    half = len(samples) // 2
    return abs(statistics.median(samples[:half]) - statistics.median(samples[half:])) if half >= _LEAST_HALF else 0.0


class PairedChange(msgspec.Struct, frozen=True, kw_only=True):
    """Relative change from A to B of paired measurements, with its 95% interval; 0.05 is 5% more."""

    change: float
    low: float
    high: float

    def pairs_needed(self, pairs: int, worth: float) -> int:
        """Return about how many pairs, ``pairs`` or more, would tell the change from 0 or from a decrease by ``worth``.

        The interval of n pairs reaches ``t(n - 1) * spread / sqrt(n)`` to each side, in logarithms: these pairs give
        the spread. The number is the least n whose interval reaches less far than from the change to 0 or to
        ``worth``, whichever is farther.
        """
        log_change = math.log1p(self.change)
        apart = max(-log_change, log_change - math.log1p(-worth))
        spread = (math.log1p(self.high) - math.log1p(self.low)) / 2 * math.sqrt(pairs) / _student(pairs - 1)
        while _student(pairs - 1) * spread > apart * math.sqrt(pairs):
            pairs += 1
        return pairs


def paired_change(a: Sequence[float], b: Sequence[float]) -> PairedChange:
    """Return the change from A to B, measured alternately: a slow phase of the machine slows both of a pair.

    The change is the mean of the middle half of the logarithms of B / A. Its interval is a bootstrap percentile
    interval, widened for few pairs (Hesterberg, "What Teachers Should Know about the Bootstrap", 2015); of up to 7
    pairs it is Student's, since resampling so few does not show their spread. The same measurements have the same
    interval.

    Raises:
        ValueError: the numbers of measurements differ, there are fewer than ``FEWEST_PAIRS``, or one is not positive.
    """
    pairs = np.array([a, b], np.float64)
    count = pairs.shape[1]
    if count < FEWEST_PAIRS or not np.all(pairs > 0):
        msg = f"at least {FEWEST_PAIRS} pairs of positive measurements are needed"
        raise ValueError(msg)
    ratios = np.diff(np.log(pairs), axis=0)
    if count - 2 < len(_STUDENT):
        middle = float(ratios.mean())
        reach = _student(count - 1) * float(ratios.std(ddof=1)) / math.sqrt(count)
        ends = (middle - reach, middle + reach)
    else:
        middle = float(_middle_half(ratios)[0])
        drawn = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
        ends = tuple(np.quantile(_middle_half(ratios[0][drawn]), (tail := _tail(count), 1 - tail)).tolist())
    change, low, high = (math.expm1(value) for value in (middle, *ends))
    return PairedChange(change=change, low=low, high=high)


def _middle_half(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    cut = rows.shape[1] // 4
    means: NDArray[np.float64] = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut].mean(axis=1)
    return means


def _tail(count: int) -> float:
    """Return the share of resamples to leave out on each side for an interval of 95%."""
    return statistics.NormalDist().cdf(-math.sqrt(count / (count - 1)) * _student(count - 1))


def _student(free: int) -> float:
    """Return the 97.5% quantile of Student's t for 2 and more degrees of freedom."""
    if free - 2 < len(_STUDENT):
        return _STUDENT[free - 2]
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def _thinned(steps: Sequence[float]) -> Sequence[float]:
    return steps[:: -(-len(steps) // _MOST_STEPS)]


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, from 1; equal values share the middle of their ranks."""
    ranks = [0] * len(values)
    below = 0
    for _, alike in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        indexes = list(alike)
        for index in indexes:
            ranks[index] = 2 * below + len(indexes) + 1
        below += len(indexes)
    return ranks


def _exact(doubled: Sequence[int], count: int) -> float:
    """Return the share of all choices of ``count`` ranks whose sum is at least as far from the middle as the first."""
    ways: list[Counter[int]] = [Counter() for _ in range(count + 1)]
    ways[0][0] = 1
    for rank in doubled:
        for chosen in range(count, 0, -1):
            for found, number in ways[chosen - 1].items():
                ways[chosen][found + rank] += number
    middle = count * (len(doubled) + 1)
    distance = abs(sum(doubled[:count]) - middle)
    far = sum(number for found, number in ways[count].items() if abs(found - middle) >= distance)
    return far / math.comb(len(doubled), count)


def _variance(pairs: int, total: int, doubled: Sequence[int]) -> float:
    ties = sum(size**3 - size for size in Counter(doubled).values())
    return pairs / 12 * (total + 1 - ties / (total * (total - 1)))


def _normal(distance: float, variance: float) -> float:
    """Return the chance of a distance from the middle, in pairs."""
    return math.erfc(max(0.0, distance - 0.5) / math.sqrt(2 * variance)) if variance > 0 else 1.0
