from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lightning_memprof.units import nanoseconds


@given(st.integers(-(2**43) * 1000, 2**43 * 1000))
@example(4_401_107_885_470_229)  # 51 days after the time from which torch counts: times 1000 it is another nanosecond
def test_microseconds_with_three_decimals_keep_each_nanosecond(ns: int) -> None:
    text = f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
    assert nanoseconds(float(text)) == ns
