from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from findings import recovery
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import HostOperators, Program, TraceReport
from lightning_memprof.judge import Severity
from trace_reports import MS, STEP_NS, found_in, gpu_times, kernel, time_ledger, trace


def test_of_several_products_the_longest_kernel_is_named_with_its_time() -> None:
    names = ("volta_sgemm_64x64_nt", "volta_sgemm_128x64_nn", "volta_scudnn_128x64_relu_medium_nn_v1")
    kernels = tuple(kernel(name, 100, (4 - place) * MS // 10) for place, name in enumerate(names))
    finding = found_in(trace(kernels=kernels, devices=("NVIDIA A100",)))["tensor_cores_unused"]
    assert (
        finding.why
        == "They take 90.0 ms of 90.0 ms of kernel time, 40.0 ms in volta_sgemm_64x64_nt; none with tensor cores."
    )


@pytest.mark.parametrize(
    "name",
    [
        "volta_sgemm_64x64_nt",
        "ampere_sgemm_128x64_nn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)",
        "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8",
    ],
)
def test_matrix_products_in_32_bits_leave_tensor_cores_unused(name: str) -> None:
    report = trace(kernels=(kernel(name, 100, MS), kernel("add", 100, MS)))
    finding = found_in(report)["tensor_cores_unused"]
    assert finding.severity is Severity.CRITICAL
    assert finding.numbers["share"] == pytest.approx(0.99 / 2)
    assert "bf16-mixed" in finding.next_steps[0]


@pytest.mark.parametrize(
    ("half_ns", "why", "advice"),
    [
        (MS, "uses half precision elsewhere.", "Let autocast run it in half"),
        (MS // 10, "with tensor cores.", "Train in mixed precision"),
    ],
    ids=["in a mixed training", "beside a few casts"],
)
def test_attention_in_32_bits_is_that_of_a_mixed_training_or_not(half_ns: int, why: str, advice: str) -> None:
    line = TimeLine(
        part=Part.COMPUTE, module="blocks.0.attention", operator="aten::_efficient_attention_forward", ns=STEP_NS / 2
    )
    report = trace(
        kernels=(
            kernel("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", 100, 4 * MS),
            kernel("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", 100, half_ns),
        ),
        device_ledger=TimeLedger(step_ns=STEP_NS, median_ns=STEP_NS, steps=5, basis="", lines=(line,)),
    )
    finding = found_in(report)["tensor_cores_unused"]
    assert finding.title.endswith("of each step, in blocks.0.attention.")
    assert finding.numbers["share"] == pytest.approx(2 * MS / (4 * MS + half_ns))
    assert finding.why.endswith(why)
    assert finding.next_steps[0].startswith(advice)
    assert finding.numbers["tensor_ns"] == 100 * half_ns


@pytest.mark.parametrize(("busy_ms", "severity"), [(95, Severity.CRITICAL), (60, Severity.INFO)])
def test_faster_matrix_products_are_worth_a_verdict_on_a_device_that_is_busy(busy_ms: int, severity: Severity) -> None:
    lines = (TimeLine(part=Part.COMPUTE, ns=busy_ms * MS), TimeLine(part=Part.IDLE_PYTHON, ns=(100 - busy_ms) * MS))
    report = trace(
        gpu_window=gpu_times(5 * STEP_NS, 5 * (100 - busy_ms) * MS),
        kernels=(kernel("volta_sgemm_64x64_nt", 100, 3 * MS), kernel("add", 100, MS)),
        device_ledger=TimeLedger(step_ns=STEP_NS, median_ns=STEP_NS, steps=5, basis="", lines=lines),
    )
    assert found_in(report)["tensor_cores_unused"].severity is severity


@pytest.mark.parametrize(
    "name",
    [
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>(Params)",
        "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
        "Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16_MI16x16x1_SN",
    ],
)
def test_kernels_of_tensor_cores_and_others_are_no_such_products(name: str) -> None:
    assert "tensor_cores_unused" not in found_in(trace(kernels=(kernel(name, 200, MS),)))


def test_what_a_device_can_do_decides_what_is_advised() -> None:
    volta = trace(devices=("Tesla V100-SXM2-32GB",), kernels=(kernel("volta_sgemm_64x64_nt", 200, MS),))
    assert "16-mixed" in found_in(volta)["tensor_cores_unused"].next_steps[0]
    assert "tensor_cores_unused" not in found_in(replace(volta, devices=("Tesla P100-PCIE-16GB",)))
    assert "tensor_cores_unused" not in found_in(replace(volta, devices=("AMD Instinct MI300X",)))
    assert "tensor_cores_unused" in found_in(replace(volta, devices=()))


@pytest.mark.parametrize(
    ("device", "capability", "advice"),
    [
        ("NVIDIA Rubin Next", (12, 1), "bf16-mixed"),
        ("NVIDIA TITAN V", (7, 0), "16-mixed"),
        ("NVIDIA GeForce GTX 1660", (7, 5), None),
        ("Tesla P100-PCIE-16GB", (6, 0), None),
        ("AMD Instinct MI300X", (9, 4), None),
    ],
)
def test_tensor_cores_are_known_by_compute_capability(device: str, capability: tuple[int, int], advice: str) -> None:
    kernels = (kernel("volta_sgemm_64x64_nt", 200, MS),)
    rules = found_in(trace(devices=(device,), capabilities=(capability,), kernels=kernels))
    assert ("tensor_cores_unused" in rules) is (advice is not None)
    if advice is not None:
        assert f'"{advice}"' in rules["tensor_cores_unused"].next_steps[0]


def test_many_short_kernels_are_to_be_fused() -> None:
    short = kernel("void at::native::vectorized_elementwise_kernel<4, add>(int)", 5_000, 8_000)
    program = Program(loop_optimizer="AdamW")
    finding = found_in(trace(kernels=(short, kernel("gemm", 500, 80_000)), program=program))["many_small_kernels"]
    assert finding.severity is Severity.INFO
    assert finding.title == "1,000 kernels per step shorter than 10 µs take 50% of each step."
    assert "torch.compile" in finding.next_steps[0]
    assert finding.next_steps[1] == "Update all parameters at once: torch.optim.AdamW(..., fused=True)."


def test_kernels_from_before_the_steps_are_not_those_of_a_step() -> None:
    small = kernel("vectorized_elementwise_kernel", 6_000, 8_000)
    every = found_in(trace(steps=5, kernels=(small,)))["many_small_kernels"]
    fewer = found_in(trace(steps=5, kernels=(small,), outside={small.name: 1_000}))["many_small_kernels"]
    assert every.title.startswith("1,200 kernels per step")
    assert fewer.title.startswith("1,000 kernels per step")


def test_short_kernels_of_a_fused_optimizer_are_not_its_loop() -> None:
    short = kernel("void at::native::vectorized_elementwise_kernel<4, add>(int)", 5_000, 8_000)
    finding = found_in(trace(kernels=(short, kernel("void multi_tensor_apply_kernel<Adam>", 5, 10_000))))[
        "many_small_kernels"
    ]
    assert not any("fused=True" in step for step in finding.next_steps)


def on_host(**changes: Any) -> TraceReport:
    """A step of 20 ms on a host: 1,200 operators, of which none is large."""
    usual: dict[str, Any] = {
        "steps": 5,
        "step_ns": 20 * MS,
        "operators": 1_200,
        "median_ns": 2_000,
        "small_ns": 9 * MS,
        "between_ns": 6 * MS,
        "events": 2_000,
        "names": (("aten::add", 800), ("MulBackward0", 400)),
        "places": (("Net: net", 1_200),),
    }
    operators = HostOperators(**{**usual, **changes})
    ledger = time_ledger(5, forward=5 * 16 * MS, callback=5 * (operators.step_ns - 16 * MS))
    return trace(
        gpu_window=None,
        step_window=None,
        idle=(),
        kernels=(),
        devices=(),
        host_operators=operators,
        host_ledger=ledger,
    )


def test_a_step_that_is_mostly_the_calling_of_short_operators_is_launch_bound_on_the_host() -> None:
    finding = found_in(on_host())["many_small_operators"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "Launch-bound on the host: calling 1,200 operators takes 65% of each step."
    assert "aten::add (800), MulBackward0 (400), in Net: net (1,200)" in finding.why
    assert finding.numbers["share"] == pytest.approx((15 - 2) / 20)
    assert finding.numbers["recording_ns"] == 2 * MS
    assert "torch.compile" in finding.next_steps[0]
    assert "torch.stack" in finding.next_steps[1]


def test_where_the_optimizer_calls_most_of_them_it_is_named_first() -> None:
    report = on_host(places=(("Optimizer.step#AdamW.step", 1_000), ("Net: net", 200)))
    finding = found_in(replace(report, program=Program(loop_optimizer="AdamW")))["many_small_operators"]
    assert "torch.optim.AdamW(..., fused=True)" in finding.next_steps[0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"step_ns": 28 * MS}, id="as much of something else"),
        pytest.param({"events": 7_000}, id="what recording takes"),
        pytest.param({"events": 100_000}, id="more than all of it"),
        pytest.param({"small_ns": 3 * MS}, id="large operators"),
    ],
)
def test_fewer_or_larger_operators_or_those_that_recording_slows_are_not(changes: dict[str, int]) -> None:
    assert not found_in(on_host(**changes))


def attention(changes: dict[str, tuple[float, int]] | None = None) -> TraceReport:
    """A step of 12 layers whose attention is not fused, by operator count and ms; ``changes`` are other ones."""
    calls = {
        "aten::bmm": (24, 10),
        "aten::_softmax": (12, 6),
        "aten::native_dropout": (12, 6),
        "aten::div": (24, 8),
        "aten::gelu": (12, 6),
        "aten::mm": (96, 40),
    }
    lines = tuple(
        TimeLine(part=Part.COMPUTE, operator=name, count=count, ns=ms * MS)
        for name, (count, ms) in (calls | (changes or {})).items()
    )
    return trace(device_ledger=TimeLedger(step_ns=STEP_NS, median_ns=STEP_NS, steps=5, basis="", lines=lines))


def test_operators_on_the_attention_matrix_are_those_that_run_as_often_and_as_long_as_the_softmax() -> None:
    finding = found_in(attention())["unfused_attention"]
    assert finding.severity is Severity.WARNING
    assert finding.title == ("Unfused attention: operators on the attention matrix take 20% of each step.")
    assert finding.numbers["operators"] == ["aten::div", "aten::_softmax", "aten::native_dropout"]
    assert "the softmax runs 60 times, with 120 batched products" in finding.why
    assert "scaled_dot_product_attention" in finding.next_steps[0]
    assert recovery(finding).min == pytest.approx(10 * MS)
    assert recovery(finding).max == pytest.approx(18 * MS)


@pytest.mark.parametrize(
    ("changes", "operators"),
    [
        pytest.param({"aten::native_dropout": (24, 12)}, {"aten::_softmax", "aten::div"}, id="dropout elsewhere too"),
        pytest.param({"aten::native_dropout": (12, 1)}, {"aten::_softmax", "aten::div"}, id="dropout of less"),
        pytest.param({"aten::native_dropout": (12, 19)}, {"aten::_softmax", "aten::div"}, id="dropout of more"),
        pytest.param({"aten::div": (36, 12)}, {"aten::_softmax", "aten::native_dropout"}, id="division elsewhere too"),
    ],
)
def test_operators_that_may_run_on_something_else_do_not_count(
    changes: dict[str, tuple[float, int]], operators: set[str]
) -> None:
    assert set(found_in(attention(changes))["unfused_attention"].numbers["operators"]) == operators


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"aten::bmm": (12, 10)}, id="a softmax beside a single product"),
        pytest.param({"aten::_softmax": (0, 0)}, id="the fused kernel"),
        pytest.param({"aten::native_dropout": (12, 1), "aten::_softmax": (12, 1), "aten::div": (24, 2)}, id="short"),
    ],
)
def test_a_softmax_of_something_else_or_of_little_is_no_unfused_attention(
    changes: dict[str, tuple[float, int]],
) -> None:
    assert "unfused_attention" not in found_in(attention(changes))
