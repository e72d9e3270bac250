from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.read.trace.intervals import (
    Intervals,
    clip,
    difference,
    exclusive_ends,
    innermost_at,
    intersection,
    length,
    length_before,
    length_within,
    lookup,
    nearest,
    nest,
    nesting_order,
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


def columns(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([start for start, _ in spans], np.int64), np.array([end for _, end in spans], np.int64)


SLICES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=14)


@given(SLICES)
def test_events_come_by_start_longest_first_and_equal_ones_keep_their_order(spans):
    wanted = sorted(range(len(spans)), key=lambda at: (spans[at][0], -spans[at][1]))
    assert nesting_order(*columns(spans)).tolist() == wanted


@given(SLICES, st.sampled_from([0, 2]))
def test_the_parent_is_the_innermost_running_event_that_lasts_long_enough(spans, slack):
    order, parents, ends = nest(*columns(spans), slack=slack)
    running: list[int] = []
    for at in order.tolist():
        start, end = spans[at]
        while running and (spans[running[-1]][1] <= start or spans[running[-1]][1] + slack < end):
            running.pop()
        assert parents[at] == (running[-1] if running else -1)
        running.append(at)
    assert ends.tolist() == [end for _, end in spans]


@given(SLICES)
def test_where_overlaps_are_cut_every_moment_has_one_innermost_event(spans):
    starts, ends = columns(spans)
    nesting = nest(starts, ends, slack=None)
    for at, parent in enumerate(nesting.parents.tolist()):
        if parent >= 0:
            assert starts[parent] <= starts[at] < nesting.ends[parent]
            assert nesting.ends[at] <= nesting.ends[parent]
        else:
            assert nesting.ends[at] == ends[at]
    alone = nesting.ends - starts
    inner = np.flatnonzero(nesting.parents >= 0)
    np.subtract.at(alone, nesting.parents[inner], (nesting.ends - starts)[inner])
    assert np.all(alone >= 0)
    assert alone.sum() == length(union(starts, nesting.ends))


@given(SLICES, st.lists(st.integers(-2, 45), max_size=8).map(sorted))
def test_the_innermost_event_at_a_moment_is_the_last_one_that_started_and_still_runs(spans, asked):
    starts, ends = columns(spans)
    nesting = nest(starts, ends)
    found = innermost_at(nesting, starts, asked).tolist()
    for moment, event in zip(asked, found, strict=True):
        running = [at for at in nesting.order.tolist() if starts[at] <= moment < ends[at]]
        assert event == (running[-1] if running else -1)


@given(SLICES, st.sampled_from([0, 2, 30]))
def test_own_times_with_exclusive_ends_add_up_to_the_union(spans, slack):
    starts, ends = columns(spans)
    nesting = nest(starts, ends, slack=slack)
    exclusive = exclusive_ends(nesting, starts)
    assert np.all((starts <= exclusive) & (exclusive <= ends))
    assert slack or length(union(starts, exclusive)) == length(union(starts, ends))
    own = exclusive - starts
    inner = np.flatnonzero(nesting.parents >= 0)
    np.subtract.at(own, nesting.parents[inner], (exclusive - starts)[inner])
    assert np.all(own >= 0)
    assert own.sum() == length(union(starts, exclusive))


@given(SLICES, st.integers(0, 1 << 14))
def test_the_nearest_marked_event_is_found_through_any_number_of_generations(spans, marks):
    starts, ends = columns(spans)
    parents = nest(starts, ends).parents
    marked = np.array([bool(marks >> at & 1) for at in range(len(spans))], bool)
    for at, found in enumerate(nearest(parents, marked).tolist()):
        around = at
        while around >= 0 and not marked[around]:
            around = int(parents[around])
        assert found == around


@given(SPANS, SPANS)
def test_the_length_within_a_span_counts_the_moments_in_both(spans, asked):
    of, asked = make(spans), [(min(span), max(span)) for span in asked]
    starts, ends = (np.array([span[end] for span in asked], np.int64) for end in (0, 1))
    expected = [len(moments(of) & naive([span])) for span in asked]
    assert length_within(of, starts, ends).tolist() == expected


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 9)), st.lists(st.integers(-1, 21)))
def test_a_key_that_is_not_there_has_no_value(known, wanted):
    keys = np.array(sorted(known), np.int64)
    values = np.array([known[key] for key in keys.tolist()], np.int64)
    assert lookup(keys, values, np.array(wanted, np.int64)).tolist() == [known.get(key, -1) for key in wanted]
