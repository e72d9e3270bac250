"""The search for the largest batch, with limits that are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.compare.batches import Batches, TriedBatch, largest_fitting

MOST = 4096


@given(st.integers(0, 2 * MOST), st.integers(1, 2 * MOST))
def test_the_search_finds_the_largest_number_and_tries_none_twice(limit, first):
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert largest_fitting(fits, first, MOST) == min(limit, MOST)
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * MOST.bit_length()
    assert all(1 <= number <= MOST for number in tried)


@given(st.integers(1, MOST), st.integers(1, MOST))
def test_a_search_with_a_tolerance_ends_below_the_largest_by_no_more_than_it(limit, first):
    found = largest_fitting(lambda number: number <= limit, first, MOST, 1 / 16)
    assert found <= limit < max(found * (1 + 1 / 16) + 1, found + 2)


def test_the_best_batch_is_the_largest_that_fits_and_the_refused_one_the_smallest_that_does_not():
    tried = tuple(TriedBatch(samples=samples, fits=samples <= 8, step_ns=2e9) for samples in (4, 8, 12, 16))
    found = Batches(program="train.py", samples=4, limit_bytes=None, tried=tried)
    assert (found.best, found.refused) == (tried[1], tried[2])
    assert tried[1].samples_per_s == 4.0
