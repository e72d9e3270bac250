"""The module with most of a step, and the names of the work of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.modules import heaviest_module, operator_family
from lightning_memprof.account.parts import Part
from passes import event
from passes import found as findings_of

MS = 1_000_000


def line(module: str, operator: str, ms: float, **of: Any) -> TimeLine:
    return TimeLine(**{"part": Part.FORWARD, "module": module, "operator": operator, "ns": ms * MS, "count": 1.0, **of})


def ledger(*lines: TimeLine) -> TimeLedger:
    return TimeLedger(step_ns=total(lines), median_ns=total(lines), steps=9, basis="", lines=lines)


def test_the_heaviest_module_is_the_innermost_with_half_of_the_time() -> None:
    found = heaviest_module(
        [
            line("net.head", "aten::addmm", 2),
            line("net.blocks.0.attention", "aten::bmm", 3),
            line("net.blocks.1.attention", "aten::bmm", 3, part=Part.BACKWARD),
            line("net.blocks.0.norm", "aten::native_layer_norm", 1),
            line("net.blocks.1.norm", "aten::native_layer_norm", 1),
        ]
    )
    assert found is not None
    assert (found.module, found.ns, found.family, found.family_ns) == (
        "net.blocks.0-1.attention", 6 * MS, "matrix multiplication", 6 * MS,
    )  # fmt: skip


def test_without_a_module_with_half_of_the_time_it_is_the_model() -> None:
    found = heaviest_module(line(f"part{number}", "aten::mul", 1) for number in range(5))
    assert found is not None
    assert (found.module, found.family) == ("the model", "aten::mul")


@pytest.mark.parametrize(
    ("times", "leader"),
    [
        ((4, 3, 2, 1), "net.part0"),
        ((4, 3.5, 2, 1), ""),
        ((2, 1, 1, 1, 1, 1, 1, 1), ""),
    ],
    ids=["it stands out", "it is beside another one", "it is small"],
)
def test_of_the_submodules_of_the_heaviest_module_the_one_that_stands_out_is_named(
    times: tuple[float, ...], leader: str
) -> None:
    found = heaviest_module(line(f"net.part{number}", "aten::mul", ms) for number, ms in enumerate(times))
    assert found is not None
    assert (found.module, found.leader, found.leader_ns) == ("net", leader, times[0] * MS if leader else 0.0)


@pytest.mark.parametrize(
    ("operators", "family"),
    [
        (("aten::bmm", "aten::_softmax", "aten::addmm"), "attention without the fused kernel"),
        # Gates of experts multiply once, a classifier not at all.
        (("aten::addmm", "aten::_softmax"), "matrix multiplication"),
    ],
)
def test_products_around_a_softmax_are_attention_without_its_fused_kernel(
    operators: tuple[str, ...], family: str
) -> None:
    each = {name: (3, 1) if "softmax" in name else (4, 1 + name.endswith("bmm")) for name in operators}
    lines = [line("attention", name, ms, count=count) for name, (ms, count) in each.items()]
    found = heaviest_module(lines)
    assert found is not None
    assert found.family == family
    assert found.family_ns == (7 if "bmm" in operators[0] else 4) * MS


def test_lines_without_operators_have_no_heaviest_module() -> None:
    assert heaviest_module([TimeLine(part=Part.FORWARD, ns=MS)]) is None


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("aten::addmm", "matrix multiplication"),
        ("aten::convolution_backward", "convolution"),
        ("aten::mkldnn_convolution", "convolution"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mul", "aten::mul"),
        ("aten::mkldnn_linear", "matrix multiplication"),
        ("_C::cutlass_scaled_mm", "matrix multiplication"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matrix multiplication"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "matrix multiplication"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x192x64", "matrix multiplication"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
        ("turing_h1688cudnn_256x64_sliced1x2_ldg8_relu_exp_large_nhwc_tn_v1", "convolution"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float>", "convolution"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", "normalization"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("aten::_foreach_addcdiv_", "optimizer updates"),
        ("aten::_fused_adamw_", "optimizer updates"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>",
            "optimizer updates",
        ),
        ("triton_poi_fused_add_mul_0", "compiled code"),
        ("aten::upsample_bilinear2d", "aten::upsample_bilinear2d"),
        ("fbgemm::bounds_check_indices", "fbgemm::bounds_check_indices"),
        ("aten::_convert_indices_from_csr_to_coo", "aten::_convert_indices_from_csr_to_coo"),
        ("aten::group_points", "aten::group_points"),
        ("## Call CompiledFxGraph fa6wywn4x5jyarehth5g74ynnob2yd7p4t7zswy3mbfqlezuhfcp ##", "compiled code"),
        ("CompiledFunctionBackward", "compiled code"),
        ("", "Python"),
        (None, "unprofiled"),
    ],
)
def test_operators_of_the_same_work_have_one_name(operator: str | None, family: str) -> None:
    assert operator_family(operator) == family


def test_the_submodule_that_stands_out_and_the_work_are_evidence(tmp_path: Path) -> None:
    events = [event("[pl][module]Net: net", 0, 1990), event("aten::relu", 0, 1990)]
    finding = findings_of(tmp_path, *events)["nothing_found"]
    assert finding.title == "Compute-bound: the model takes 88% of each step (16.3 ms of 18.6 ms)."
    assert finding.why.startswith("56% of the time in the model is matrix multiplication; 37% is in net. ")
