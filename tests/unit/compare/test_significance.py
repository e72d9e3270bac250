from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.compare.significance import PairedChange, paired_change


def drawn(rng: np.random.Generator, pairs: int, change: float = 0.0) -> PairedChange:
    """Compare noise of 2% with hiccups of one pair in ten."""
    times = np.exp(rng.normal(0, 0.02, (2, pairs)) + (rng.random((2, pairs)) < 0.1) * rng.exponential(0.3, (2, pairs)))
    return paired_change(times[0].tolist(), (times[1] * (1 + change)).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [3, 7, 8, 20])
def test_the_interval_of_equal_programs_contains_0_in_93_of_100(pairs):
    rng = np.random.default_rng(5)
    assert sum(change.low <= 0 <= change.high for change in (drawn(rng, pairs) for _ in range(100))) >= 93


def test_a_change_by_5_percent_is_found_in_20_pairs():
    rng = np.random.default_rng(5)
    assert sum(change.low > 0 for change in (drawn(rng, 20, 0.05) for _ in range(100))) >= 85


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=30), st.floats(0.01, 100))
def test_a_constant_ratio_is_the_change_and_its_interval(times, ratio):
    change = paired_change(times, [time * ratio for time in times])
    assert (change.low, change.change, change.high) == pytest.approx((ratio - 1,) * 3, abs=1e-6)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=3, max_size=30))
def test_the_interval_contains_the_change_and_is_the_same_each_time(pairs):
    a, b = zip(*pairs, strict=True)
    change = paired_change(a, b)
    assert change.low - 1e-9 <= change.change <= change.high + 1e-9
    assert paired_change(a, b) == change


@pytest.mark.parametrize(
    ("middle", "reach", "needed"),
    [
        # The spread is 0.1 * 2 / 3.182 = 0.0629, and ln(0.95) = -0.0513: 2.365 * 0.0629 / sqrt(8) = 0.0526 is too far,
        # 2.306 * 0.0629 / sqrt(9) = 0.0483 is not.
        (0.0, 0.1, 9),
        # 0 and a change by -5% are as far: 2.060 * 0.0629 / sqrt(26) = 0.0254 is less than half of it.
        (-0.02565, 0.1, 26),
        # 0.0629 * 2.776 / sqrt(5) = 0.078 is less than the change.
        (-0.08, 0.1, 5),
        (-0.3, 0.1, 4),
    ],
)
def test_the_needed_pairs_tell_a_change_from_none_or_from_one_that_is_worth_it(middle, reach, needed):
    low, change, high = (math.expm1(middle + side * reach) for side in (-1, 0, 1))
    assert PairedChange(change=change, low=low, high=high).pairs_needed(4, 0.05) == needed


@pytest.mark.parametrize(("a", "b"), [([1, 1], [1, 1]), ([1, 1, 0], [1, 1, 1]), ([1, 1, 1], [1, 1, -1])])
def test_too_few_pairs_and_times_that_are_not_positive_are_refused(a, b):
    with pytest.raises(ValueError, match="at least 3 pairs of positive measurements"):
        paired_change(a, b)
