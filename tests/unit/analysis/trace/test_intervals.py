from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.analysis.trace.intervals import (
    Intervals,
    clip,
    difference,
    intersection,
    length,
    length_before,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def make(spans: list[tuple[int, int]]) -> Intervals:
    return union(np.array([start for start, _ in spans], np.int64), np.array([end for _, end in spans], np.int64))


def moments(of: Intervals) -> set[int]:
    return {at for start, end in zip(of.starts.tolist(), of.ends.tolist(), strict=True) for at in range(start, end)}


def naive(spans: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


@given(SPANS)
def test_a_union_holds_every_moment_once(spans):
    found = make(spans)
    assert moments(found) == naive(spans)
    assert length(found) == len(naive(spans))
    assert np.all(found.starts < found.ends)
    assert np.all(found.starts[1:] > found.ends[:-1])


@given(SPANS, SPANS)
def test_sets_of_time_behave_as_sets(left, other):
    first, second = make(left), make(other)
    assert moments(intersection(first, second)) == naive(left) & naive(other)
    assert moments(difference(first, second)) == naive(left) - naive(other)
    assert moments(clip(first, 7, 21)) == naive(left) & set(range(7, 21))


@given(SPANS, st.lists(st.integers(-3, 45), max_size=6))
def test_the_length_before_a_moment_is_what_lies_before_it(spans, asked):
    found = length_before(make(spans), np.array(asked, np.int64))
    assert found.tolist() == [len([at for at in naive(spans) if at < moment]) for moment in asked]
