from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from device_traces import GEMM, Recording
from findings import bound
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import examine_files, nothing_in_files

MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>(int)"
OTHERS = [("aten::_softmax", "b"), ("aten::sum", "c")]
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)"


def test_the_operators_of_a_busy_device_count_by_what_they_do(tmp_path: Path) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            for name in ("aten::mm", "aten::addmm", "aten::relu"):
                with made.inside(name, "cpu_op"):
                    made.python(1)
                    made.launch(3_000)
            made.synchronize()
    assert bound(made, tmp_path).title.startswith("Compute-bound: matrix multiplication takes 67% of each step")


@pytest.mark.parametrize(
    ("name", "is_copies", "advice"),
    [
        ("Memcpy DtoD (Device -> Device)", "copies within the GPU", "Copy less: keep references"),
        ("Memcpy HtoD (Host -> Device)", "copies to the GPU", "Copy from pinned memory without blocking"),
        ("Memcpy PtoP (Device -> Device)", "copies between GPUs", "Copy less between GPUs: keep a layer"),
    ],
)
def test_copies_that_take_most_of_a_step_are_what_it_is_bound_by(
    name: str, is_copies: str, advice: str, tmp_path: Path
) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            with made.inside("aten::mm", "cpu_op"):
                made.launch(2_000)
            made.copy(8_000, name, 1 << 20)
            made.synchronize()
    finding = bound(made, tmp_path)
    assert finding.title.startswith(f"Copy-bound: {is_copies} take 80% of each step (8.00 ms of")
    assert finding.next_steps[0].startswith(advice)


@pytest.mark.parametrize(
    ("operator", "shapes", "advice"),
    [
        ("aten::mul", 0, "Fuse operators"),
        ("aten::mm", 0, "Record the input shapes of operators"),
        ("aten::mm", 1, "See every operator on a timeline"),
    ],
)
def test_operators_that_read_and_write_each_element_are_to_be_fused_also_where_no_shapes_are(
    operator: str, shapes: int, advice: str, tmp_path: Path
) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            with made.inside(operator, "cpu_op"):
                made.python(1)
                made.launch(3_000)
            made.synchronize()
    assert bound(made, tmp_path, record_shapes=shapes).next_steps[0].startswith(advice)


@pytest.mark.parametrize(
    ("launched", "sentence"),
    [
        (
            [("aten::mul", MUL), ("aten::cat", CAT), ("aten::mm", GEMM), (None, MUL)],
            "Memory-bound: pointwise and copy operators take 75% of the recorded time (75.0 ms of 100 ms).",
        ),
        (
            [("aten::mul", MUL), ("aten::mul", MUL), ("aten::mul", MUL), ("aten::mm", GEMM)],
            "Memory-bound: aten::mul takes 75% of the recorded time (75.0 ms of 100 ms).",
        ),
        (
            [("aten::mm", GEMM), ("_C::cutlass_scaled_mm", GEMM), (None, GEMM), ("aten::mul", MUL)],
            "Compute-bound: matrix multiplication takes 75% of the recorded time (75.0 ms of 100 ms).",
        ),
        (
            [(None, "volta_h884cudnn_256x64_ldg8"), ("aten::conv2d", "a"), ("aten::mm", GEMM), *OTHERS],
            "Compute-bound: kernels take 100% of the recorded time, convolution 40%.",
        ),
    ],
)
def test_a_device_is_bound_by_the_work_of_all_names_of_a_family(
    launched: list[tuple[str | None, str]], sentence: str, tmp_path: Path
) -> None:
    made = Recording()
    for _ in range(10):
        for operator, kernel in launched:
            with made.inside(operator, "cpu_op") if operator else nullcontext():
                made.python(1)
                made.launch(2_500, kernel)
    assert bound(made, tmp_path).title == sentence


@pytest.mark.parametrize(("us", "says"), [(2, "Too little was recorded"), (3_000, "The GPU is idle")])
def test_a_kernel_or_two_do_not_tell_how_busy_a_device_is(us: int, says: str, tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        for _ in range(2):
            with made.inside("aten::mm", "cpu_op"):
                made.python(us)
                made.launch(us)
            made.synchronize()
            made.python(20 * us)
    trace = trace_report(made.write(tmp_path / "trace.pt.trace.json"))
    (verdict, *_) = [*examine_files([trace], ()), nothing_in_files([trace], [])]
    assert verdict.title.startswith(says)
    missing = replace(trace, is_sample=True)
    assert not examine_files([missing], ())
    assert nothing_in_files([missing], []).title.startswith("Most events are missing from the trace")


def test_devices_at_once_say_how_busy_each_is(tmp_path: Path) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            for device, us in enumerate((10_000, 3_000)):
                with made.inside("aten::mm", "cpu_op"):
                    made.python(1)
                    made.launch(us)
                made.events[-2]["pid"] = device
                made.free -= us * (device == 0)
            made.synchronize()
    finding = bound(made, tmp_path)
    assert finding.title.startswith("Compute-bound")
    assert "; by GPU: " in finding.why


def test_a_busy_device_says_what_its_operators_reach_and_what_makes_them_faster(tmp_path: Path) -> None:
    made = Recording()
    arguments = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]}
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            with made.inside("aten::mm", "cpu_op"):
                made.python(1)
                made.launch(20_000)
            made.events[-1]["args"] = arguments
            made.synchronize()
    finding = bound(made, tmp_path)
    assert finding.why.startswith(
        "aten::mm in float32 reaches 6.87 TFLOP/s, 35% of the 19.5 TFLOP/s in the NVIDIA A100"
    )
    assert finding.numbers["flops_per_s"] == pytest.approx(2 * 4096**3 / 0.02)
    assert finding.remedies[0].id == "smaller_weights"


def test_devices_that_compute_at_the_same_time_have_rates_of_their_own(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(6):
        for device in (0, 1):
            with made.inside("aten::mm", "cpu_op"):
                made.python(1)
                made.launch(20_000)
            made.events[-2]["pid"] = device
            made.events[-1]["args"] = {"Input Dims": [[4096, 4096]] * 2, "Input type": ["float", "float"]}
            made.free -= 20_000 * (device == 0)
    gpus = [{"id": device, "name": "NVIDIA A100-SXM4-80GB"} for device in (0, 1)]
    numbers = bound(made, tmp_path, deviceProperties=gpus).numbers
    assert numbers["flops_per_s"] == pytest.approx(2 * 4096**3 / 0.02, rel=0.01)


@pytest.mark.parametrize(("pointwise_us", "remedy"), [(100, "view_trace"), (4_000, "fuse_operators")])
def test_fusing_is_proposed_where_there_is_something_to_fuse(pointwise_us: int, remedy: str, tmp_path: Path) -> None:
    made = Recording()
    for _ in range(3):
        with made.inside("aten::mm", "cpu_op"):
            made.python(1)
            made.launch(600)
        made.events[-1]["args"] = {"Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::Half", "c10::Half"]}
        for _ in range(4):
            with made.inside("aten::mul", "cpu_op"):
                made.python(1)
                made.launch(pointwise_us // 40)
    assert bound(made, tmp_path).remedies[0].id == remedy


@pytest.mark.parametrize(
    ("operator", "remedy"), [("aten::_foreach_addcdiv_", "fused_updates"), ("aten::_fused_adamw_", "accumulate")]
)
def test_updates_of_all_parameters_are_of_the_optimizer(operator: str, remedy: str, tmp_path: Path) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            for name in ("aten::mm", operator, "aten::_foreach_mul_" if "foreach" in operator else operator):
                with made.inside(name, "cpu_op"):
                    made.python(1)
                    made.launch(3_000)
            with made.inside("Optimizer.step#AdamW.step"):
                made.synchronize()
    finding = bound(made, tmp_path)
    assert finding.title.startswith("Memory-bound: optimizer updates take 67% of each step")
    assert finding.remedies[0].id == remedy


def test_products_with_a_vector_are_bound_by_memory_and_want_more_work(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(30):
        with made.inside("aten::mm", "cpu_op"):
            made.python(1)
            made.launch(60)
        arguments = {"Input Dims": [[1, 4096], [4096, 11008]], "Input type": ["c10::Half"] * 2}
        made.events[-1]["args"] = arguments
    finding = bound(made, tmp_path)
    assert finding.title.startswith("Memory-bound: matrix multiplication takes 100%")
    assert finding.remedies[0].id == "more_work"


@pytest.mark.parametrize(
    ("together", "title"), [(False, "3 GPUs take turns: each computes at most 33%"), (True, "Comp")]
)
def test_gpus_that_compute_one_after_the_other_take_turns(together: bool, title: str, tmp_path: Path) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            for device in range(3):
                with made.inside("aten::mm", "cpu_op"):
                    made.python(1)
                    made.launch(5_000)
                made.events[-2]["pid"] = device
                made.free -= 5_000 * (together and device < 2)
            made.synchronize()
    finding = bound(made, tmp_path)
    assert finding.title.startswith(title)
    assert (finding.remedies[0].id == "all_gpus") == (not together)


def test_an_idle_device_without_a_fault_says_what_it_mostly_waits_for(tmp_path: Path) -> None:
    made = Recording()
    for step in range(5):
        with made.inside(f"ProfilerStep#{step}"):
            with made.inside("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                made.python(300 if step else 30_000)
            for _ in range(20):
                with made.inside("aten::mm", "cpu_op"):
                    made.launch(200)
            made.synchronize()
    assert ", mostly data wait (" in bound(made, tmp_path).title
