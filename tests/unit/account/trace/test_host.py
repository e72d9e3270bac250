"""Operators on the host, from traces written for the test."""

from __future__ import annotations

import pytest

from kineto import Made, event_fields, write_trace
from lightning_memprof.account.trace.operators import TableOptions, operator_table
from lightning_memprof.account.trace.report import trace_report


@pytest.mark.parametrize("zero", [0, 5, 50, 95, 100])
@pytest.mark.parametrize("child", [(0, 90), (5, 95), (10, 100)])
def test_a_child_without_length_takes_no_self_time_in_report_table_and_ledger(zero, child, tmp_path):
    made = [Made("parent", 0, 100), Made("zero", zero, zero), Made("child", child[0], child[1])]
    path = write_trace(tmp_path / "zero.pt.trace.json", [event_fields(event) for event in made])
    report = trace_report(path)
    wanted = {"parent": 10_000, "child": 90_000}
    assert {row.name: row.self_ns for row in report.operators if row.self_ns} == wanted
    assert report.host_ledger is not None
    assert {line.operator: line.ns for line in report.host_ledger.lines if line.ns} == wanted
    table = {
        row.split()[0]: row.split()[2] for row in operator_table([path], TableOptions()).splitlines() if "us" in row
    }
    assert (table["parent"], table["child"]) == ("10.000us", "90.000us")
