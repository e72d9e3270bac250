from __future__ import annotations

from pathlib import Path

import pytest

from fake_runs import HEALTHY, FakeRun
from passes import BUSY, calls, event, found


@pytest.mark.parametrize(("times", "is_found"), [(4, False), (18, True)])
def test_a_forward_that_calls_an_operator_many_times_is_a_python_loop(
    tmp_path: Path, times: int, is_found: bool
) -> None:
    findings = found(tmp_path, *calls("attention", "aten::bmm", times))
    assert ("hot_line" in findings) == is_found
    if is_found:
        assert "attention runs aten::bmm 18 times in each forward" in findings["hot_line"].title
        assert "Vectorize the loop in the forward of attention" in findings["hot_line"].next_steps[0]


def test_operators_that_an_operator_calls_are_no_loop(tmp_path: Path) -> None:
    module, *inside = calls("rnn", "aten::addmm", 18)
    findings = found(tmp_path, module, event("aten::lstm", 5, 1900), *inside)
    assert "hot_line" not in findings


def test_views_are_no_loop(tmp_path: Path) -> None:
    assert "hot_line" not in found(tmp_path, *calls("split", "aten::slice", 18))


def test_a_submodule_that_runs_many_times_in_each_forward_is_a_loop(tmp_path: Path) -> None:
    cells = [
        made
        for at in range(18)
        for made in (
            event("[pl][module]Cell: net.cell", 10 + 100 * at, 100 + 100 * at),
            event("aten::addmm", 11 + 100 * at, 99 + 100 * at),
        )
    ]
    sentence = found(tmp_path, event("[pl][module]Net: net", 0, 1900), *cells)["hot_line"].title
    assert "net runs net.cell 18 times" in sentence


def test_long_calls_are_no_loop(tmp_path: Path) -> None:
    assert "hot_line" in found(tmp_path / "short", *calls("net", "aten::bmm", 8, each=BUSY))
    assert "hot_line" not in found(tmp_path / "long", *calls("net", "aten::bmm", 8, each=1000))


# The step is three times as long as its trace.
@pytest.mark.parametrize(("each", "work"), [(25, 0), (BUSY, BUSY / (BUSY + 10))], ids=["mostly dispatch", "computes"])
def test_a_loop_recovers_up_to_all_of_its_shortest_calls_and_a_part_of_those_that_compute(
    tmp_path: Path, each: float, work: float
) -> None:
    _, *looped = calls("net", "aten::bmm", 18, each=each)
    finding = found(tmp_path, event("[pl][module]Net: net", 10, 10 + 18 * (each + 10)), *looped)["hot_line"]
    worth, loop = finding.recovers, finding.numbers["ns"]
    assert worth is not None
    assert worth.min == pytest.approx(0.2 * loop)
    assert worth.max == pytest.approx(loop * (1 - 0.3 * work), rel=0.01)


def test_what_runs_beside_a_loop_is_not_in_it(tmp_path: Path) -> None:
    module, (_, *looped) = event("[pl][module]Net: net", 0, 1900), calls("net", "aten::mul", 8)
    alone = found(tmp_path / "alone", module, *looped)["hot_line"].numbers["ns"]
    both = found(tmp_path / "both", module, *looped, event("aten::mm", 1000, 1800))["hot_line"].numbers["ns"]
    python = 1900 - 8 * BUSY - 800
    assert both / alone == pytest.approx((8 * BUSY + python * 8 / 9) / 1900, rel=0.02)


def test_a_loop_outside_of_submodules_has_the_line_with_most_of_the_forward(tmp_path: Path) -> None:
    line = {"functions": ["Net.training_step", "Net.penalty"], "place": "net.py:9", "source": "p.pow(2)", "looks": 40}
    _, *looped = calls("net", "aten::pow", 18)
    module = event("[pl][module]Net: net", 1900, 1990)
    finding = found(tmp_path, module, *looped, lines=[{**line, "ns": 1_000_000}])["hot_line"]
    assert "Net.penalty (net.py:9)" in finding.why
    assert finding.owner == "Net.penalty"
    assert "Vectorize the loop in Net.penalty:" in finding.next_steps[0]


def test_modules_whose_own_time_is_below_the_cost_of_recording_are_no_loop(tmp_path: Path) -> None:
    layers = [
        made
        for at in range(20)
        for made in (
            event(f"[pl][module]Net: blocks.{at}.reduce", 90 * at, 90 * at + 80),
            event("aten::linear", 90 * at + 1, 90 * at + 79),
        )
    ]
    fake = FakeRun(phases=lambda _rank, _step: {**dict.fromkeys(HEALTHY, 0), "forward": 1_000_000})
    assert "hot_line" not in found(tmp_path, *layers, fake=fake)


def test_python_outside_operators_is_found_with_its_module(tmp_path: Path) -> None:
    finding = found(tmp_path, *calls("tokenizer", "aten::add", 12, each=1))
    assert "Python code in training_step" in finding["hot_line"].title
    assert finding["hot_line"].recovers is not None
    slow = [event("[pl][module]Net: tokenizer", 0, 1990), *calls("tokenizer", "aten::add", 12, each=1)[1:]]
    assert "the forward of tokenizer" in found(tmp_path / "module", *slow)["hot_line"].title


@pytest.mark.parametrize(("times", "reads"), [(100, 0), (300, 300)])
def test_values_that_are_read_one_by_one_are_named_with_their_number(tmp_path: Path, times: int, reads: int) -> None:
    values = [
        made
        for at in range(times)
        for made in (
            event("aten::item", 10 + 5 * at, 12 + 5 * at),
            event("aten::_local_scalar_dense", 11 + 5 * at, 11.5 + 5 * at),
        )
    ]
    finding = found(tmp_path, *values)["hot_line"]
    assert finding.numbers["reads"] == reads
    assert ("Scalar loop: training_step reads 300 values one by one" in finding.title) == (times == 300)
    assert (finding.remedies[0].id == "whole_tensors") == (times == 300)


def test_a_forward_hook_is_named_with_its_line_and_its_modules_are_not_accused(tmp_path: Path) -> None:
    hooked = [event("[pl][forward_hook]look (train.py:7)", 100 * at, 100 * at + 60) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *hooked)
    hook = findings["registered_hook_bound"]
    assert hook.title.startswith("The forward hook look (train.py:7) takes ")
    assert "18 calls per step" in hook.why
    assert "Remove the hook look (train.py:7)" in hook.next_steps[0]
    assert "hot_line" not in findings


def test_self_log_in_the_training_step_is_logging_and_not_python_of_the_model(tmp_path: Path) -> None:
    logs = [event("[pl][profile][LightningModule]Net.log", 100 * at, 100 * at + 80) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *logs)
    assert "18 calls per step" in findings["logging_bound"].why
    assert "hot_line" not in findings
