from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import GEMM, Recording
from lightning_memprof.account.trace.device import copy_kind
from lightning_memprof.account.trace.report import trace_report
from trace_events import OTHER_STREAM, STREAM, call, event, kernel, report


def test_streams_overlap_and_count_once(tmp_path):
    found = report(
        tmp_path,
        kernel(0, 10),
        kernel(5, 20, tid=OTHER_STREAM, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 18, 30, OTHER_STREAM, bytes=64),
        kernel(40, 50),
    ).gpu_window
    assert found is not None
    assert (found.window_ns, found.busy_ns, found.idle_ns) == (50_000, 40_000, 10_000)
    assert (found.compute_ns, found.communication_ns, found.memory_copy_ns) == (20_000, 15_000, 12_000)
    assert (found.communication_overlapped_ns, found.communication_exposed_ns) == (5_000, 10_000)


def test_a_step_is_counted_once_and_owns_the_device_work_that_it_launched(tmp_path):
    found = report(
        tmp_path,
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("user_annotation", "ProfilerStep#5", 100, 160),
        event("gpu_user_annotation", "ProfilerStep#4", 50, 190, STREAM),
        event("user_annotation", "enumerate(DataLoader)#_Loader.__next__", 5, 15),
        call(20, 22, 1),
        call(120, 122, 2),
        kernel(50, 110, 1),
        kernel(110, 190, 2),
        kernel(195, 200),
    )
    assert [(step.number, step.busy_ns, step.data_loading_ns) for step in found.steps] == [
        (4, 60_000, 10_000),
        (5, 85_000, 0),
    ]
    assert found.step_window is not None
    assert (found.step_window.window_ns, found.step_window.busy_ns) == (160_000 - 50_000, 110_000)
    assert (found.step_window.data_loading_ns, found.step_window.mean_step_ns) == (10_000, 80_000)


def test_steps_of_a_host_that_is_ahead_last_as_long_as_their_device_work(tmp_path):
    found = report(
        tmp_path,
        event("user_annotation", "ProfilerStep#4", 0, 10),
        event("user_annotation", "ProfilerStep#5", 10, 20),
        call(4, 5, 1),
        call(14, 15, 2),
        *(kernel(at, at + 10, name="before") for at in (0, 10, 20)),
        kernel(30, 80, 1),
        kernel(80, 130, 2),
        call(21, 22, 3),
        kernel(130, 140, 3, name="after"),
    )
    assert found.step_window is not None
    assert found.ahead_window is not None
    assert (found.step_window.window_ns, found.step_window.mean_step_ns) == (20_000, 10_000)
    assert (found.ahead_window.window_ns, found.ahead_window.mean_step_ns) == (100_000, 50_000)
    assert found.ahead_steps_ns == (50_000, 50_000)
    assert [step.busy_ns for step in found.steps] == [50_000, 60_000]


@pytest.mark.parametrize(("kernel_us", "span_us"), [(300, 1_300), (50, 1_000)])
def test_steps_of_a_slow_host_end_with_the_work_that_it_leaves_to_the_device(kernel_us, span_us, tmp_path):
    found = report(
        tmp_path,
        event("user_annotation", "ProfilerStep#1", 0, 500),
        event("user_annotation", "ProfilerStep#2", 500, 1_000),
        call(480, 482, 1),
        kernel(490, 500, 1),
        call(980, 990, 2),
        kernel(1_000, 1_000 + kernel_us, 2),
    )
    assert found.work_window is not None
    assert 2 * found.work_window.mean_step_ns == 1_000 * span_us


@pytest.mark.parametrize(("waits_until", "ends_at"), [(40, 40), (900, 1_000)])
def test_a_recording_that_ends_in_the_last_step_ends_the_step(waits_until, ends_at, tmp_path):
    found = report(
        tmp_path,
        event("Trace", "PyTorch Profiler (0)", -5, 1_000),
        event("user_annotation", "ProfilerStep#1", 0, 1_000),
        call(10, 12, 1),
        kernel(20, 30, 1),
        call(31, waits_until, name="cudaDeviceSynchronize"),
    )
    assert [step.duration_ns for step in found.steps] == [1_000 * ends_at]


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_a_last_step_without_work_is_none(on_device, works, tmp_path):
    found = report(
        tmp_path,
        *(event("user_annotation", f"ProfilerStep#{number}", 100 * number, 100 * number + 100) for number in (0, 1, 2)),
        *(event("cpu_op", "aten::mm", at, at + 10) for at in (20, 120, 220)[: 2 + works]),
        event("user_annotation", "enumerate(DataLoader)#_Loader.__next__", 200, 215),
        event("cpu_op", "aten::stack", 205, 210),
        *(call(at, at + 2, at) for at in (20, 120, 220)[: on_device * (2 + works)]),
        *(kernel(at + 5, at + 40, at) for at in (20, 120, 220)[: on_device * (2 + works)]),
        call(290, 299, name="cudaDeviceSynchronize"),
    )
    assert [step.number for step in found.steps] == [0, 1, 2][: 2 + works]
    assert (found.step_window.mean_step_ns if found.step_window else 100_000) == 100_000


def test_work_on_an_mtia_is_device_work(tmp_path):
    assert report(tmp_path, event("mtia_ccp_events", "gemm", 0, 10)).gpu_window is not None


def test_a_streams_wait_for_an_event_is_no_work(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(50):
        made.work(20, "aten::linear")
        made.launch(100)
        made.launch(900, "event_wait")
    report = trace_report(made.write(tmp_path / "waits.pt.trace.json"))
    assert {kernel.name for kernel in report.kernels} == {GEMM}
    assert report.gpu_window is not None
    assert report.gpu_window.busy_ns == 50 * 100_000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", ("HtoD", True)),
        ("Memset (Device)", ("Memset (Device)", None)),
        ("CopyHostToDevice", ("HtoD", None)),
        ("CopyDeviceToDevice", ("DtoD", None)),
        ("FillBuffer", ("Memset", None)),
        ("zeCommandListAppendMemoryCopy(M2D)", ("HtoD", None)),
        ("zeCommandListAppendMemoryCopy(D2M)", ("DtoH", None)),
        ("zeCommandListAppendMemoryFill(<1>)", ("Memset", None)),
    ],
)
def test_a_copy_has_one_kind_under_the_names_of_all_vendors(name, kind):
    assert copy_kind(name) == kind
