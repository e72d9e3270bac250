"""Batches of few samples, and of gradients that are accumulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from findings import phases, recovery
from kineto import write_trace
from lightning_memprof.account.ledger.memory import ByteLedger, ByteLine
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.load import load_run

FORWARD = "[pl][profile][Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[pl][profile][Strategy]SingleDeviceStrategy.backward"


def of_traced(tmp_path: Path, fake: FakeRun) -> dict[str, Finding]:
    """The findings of a run with a trace of two operators of forward and backward."""
    events = [("ProfilerStep#2", 0, 3000), (FORWARD, 0, 1000), ("aten::mm", 0, 900), (BACKWARD, 1000, 3000)]
    trace = trace_report(write_trace(tmp_path / "made.json", [
        {"ph": "X", "cat": "user_annotation" if name.startswith("Prof") else "cpu_op", "name": name, "pid": 9, "tid": 9,
         "ts": start, "dur": end - start, "args": {}}
        for name, start, end in (*events, ("aten::mm", 1000, 2900))
    ]))  # fmt: skip
    run = load_run(make_run(tmp_path / "log", fake))
    return {finding.rule: finding for finding in examine(Facts.of(run, (trace,)))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "positions", "is_found"), [(2, 0, True), (8, 0, True), (9, 0, False), (2, 99, False)]
)
def test_a_small_batch_is_found_where_the_optimizer_takes_much_of_the_step(
    tmp_path: Path, samples: int, positions: int, is_found: bool
) -> None:
    fake = FakeRun(phases=phases(optimizer=20_000_000), samples=samples, padding=(positions, 0, 0))
    assert ("small_batch" in of_traced(tmp_path, fake)) == is_found


def test_a_small_batch_of_long_operators_is_no_overhead(tmp_path: Path) -> None:
    assert "small_batch" not in of_traced(tmp_path, FakeRun(samples=2, padding=(0, 0, 0)))


def test_a_larger_batch_recovers_half_of_the_fixed_work_or_more(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(optimizer=20_000_000), samples=2, padding=(0, 0, 0))
    finding = of_traced(tmp_path, fake)["small_batch"]
    fixed = finding.numbers["ns"]
    # The optimizer, the callback, and 10 µs for each of two operators and for the Python around them.
    assert fixed == pytest.approx(20_000_000 + HEALTHY["callbacks"] + HEALTHY["other"] + 20_000, rel=0.01)
    assert (recovery(finding).min, recovery(finding).max) == (fixed / 2, fixed * 7 / 8)
    assert "DataLoader(batch_size=16)" in finding.next_steps[0]


@pytest.mark.parametrize(("calls", "is_found"), [(8, False), (200, True)])
def test_calls_that_compute_little_take_as_long_for_a_larger_batch(tmp_path: Path, calls: int, is_found: bool) -> None:
    lines = tuple(
        TimeLine(part=Part.BACKWARD, module=f"layers.{number}", operator="aten::mm", ns=10e6 / calls, count=1)
        for number in range(calls)
    )
    fake = FakeRun(samples=2, padding=(0, 0, 0))
    host = TimeLedger(step_ns=10e6, median_ns=10e6, steps=2, basis="", lines=lines)
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), host_ledger=host)
    findings = examine(Facts.of(load_run(make_run(tmp_path, fake)), (trace,)))
    found = {finding.rule: finding for finding in findings}
    assert ("small_batch" in found) == is_found
    if is_found:
        assert found["small_batch"].numbers["ns"] == pytest.approx(10e6 + 2.8e6, rel=0.2)


@pytest.mark.parametrize(
    ("filled", "next_step"),
    [
        (0.1, "DataLoader(batch_size=16), Trainer(accumulate_grad_batches=1)"),
        (0.6, "DataLoader(batch_size=4), Trainer(accumulate_grad_batches=4)"),
        (0.69, None),
    ],
)
def test_accumulated_batches_of_few_samples_are_one_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: float, next_step: str | None
) -> None:
    # Each batch of activations is 1% of the memory, and its temporary tensors another.
    lines = (ByteLine(category="activation", bytes=1), ByteLine(category="parameter", bytes=round(100 * filled) - 1))
    ledger = ByteLedger(peak_bytes=round(100 * filled), basis="", place="host", lines=lines, limit_bytes=100)
    monkeypatch.setattr(Facts, "byte_ledgers", {0: ledger})
    training = {"accumulate_grad_batches": 16}
    fake = FakeRun(phases=phases(other=20_000_000), samples=1, padding=(25, 0, 0), training=training)
    found = of_traced(tmp_path, fake)
    if next_step is None:
        assert "small_batch" not in found
        return
    finding = found["small_batch"]
    assert next_step in finding.next_steps[0]
    assert "Gradients of 16 batches accumulate;" in finding.why
    joined = finding.numbers["joined"]
    assert recovery(finding).max == pytest.approx(finding.numbers["ns"] * (1 - 1 / joined))
    # All of them share the optimizer's step.
    assert finding.numbers["ns"] < 20_000_000 + HEALTHY["callbacks"] + 100_000
