"""Operators of a step on the host, from traces written for the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kineto import Made, event_fields, write_trace
from lightning_memprof.account.trace.lanes import read_lanes
from lightning_memprof.account.trace.model import HostOperators
from lightning_memprof.account.trace.operators import TableOptions, operator_table
from lightning_memprof.account.trace.report import trace_report


def range_of(name: str, start: int, end: int) -> Made:
    return Made(name, start, end, cat="user_annotation")


def step(number: int, start: int, end: int) -> Made:
    return range_of(f"ProfilerStep#{number}", start, end)


def found(directory: Path, *made: Made, **changes: Any) -> HostOperators | None:
    events = [event_fields(event) for event in made]
    return trace_report(write_trace(directory / "a.json", events, **changes)).host_operators


def one_step(number: int, at: int, interrupted_us: int = 0) -> list[Made]:
    """100 us, and what interrupts it: two additions, a product that takes 40 us, and a call in backward."""
    late = at + interrupted_us
    return [
        step(number, at, late + 100),
        range_of("[pl][profile][Strategy]SingleDeviceStrategy.training_step", at + 1, late + 70),
        range_of("[pl][module]torch.nn.modules.linear.Linear: net.0", at + 1, at + 9),
        Made("aten::add", at + 2, at + 6),
        Made("aten::add", late + 10, late + 15),
        Made("aten::linear", late + 20, late + 66),
        Made("aten::mm", late + 23, late + 63),
        range_of("[pl][profile][Strategy]SingleDeviceStrategy.backward", late + 70, late + 90),
        Made("autograd::engine::evaluate_function: AddBackward0", late + 80, late + 86),
        Made("AddBackward0", late + 82, late + 84),
    ]


def test_a_step_is_what_is_short_in_operators_and_between_them(tmp_path: Path) -> None:
    finding = found(tmp_path, *one_step(3, 1_000))
    assert finding == HostOperators(
        steps=1,
        step_ns=100_000,
        operators=4,
        median_ns=4_500,
        small_ns=(4 + 5 + 3 + 3 + 6) * 1000,
        between_ns=(2 + 4 + 5 + 14 + 14) * 1000,
        events=10,
        names=(("aten::add", 2), ("aten::linear", 1), ("AddBackward0", 1)),
        places=(
            ("SingleDeviceStrategy.training_step", 2),
            ("torch.nn.modules.linear.Linear: net.0", 1),
            ("SingleDeviceStrategy.backward", 1),
        ),
    )


def test_what_interrupts_one_of_several_steps_does_not_count(tmp_path: Path) -> None:
    alone = found(tmp_path, *one_step(3, 1_000))
    both = found(tmp_path, *one_step(3, 1_000, interrupted_us=5_000), *one_step(4, 7_000))
    assert alone is not None
    assert both is not None
    assert (both.steps, both.step_ns, both.between_ns) == (2, alone.step_ns, alone.between_ns)


def test_of_steps_that_differ_those_that_are_alike_count(tmp_path: Path) -> None:
    other = [step(2, 0, 500), Made("aten::sub", 10, 400)]
    finding = found(tmp_path, *other, *one_step(3, 1_000), *one_step(4, 7_000))
    assert finding is not None
    assert (finding.steps, finding.operators) == (2, 4)


def test_steps_that_lie_in_one_another_are_told_once(tmp_path: Path) -> None:
    finding = found(tmp_path, *(step(number, 1_000, 1_100) for number in range(50)), *one_step(3, 1_000))
    assert finding is not None
    assert (finding.steps, finding.operators) == (1, 4)


def test_operators_of_another_thread_and_between_the_steps_are_not_in_it(tmp_path: Path) -> None:
    others = [Made("aten::add", 1_002 + 5 * i, 1_004 + 5 * i, thread=8) for i in range(3)]
    finding = found(tmp_path, *one_step(3, 1_000), *others, Made("aten::add", 1_200, 1_210))
    assert finding is not None
    assert finding.operators == 4


def test_without_steps_without_operators_or_with_a_device_it_says_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, Made("aten::add", 0, 5)) is None
    assert found(tmp_path, step(3, 0, 100)) is None
    assert found(tmp_path, step(3, 0, 100), Made("aten::add", 200, 205)) is None
    assert found(tmp_path, step(3, 0, 100), Made("aten::add", 5, 5)) is None
    assert found(tmp_path, *one_step(3, 1_000), Made("add", 1_050, 1_060, cat="kernel", thread=20)) is None


@pytest.mark.parametrize("zero", [0, 5, 50, 95, 100])
@pytest.mark.parametrize("child", [(0, 90), (5, 95), (10, 100)])
def test_a_child_without_length_takes_no_self_time_in_report_export_table_and_ledger(zero, child, tmp_path):
    made = [Made("parent", 0, 100), Made("zero", zero, zero), Made("child", child[0], child[1])]
    path = write_trace(tmp_path / "zero.pt.trace.json", [event_fields(event) for event in made])
    report = trace_report(path)
    wanted = {"parent": 10_000, "child": 90_000}
    assert {row.name: row.self_ns for row in report.operators if row.self_ns} == wanted
    assert {stack[-1]: ns for stack, ns in read_lanes(path).self_times().items()} == wanted
    assert report.host_ledger is not None
    assert {line.operator: line.ns for line in report.host_ledger.lines if line.ns} == wanted
    table = {
        row.split()[0]: row.split()[2] for row in operator_table([path], TableOptions()).splitlines() if "us" in row
    }
    assert (table["parent"], table["child"]) == ("10.000us", "90.000us")
