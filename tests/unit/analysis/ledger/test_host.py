from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kineto import write_trace
from lightning_memprof.analysis.ledger.host import corrected
from lightning_memprof.analysis.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.analysis.trace.report import trace_report

HOST, AUTOGRAD = 1, 2
NODE = "autograd::engine::evaluate_function: "
FORWARD = "[pl][profile][Strategy]SingleDeviceStrategy.training_step"
BACKWARD = "[pl][profile][Strategy]SingleDeviceStrategy.backward"


def event(cat: str, name: str, start: float, end: float, tid: int = HOST, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": end - start, "args": args}


def step(start: float, end: float, number: int = 1) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def action(name: str, start: float, end: float) -> dict[str, Any]:
    return event("cpu_op", name, start, end)


def module(path: str, start: float, end: float) -> dict[str, Any]:
    return event("cpu_op", f"[pl][module]torch.nn.Linear: {path}", start, end)


def operator(
    name: str, start: float, end: float, tid: int = HOST, *, makes: int = -1, runs: int = -1
) -> dict[str, Any]:
    numbers = {"Sequence number": max(makes, runs), "Fwd thread id": int(runs >= 0)} if max(makes, runs) >= 0 else {}
    return event("cpu_op", name, start, end, tid, **numbers)


def ledger(directory: Path, *events: dict[str, Any]) -> TimeLedger:
    found = trace_report(write_trace(directory / "made.json", list(events))).host_ledger
    assert found is not None
    assert total(found.lines) == pytest.approx(found.step_ns)
    return found


def owners(found: TimeLedger) -> dict[tuple[str, str | None, str | None], float]:
    """Microseconds per step by part, module and operator."""
    return {(line.part, line.module, line.operator): line.ns / 1000 for line in found.lines if line.ns}


def test_an_instant_belongs_to_the_innermost_event(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 10, 60),
        module("net", 20, 50),
        operator("aten::linear", 25, 45),
        operator("aten::addmm", 30, 40),
    )
    assert owners(found) == {
        ("untracked", "", ""): 50,
        ("forward", "", ""): 20,
        ("forward", "net", ""): 10,
        ("forward", "net", "aten::linear"): 10,
        ("forward", "net", "aten::addmm"): 10,
    }


def test_an_operator_of_backward_belongs_to_the_module_that_made_its_node(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 50),
        module("first", 0, 20),
        operator("aten::addmm", 0, 20, makes=7),
        module("second", 20, 50),
        operator("aten::addmm", 20, 50, makes=8),
        action(BACKWARD, 50, 100),
        operator(f"{NODE}AddmmBackward0", 50, 80, runs=8),
        operator("aten::mm", 60, 80),
        operator(f"{NODE}AddmmBackward0", 80, 100, runs=7),
    )
    assert owners(found) == {
        ("forward", "first", "aten::addmm"): 20,
        ("forward", "second", "aten::addmm"): 30,
        ("backward", "second", "AddmmBackward0"): 10,
        ("backward", "second", "aten::mm"): 20,
        ("backward", "first", "AddmmBackward0"): 20,
    }


def test_while_backward_waits_the_time_belongs_to_the_thread_of_autograd(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 40),
        module("net", 0, 40),
        operator("aten::addmm", 0, 40, makes=3),
        action(BACKWARD, 40, 100),
        operator("aten::ones_like", 40, 45),
        operator(f"{NODE}AddmmBackward0", 50, 90, AUTOGRAD, runs=3),
        operator("aten::mm", 55, 85, AUTOGRAD),
    )
    assert owners(found) == {
        ("forward", "net", "aten::addmm"): 40,
        ("backward", "", "aten::ones_like"): 5,
        ("backward", "net", "AddmmBackward0"): 10,
        ("backward", "net", "aten::mm"): 30,
        ("backward", "", ""): 15,
    }


def test_two_steps_share_their_time_and_what_lies_between_them_is_not_counted(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        step(200, 300, 2),
        operator("aten::mm", 10, 50),
        operator("aten::mm", 120, 180),
        operator("aten::mm", 210, 230),
    )
    assert (found.step_ns, found.steps) == (100_000, 2)
    assert owners(found) == {("forward", None, ""): 70, ("forward", None, "aten::mm"): 30}
    assert [line.count for line in found.lines if line.operator] == [1.0]


def test_without_steps_the_operators_are_the_whole_and_the_basis_says_so(tmp_path: Path) -> None:
    found = ledger(tmp_path, operator("aten::mm", 10, 50), operator("aten::add", 80, 90))
    assert found.step_ns == 80_000
    assert "no steps" in found.basis


def test_children_without_length_take_no_time_of_their_parent(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        operator("aten::sum", 0, 100),
        operator("aten::zero", 10, 10),
        operator("aten::x", 5, 95),
    )
    assert owners(found)[("forward", None, "aten::sum")] == 10


def test_callbacks_fetches_and_the_optimizer_have_their_parts_and_names(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 0, 20),
        action("[pl][profile][Callback]Slow.on_train_batch_start", 20, 30),
        action("[pl][profile][LightningModule]Net.on_train_batch_start", 30, 35),
        event("user_annotation", "Optimizer.step#Adam.step", 40, 100),
        operator("aten::add_", 50, 100),
        action(FORWARD, 41, 45),
    )
    parts = {(line.part, line.name): line.ns / 1000 for line in found.lines if not line.operator}
    assert parts == {
        ("data_wait", "_TrainingEpochLoop.train_dataloader_next"): 20,
        ("callback", "Slow.on_train_batch_start"): 10,
        ("module_hook", "Net.on_train_batch_start"): 5,
        ("optimizer", ""): 6,
        ("forward", ""): 4,
        ("untracked", ""): 5,
    }
    assert found.ns("optimizer") == 56_000


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [FORWARD, BACKWARD, "[pl][module]x: a", "[pl][module]x: a.0", "aten::mm", NODE + "Mm", "ProfilerStep#1"]
        ),
        st.integers(0, 50),
        st.integers(0, 40),
        st.sampled_from([HOST, AUTOGRAD]),
        st.integers(-1, 3),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(made=EVENTS)
def test_the_lines_sum_to_the_steps_whatever_the_trace_has(
    made: list[tuple[str, int, int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = [
        operator(name, start, start + took, tid, **{"runs" if name.startswith(NODE) else "makes": number})
        for name, start, took, tid, number in made
    ]
    found = trace_report(write_trace(tmp_path_factory.mktemp("trace") / "made.json", events)).host_ledger
    if found is not None:
        assert total(found.lines) == pytest.approx(found.step_ns)
        assert all(line.ns >= 0 for line in found.lines)


LINES = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**5)), min_size=1, max_size=20)


@given(spent=LINES, true_ns=st.integers(0, 10**10))
def test_corrected_lines_sum_to_the_true_time_and_none_is_negative(spent: list[tuple[int, int]], true_ns: int) -> None:
    lines = tuple(TimeLine(part="forward", operator=str(at), ns=ns, count=n) for at, (ns, n) in enumerate(spent))
    recorded = TimeLedger(step_ns=total(lines), median_ns=0, steps=1, basis="", lines=lines)
    found = corrected(recorded, {"forward": true_ns})
    assert all(line.ns >= 0 for line in found)
    if found:
        assert total(found) == pytest.approx(true_ns)


def test_the_cost_of_recording_is_taken_from_each_event() -> None:
    lines = (
        TimeLine(part="forward", operator="aten::mm", ns=1000, count=1),
        TimeLine(part="forward", operator="aten::add", ns=1000, count=9),
    )
    recorded = TimeLedger(step_ns=2000, median_ns=2000, steps=1, basis="", lines=lines)
    found = corrected(recorded, {"forward": 1000})
    assert [round(line.ns) for line in found] == [900, 100]
