from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_memprof.units import AT_ONCE_US, format_count, format_list, nanoseconds


@given(st.integers(-(2**43) * 1000, 2**43 * 1000))
@example(4_401_107_885_470_229)  # 51 days after the time from which torch counts: times 1000 it is another nanosecond
def test_microseconds_with_three_decimals_keep_each_nanosecond(ns: int) -> None:
    text = f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
    assert nanoseconds(float(text)) == ns


@given(st.integers(-int(AT_ONCE_US) * 1000 + 1, int(AT_ONCE_US) * 1000 - 1))
@example(int(AT_ONCE_US) * 1000 - 1)
def test_below_its_bound_a_time_may_be_multiplied_at_once(ns: int) -> None:
    assert round(ns / 1000 * 1000) == nanoseconds(ns / 1000) == ns


def test_a_long_list_is_cut_and_counted() -> None:
    assert format_list([1, 2], 2) == "1, 2"
    assert format_list([1, 2, 3], 2) == "1, 2 and 1 more"


def test_one_of_something_has_no_s() -> None:
    assert [format_count(number, "event") for number in (0, 1, 12_345)] == ["0 events", "1 event", "12,345 events"]
