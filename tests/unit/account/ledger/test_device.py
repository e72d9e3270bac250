from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kineto import write_trace
from lightning_memprof.account.ledger.device import device_account
from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.parts import PARTS, Part
from lightning_memprof.account.trace.device import device_steps
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.account.trace.table import event_table
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.intervals import clip, length
from trace_events import event

IDLE = tuple(part for part in PARTS if part.group == "device idle" and part is not Part.IDLE_UNKNOWN)
HOST, AUTOGRAD, OTHER_THREAD, STREAM, OTHER_STREAM = 1, 2, 3, 7, 9


def step(start: float, end: float, number: int = 1) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def operator(name: str, start: float, end: float, tid: int = HOST) -> dict[str, Any]:
    return event("cpu_op", name, start, end, tid)


def launch(number: int, start: float, end: float, tid: int = HOST, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, start, end, tid, correlation=number)


def kernel(number: int, start: float, end: float, tid: int = STREAM, name: str = "gemm") -> dict[str, Any]:
    return event("kernel", name, start, end, tid, correlation=number)


def ledger(directory: Path, *events: dict[str, Any]) -> TimeLedger:
    found = trace_report(write_trace(directory / "made.json", events)).device_ledger
    assert found is not None
    assert sum(round(line.ns * found.steps) for line in found.lines) == round(found.step_ns * found.steps)
    return found


def owners(found: TimeLedger) -> dict[tuple[str, str, str | None, str | None], float]:
    """Microseconds per step by part, name, module and operator."""
    return {(line.part, line.name, line.module, line.operator): line.ns / 1000 for line in found.lines}


def test_work_belongs_to_computation_then_to_a_collective_then_to_a_copy(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 100),
        kernel(0, 10, 30),
        kernel(0, 20, 50, OTHER_STREAM, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 60, 11),
    )
    assert owners(found) == {
        ("compute", "", None, "gemm"): 20,
        ("collective", "all_reduce", None, None): 20,
        ("copy", "HtoD (pageable)", None, None): 10,
        ("idle_python", "", None, None): 40,
    }


def test_kernels_of_one_stream_and_another_count_once_for_the_first(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 100),
        operator("aten::mm", 0, 10),
        launch(1, 2, 4),
        operator("aten::add", 12, 20),
        launch(2, 13, 14),
        kernel(1, 30, 70),
        kernel(2, 40, 100, OTHER_STREAM, "add"),
    )
    busy = {key[3]: us for key, us in owners(found).items() if key[0] == "compute"}
    assert busy == {"aten::mm": 40, "aten::add": 30}
    (product,) = [line for line in found.of("compute") if line.operator == "aten::mm"]
    assert (product.count, product.longest_ns) == (1, 40_000)


def test_idle_time_belongs_to_what_the_launching_thread_did_up_to_the_end_of_the_step(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 200),
        event("user_annotation", "[pl][module]torch.nn.Linear: net.0", 10, 60),
        operator("aten::linear", 20, 50),
        operator("aten::mm", 25, 45),
        launch(1, 30, 35),
        kernel(1, 100, 120),
        event("user_annotation", "enumerate(DataLoader)#_Loader.__next__", 150, 190),
        operator("aten::stack", 160, 170),
    )
    assert owners(found) == {
        # In the first 20 us, a kernel as long as this one may run that began before the recording.
        ("idle_python", "", "", None): 30 + 10,
        ("idle_operators", "", "net.0", "aten::linear"): 5,
        ("idle_operators", "", "net.0", "aten::mm"): 5,
        ("idle_launch", "cudaLaunchKernel", "net.0", "aten::mm"): 5 + 20,
        ("idle_queue", "", "net.0", "aten::mm"): 45,
        ("compute", "", "net.0", "aten::mm"): 20,
        ("idle_data", "enumerate(DataLoader)#_Loader.__next__", "", None): 30,
        ("idle_data", "enumerate(DataLoader)#_Loader.__next__", "", "aten::stack"): 10,
    }


def test_kernels_of_forward_and_backward_are_told_apart_and_stand_for_those_launched_before(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 200),
        event("user_annotation", "[pl][profile][Strategy]SingleDeviceStrategy.training_step", 10, 60),
        event("user_annotation", "[pl][module]torch.nn.Linear: net", 12, 58),
        operator("aten::mm", 20, 50),
        launch(1, 30, 35),
        kernel(1, 100, 120),
        operator("autograd::engine::evaluate_function: MmBackward0", 60, 80, AUTOGRAD),
        operator("aten::mm", 62, 78, AUTOGRAD),
        launch(2, 65, 70, AUTOGRAD),
        kernel(2, 120, 160),
        operator("aten::_fused_adamw_", 82, 98),
        launch(3, 85, 90),
        kernel(3, 160, 170),
        kernel(9, 0, 70),  # launched before the recording
        operator("aten::resize", 90, 99, OTHER_THREAD),
        launch(4, 92, 94, OTHER_THREAD),
        kernel(4, 170, 180),  # a thread of the program's
    )
    us = {(line.part, line.module, line.operator): line.ns / 1000 for line in found.passes}
    # All computation takes 150 us, of which 80 us have a known launch.
    assert us == {("forward", "net", "aten::mm"): 37.5, ("backward", "", "aten::mm"): 75}


def test_a_host_that_is_ahead_does_not_make_the_steps_short(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 10, 1),
        step(10, 20, 2),
        *(launch(number, 4 + 10 * (number > 2), 5 + 10 * (number > 2)) for number in (1, 2, 3, 4)),
        kernel(9, 0, 30),  # launched before the recording
        kernel(1, 30, 70),
        kernel(2, 80, 120),
        kernel(3, 120, 160),
        kernel(4, 160, 210),
        launch(5, 22, 23),  # after the steps
        kernel(5, 210, 400),
    )
    assert (found.step_ns, found.median_ns) == (90_000, 90_000)
    assert owners(found) == {("compute", "", None, "gemm"): 85, ("idle_queue", "", None, None): 5}
    assert "host is ahead" in found.basis


def test_a_host_that_waits_has_its_own_steps(tmp_path):
    found = ledger(tmp_path, step(0, 100), launch(1, 4, 5), kernel(9, 0, 3), kernel(1, 30, 110))
    assert (found.step_ns, found.basis) == (100_000, "1 recorded step")


def test_before_autograds_thread_begins_the_training_thread_owns_the_time(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 100),
        event("user_annotation", "forward", 0, 30),
        operator("autograd::engine::evaluate_function: MmBackward0", 50, 70, AUTOGRAD),
        operator("aten::mm", 55, 65, AUTOGRAD),
        launch(1, 60, 62, AUTOGRAD),
        kernel(1, 65, 100),
    )
    assert owners(found) == {
        # A kernel as long as this one may run before it.
        ("idle_python", "", None, None): 50 - 35,
        ("idle_operators", "", None, "MmBackward0"): 5,
        ("idle_operators", "", None, "aten::mm"): 5,
        ("idle_launch", "cudaLaunchKernel", None, "aten::mm"): 5,
        ("compute", "", None, "aten::mm"): 35,
    }


def test_a_kernel_of_backward_belongs_to_the_module_whose_forward_made_its_node(tmp_path):
    backward = "autograd::engine::evaluate_function: MmBackward0"
    found = ledger(
        tmp_path,
        step(0, 200),
        event("user_annotation", "[pl][module]torch.nn.Linear: net.0", 0, 50),
        event("cpu_op", "aten::linear", 10, 40, **{"Sequence number": 7}),
        launch(1, 20, 25),
        event("cpu_op", backward, 80, 120, AUTOGRAD, **{"Sequence number": 7, "Fwd thread id": 1}),
        operator("aten::mm", 85, 115, AUTOGRAD),
        launch(2, 90, 95, AUTOGRAD),
        kernel(1, 30, 60),
        kernel(2, 100, 200),
    )
    compute = {(line.module, line.operator): line.ns / 1000 for line in found.of("compute")}
    assert compute == {("net.0", "aten::linear"): 30, ("net.0", "aten::mm"): 100}


def test_a_kernel_without_a_launch_has_the_operator_of_most_kernels_of_its_name(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 200),
        *(operator("aten::linear", 10, 20), launch(1, 11, 12), kernel(1, 30, 50)),
        *(operator("aten::mm", 20, 30), launch(2, 21, 22), kernel(2, 50, 90)),
        kernel(0, 0, 10),
        kernel(0, 90, 95, name="other"),
        launch(3, 95, 97),
        kernel(3, 100, 120),
    )
    compute: dict[str | None, float] = {}
    for line in found.of("compute"):
        compute[line.operator] = compute.get(line.operator, 0) + line.ns / 1000
    assert compute == {"aten::linear": 20, "aten::mm": 70, "other": 5}


def test_a_line_of_the_users_code_owns_the_python_that_it_calls(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 100),
        event("python_function", "train.py(12): training_step", 0, 90),
        event("python_function", "nn.Module: Net_0", 10, 80),
        event("python_function", "torch/nn/modules/module.py(1773): _call_impl", 20, 70),
        event("python_function", "<built-in method sleep>", 30, 60),
        launch(1, 88, 90),
        kernel(1, 90, 100),
    )
    python = {key[1:3]: us for key, us in owners(found).items() if key[0] == "idle_python"}
    assert python == {("train.py(12): training_step", ""): 8, ("train.py(12): training_step", "Net_0"): 70}


def test_no_time_is_laid_on_this_packages_own_callback(tmp_path):
    callback = "[pl][profile][Callback]MemProfilerCallback.on_train_batch_end"
    path = write_trace(
        tmp_path / "own.json",
        [
            kernel(0, 0, 10), step(0, 100), event("user_annotation", callback, 10, 80), launch(1, 88, 90),
            kernel(1, 90, 100),
        ],
    )  # fmt: skip
    found = trace_report(path)
    assert found.device_ledger is not None
    assert owners(found.device_ledger)["idle_python", "", None, None] == 78
    assert "MemProfilerCallback" not in {cause.example for cause in found.idle}
    assert [cause.example for cause in found.idle if cause.cause == Part.IDLE_PYTHON] == [""]


def test_code_that_the_driver_loads_owns_its_time(tmp_path):
    found = ledger(
        tmp_path,
        step(0, 100),
        event("overhead", "Lazy Function Loading", 20, 80, -1),
        launch(1, 10, 90),
        kernel(1, 90, 100),
    )
    assert owners(found)["idle_loading", "Lazy Function Loading", None, None] == 60
    assert owners(found)["idle_launch", "cudaLaunchKernel", None, None] == 20


def test_without_steps_the_device_window_is_the_step(tmp_path):
    found = ledger(tmp_path, launch(1, 0, 5), kernel(1, 10, 20), launch(2, 20, 40), kernel(2, 60, 70))
    assert (found.steps, found.step_ns) == (1, 60_000)
    assert "no steps" in found.basis


def test_without_the_host_the_cause_of_idle_time_is_unknown(tmp_path):
    found = ledger(tmp_path, kernel(1, 10, 20), kernel(2, 60, 70))
    assert owners(found) == {("compute", "", None, "gemm"): 20, ("idle_unknown", "", None, None): 40}


def test_without_a_device_there_is_no_ledger(tmp_path):
    made = write_trace(tmp_path / "host.json", [step(0, 10), operator("aten::add", 1, 5)])
    assert trace_report(made).device_ledger is None


NAMES = {
    Kind.KERNEL: ("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    Kind.MEMORY_COPY: ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"),
    Kind.MEMORY_SET: ("Memset (Device)",),
    Kind.RUNTIME: ("cudaLaunchKernel", "cudaMalloc", "cudaStreamSynchronize", "cudaGraphLaunch"),
    Kind.OPERATOR: ("aten::mm", "aten::item", "autograd::engine::evaluate_function: MmBackward0"),
    Kind.ANNOTATION: ("ProfilerStep#1", "ProfilerStep#2", "enumerate(DataLoader)#x", "[pl][module]Linear: net.0"),
    Kind.PYTHON: ("train.py(3): f", "nn.Module: Net_0", "Python GC"),
    Kind.OVERHEAD: ("Lazy Function Loading", "Buffer Flush"),
}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([(kind, name) for kind, names in NAMES.items() for name in names]),
        st.integers(0, 50).map(lambda at: at * 100_000),
        st.integers(0, 40).map(lambda at: at * 100_000),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    max_size=40,
)


@given(EVENTS)
def test_the_lines_sum_to_the_steps_whatever_the_trace_has(made):
    on_device = {Kind.KERNEL, Kind.MEMORY_COPY, Kind.MEMORY_SET}
    names = sorted({name for (_, name), *_ in made})
    columns = TraceColumns(
        starts=np.array([start for _, start, *_ in made], np.int64),
        ends=np.array([start + took for _, start, took, *_ in made], np.int64),
        names=np.array([names.index(name) for (_, name), *_ in made], np.int32),
        lanes=np.array([lane + 3 * (kind in on_device) for (kind, _), _, _, lane, _ in made], np.int32),
        kinds=np.array([kind for (kind, _), *_ in made], np.int8),
        correlations=np.array([link for *_, link in made], np.int64),
        sequences=np.full(len(made), -1, np.int64),
        runs_node=np.zeros(len(made), np.bool_),
        name_of=tuple(names),
        lane_of=tuple((lane // 3, lane) for lane in range(6)),
        copied={},
        collectives={},
        events=len(made),
        metadata={},
        origin_ns=0,
    )
    table = event_table(columns)
    device, steps, (found, idle) = table.device, table.steps, device_account(table)
    if found is None:
        assert (
            not len(device.busy.starts) or length(device.unrecorded) or not any(step.end > step.start for step in steps)
        )
        return
    idle_ns = found.ns(*IDLE) * found.steps
    assert sum(cause.total_ns for cause in idle) == round(idle_ns)
    assert all(cause.longest_ns <= cause.total_ns <= cause.count * cause.longest_ns for cause in idle)
    whole = found.step_ns * found.steps
    assert sum(round(line.ns * found.steps) for line in found.lines) == round(whole)
    assert all(line.ns > 0 for line in found.lines)
    assert all(line.ns <= line.count * (line.longest_ns or 0) + 1e-6 for line in found.lines)
    if steps:
        timed = device_steps(columns, device, steps)
        start, end = timed[0].start, max(step.end for step in timed)
        assert whole == pytest.approx(end - start - length(clip(device.unrecorded, start, end)))
        assert end - start >= max(step.end for step in steps) - steps[0].start
