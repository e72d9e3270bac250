from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_memprof.units import AT_ONCE_US, format_count, format_list, nanoseconds, printable, quoted, sentence


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


ODD_NAMES = [
    "a\nb",
    "-dash",
    "~",
    "it's",
    "a\x1b[31m\\b'",
    "ü\r",
    "\udcff",
    "[lr=0.1]{x}*?'\"\\$HOME#%41&;`ü",
    "x%d{}y",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_quoted_name_is_one_printable_line_that_a_shell_reads_back(name: str) -> None:
    argument = quoted(name)
    assert argument.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {argument}"], check=True, capture_output=True)
    assert os.path.normpath(os.fsdecode(done.stdout)) == name


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_printable_text_is_the_same_but_for_control_characters(name: str) -> None:
    assert printable(name).isprintable()
    assert (printable(name) == name) is name.isprintable()


@pytest.mark.parametrize(("clauses", "text"), [(("it waits", "", "3 calls"), "It waits; 3 calls."), (("",), "")])
def test_clauses_make_one_sentence(clauses: tuple[str, ...], text: str) -> None:
    assert sentence(*clauses) == text
