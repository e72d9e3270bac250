from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import (
    Copies,
    HostOperators,
    Program,
    Synchronization,
    TraceReport,
)
from lightning_memprof.judge import Finding, Severity, examine_files
from lightning_memprof.judge.traces import listed
from lightning_memprof.units import GIB
from trace_reports import MS, START, STEP_NS, call, collective, gpu_times, idle, kernel, time_ledger, trace


def found(report: TraceReport) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine_files((report,), ())}


def copies(**changes: Any) -> Copies:
    usual: dict[str, Any] = {"kind": "HtoD", "is_pageable": True, "count": 10, "total_ns": 40 * MS, "bytes": 400 << 20}
    return Copies(**{**usual, **changes})


def waits(name: str, count: int, gap_ns: int) -> Synchronization:
    return Synchronization(
        name=name,
        count=count,
        total_ns=gap_ns,
        gap_ns=gap_ns,
        longest_gap_ns=gap_ns // count,
        longest_start_ns=START,
        own_ns=gap_ns,
    )


def test_a_healthy_trace_has_no_findings() -> None:
    assert not found(trace())
    assert [finding.severity for finding in examine_files([trace()], [])] in ([], [Severity.NONE])


def test_what_several_traces_show_is_one_finding_with_the_evidence_of_all() -> None:
    ranks = [
        replace(
            trace(causes=(idle(Part.IDLE_GC_PAUSES, share * MS),), rank=rank, world_size=3),
            file=Path(f"rank{rank}.json"),
        )
        for rank, share in enumerate((60, 200, 0))
    ]
    (finding,) = [finding for finding in examine_files(ranks, []) if finding.rule == "gpu_idle"]
    assert "on rank 1" in finding.title
    assert finding.severity is Severity.CRITICAL
    assert finding.why.endswith("1 other trace shows it too.")
    assert [each.artifact for each in finding.evidence] == ["rank1.json", "rank0.json"]


def test_of_traces_that_may_be_of_several_programs_the_finding_names_its_file() -> None:
    programs = [
        replace(trace(causes=(idle(Part.IDLE_GC_PAUSES, share * MS),)), file=Path(f"of/{share}.json"))
        for share in (60, 200)
    ]
    (finding,) = [finding for finding in examine_files(programs, []) if finding.rule == "gpu_idle"]
    assert finding.why.startswith("In 200.json: The GPU is idle for ")
    assert finding.why.endswith(" gpu_idle is found in 1 other trace, too.")


def test_copies_in_two_directions_are_one_finding() -> None:
    both = trace(copies=(copies(), copies(kind="DtoH", total_ns=20 * MS, bytes=40 << 20)))
    (finding,) = [finding for finding in examine_files([both, both], []) if finding.rule == "blocking_transfers"]
    assert finding.numbers["kinds"] == ["HtoD", "DtoH"]
    assert finding.numbers["share"] == pytest.approx(60 / 500)
    assert "pin_memory=True" in finding.next_steps[0]
    assert any(".cpu()" in step for step in finding.next_steps)


def test_a_host_trace_without_loading_has_no_findings() -> None:
    assert not found(trace(gpu_window=None, idle=(), kernels=()))


def test_loading_that_no_kernel_hides_is_input_bound_with_its_share() -> None:
    finding = found(trace(loading_ns=200 * MS, causes=(idle(Part.IDLE_DATA, 180 * MS, at_ns=START + 2 * STEP_NS),)))
    said = finding["input_bound"]
    assert said.severity is Severity.WARNING
    assert "36% of each step" in said.title
    assert "the GPU is idle for 180 ms meanwhile" in said.why
    assert said.numbers["data_loading_ns"] == 200 * MS
    assert said.numbers["ns"] == 36 * MS
    assert "num_workers=4" in said.next_steps[0]
    assert "gpu_idle" not in finding


def test_evidence_is_the_file_and_the_longest_stretch_with_its_steps() -> None:
    moment = START + 2 * STEP_NS + MS
    said = found(trace(loading_ns=200 * MS, causes=(idle(Part.IDLE_DATA, 180 * MS, at_ns=moment),), rank=3))
    whole, longest = said["input_bound"].evidence
    assert (whole.artifact, whole.rank, whole.steps) == ("runs/rank0.pt.trace.json.gz", 3, (3, 7))
    assert (whole.start_ns, whole.end_ns) == (START, START + 5 * STEP_NS)
    assert (longest.start_ns, longest.end_ns, longest.steps) == (moment, moment + 36 * MS, (5, 5))


def test_loading_behind_a_busy_device_is_not_input_bound() -> None:
    assert "input_bound" not in found(trace(loading_ns=300 * MS, causes=(idle(Part.IDLE_DATA, 20 * MS),)))


def test_loading_costs_the_idle_time_that_it_causes() -> None:
    finding = found(trace(loading_ns=200 * MS, causes=(idle(Part.IDLE_DATA, 80 * MS),)))["input_bound"]
    assert finding.numbers["ns"] == 16 * MS


def test_loading_in_one_step_of_several_is_only_info() -> None:
    report = trace(loading_ns=250 * MS, causes=(idle(Part.IDLE_DATA, 240 * MS),))
    steps = [replace(step, data_loading_ns=0) for step in report.steps]
    report = replace(report, steps=(replace(steps[0], data_loading_ns=250 * MS), *steps[1:]))
    said = found(report)["input_bound"]
    assert said.severity is Severity.INFO
    assert "in one of 5 steps" in said.why


def test_loading_on_a_host_alone_is_input_bound_too() -> None:
    said = found(trace(loading_ns=200 * MS, gpu_window=None, idle=(), kernels=()))["input_bound"]
    assert "40% of each step" in said.title
    assert not any("pin_memory" in step for step in said.next_steps)


def test_fetches_of_very_short_steps_are_not_loading() -> None:
    report = trace(loading_ns=5 * 3 * MS // 10, gpu_window=None, idle=(), kernels=())
    short = tuple(replace(step, duration_ns=MS, data_loading_ns=3 * MS // 10) for step in report.steps)
    assert not found(replace(report, steps=short))


def test_short_kernels_and_a_busy_host_are_launch_bound() -> None:
    causes = (idle(Part.IDLE_OPERATORS, 200 * MS, "aten::linear", at_ns=START), idle(Part.IDLE_PYTHON, 100 * MS))
    said = found(trace(causes=causes, kernels=(kernel("void at::native::vectorized_layer_norm(int)", 200, 5_000),)))
    finding = said["gpu_idle"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "Launch-bound: the GPU is idle 61% of each step between kernel launches."
    assert "200 ms while the host is in operators (mostly aten::linear)" in finding.why
    assert finding.numbers["launch_bound"] is True
    assert "torch.compile" in finding.next_steps[0]


def test_an_idle_device_with_long_kernels_names_what_the_host_does() -> None:
    finding = found(trace(causes=(idle(Part.IDLE_GC_PAUSES, 80 * MS, "gen 2"),)))["gpu_idle"]
    assert finding.severity is Severity.WARNING
    assert finding.title == "The GPU is idle 16% of each step while the host is in GC pauses."
    assert "gc.freeze" in finding.next_steps[0]
    assert finding.numbers["main_cause"] == Part.IDLE_GC_PAUSES


def test_waiting_that_leaves_the_device_idle_is_named_by_its_operator() -> None:
    report = trace(
        causes=(idle(Part.IDLE_PYTHON, 80 * MS),),
        synchronizations=(waits("aten::item", 50, 80 * MS), waits("aten::to", 5, MS)),
    )
    finding = found(report)["synchronization"]
    assert finding.severity is Severity.WARNING
    assert finding.title == "Waits for the GPU (11 times per step) leave it idle 16% of each step."
    assert "80.0 ms after aten::item (50 times)" in finding.why
    assert "loss.detach()" in finding.next_steps[0]
    assert "non_blocking" in finding.next_steps[1]
    assert "set_sync_debug_mode" in finding.next_steps[-1]


def test_copies_from_pageable_memory_are_told_by_direction() -> None:
    finding = found(trace(copies=(copies(),)))["blocking_transfers"]
    assert finding.severity is Severity.INFO
    assert finding.title == "Blocking copies to the GPU take 8% of each step."
    assert "400 MiB in 40.0 ms, 9.77 GiB/s" in finding.why
    assert "pin_memory=True" in finding.next_steps[0]
    back = found(trace(copies=(copies(kind="DtoH", total_ns=200 * MS),)))["blocking_transfers"]
    assert back.severity is Severity.CRITICAL
    assert ".cpu()" in back.next_steps[0]


def test_of_several_products_the_longest_kernel_is_named_with_its_time() -> None:
    names = ("volta_sgemm_64x64_nt", "volta_sgemm_128x64_nn", "volta_scudnn_128x64_relu_medium_nn_v1")
    kernels = tuple(kernel(name, 100, (4 - place) * MS // 10) for place, name in enumerate(names))
    finding = found(trace(kernels=kernels, devices=("NVIDIA A100",)))["tensor_cores_unused"]
    assert (
        finding.why == "90.0 ms of 90.0 ms in kernels, 40.0 ms of it in volta_sgemm_64x64_nt; none with tensor cores."
    )


@pytest.mark.parametrize(("back_bytes", "stays"), [(410 << 20, True), (40 << 20, False)])
def test_what_moves_back_and_forth_in_each_step_can_stay_on_the_gpu(back_bytes: int, stays: bool) -> None:
    report = trace(copies=(copies(), copies(kind="DtoH", bytes=back_bytes)))
    for finding in (each for each in examine_files((report,), ()) if each.rule == "blocking_transfers"):
        assert finding.why.endswith("As many bytes move back and forth.") is stays
        assert finding.next_steps[0].startswith("Leave it on the GPU") is stays
        assert len(finding.next_steps) > 1


def test_copies_that_are_pinned_hidden_or_short_are_no_finding() -> None:
    assert not found(trace(copies=(copies(is_pageable=False, exposed_ns=20 * MS), copies(is_pageable=None))))
    assert not found(trace(copies=(copies(exposed_ns=MS), copies(kind="DtoH", total_ns=MS))))


def test_exposed_communication_names_the_collective_its_size_and_overlap() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=200 * MS, overlapped_ns=50 * MS)
    worst = collective(exposed_ns=150 * MS, longest_start_ns=START)
    report = trace(gpu_window=times, collectives=(collective(name="nccl:broadcast"), worst), rank=1, world_size=8)
    finding = found(report)["communication_exposed"]
    assert finding.severity is Severity.WARNING
    assert finding.title == "Exposed collectives take 40% of each step on rank 1, mostly all_reduce."
    assert "20% of all communication overlaps kernels; all_reduce of 25.0 MiB, 10 times" in finding.why
    most = trace(gpu_window=gpu_times(500 * MS, 5 * MS, exposed_ns=250 * MS), collectives=(worst,))
    assert found(most)["communication_exposed"].title.startswith("Communication-bound: ")
    assert "bucket_cap_mb" in finding.next_steps[0]
    assert finding.numbers["collectives"][0]["bytes_each"] == 25 << 20


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bus_bytes_per_s": 3.0 * GIB}, "exposed, up to 3.00 GiB/s of bus bandwidth."),
        ({"bus_bytes_per_s": 3.0 * GIB, "bytes_each": 4096}, "exposed."),
        ({}, "exposed."),
    ],
)
def test_a_large_collective_tells_what_bandwidth_it_reached(changes: dict[str, Any], told: str) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    finding = found(trace(gpu_window=times, collectives=(collective(**changes),)))["communication_exposed"]
    assert finding.why.endswith(told)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "forward_prefetch"),
        ("nccl:_reduce_scatter_base", "forward_prefetch"),
        ("nccl:all_to_all", "async_op=True"),
        ("allreduce", "bucket_cap_mb"),
        ("nccl:broadcast", "async_op=True"),
        ("nccl:recv 0<-1", "Fill the pipeline: more micro-batches"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "async_op=True"),
    ],
)
def test_the_advice_fits_the_collective(name: str, advice: str) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    finding = found(trace(gpu_window=times, collectives=(collective(name=name),)))["communication_exposed"]
    assert finding.severity is Severity.WARNING
    assert advice in finding.next_steps[0]


def test_what_a_stage_of_a_pipeline_receives_late_is_no_late_rank() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    finding = found(trace(gpu_window=times, collectives=(collective(name="recv", max_ns=90 * MS),)))
    assert finding["communication_exposed"].next_steps[0].startswith("Fill the pipeline")


@pytest.mark.parametrize(
    ("bytes_each", "count", "advice"),
    [
        pytest.param(20 << 20, 3, "DDPStrategy(bucket_cap_mb=2)", id="one bucket per step"),
        pytest.param(25 << 20, 6, "DDPStrategy(bucket_cap_mb=6)", id="two buckets per step"),
        pytest.param(25 << 20, 9, "DDPStrategy(bucket_cap_mb=50, static_graph=True)", id="three buckets per step"),
        pytest.param(4096, 3, "DDPStrategy(bucket_cap_mb=50, static_graph=True)", id="not of gradients"),
        pytest.param(None, 3, "DDPStrategy(bucket_cap_mb=50, static_graph=True)", id="unknown size"),
    ],
)
def test_gradients_that_one_or_two_buckets_hold_are_sent_in_smaller_ones(
    bytes_each: int | None, count: int, advice: str
) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    report = trace(3, gpu_window=times, collectives=(collective(bytes_each=bytes_each, count=count),))
    assert advice in found(report)["communication_exposed"].next_steps[0]


def test_of_gradients_that_are_mostly_hidden_the_last_bucket_is_to_be_smaller() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=60 * MS, overlapped_ns=180 * MS)
    report = trace(gpu_window=times, collectives=(collective(bytes_each=25 << 20, count=40),))
    assert "DDPStrategy(bucket_cap_mb=6)" in found(report)["communication_exposed"].next_steps[0]


@pytest.mark.parametrize(("sent", "is_advised"), [("Sum_f32", True), ("Sum_bf16", False), ("Sum_f16", False)])
def test_what_is_sent_in_16_bits_is_not_to_be_sent_in_bfloat16(sent: str, is_advised: bool) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    kernels = (
        kernel("gemm", 100, 4 * MS),
        replace(kernel(f"ncclDevKernel_AllReduce_{sent}_RING_LL", 10, MS), kind="communication"),
    )
    for name in ("all_reduce", "all_to_all"):
        report = trace(gpu_window=times, collectives=(collective(name=name),), kernels=kernels)
        steps = found(report)["communication_exposed"].next_steps
        assert any("bf16" in step or "bfloat16" in step for step in steps) is is_advised


@pytest.mark.parametrize(("exposed_ns", "first"), [(240 * MS, "Prefetch"), (260 * MS, "Shard")])
def test_communication_that_takes_longer_than_computation_is_reduced_first(exposed_ns: int, first: str) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=exposed_ns)
    report = trace(gpu_window=times, collectives=(collective(name="nccl:all_gather"),))
    assert found(report)["communication_exposed"].next_steps[0].startswith(first)


def test_a_collective_that_sometimes_waits_for_a_rank_says_so_first() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    late = collective(max_ns=90 * MS)
    finding = found(trace(gpu_window=times, collectives=(late,)))["communication_exposed"]
    assert finding.numbers["late"] == "nccl:all_reduce"
    assert finding.next_steps[0].startswith("Find the late rank: the same all_reduce takes 10.0 ms or 90.0 ms.")


@pytest.mark.parametrize(
    ("small", "large", "is_waiting"),
    [
        pytest.param((4 << 20, 8 * MS), (16 << 20, 10 * MS), True, id="four times the bytes, hardly longer"),
        pytest.param((4 << 20, 8 * MS), (16 << 20, 7 * MS), True, id="even shorter"),
        pytest.param((4 << 20, 2 * MS), (16 << 20, 8 * MS), False, id="in proportion to the bytes"),
        pytest.param((4 << 20, 12 * MS), (16 << 20, 36 * MS), False, id="a third does not grow with the bytes"),
        pytest.param((12 << 20, 8 * MS), (16 << 20, 8 * MS), False, id="of nearly one size"),
        pytest.param((4096, 8 * MS), (16 << 20, 8 * MS), False, id="too small to be a transfer"),
        pytest.param((4 << 20, MS), (16 << 20, MS), False, id="too short to matter"),
    ],
)
def test_collectives_that_take_as_long_for_fewer_bytes_wait_for_a_rank(
    small: tuple[int, int], large: tuple[int, int], is_waiting: bool
) -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    sizes = tuple(
        collective(bytes_each=size, median_ns=ns, max_ns=ns, total_ns=10 * ns, exposed_ns=5 * ns)
        for size, ns in (small, large)
    )
    step = found(trace(gpu_window=times, collectives=sizes))["communication_exposed"].next_steps[0]
    assert step.startswith("Find the late rank: all_reduce takes") is is_waiting


def test_many_small_collectives_are_better_sent_together() -> None:
    times = gpu_times(500 * MS, 5 * MS, exposed_ns=80 * MS)
    small = collective(bytes_each=4096, count=500)
    finding = found(trace(gpu_window=times, collectives=(small,)))["communication_exposed"]
    assert finding.next_steps[0] == "Combine 500 collectives of less than 1.00 MiB."


def test_memory_that_is_given_back_and_taken_again_is_thrash() -> None:
    calls = (
        call("cudaFree", 40, 60 * MS, at_ns=START),
        call("cudaMalloc", 40, 20 * MS),
        call("cudaLaunchKernel", 9, 9),
    )
    finding = found(trace(steady_allocations=calls, causes=(idle(Part.IDLE_ALLOCATOR, 75 * MS),)))["allocator_thrash"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["share"] == pytest.approx(75 / 500)
    assert "cudaFree 40 times (60.0 ms), cudaMalloc 40 times (20.0 ms)" in finding.why
    assert finding.numbers["freed"] == 40
    assert "expandable_segments" in finding.next_steps[0]


def test_growing_segments_are_only_info() -> None:
    calls = (call("cuMemCreate", 40, 130 * MS), call("hipMalloc", 40, 20 * MS))
    finding = found(trace(steady_allocations=calls, causes=(idle(Part.IDLE_ALLOCATOR, 150 * MS),)))
    assert finding["allocator_thrash"].severity is Severity.INFO
    assert not found(trace(steady_allocations=(call("cudaMalloc", 2, MS),)))


def test_a_collective_that_waits_for_the_allocator_takes_hundreds_of_times_as_long() -> None:
    slow = collective(median_ns=MS // 2, max_ns=150 * MS, longest_start_ns=START + 10 * MS)
    report = trace(
        steady_allocations=(call("cudaFree", 2, 2 * MS),),
        collectives=(collective(), slow),
        allocator_spans=((START, START + MS), (START + 100 * MS, START + 101 * MS)),
        gpu_window=gpu_times(500 * MS, 5 * MS, exposed_ns=200 * MS),
    )
    finding = found(report)["allocator_thrash"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["share"] == pytest.approx(149.5 / 500)
    assert finding.title.startswith("Low memory: nccl:all_reduce took 150 ms (median 500 µs) during an allocator call")
    assert finding.numbers["slow_collectives"] == [
        {"name": "nccl:all_reduce", "median_ns": MS // 2, "max_ns": 150 * MS}
    ]
    assert (finding.evidence[-1].start_ns, finding.evidence[-1].end_ns) == (START + 10 * MS, START + 160 * MS)


@pytest.mark.parametrize("spans", [(), ((START, START + MS),), ((START + 161 * MS, START + 162 * MS),)])
def test_a_slow_collective_at_another_time_is_not_the_allocators(spans: tuple[tuple[int, int], ...]) -> None:
    slow = collective(median_ns=MS // 2, max_ns=150 * MS, longest_start_ns=START + 10 * MS)
    report = trace(steady_allocations=(call("cudaFree", 2, 2 * MS),), collectives=(slow,), allocator_spans=spans)
    assert "allocator_thrash" not in found(report)


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
    finding = found(report)["tensor_cores_unused"]
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
    finding = found(report)["tensor_cores_unused"]
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
    assert found(report)["tensor_cores_unused"].severity is severity


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
    assert "tensor_cores_unused" not in found(trace(kernels=(kernel(name, 200, MS),)))


def test_what_a_device_can_do_decides_what_is_advised() -> None:
    volta = trace(devices=("Tesla V100-SXM2-32GB",), kernels=(kernel("volta_sgemm_64x64_nt", 200, MS),))
    assert "16-mixed" in found(volta)["tensor_cores_unused"].next_steps[0]
    assert "tensor_cores_unused" not in found(replace(volta, devices=("Tesla P100-PCIE-16GB",)))
    assert "tensor_cores_unused" not in found(replace(volta, devices=("AMD Instinct MI300X",)))
    assert "tensor_cores_unused" in found(replace(volta, devices=()))


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
    rules = found(trace(devices=(device,), capabilities=(capability,), kernels=kernels))
    assert ("tensor_cores_unused" in rules) is (advice is not None)
    if advice is not None:
        assert f'"{advice}"' in rules["tensor_cores_unused"].next_steps[0]


def test_many_short_kernels_are_to_be_fused() -> None:
    short = kernel("void at::native::vectorized_elementwise_kernel<4, add>(int)", 5_000, 8_000)
    program = Program(loop_optimizer="AdamW")
    finding = found(trace(kernels=(short, kernel("gemm", 500, 80_000)), program=program))["many_small_kernels"]
    assert finding.severity is Severity.INFO
    assert finding.title == "1,000 kernels per step below 10.0 µs take 50% of each step."
    assert "torch.compile" in finding.next_steps[0]
    assert finding.next_steps[1] == "Update all parameters at once: torch.optim.AdamW(..., fused=True)."


def test_kernels_from_before_the_steps_are_not_those_of_a_step() -> None:
    small = kernel("vectorized_elementwise_kernel", 6_000, 8_000)
    every = found(trace(steps=5, kernels=(small,)))["many_small_kernels"]
    fewer = found(trace(steps=5, kernels=(small,), outside={small.name: 1_000}))["many_small_kernels"]
    assert every.title.startswith("1,200 kernels per step")
    assert fewer.title.startswith("1,000 kernels per step")


def test_short_kernels_of_a_fused_optimizer_are_not_its_loop() -> None:
    short = kernel("void at::native::vectorized_elementwise_kernel<4, add>(int)", 5_000, 8_000)
    finding = found(trace(kernels=(short, kernel("void multi_tensor_apply_kernel<Adam>", 5, 10_000))))[
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
    finding = found(on_host())["many_small_operators"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "Launch-bound on the host: calling 1,200 operators takes 65% of each step."
    assert "aten::add (800), MulBackward0 (400), in Net: net (1,200)" in finding.why
    assert finding.numbers["share"] == pytest.approx((15 - 2) / 20)
    assert finding.numbers["recording_ns"] == 2 * MS
    assert "torch.compile" in finding.next_steps[0]
    assert "torch.stack" in finding.next_steps[1]


def test_where_the_optimizer_calls_most_of_them_it_is_named_first() -> None:
    report = on_host(places=(("Optimizer.step#AdamW.step", 1_000), ("Net: net", 200)))
    finding = found(replace(report, program=Program(loop_optimizer="AdamW")))["many_small_operators"]
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
    assert not found(on_host(**changes))


def test_a_profiler_that_takes_much_of_the_time_says_how_far_to_believe_the_rest() -> None:
    asked = call("Activity Buffer Request", 3, 80 * MS)
    finding = found(trace(profiler_overhead=(asked,), causes=(idle(Part.IDLE_PYTHON, 60 * MS),)))["recording_overhead"]
    assert finding.severity is Severity.INFO
    # No more than the time in which the device waits for the host: 60 ms, and 5 in launches.
    assert finding.numbers["share"] == pytest.approx(65 / 500)
    assert "recording_overhead" not in found(trace(profiler_overhead=(asked,)))
    assert "Activity Buffer Request 3 times" in finding.why


def test_what_the_driver_does_is_not_the_profilers_work() -> None:
    assert not found(trace(profiler_overhead=(call("Lazy Function Loading", 3, 80 * MS),)))


def test_events_as_dense_as_their_cost_say_so_where_the_host_matters() -> None:
    causes = (idle(Part.IDLE_PYTHON, 300 * MS),)
    finding = found(trace(causes=causes, host_events=300_000, recorded_with=("with_stack", "record_shapes")))[
        "recording_overhead"
    ]
    assert finding.severity is Severity.INFO
    assert finding.numbers["share"] == pytest.approx(0.6)
    assert "with_stack=False" in finding.next_steps[0]
    assert "record_shapes=False" in finding.next_steps[0]
    assert not found(trace(host_events=300_000))


def test_a_device_that_idles_for_unknown_reasons_is_not_called_launch_bound() -> None:
    window_ns = 5 * STEP_NS
    finding = found(trace(gpu_window=gpu_times(window_ns, window_ns // 2), idle=()))["gpu_idle"]
    assert finding.numbers["main_cause"] == Part.IDLE_UNKNOWN
    assert "while the host" not in finding.title
    assert "ProfilerActivity.CPU" in finding.next_steps[0]


def test_device_and_metadata_events_cost_the_host_nothing() -> None:
    report = trace(causes=(idle(Part.IDLE_PYTHON, 300 * MS),), events=3_000_000, host_events=1_000)
    assert "recording_overhead" not in found(report)


LIGHTNING_ONLY = (
    "Trainer(",
    "DDPStrategy",
    "FSDPStrategy",
    "self.log",
    "ExtendedPyTorchProfiler",
    "Schedule(",
    "pulse",
)
TRAINING_ONLY = ("fused=True", "mixed precision", "accumul", "gradient", "checkpointing")


@pytest.mark.parametrize(
    ("program", "banned"),
    [
        (Program(is_lightning=False), LIGHTNING_ONLY),
        (Program(is_lightning=False, trains=False), (*LIGHTNING_ONLY, *TRAINING_ONLY)),
        (Program(trains=False), TRAINING_ONLY),
        (Program(is_compiled=True), ("torch.compile(model).", "torch.compile(model), or")),
        (Program(is_compiled=True, has_graphs=True), ("torch.compile",)),
        (Program(has_stacks=True), ("with_stack=True",)),
        (Program(is_ddp=False), ("DDPStrategy", "DistributedDataParallel", "accumulate_grad_batches=2).")),
    ],
)
def test_next_steps_fit_the_recorded_program(program: Program, banned: tuple[str, ...]) -> None:
    window_ns = 5 * STEP_NS
    exposed = gpu_times(window_ns, 5 * MS, exposed_ns=200 * MS)
    reports = [
        *(trace(causes=(idle(cause, 300 * MS),)) for cause in Part if cause.group == "device idle"),
        trace(causes=(idle(Part.IDLE_LAUNCH, 300 * MS),), kernels=(kernel("elementwise_kernel", 5_000, 8_000),)),
        trace(kernels=(kernel("volta_sgemm_64x64_nt", 100, 4 * MS),), devices=("NVIDIA A100",)),
        trace(kernels=(kernel("volta_sgemm_64x64_nt", 100, 4 * MS),), devices=("Tesla V100",)),
        trace(
            causes=(idle(Part.IDLE_SYNCHRONIZATION, 200 * MS),), synchronizations=(waits("aten::item", 50, 100 * MS),)
        ),
        trace(copies=(copies(), copies(kind="DtoH"))),
        trace(steady_allocations=(call("cudaFree", 40, 60 * MS), call("cudaMalloc", 40, 20 * MS))),
        *(
            trace(gpu_window=exposed, collectives=(collective(name=name),))
            for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")
        ),
        trace(causes=(idle(Part.IDLE_PYTHON, 300 * MS),), host_events=300_000, recorded_with=("record_shapes",)),
    ]
    findings = [finding for report in reports for finding in found(replace(report, program=program)).values()]
    assert {finding.rule for finding in findings} >= {
        "gpu_idle", "many_small_kernels", "tensor_cores_unused", "synchronization", "blocking_transfers",
        "allocator_thrash", "communication_exposed", "recording_overhead",
    }  # fmt: skip
    for finding in findings:
        assert finding.next_steps
        for step in finding.next_steps:
            assert not [word for word in banned if word in step], (finding.rule, step)


def test_kernels_of_a_sentence_have_different_names() -> None:
    kernels = [
        (f"void at::native::vectorized_elementwise_kernel<4, at::native::{call}<float, Mul<float> > >(int)", 9)
        for call in ("AUnaryFunctor", "BinaryFunctor")
    ]
    assert listed(kernels) == (
        "vectorized_elementwise_kernel<4, AUnaryFunctor<Mul<float>>> (9), "
        "vectorized_elementwise_kernel<4, BinaryFunctor<Mul<float>>> (9)"
    )
    assert listed(kernels[:1]) == "vectorized_elementwise_kernel<Mul<float>> (9)"


def test_kernels_that_wait_in_a_queue_of_one_process_wait_for_no_other_rank() -> None:
    (step,) = found(trace(causes=(idle(Part.IDLE_QUEUE, 300 * MS),)))["gpu_idle"].next_steps
    assert step == "See every operator on a timeline: lightning-memprof view runs/rank0.pt.trace.json.gz"


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
    finding = found(attention())["unfused_attention"]
    assert finding.severity is Severity.WARNING
    assert finding.title == ("Unfused attention: operators on the attention matrix take 20% of each step.")
    assert finding.numbers["operators"] == ["aten::div", "aten::_softmax", "aten::native_dropout"]
    assert "the softmax runs 60 times, with 120 batched products" in finding.why
    assert "scaled_dot_product_attention" in finding.next_steps[0]
    assert finding.recovers is not None
    assert finding.recovers.min == pytest.approx(10 * MS)
    assert finding.recovers.max == pytest.approx(18 * MS)


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
    assert set(found(attention(changes))["unfused_attention"].numbers["operators"]) == operators


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
    assert "unfused_attention" not in found(attention(changes))


def optimizer_loop(optimizer: str, ms_per_step: int) -> TraceReport:
    """Five busy steps with kernels of an optimizer's loop."""
    lines = (TimeLine(part=Part.COMPUTE, operator="aten::mm", ns=STEP_NS),)
    return trace(
        gpu_window=gpu_times(5 * STEP_NS),
        program=Program(is_lightning=False, loop_optimizer=optimizer, loop_ns=5 * ms_per_step * MS),
        device_ledger=TimeLedger(step_ns=STEP_NS, median_ns=STEP_NS, steps=5, basis="", lines=lines),
    )


def test_an_optimizer_that_updates_parameters_one_by_one_on_a_busy_device_is_worth_a_fused_one() -> None:
    finding = found(optimizer_loop("AdamW", 20))["optimizer_bound"]
    assert finding.severity is Severity.WARNING
    assert finding.title == ("AdamW, one parameter at a time, takes 20% of each step.")
    assert finding.next_steps == ("Update all parameters at once: torch.optim.AdamW(..., fused=True).",)
    assert finding.recovers is not None
    assert finding.recovers.min == pytest.approx(8 * MS)
    assert finding.recovers.max == pytest.approx(18 * MS)


@pytest.mark.parametrize(("optimizer", "ms_per_step"), [("AdamW", 4), ("Shampoo", 20), ("", 0)])
def test_an_optimizer_of_little_time_or_without_another_form_is_no_loop(optimizer: str, ms_per_step: int) -> None:
    assert "optimizer_bound" not in found(optimizer_loop(optimizer, ms_per_step))
