from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_runs import HEALTHY, FakeRun, make_run
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, examine
from lightning_memprof.judge.rules.modules import (
    Heaviest,
    faster,
    heaviest_module,
    in_compiled,
    operator_family,
)
from lightning_memprof.judge.rules.program.python import _python
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB
from passes import calls, event, found

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


def test_the_submodule_that_stands_out_and_the_work_are_evidence(tmp_path: Path) -> None:
    events = [event("[pl][module]Net: net", 0, 1990), event("aten::relu", 0, 1990)]
    finding = found(tmp_path, *events)["nothing_found"]
    assert finding.title == "Compute-bound: the model takes 88% of each step (16.3 ms of 18.6 ms)."
    assert finding.why.startswith("56% of the model is matrix multiplication; net has 37% of it. ")


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


@pytest.mark.parametrize(
    ("operator", "on_device", "ids"),
    [
        ("aten::conv1d", False, ["less_work", "compile"]),
        # Some convolutions are slower on a CPU.
        ("aten::conv2d", False, ["less_work", "compare_channels_last"]),
        ("aten::conv2d", True, ["bfloat16", "channels_last"]),
    ],
)
def test_channels_last_is_for_images(tmp_path: Path, operator: str, on_device: bool, ids: list[str]) -> None:
    heaviest = heaviest_module([line("net", "aten::mkldnn_convolution", 4), line("net", operator, 0.1)])
    assert heaviest is not None
    fake = FakeRun(device_bytes=lambda _: MIB) if on_device else FakeRun()
    assert [remedy.id for remedy in faster(heaviest, load_run(make_run(tmp_path, fake)).lead)] == ids


@pytest.mark.parametrize(
    ("family", "share", "first"),
    [
        ("matrix multiplication", 0.9, "less_work"),
        ("recurrent layers", 0.9, "less_work"),
        ("matrix multiplication", 0.3, "compile"),
        ("aten::mul", 0.9, "compile"),
    ],
)
def test_on_a_cpu_arithmetic_is_not_to_be_fused(tmp_path: Path, family: str, share: float, first: str) -> None:
    heaviest = Heaviest(module="net", ns=100.0, family=family, family_ns=100 * share)
    assert faster(heaviest, load_run(make_run(tmp_path)).lead)[0].id == first


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


@pytest.mark.parametrize(
    ("compiled", "module", "is_compiled", "is_advised"),
    [
        ([], "net", False, True),
        (["head"], "net", False, True),
        (["net"], "net", True, False),
        (["net"], "net.blocks.0", True, False),
        ([f"blocks.{number}" for number in range(6)], "blocks.0-5.norm", True, False),
        (["net.blocks.0"], "net", False, False),
        ([""], "the model", True, False),
    ],
)
def test_a_compiled_module_is_named_as_compiled_and_not_to_be_compiled(
    tmp_path: Path, compiled: list[str], module: str, is_compiled: bool, is_advised: bool
) -> None:
    run = load_run(make_run(tmp_path, FakeRun(training={"compiled": compiled})))
    heaviest = Heaviest(module=module, ns=9.0, family="aten::mul", family_ns=9.0)
    assert in_compiled(module, run.lead) == is_compiled
    assert any(step.id == "compile" for step in faster(heaviest, run.lead)) == is_advised


def test_python_outside_operators_is_found_with_its_module(tmp_path: Path) -> None:
    finding = found(tmp_path, *calls("tokenizer", "aten::add", 12, each=1))
    assert "Python code in training_step" in finding["python_time"].title
    assert finding["python_time"].recovers is not None
    slow = [event("[pl][module]Net: tokenizer", 0, 1990), *calls("tokenizer", "aten::add", 12, each=1)[1:]]
    assert "the forward of tokenizer" in found(tmp_path / "module", *slow)["python_time"].title


@pytest.mark.parametrize(("times", "reads"), [(100, 0), (300, 300)])
def test_values_that_are_read_one_by_one_are_named_with_their_number(tmp_path: Path, times: int, reads: int) -> None:
    values = [
        made
        for at in range(times)
        for made in (
            event("aten::item", 10 + 5 * at, 12 + 5 * at),
            event("aten::_local_scalar_dense", 11 + 5 * at, 11.5 + 5 * at),
        )
    ]
    findings = found(tmp_path, *values)
    assert findings["python_time"].numbers["reads"] == reads
    assert "python_loop" not in findings
    assert ("Scalar loop: training_step reads 300 tensor values one by one" in findings["python_time"].title) == (
        times == 300
    )
    assert ("whole tensors" in findings["python_time"].next_steps[0]) == (times == 300)


def test_gc_pauses_belong_to_the_values_that_are_read_as_far_as_their_objects_start_them() -> None:
    reads = line("", "aten::item", 1, count=1400, called=1400)
    pauses = TimeLine(part=Part.GC_PAUSES, ns=6 * MS, count=4)
    python = _python(ledger(reads, pauses))
    assert (python.reads, python.ns) == (1400, 1 * MS + 6 * MS / 2)
    assert _python(ledger(msgspec.structs.replace(reads, called=70), pauses)).ns == 0


def test_a_forward_hook_is_named_with_its_line_and_its_modules_are_not_accused(tmp_path: Path) -> None:
    hooked = [event("[pl][forward_hook]look (train.py:7)", 100 * at, 100 * at + 60) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *hooked)
    hook = findings["registered_hook_bound"]
    assert hook.title.startswith("The forward hook look (train.py:7) takes ")
    assert "18 calls per step" in hook.why
    assert "Remove the hook look (train.py:7)" in hook.next_steps[0]
    assert "python_time" not in findings


def test_self_log_in_the_training_step_is_logging_and_not_python_of_the_model(tmp_path: Path) -> None:
    logs = [event("[pl][profile][LightningModule]Net.log", 100 * at, 100 * at + 80) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *logs)
    assert "18 calls per step" in findings["logging_bound"].why
    assert "python_time" not in findings


def trained(**training: Any) -> FakeRun:
    return FakeRun(phases=lambda _rank, _step: {**HEALTHY, "backward": 40_000_000}, training=training)


def gradients(count: int) -> list[dict[str, Any]]:
    return [event("torch::autograd::AccumulateGrad", 2905 + 5 * at, 2908 + 5 * at) for at in range(count)]


def node(module: str, at: int) -> list[dict[str, Any]]:
    """An operator in a module's forward at ``at``, and its node in backward 2 ms later, of 600 us."""
    made = event("aten::relu", at, at + 10)
    made["args"] = {"Sequence number": at, "Fwd thread id": 0}
    ran = event("autograd::engine::evaluate_function: ReluBackward0", at + 2000, at + 2600)
    ran["args"] = {"Sequence number": at, "Fwd thread id": 1}
    return [event(f"[pl][module]Net: {module}", at, at + 20), made, ran]


def test_a_module_in_no_optimizer_whose_gradients_are_computed_is_named(tmp_path: Path) -> None:
    fake = trained(not_optimized=["head", "backbone"])
    finding = found(tmp_path, *node("backbone.0", 100), fake=fake)["unused_gradients"]
    assert "backbone, which is in no optimizer" in finding.title
    assert "self.backbone.requires_grad_(False)" in finding.next_steps[0]
    assert finding.recovers is not None
    assert finding.recovers.min == pytest.approx(finding.recovers.max * 0.4)
    assert finding.recovers.max == pytest.approx(40e6 * 0.6, rel=0.05)


def test_a_module_whose_learning_rate_is_0_is_named_as_one_in_no_optimizer(tmp_path: Path) -> None:
    finding = found(tmp_path, *node("backbone.0", 100), fake=trained(zero_lr=["backbone"]))["unused_gradients"]
    assert "backbone, whose learning rate is 0" in finding.title
    assert "self.backbone.requires_grad_(False)" in finding.next_steps[0]


def test_a_module_in_no_optimizer_without_backward_costs_nothing(tmp_path: Path) -> None:
    assert "unused_gradients" not in found(tmp_path, *node("net", 100), fake=trained(not_optimized=["backbone"]))


OPTIMIZERS = [
    {"name": "Adam", "parameters": 4, "modules": ["generator"], "fused": True},
    {"name": "SGD", "parameters": 2, "modules": ["critic"], "fused": True},
]


@pytest.mark.parametrize(("count", "passes", "is_found"), [(18, 3, True), (14, 3, False), (6, 1, False)])
def test_passes_that_all_reach_two_optimizers_compute_gradients_in_vain(
    tmp_path: Path, count: int, passes: int, is_found: bool
) -> None:
    fake = replace(trained(optimizers=OPTIMIZERS), actions=("[Precision]Half.backward", "[Optimizer]SGD.step") * passes)
    events = [*node("generator.0", 100), *gradients(count)]
    findings = found(tmp_path, *events, fake=fake)
    assert ("unused_gradients" in findings) == is_found
    if is_found:
        assert "3 backward passes per step reach all optimizers" in findings["unused_gradients"].title
        assert findings["unused_gradients"].remedies[0].id == "detach_parts"


@pytest.mark.parametrize(
    ("count", "passes", "detached", "named"),
    [
        (10, 2, False, "generator"),
        (8, 2, False, "critic"),
        (6, 2, False, None),
        # Its samples are detached for the critic: the graph is freed before that pass.
        (10, 2, True, None),
        (10, 3, False, None),
    ],
)
def test_gradients_that_the_pass_for_another_optimizer_computes_too_are_named(
    tmp_path: Path, count: int, passes: int, detached: bool, named: str | None
) -> None:
    fake = replace(
        trained(optimizers=OPTIMIZERS),
        actions=("[Precision]Half.backward", "[Optimizer]SGD.step") * passes,
        memory=None,
    )
    row = {"step": 2, "recorded": True, "time_ns": 1}
    first, second = ({"generator": [0, size, 1, 9, 9], "critic": [0, 9, 2, 9, 9]} for size in (0 if detached else 9, 9))
    findings = found(
        tmp_path,
        *node("generator.0", 100),
        *node("critic.0", 1000),
        *gradients(count),
        fake=fake,
        saved_tensors=[row | {"modules": first}, row | {"modules": second}],
    )
    assert ("unused_gradients" in findings) == (named is not None)
    if named:
        finding = findings["unused_gradients"]
        assert f"both backward passes of each step reach {named}, " in finding.title
        assert finding.remedies[0].id == "detach_parts"
        assert finding.recovers is not None
        # 15 ms of backward for each part: one of its two passes.
        assert "15.0 ms of" in finding.why
        assert finding.recovers.max == pytest.approx(7.5e6)
        assert finding.recovers.min == pytest.approx(0.4 * finding.recovers.max)


def test_modules_whose_own_time_is_below_the_cost_of_recording_are_no_loop(tmp_path: Path) -> None:
    layers = [
        made
        for at in range(20)
        for made in (
            event(f"[pl][module]Net: blocks.{at}.reduce", 90 * at, 90 * at + 80),
            event("aten::linear", 90 * at + 1, 90 * at + 79),
        )
    ]
    fake = FakeRun(phases=lambda _rank, _step: {**dict.fromkeys(HEALTHY, 0), "forward": 1_000_000})
    assert "python_loop" not in found(tmp_path, *layers, fake=fake)


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
        assert "python_time" not in findings
