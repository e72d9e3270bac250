from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kineto import write_trace
from lightning_memprof.account.ledger.host import corrected
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.artifacts.naming import TraceName

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


def test_where_no_range_is_around_backward_autograds_thread_owns_what_the_training_thread_leaves(
    tmp_path: Path,
) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        operator("aten::addmm", 0, 40),
        operator(f"{NODE}AddmmBackward0", 50, 80, AUTOGRAD),
        operator("aten::mm", 55, 75, AUTOGRAD),
        operator("aten::add_", 70, 90),
    )
    assert owners(found) == {
        ("forward", None, "aten::addmm"): 40,
        ("forward", None, "aten::add_"): 20,
        ("backward", None, "AddmmBackward0"): 5,
        ("backward", None, "aten::mm"): 15,
        ("forward", None, ""): 20,
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


def test_without_steps_a_range_that_outlasts_its_operators_counts_to_its_end(tmp_path: Path) -> None:
    optimizer = event("user_annotation", "Optimizer.step#SGD.step", 48, 100)
    found = ledger(tmp_path, operator("aten::mm", 0, 48), optimizer, operator("aten::add_", 50, 90))
    assert {part: found.ns(part) / 1000 for part in (Part.FORWARD, Part.OPTIMIZER)} == {"forward": 48, "optimizer": 52}


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
        ("optimizer", "Adam"): 6,
        ("forward", ""): 4,
        ("untracked", ""): 5,
    }
    assert found.ns("optimizer") == 56_000


def test_with_stacks_the_call_of_autograds_engine_is_backward_in_any_program(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        event("python_function", "<built-in method run_backward of torch._C._EngineBase object at 0x7f>", 40, 100),
        operator(f"{NODE}AddmmBackward0", 50, 90, AUTOGRAD, runs=3),
    )
    assert owners(found) == {
        ("forward", None, ""): 40,
        ("backward", None, ""): 20,
        ("backward", None, "AddmmBackward0"): 40,
    }


def test_autograds_call_of_a_backward_function_and_the_function_are_one_operator(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        operator(f"{NODE}AddmmBackward0", 0, 100, runs=3),
        operator("AddmmBackward0", 20, 100, runs=3),
    )
    assert [(line.operator, line.ns) for line in found.lines if line.operator] == [("AddmmBackward0", 100_000)]


def test_a_recomputed_forward_and_its_backward_belong_to_the_modules_that_are_recomputed(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 40),
        module("block", 0, 20),
        operator("CheckpointFunction", 0, 20, makes=1),
        module("head", 20, 40),
        operator("aten::addmm", 20, 40, makes=2),
        action(BACKWARD, 40, 100),
        operator(f"{NODE}CheckpointFunctionBackward", 40, 100, AUTOGRAD, runs=1),
        operator("CheckpointFunctionBackward", 40, 100, AUTOGRAD, runs=1),
        event("cpu_op", "[pl][module]torch.nn.Linear: block.inner", 50, 70, AUTOGRAD),
        operator("aten::mul", 55, 70, AUTOGRAD, makes=2),
        operator(f"{NODE}MulBackward0", 80, 95, AUTOGRAD, runs=2),
    )
    backward = {key[1:]: us for key, us in owners(found).items() if key[0] == "backward"}
    assert backward == {
        ("block", "CheckpointFunctionBackward"): 25,
        ("block.inner", ""): 5,
        ("block.inner", "aten::mul"): 15,
        ("block.inner", "MulBackward0"): 15,
    }


def test_a_validation_in_a_fit_is_one_part_but_for_callbacks_logging_and_checkpoints(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action("[pl][profile]run_validation", 0, 90),
        action("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device", 10, 20),
        action("[pl][profile][Callback]Slow.on_validation_end", 30, 45),
        operator("aten::mm", 50, 60),
    )
    assert {part: found.ns(part) / 1000 for part in ("validation", "callback", "untracked")} == {
        "validation": 75,
        "callback": 15,
        "untracked": 10,
    }


def test_the_stage_in_the_name_of_a_trace_tells_which_step_is_the_forward(tmp_path: Path) -> None:
    events = [step(0, 100), action("[pl][profile][Strategy]S.predict_step", 0, 80), operator("aten::mm", 10, 50)]
    name = TraceName("predict", "trace", 0, "S", "predict_step", 1)
    found = trace_report(write_trace(tmp_path / str(name).removesuffix(".gz"), events)).host_ledger
    assert found is not None
    assert found.ns("forward") == 80_000


def test_the_calls_of_an_operator_by_the_program_are_told_from_those_by_operators(tmp_path: Path) -> None:
    calls = [operator("aten::mul", at, at + 5) for at in (20, 25, 30)]
    inner = [operator("aten::square", 40, 50), operator("aten::mul", 42, 48)]
    found = ledger(tmp_path, step(0, 100), action(FORWARD, 0, 90), module("net.4", 10, 60), *calls, *inner)
    lines = {(line.module, line.operator): (line.count, line.called) for line in found.lines if line.operator}
    assert lines == {("net.4", "aten::mul"): (4, 3), ("net.4", "aten::square"): (1, 1)}


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


LINES = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c"]), st.integers(0, 10**9), st.integers(0, 10**5), st.integers(0, 10**5)
    ),
    min_size=1,
    max_size=20,
)


@given(spent=LINES, true_ns=st.integers(0, 10**10))
def test_corrected_lines_sum_to_the_true_time_and_none_is_negative(
    spent: list[tuple[str, int, int, int]], true_ns: int
) -> None:
    lines = tuple(
        TimeLine(part=Part.FORWARD, operator=at, ns=ns, count=n, inside=inside) for at, ns, n, inside in spent
    )
    found = corrected(lines, true_ns)
    assert all(line.ns >= 0 for line in found)
    if found:
        assert total(found) == pytest.approx(true_ns)


def operator_line(ns: float, inside: int, name: str = "aten::linear", count: int = 1) -> TimeLine:
    return TimeLine(part=Part.FORWARD, operator=name, ns=ns, count=count, inside=inside)


def test_the_cost_of_recording_an_operator_is_taken_from_the_event_around_it() -> None:
    lines = operator_line(1000, 1), operator_line(1000, 9), operator_line(1000, 0)
    assert [round(line.ns) for line in corrected(lines, 2000)] == [900, 100, 1000]


def test_the_cost_of_recording_is_no_more_than_a_line_has() -> None:
    # 100,000 reads of a value beside a product, on a machine that waits for a core: they take no time for recording.
    reads, product = operator_line(300_000, 100_000, "aten::item", 100_000), operator_line(9_000_000, 0, "aten::mm")
    python = operator_line(800_000, 100_000, "")
    found = [round(line.ns) for line in corrected((reads, product, python), 4_725_000)]
    assert found == [0, 4_500_000, 225_000]


def test_the_cost_of_a_range_is_taken_from_itself() -> None:
    lines = operator_line(1000, 0), operator_line(400, 2, "", 2), operator_line(5000, 1, "")
    assert [round(line.ns) for line in corrected(lines, 5800)] == [1000, 0, 4800]


def test_the_hooks_of_the_program_own_their_time_in_forward_and_backward(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 50),
        module("net", 10, 45),
        operator("aten::mm", 12, 20),
        action("[pl][forward_hook]Probe.look (train.py:7)", 25, 40),
        operator("aten::std", 30, 35),
        action(BACKWARD, 50, 100),
        action("[pl][backward_hook]clip (train.py:9)", 60, 90),
    )
    hooks = {(line.part, line.name, line.module, line.operator): line.ns for line in found.lines if "hook" in line.part}
    assert hooks == {
        ("forward_hook", "Probe.look (train.py:7)", "net", ""): 10_000,
        ("forward_hook", "Probe.look (train.py:7)", "net", "aten::std"): 5_000,
        ("backward_hook", "clip (train.py:9)", "", ""): 30_000,
    }
    assert (found.ns("forward"), found.ns("backward")) == (35_000, 20_000)


def test_logging_and_metrics_in_forward_own_their_time(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 50),
        operator("aten::mm", 0, 5),
        action("[pl][profile][LightningModule]Net.log", 10, 20),
        action("[pl][profile][Metric]Accuracy.update", 20, 25),
        action("[pl][profile][LightningModule]Net.optimizer_step", 50, 80),
        action("[pl][profile][Callback]Norms.on_train_batch_end", 80, 100),
        action("[pl][profile][LightningModule]Net.log", 85, 90),
    )
    spent = {(line.part, line.name): line.ns / 1000 for line in found.lines if not line.operator}
    assert spent == {
        ("forward", ""): 30,
        ("self_log", "Net.log"): 10,
        ("metric", "Accuracy.update"): 5,
        ("optimizer", ""): 30,
        ("callback", "Norms.on_train_batch_end"): 15,
        ("logging", "Net.log"): 5,
    }


def test_a_collective_in_self_log_is_a_wait_for_other_ranks_and_the_rest_is_logging(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 80),
        operator("aten::mm", 0, 20),
        action("[pl][profile][LightningModule]Net.log", 20, 70),
        operator("c10d::allreduce_", 30, 32),
        {**operator("gloo:all_reduce", 31, 65), "cat": "user_annotation", "tid": 77},
        action("[pl][profile][LightningModule]Net.log", 72, 78),
    )
    assert (found.ns("rank_wait"), found.ns("self_log"), found.ns("forward")) == (39_000, 17_000, 24_000)
    # Of two calls of self.log one meets the other ranks.
    assert sum(line.count for line in found.of("rank_wait") if line.name == "Net.log") == 1
    assert total(found.lines) == found.step_ns


def test_forwards_of_modules_in_backward_are_recomputed(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 30),
        module("block", 0, 20),
        operator("aten::mm", 2, 18, makes=3),
        action(BACKWARD, 30, 100),
        operator(f"{NODE}CheckpointFunctionBackward", 30, 90, runs=3),
        module("block", 32, 52),
        module("block.inner", 33, 50),
        module("head", 60, 65),
    )
    assert found.recomputed_ns == 25_000
    assert found.double_backward_ns == 0


def penalized(net: Any, batch: Any) -> Any:
    import torch

    given = batch.clone().requires_grad_()
    out = net(given)
    (slope,) = torch.autograd.grad(out.sum(), given, create_graph=True)
    return out.square().mean() + slope.square().mean()


def checkpointed(net: Any, batch: Any, *, use_reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: net(x).sin(), batch.clone().requires_grad_(), use_reentrant=use_reentrant).sum()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    ("losses", "is_found"),
    [
        ([penalized, penalized], True),
        ([penalized, lambda net, batch: net(batch).sum()], False),
        ([lambda net, batch: net(batch).square().mean()] * 2, False),
        ([partial(checkpointed, use_reentrant=True)] * 2, False),
        ([partial(checkpointed, use_reentrant=False)] * 2, False),
    ],
    ids=["penalty in each step", "in every second", "none", "reentrant checkpoint", "checkpoint"],
)
def test_gradients_of_gradients_in_each_step_are_double_backward(
    tmp_path: Path, losses: list[Any], is_found: bool
) -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    batch = torch.randn(4, 8)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(tmp_path / "made.json")),
    ) as recorded:
        for loss in (losses[0], *losses):
            loss(net, batch).backward()
            recorded.step()
    found = trace_report(tmp_path / "made.json").host_ledger
    assert found is not None
    assert (found.double_backward_ns > 0) == is_found
    assert found.double_backward_ns < found.step_ns
    assert found.recomputed_ns == 0  # torch's profiler has the ranges of no module


def test_a_collective_of_the_host_has_the_time_in_which_no_operator_computes(tmp_path: Path) -> None:
    found = ledger(
        tmp_path,
        step(0, 100),
        action(FORWARD, 0, 30),
        operator("aten::mm", 0, 30),
        action(BACKWARD, 30, 90),
        operator("aten::mm", 30, 50),
        operator("c10d::allreduce_", 50, 52),
        event("user_annotation", "gloo:all_reduce", 45, 80, 7),
        operator("aten::add", 60, 65),
    )
    (line,) = found.communication
    assert (line.part, line.name, line.ns, line.count, line.longest_ns) == (
        "collective",
        "all_reduce",
        25_000,
        1,
        35_000,
    )


@pytest.mark.parametrize(
    ("called", "forwards"),
    [
        pytest.param(["body head", "body head"], None, id="once"),
        pytest.param(["body age body sex", "body age body sex"], ("body", 2), id="two losses"),
        pytest.param(["body a body b body c"], ("body", 3), id="three losses"),
        pytest.param(["body a body b body c body d"], None, id="a loop"),
        pytest.param(["body age body sex", "body age"], None, id="in some steps"),
        pytest.param(["body head body head"], None, id="the same module after each call"),
        pytest.param(["body body head"], None, id="a block that is repeated"),
        pytest.param(["stem body age body sex"], None, id="a block after another one"),
        pytest.param([""], None, id="no module"),
    ],
)
def test_a_module_that_is_called_first_and_again_for_other_modules_runs_several_forwards(
    called: list[str], forwards: tuple[str, int] | None, tmp_path: Path
) -> None:
    made = [operator("aten::mm", 0, 1)]
    for number, calls in enumerate(called):
        begin = 100 * number
        made += [step(begin, begin + 100, number), action(FORWARD, begin, begin + 80)]
        made += [action(BACKWARD, begin + 80, begin + 100), module("body", begin + 85, begin + 90)]
        for at, path in enumerate(calls.split()):
            start = begin + 10 * at
            made += [module(path, start, start + 8), module(f"{path}.0", start + 1, start + 4)]
            made.append(operator("aten::mm", start + 2, start + 3))
    assert ledger(tmp_path, *made).forwards == forwards
