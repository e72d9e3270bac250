from __future__ import annotations

import json
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.errors import ConfigError
from lightning_memprof.testing.budgets import (
    Budget,
    budget_of,
    excesses,
    read_baseline,
    reductions,
    write_baseline,
)
from lightning_memprof.testing.figures import Figures
from lightning_memprof.units import KIB, MIB


def figures(**values: int) -> Figures:
    return Figures(values=values, made_with="torch 2.13.0 on cpu")


def test_a_size_has_a_unit_or_is_a_number_of_bytes():
    for value in ("1.5 MiB", "1536kib", 1_572_864):
        assert budget_of([{"peak": value}], Path()).limits == {"peak": 1_572_864}


@given(st.one_of(st.text(st.characters(exclude_categories=["Nd"])), st.floats(), st.booleans(), st.integers(-9, -1)))
def test_what_is_no_size_is_refused_in_one_line_that_names_the_argument(value):
    with pytest.raises(ConfigError) as error:
        budget_of([{"peak": value}], Path())
    assert str(error.value).startswith("peak")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": "600"}, "peak '600': must be a positive number and a unit, as in 24GiB or 16GB"),
        ({"peak": 0.5}, "peak=0.5: must be a size, as in peak='600 MiB'"),
        ({"peek": 1}, "peek=1: unknown quantity; did you mean peak?"),
        ({"operators": "2 MiB"}, "operators='2 MiB': must be a count, an integer of at least 0"),
        ({"operators": True}, "operators=True: must be a count, an integer of at least 0"),
        ({"tolerance": "1%"}, "tolerance='1%': applies to a baseline; add baseline='tests/baselines/gpt.json'"),
        ({"baseline": "a.json", "tolerance": 0.01}, "tolerance=0.01: must be a percentage, as in tolerance='1%'"),
        ({"baseline": "a.json", "tolerance": "-1%"}, "tolerance='-1%': must not be negative"),
        ({"baseline": 3}, "baseline=3: must be the path of a JSON file"),
    ],
)
def test_an_invalid_argument_is_refused_with_the_way_out(arguments, message):
    with pytest.raises(ConfigError) as error:
        budget_of([arguments], Path("/root"))
    assert str(error.value) == message


def test_an_unknown_quantity_that_resembles_none_lists_all():
    with pytest.raises(ConfigError, match=r"unknown quantity; use peak, saved_activations, .*, baseline or tolerance"):
        budget_of([{"zzz": 1}], Path())


def test_several_marks_add_up_and_the_nearest_one_decides():
    budget = budget_of([{"peak": "1 KiB"}, {"peak": 5, "operators": 7, "baseline": "b.json"}], Path("/root"))
    assert budget == Budget(limits={"peak": KIB, "operators": 7}, baseline=Path("/root/b.json"))


def test_a_value_at_its_limit_passes_and_one_more_fails():
    budget = Budget(limits={"peak": MIB, "operators": 3})
    assert excesses(budget, [figures(peak=MIB, operators=3)], None) == []
    assert excesses(budget, [figures(peak=MIB + 1, operators=4)], None) == [
        "peak 1.00 MiB is 1 B (0.0%) over the budget of 1.00 MiB",
        "operators 4 is 1 (33.3%) over the budget of 3",
    ]


@given(st.integers(0, 10**13))
def test_a_baseline_without_a_tolerance_is_exact(size):
    budget, before = Budget(baseline=Path("b.json")), [figures(peak=size)]
    assert excesses(budget, [figures(peak=size)], before) == []
    assert len(excesses(budget, [figures(peak=size + 1)], before)) == 1


@given(st.integers(100, 10**13), st.integers(1, 100))
def test_a_tolerance_is_allowed_to_the_byte(size, percent):
    budget, before = Budget(baseline=Path("b.json"), tolerance=Fraction(percent, 100)), [figures(peak=size)]
    most = size * (100 + percent) // 100
    assert excesses(budget, [figures(peak=most)], before) == []
    assert len(excesses(budget, [figures(peak=most + 1)], before)) == 1


def test_growth_is_shown_by_module_largest_first_and_with_another_torch():
    before = Figures(
        values={"peak": 10, "saved_activations": 6},
        parts={"peak": {"activations": 6, "parameters": 4}, "saved_activations": {"net.0": 2, "net.1": 4}},
        made_with="torch 2.12.0 on cpu",
    )
    after = Figures(
        values={"peak": 17, "saved_activations": 13},
        parts={"peak": {"activations": 13, "parameters": 4}, "saved_activations": {"net.0": 4, "net.1": 8, "net.2": 1}},
        made_with="torch 2.13.0 on cpu",
    )
    peak, saved = excesses(Budget(baseline=Path("b.json")), [after], [before])
    assert peak.splitlines() == [
        "peak 17 B is 7 B (70.0%) over its baseline of 10 B",
        "  activations: +7 B (6 B to 13 B)",
        "  saved_activations:",
        "  net.1: +4 B (4 B to 8 B)",
        "  net.0: +2 B (2 B to 4 B)",
        "  net.2: +1 B (0 B to 1 B)",
        "  the baseline is from torch 2.12.0 on cpu, this is torch 2.13.0 on cpu",
    ]
    assert saved.splitlines()[1] == "  net.1: +4 B (4 B to 8 B)"


def test_without_a_baseline_the_largest_parts_are_shown():
    parts = {"operators": {f"aten::op{n}": n for n in range(9, 0, -1)}}
    (text,) = excesses(Budget(limits={"operators": 44}), [Figures(values={"operators": 45}, parts=parts)], None)
    assert text.splitlines()[1:] == [*(f"  aten::op{n}: {n}" for n in range(9, 4, -1)), "  and 4 more"]


def test_a_long_name_of_a_kernel_is_cut():
    parts = {"kernels": {"at::native::" + "x" * 3000: 2}}
    (text,) = excesses(Budget(limits={"kernels": 1}), [Figures(values={"kernels": 2}, parts=parts)], None)
    assert text.splitlines()[1] == "  at::native::" + "x" * 88 + "...: 2"


def test_a_quantity_that_was_not_measured_fails_with_its_reason():
    missing = Figures(values={}, missing={"kernels": "the training ran without an accelerator"})
    assert excesses(Budget(limits={"kernels": 5}), [missing], None) == [
        "kernels was not measured: the training ran without an accelerator"
    ]


def test_each_training_has_the_whole_budget():
    found = excesses(Budget(limits={"syncs": 0}), [figures(syncs=0), figures(syncs=2)], None)
    assert found == ["training 2 of 2: syncs 2 is 2 over the budget of 0"]


def test_another_number_of_trainings_than_in_the_baseline_fails():
    found = excesses(Budget(baseline=Path("b.json")), [figures(peak=1), figures(peak=9)], [figures(peak=1)])
    assert found == ["the test has 2 trainings, its baseline 1: pytest --memprof-update writes a new one"]


def test_reductions_are_named():
    assert reductions([figures(peak=KIB, syncs=3)], [figures(peak=3 * KIB, syncs=3)]) == ["peak -2.00 KiB"]


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "b.json"
    given = Figures(values={"peak": 3}, parts={"peak": {"inputs": 3}}, missing={"kernels": "no"}, made_with="torch")
    write_baseline(path, "test_a.py::test_b", [given, given])
    write_baseline(path, "test_a.py::test_c", [figures(peak=1)])
    assert read_baseline(path, "test_a.py::test_b") == [given, given]
    assert list(json.loads(path.read_text())["tests"]) == ["test_a.py::test_b", "test_a.py::test_c"]
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


def test_processes_that_write_one_baseline_at_once_lose_nothing(tmp_path):
    path = tmp_path / "b.json"
    threads = [threading.Thread(target=write_baseline, args=(path, f"t{n}", [figures(peak=n)])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: found[0]["values"]["peak"] for name, found in json.loads(path.read_text())["tests"].items()} == {
        f"t{n}": n for n in range(8)
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: pytest --memprof-update writes it"),
        ('{"version": 1, "tests": {}}', "does not have test_a: pytest --memprof-update writes it"),
        ("{", "cannot be read"),
        ('{"version": 1, "tests": {"test_a": 3}}', "cannot be read"),
        ('{"version": 9, "tests": {}}', "has version 9: this package reads version 1"),
    ],
)
def test_a_baseline_that_is_missing_or_damaged_is_named(tmp_path, content, message):
    path = tmp_path / "b.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_baseline(path, "test_a")
    assert str(error.value).startswith(f"baseline {path} {message}")
    assert "\n" not in str(error.value)
