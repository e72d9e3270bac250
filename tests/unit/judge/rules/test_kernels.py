from __future__ import annotations

import pytest

from findings import recovery
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import Severity
from trace_reports import MS, STEP_NS, found_in, gpu_times, kernel, trace


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


@pytest.mark.parametrize(("number", "is_found"), [("float", True), ("__half", False), ("__nv_bfloat16", False)])
def test_a_product_with_a_vector_tells_its_type(number: str, is_found: bool) -> None:
    name = f"void gemv2T_kernel_val<int, int, {number}, {number}, {number}, float, 128, 16, 4, 4, false>(Params)"
    assert ("tensor_cores_unused" in found_in(trace(kernels=(kernel(name, 100, MS),)))) == is_found


@pytest.mark.parametrize(
    ("half_ns", "why", "advice"),
    [
        (MS, "uses half precision elsewhere.", "Let autocast run it in half"),
        (MS // 10, "with tensor cores.", "Compute in bfloat16"),
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


@pytest.mark.parametrize(
    ("device", "capability", "advice"),
    [
        ("NVIDIA Rubin Next", (12, 1), "bfloat16"),
        ("NVIDIA TITAN V", (7, 0), "float16"),
        ("NVIDIA GeForce GTX 1660", (7, 5), None),
        ("Tesla P100-PCIE-16GB", (6, 0), None),
        ("AMD Instinct MI300X", (9, 4), None),
        ("unknown", (0, 0), None),
    ],
)
def test_tensor_cores_are_known_by_compute_capability(device: str, capability: tuple[int, int], advice: str) -> None:
    kernels = (kernel("volta_sgemm_64x64_nt", 200, MS),)
    rules = found_in(trace(devices=(device,), capabilities=(capability,), kernels=kernels))
    assert ("tensor_cores_unused" in rules) is (advice is not None)
    if advice is not None:
        assert rules["tensor_cores_unused"].remedies[0].id == advice


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
