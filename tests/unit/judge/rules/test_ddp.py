"""Needless traffic of DistributedDataParallel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from kineto import write_trace
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

BUFFERS = [{"name": "bank", "bytes": 32 * MIB}, {"name": "places", "bytes": 8}]


STATISTICS = [{"name": f"norm.running_{name}", "bytes": 32 * MIB} for name in ("mean", "var")]


@pytest.mark.parametrize(
    ("strategy", "buffers", "place", "is_found"),
    [
        ("DDPStrategy", BUFFERS, 100, True),
        ("DDPStrategy", [], 100, False),
        # Those that training changes have to be sent; a few bytes are sent while a rank waits for the last one.
        ("DDPStrategy", STATISTICS, 100, False),
        ("DDPStrategy", BUFFERS[1:], 100, False),
        # A broadcast of the program, and one in backward.
        ("SingleDeviceStrategy", BUFFERS, 100, False),
        ("DDPStrategy", BUFFERS, 2100, False),
    ],
)
def test_buffers_that_are_broadcast_before_each_forward_are_named(
    tmp_path: Path, strategy: str, buffers: list[dict[str, object]], place: float, is_found: bool
) -> None:
    events = [
        ("user_annotation", "ProfilerStep#2", 0, 4000, 9),
        ("cpu_op", "[pl][profile][Strategy]DDPStrategy.training_step", 0, 2000, 9),
        ("cpu_op", "[pl][profile][Strategy]DDPStrategy.backward", 2000, 4000, 9),
        ("cpu_op", "c10d::broadcast_", place, place + 10, 9),
        ("user_annotation", "gloo:broadcast", place, place + 800, 10),
        ("cpu_op", "aten::mm", 1000, 1990, 9),
        ("cpu_op", "aten::mm", 3000, 3990, 9),
    ]
    rows = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 9,
            "tid": tid,
            "ts": 5 * start,
            "dur": 5 * (end - start),
            "args": {},
        }
        for cat, name, start, end, tid in events
    ]
    trace = trace_report(write_trace(tmp_path / "made.json", rows))
    directory = make_run(tmp_path / "log", FakeRun(training={"largest_buffers": buffers}))
    manifest = directory / "manifest.rank00000.jsonl"
    run_row, *others = manifest.read_text().splitlines()
    manifest.write_text("\n".join([json.dumps({**json.loads(run_row), "strategy": strategy}), *others]) + "\n")
    findings = {finding.rule: finding for finding in examine(Facts.of(load_run(directory), (trace,)))}
    assert ("buffer_broadcast" in findings) == is_found
    if is_found:
        found = findings["buffer_broadcast"]
        assert "buffer bank " in found.title
        assert "32.0 MiB" in found.why
        assert [remedy.id for remedy in found.remedies] == ["own_buffers", "plain_attribute"]
        # The wait is the strategy's, not Python of the program.
        assert "hot_line" not in findings
