from __future__ import annotations

from pathlib import Path

import pytest

from passes import BUSY, calls, event, found


@pytest.mark.parametrize(("times", "is_found"), [(4, False), (18, True)])
def test_a_forward_that_calls_an_operator_many_times_is_a_python_loop(
    tmp_path: Path, times: int, is_found: bool
) -> None:
    findings = found(tmp_path, *calls("attention", "aten::bmm", times))
    assert ("python_loop" in findings) == is_found
    if is_found:
        assert "attention runs aten::bmm 18 times in each forward" in findings["python_loop"].title
        assert "Vectorize the loop in the forward of attention" in findings["python_loop"].next_steps[0]


def test_operators_that_an_operator_calls_are_no_loop(tmp_path: Path) -> None:
    module, *inside = calls("rnn", "aten::addmm", 18)
    findings = found(tmp_path, module, event("aten::lstm", 5, 1900), *inside)
    assert "python_loop" not in findings


def test_views_are_no_loop(tmp_path: Path) -> None:
    assert "python_loop" not in found(tmp_path, *calls("split", "aten::slice", 18))


def test_a_submodule_that_runs_many_times_in_each_forward_is_a_loop(tmp_path: Path) -> None:
    cells = [
        made
        for at in range(18)
        for made in (
            event("[pl][module]Cell: net.cell", 10 + 100 * at, 100 + 100 * at),
            event("aten::addmm", 11 + 100 * at, 99 + 100 * at),
        )
    ]
    sentence = found(tmp_path, event("[pl][module]Net: net", 0, 1900), *cells)["python_loop"].title
    assert "net runs net.cell 18 times" in sentence


def test_long_calls_are_no_loop(tmp_path: Path) -> None:
    assert "python_loop" in found(tmp_path / "short", *calls("net", "aten::bmm", 8, each=BUSY))
    assert "python_loop" not in found(tmp_path / "long", *calls("net", "aten::bmm", 8, each=1000))


# The step is three times as long as its trace.
@pytest.mark.parametrize(("each", "work"), [(25, 0), (BUSY, BUSY / (BUSY + 10))], ids=["mostly dispatch", "computes"])
def test_a_loop_recovers_up_to_all_of_its_shortest_calls_and_a_part_of_those_that_compute(
    tmp_path: Path, each: float, work: float
) -> None:
    _, *looped = calls("net", "aten::bmm", 18, each=each)
    finding = found(tmp_path, event("[pl][module]Net: net", 10, 10 + 18 * (each + 10)), *looped)["python_loop"]
    worth, loop = finding.recovers, finding.numbers["loop_ns"]
    assert worth is not None
    assert worth.min == pytest.approx(0.2 * loop)
    assert worth.max == pytest.approx(loop * (1 - 0.3 * work), rel=0.01)


def test_what_runs_beside_a_loop_is_not_in_it(tmp_path: Path) -> None:
    module, (_, *looped) = event("[pl][module]Net: net", 0, 1900), calls("net", "aten::mul", 8)
    alone = found(tmp_path / "alone", module, *looped)["python_loop"].numbers["loop_ns"]
    both = found(tmp_path / "both", module, *looped, event("aten::mm", 1000, 1800))["python_loop"].numbers["loop_ns"]
    python = 1900 - 8 * BUSY - 800
    assert both / alone == pytest.approx((8 * BUSY + python * 8 / 9) / 1900, rel=0.02)


def test_a_loop_outside_of_submodules_has_the_line_with_most_of_the_forward(tmp_path: Path) -> None:
    line = {"functions": ["Net.training_step", "Net.penalty"], "place": "net.py:9", "source": "p.pow(2)", "looks": 40}
    _, *looped = calls("net", "aten::pow", 18)
    module = event("[pl][module]Net: net", 1900, 1990)
    finding = found(tmp_path, module, *looped, lines=[{**line, "ns": 1_000_000}])["python_loop"]
    assert "Net.penalty (net.py:9)" in finding.why
    assert finding.owner == "Net.penalty"
    assert "Vectorize the loop in Net.penalty:" in finding.next_steps[0]
