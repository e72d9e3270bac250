from __future__ import annotations

import pytest
from rich.cells import cell_len

from lightning_memprof.report.document import Cell, Column, Table
from lightning_memprof.report.printers.layout import (
    Line,
    bar,
    cut,
    hang,
    sparkline,
    table_lines,
    text_width,
    tops,
    wrap,
)
from lightning_memprof.units import MIB


def shown(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in lines]


MODULES = Table(
    id="t",
    title="",
    columns=(
        Column("module", "code"),
        Column("self", "bytes"),
        Column("total", "bytes", priority=1),
        Column("count", "count", priority=2),
    ),
    rows=[(Cell("net.head", "code"), Cell(MIB, "bytes"), Cell(2 * MIB, "bytes", 4 * MIB), Cell(3, "count"))],
)


def test_a_narrow_table_drops_the_columns_of_the_highest_priority_first() -> None:
    assert [line.split() for line in shown(table_lines(MODULES, 40))] == [
        ["module", "self", "total", "count"],
        ["net.head", "1.00", "MiB", "2.00", "MiB", "3"],
    ]
    assert shown(table_lines(MODULES, 32))[0].split() == ["module", "self", "total"]
    assert shown(table_lines(MODULES, 22))[0].split() == ["module", "self"]


def test_a_wide_table_has_a_bar_behind_its_rows() -> None:
    assert shown(table_lines(MODULES, 60))[1].endswith("3  █████")


def test_columns_that_must_stay_are_repeated_below_with_the_first_one() -> None:
    columns = (Column("phase"), *(Column(f"step {step}", "bytes") for step in range(4)))
    table = Table(id="t", title="", columns=columns, rows=[(Cell("forward"), *[Cell(MIB, "bytes")] * 4)])
    heads = [line.split() for line in shown(table_lines(table, 32)) if "phase" in line]
    assert heads == [["phase", "step", "0", "step", "1"], ["phase", "step", "2", "step", "3"]]


def test_a_name_takes_two_lines_and_breaks_behind_a_separator() -> None:
    columns = (Column("owner", "code"), Column("share", "bytes"))
    rows = [
        (Cell("model.blocks.0-5.feed_forward.2", "code"), Cell(MIB, "bytes")),
        (Cell("a" * 25, "code"), Cell(MIB, "bytes")),
    ]
    lines = shown(table_lines(Table(id="t", title="", columns=columns, rows=rows), 32))
    assert lines[1:] == [
        "  model.blocks.0-5.     1.00 MiB",
        "  feed_forward.2",
        f"  {'a' * 20}  1.00 MiB",
        f"  {'a' * 5}",
    ]


def test_names_are_cut_at_the_front_and_sentences_wrapped() -> None:
    columns = (Column("name", "code"), Column("bytes", "bytes"), Column("reason"))
    row = (Cell("x" * 70 + ".end", "code"), Cell(MIB, "bytes"), Cell("a sentence of several words that is long"))
    lines = shown(table_lines(Table(id="t", title="", columns=columns, rows=[row]), 36))
    assert lines[1].split()[0].startswith("…")
    assert lines[2].split()[0].endswith(".end")
    assert len(lines) > 2
    assert max(map(len, lines)) <= 36


def test_of_many_rows_the_first_are_shown_and_the_others_counted() -> None:
    rows = [(Cell(f"m{index}", "code"), Cell(index, "bytes")) for index in range(30)]
    table = Table(id="t", title="", columns=(Column("module", "code"), Column("self", "bytes")), rows=rows)
    lines = shown(table_lines(table, 40))
    assert len(lines) == 1 + 10 + 1
    assert lines[-1] == "  20 more"


def test_one_line_above_the_sums_counts_all_rows_that_are_not_shown() -> None:
    rows = [(Cell(f"m{index}", "code"), Cell(index, "bytes")) for index in range(30)]
    columns = (Column("module", "code"), Column("self", "bytes"))
    table = Table("t", "", columns, rows, footer=[(Cell("sum"), Cell(MIB, "bytes"))], left_out=5)
    lines = shown(table_lines(table, 40))
    assert lines[-2:] == ["  25 more: --format json", "  sum     1.00 MiB"]


def test_a_table_without_rows_is_its_head() -> None:
    table = Table(id="t", title="", columns=(Column("event"), Column("self", "ns")), rows=[], is_sortable=False)
    assert shown(table_lines(table, 80)) == ["  event"]


def test_a_bar_is_never_longer_than_its_place_nor_empty_for_something() -> None:
    assert bar(1, 4) == "████"
    assert bar(2, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(0, 4) == bar(-1, 4) == ""
    assert bar(1e-9, 4) == "▏"


def test_a_curve_goes_from_zero_to_its_largest_value() -> None:
    assert sparkline([0, 50, 100], 9) == "▁▄█"
    assert sparkline([0, 50, 100, -5], 9) == "▁▄█▁"
    assert sparkline([0, 0], 9) == "▁▁"
    assert sparkline([], 9) == ""


def test_values_that_share_a_place_keep_the_largest() -> None:
    assert tops([1, 9, 2, 3], 2) == [9, 3]
    assert tops([1, 2], 5) == [1, 2]
    assert tops([], 5) == []


def test_texts_that_are_too_long_are_cut() -> None:
    assert cut("model.layers.0", 8, front=True) == "…ayers.0"
    assert cut("model.layers.0", 8) == "model.l…"
    assert cut("short", 8) == "short"
    assert (cut("long", 1), cut("long", 0)) == ("…", "")


def test_a_number_keeps_its_unit() -> None:
    assert wrap("about as much as 14.8 MiB more", 20) == ["about as much as", "14.8 MiB more"]


def test_a_word_that_is_longer_than_a_line_is_broken() -> None:
    assert wrap("a" * 7 + " b", 3) == ["aaa", "aaa", "a b"]
    assert wrap("", 3) == [""]


def test_a_label_stands_before_its_text_or_above_it_where_there_is_no_room() -> None:
    assert shown(hang("why", "one two three", 18, 10)) == ["why       one two", "          three"]
    assert shown(hang("why", "one two", 9, 10)) == ["why", "one two"]


@pytest.mark.parametrize("words", ["plain", "größe", "名前", "e\u0301"])
def test_widths_are_those_of_a_terminal(words: str) -> None:
    assert text_width(words) == cell_len(words)
