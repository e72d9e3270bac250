from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from device_traces import Recording
from kineto import write_trace
from lightning_memprof.account.trace.key_averages import collect_rows
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.columns import Kind, read_columns
from trace_events import AUTOGRAD, STREAM, call, event, kernel, report


def given(shapes: list[list[int]], types: list[str]) -> dict[str, Any]:
    return {"Input Dims": shapes, "Input type": types}


def test_the_steps_of_another_process_in_the_file_make_no_step_shorter(tmp_path):
    steps = [event("user_annotation", f"ProfilerStep#{at}", 100 * at, 100 * at + 100) for at in range(3)]
    kernels = [kernel(100 * at, 100 * at + 90) for at in range(3)]
    others = [{**each, "pid": each["pid"] + 1, "ts": each["ts"] + 7} for each in (*steps[:2], *kernels)]
    found = report(tmp_path, *others, *steps, *kernels)
    assert [step.start_ns for step in found.steps] == [0, 100_000, 200_000]
    assert found.device_ledger is not None
    assert found.work_window is not None
    assert found.device_ledger.step_ns == found.work_window.mean_step_ns == 100_000


@pytest.mark.parametrize(
    ("numbers", "is_sample"),
    [
        pytest.param(sorted(random.Random(1).sample(range(1, 20_000), 125)), True, id="one in 160"),
        pytest.param(sorted(random.Random(1).sample(range(1, 20_000), 50)), False, id="too few to tell"),
        pytest.param([*range(1, 20_000, 160), *range(2, 20_000, 1_600)], False, id="calls that follow each other"),
        pytest.param([*range(30, 6_000, 30)], False, id="steps of a fixed size"),
        pytest.param(
            [sum(random.Random(1).choices((20, 30, 40), k=i)) for i in range(1, 200)],
            False,
            id="steps of similar sizes",
        ),
        pytest.param([*range(1, 2_000, 4)], False, id="a few apart"),
    ],
)
def test_a_file_with_one_call_in_many_is_a_sample(numbers, is_sample, tmp_path):
    made = [event for at in numbers for event in (call(at, at + 1, at), kernel(at + 1, at + 2, at))]
    found = report(tmp_path, *made)
    assert found.is_sample is is_sample
    assert any(text.startswith("most events") for text in found.missing) is is_sample


@pytest.mark.parametrize(("us", "is_sample"), [(1, True), (100, False)])
def test_kernels_that_fill_the_time_are_no_sample_whatever_the_numbers_of_their_calls(us, is_sample, tmp_path):
    numbers = sorted(random.Random(1).sample(range(1, 20_000), 125))
    made = [(call(130 * i, 130 * i + 5, at), kernel(130 * i + 9, 130 * i + 9 + us, at)) for i, at in enumerate(numbers)]
    assert report(tmp_path, *(event for pair in made for event in pair)).is_sample is is_sample


def test_the_first_schema_is_read_as_the_present_one(tmp_path):
    found = report(
        tmp_path,
        event("Operator", "ProfilerStep#1", 0, 100),
        event("Operator", "enumerate(DataLoader)#_Loader.__next__", 0, 30),
        event("Operator", "aten::mm", 40, 50),
        event("Runtime", "cudaLaunchKernel", 45, 47, correlation=3),
        event("Kernel", "sgemm", 60, 80, STREAM, correlation=3),
        event("Memcpy", "Memcpy DtoH (Device -> Pinned)", 90, 95, STREAM, correlation=4, bytes=12),
    )
    assert [step.number for step in found.steps] == [1]
    assert found.gpu_window is not None
    assert (found.gpu_window.compute_ns, found.gpu_window.memory_copy_ns) == (20_000, 5_000)
    assert [(each.kind, each.is_pageable, each.bytes, each.exposed_ns) for each in found.copies] == [
        ("DtoH", False, 12, 5_000)
    ]


def test_rank_and_device_are_those_of_the_metadata(tmp_path):
    properties = [{"id": 0, "name": "Fast 9"}, {"id": 1, "name": "Idle"}]
    found = report(tmp_path, kernel(0, 1), distributedInfo={"rank": 3, "world_size": 8}, deviceProperties=properties)
    assert (found.rank, found.world_size, found.devices) == (3, 8, ("Fast 9",))


@pytest.mark.parametrize(
    ("names", "device"), [(["Fast 9"], "Fast 9"), (["Fast 9", "Fast 9"], "Fast 9"), (["Fast 9", "Slow 1"], "device 2")]
)
def test_a_device_that_is_not_listed_is_that_of_the_list_if_all_are_alike(tmp_path, names, device):
    properties = [{"id": number, "name": name, "computeMajor": 9} for number, name in enumerate(names)]
    found = report(tmp_path, {**kernel(0, 1), "pid": 2}, deviceProperties=properties)
    assert found.devices == (device,)


@pytest.mark.parametrize(("major", "capability"), [(9, (9, 0)), ("9", (0, 0)), (None, (0, 0))])
def test_the_compute_capability_is_read_where_the_trace_has_it(tmp_path, major, capability):
    properties = [{"id": 0, "name": "Fast 9", "computeMajor": major, "computeMinor": 0}]
    assert report(tmp_path, kernel(0, 1), deviceProperties=properties).capabilities == (capability,)


def test_a_trace_without_a_device_says_what_it_lacks(tmp_path):
    found = report(tmp_path, event("cpu_op", "aten::mm", 0, 5))
    assert (found.gpu_window, found.step_window, found.idle, found.steps) == (None, None, (), ())
    assert [sentence.split(":")[0] for sentence in found.missing] == ["no device events", "no steps", "no rank"]


def test_operators_of_a_trace_without_a_device_have_the_time_of_their_own(tmp_path):
    found = report(
        tmp_path,
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::addmm", 10, 90),
        event("cpu_op", "aten::copy_", 20, 30),
        event("cpu_op", "aten::addmm", 100, 150),
        event("cpu_op", "aten::copy_", 110, 110),
        event("cpu_op", "aten::mm", 50, 80, AUTOGRAD),
        event("user_annotation", "ProfilerStep#1", 0, 200),
    ).operators
    assert [
        (operator.name, operator.count, operator.self_ns, operator.total_ns, operator.max_ns) for operator in found
    ] == [
        ("aten::addmm", 2, 120_000, 130_000, 80_000),
        ("aten::mm", 1, 30_000, 30_000, 30_000),
        ("aten::linear", 1, 20_000, 100_000, 100_000),
        ("aten::copy_", 2, 10_000, 10_000, 10_000),
    ]
    assert report(tmp_path, event("cpu_op", "aten::mm", 0, 9), kernel(0, 10)).operators == ()


@pytest.mark.parametrize("spacing", ['"ts": ', '"ts":'])
def test_times_since_1970_keep_their_nanoseconds(tmp_path, spacing):
    times = ["1712195499999999.123", "1712195500000000.877", "1712205500000001.001", "1712195499999998"]
    events = ",".join(f'{{"ph":"X","cat":"kernel","name":"k",{spacing}{ts},"dur":1.5,"args":{{}}}}' for ts in times)
    path = tmp_path / "epoch.json"
    path.write_text('{"traceEvents": [' + events + "]}", encoding="utf-8")
    columns = read_columns(path)
    assert (columns.starts + columns.origin_ns).tolist() == [
        1712195499999999123,
        1712195500000000877,
        1712205500000001001,
        1712195499999998000,
    ]
    assert (columns.ends - columns.starts).tolist() == [1500] * 4


def test_the_first_collective_of_a_trace_and_all_behind_it_keep_their_arguments(tmp_path):
    sizes = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 8, "dtype": "Float"}
    plain = [kernel(i * 10, i * 10 + 2) for i in range(3_000)]
    late = {**kernel(29_000, 29_005, name="my_reduction"), "args": {"correlation": 7, **sizes}}
    last = event("cpu_op", "nccl:all_reduce", 30_000, 30_009, **{"External id": 3, **given([[8]], ["float"])})
    columns = read_columns(write_trace(tmp_path / "late.json", [*plain, late, *plain, last]))
    assert [*columns.collectives] == [3_000, 6_001]
    kept, shaped = columns.collectives.values()
    assert (kept.cat, kept.start_ns) == ("kernel", 29_000_000)
    assert (kept.args.collective, kept.args.group, kept.args.sent, kept.args.dtype) == tuple(sizes.values())
    assert (shaped.cat, shaped.start_ns, shaped.args.external_id) == ("cpu_op", 30_000_000, 3)
    assert json.loads(bytes(shaped.args.input_dims)) == [[8]]
    assert columns.correlations[3_000] == 7


def test_a_category_is_known_in_any_case_and_an_unknown_one_is_another_event(tmp_path):
    kinds = {
        "kernel": Kind.KERNEL,
        "KERNEL": Kind.KERNEL,
        "Kernel": Kind.KERNEL,
        "Gpu_Memcpy": Kind.MEMORY_COPY,
        "xpu_runtime": Kind.RUNTIME,
        "hip_driver": Kind.RUNTIME,
        "CPU_OP": Kind.OPERATOR,
        "tuned \u00e9": Kind.OTHER,
        "": Kind.OTHER,
    }
    columns = read_columns(write_trace(tmp_path / "made.json", [event(cat, "f", 0, 1) for cat in kinds]))
    assert columns.kinds.tolist() == list(kinds.values())


@pytest.mark.slow
def test_every_event_of_a_trace_of_many_pieces_keeps_its_time(tmp_path):
    count = 40_000
    events = [{**kernel(i, i), "dur": i % 3 - 1 + 0.125} for i in range(count)]
    columns = read_columns(write_trace(tmp_path / "long.json", events))
    assert columns.starts.tolist() == [i * 1000 for i in range(count)]
    assert (columns.ends - columns.starts).tolist() == [max((i % 3 - 1) * 1000 + 125, 0) for i in range(count)]


def test_arguments_of_other_types_than_usual_do_no_harm(tmp_path):
    odd = [
        {**kernel(0, 1), "args": {"correlation": "5", "bytes": "12"}},
        {**kernel(2, 3), "args": {"correlation": [1], "bytes": None, "Collective name": 7}},
        {**kernel(4, 5), "args": None, "tid": None},
        {**kernel(6, 7), "ts": "6", "dur": None, "name": 3},
        call(0, 1, 5),
    ]
    found = report(tmp_path, *odd)
    assert found.events == 5
    assert found.gpu_window is not None
    assert found.gpu_window.busy_ns == 3_000


def test_a_trace_that_was_cut_anywhere_is_told_in_one_line(tmp_path):
    path = write_trace(tmp_path / "whole.json", [kernel(0, 1, 1), call(0, 1, 1), event("cpu_op", "aten::mm", 0, 5)])
    text = path.read_bytes().rstrip()
    packed = gzip.compress(text)
    for data, name in ((text, "cut.json"), (packed, "cut.json.gz")):
        for end in range(0, len(data) - 1, 7):
            cut = tmp_path / name
            cut.write_bytes(data[:end])
            with pytest.raises(ArtifactError) as raised:
                trace_report(cut)
            assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_progress_is_told_in_bytes_of_the_file(tmp_path):
    path = write_trace(tmp_path / "long.json.gz", [kernel(i, i + 1) for i in range(20_000)])
    told: list[tuple[int, int]] = []
    trace_report(path, lambda done, of: told.append((done, of)))
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size,) * 2


@pytest.mark.parametrize("category", ["mtia_runtime", "xpu_runtime", "privateuse1_runtime", "hpu_op"])
def test_a_trace_that_calls_an_accelerator_was_not_recorded_on_a_cpu(category, tmp_path):
    (missing,) = [
        text for text in report(tmp_path, event(category, "launchKernel", 0, 5)).missing if "no device events" in text
    ]
    assert "CPU" not in missing
    assert "launchKernel" in missing


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        (["[pl][profile]predict_step", "aten::mm"], {"is_lightning"}),
        (["Torch-Compiled Region: 0/0", "aten::mm"], {"is_compiled"}),
        (["aten::mm", "autograd::engine::evaluate_function: MmBackward0"], {"trains"}),
        (["aten::mm", "DistributedDataParallel.forward"], {"is_ddp"}),
        (["aten::mm"], set()),
    ],
)
def test_names_tell_the_program(names, facts, tmp_path):
    program = report(tmp_path, *(event("cpu_op", name, 0, 5) for name in names)).program
    assert {fact for fact in ("is_lightning", "is_compiled", "is_ddp", "trains") if getattr(program, fact)} == facts


@pytest.mark.parametrize(("in_forward", "is_ddp"), [(0, True), (1, False)])
def test_all_reduces_in_backward_alone_are_those_of_gradients(in_forward, is_ddp, tmp_path):
    found = report(
        tmp_path,
        *(event("cpu_op", "c10d::allreduce_", at, at + 1) for at in range(in_forward)),
        event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 10, 20),
        event("cpu_op", "c10d::allreduce_", 12, 13),
    )
    assert found.program.is_ddp is is_ddp


@pytest.mark.parametrize(("fused", "found"), [(False, ("Adam", 150_000)), (True, ("", 0))])
def test_the_kernels_of_an_optimizers_loop_are_those_that_its_steps_launch(
    fused: bool, found: tuple[str, int], tmp_path: Path
) -> None:
    made = Recording()
    for _ in range(3):
        with made.inside("aten::mm", "cpu_op"):
            made.launch(400)
        with made.inside("Optimizer.step#Adam.step"):
            for _ in range(2):
                with made.inside("aten::_fused_adam_" if fused else "aten::addcdiv_", "cpu_op"):
                    made.launch(25, "vectorized_elementwise_kernel")
            made.copy(5, "Memcpy HtoD (Pinned -> Device)", 4)
    program = trace_report(made.write(tmp_path / "a.pt.trace.json")).program
    assert (program.loop_optimizer, program.loop_ns) == found


def legacy(pid: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": start, "dur": end - start, "tid": 1, "pid": pid, "args": {}}


def test_a_list_of_the_older_profiler_has_operators_and_kernels(tmp_path):
    path = tmp_path / "list.json"
    arrow = {"name": "aten::mm", "ph": "s", "ts": 5, "tid": 1, "pid": "CPU functions", "id": 0, "cat": "cpu_to_cuda"}
    events = [legacy("CPU functions", "aten::mm", 0.5, 30.5), arrow, legacy("CUDA functions", "sgemm", 10, 90)]
    path.write_text(json.dumps(events))
    found = trace_report(path)
    assert found.host_events == 1
    assert [(each.name, each.total_ns) for each in found.kernels] == [("sgemm", 80_000)]
    assert [(row.name, row.on_device) for row in collect_rows([path], group_by_input_shapes=False).rows] == [
        ("aten::mm", False),
        ("sgemm", True),
    ]


def test_a_list_without_kernels_shows_by_its_arrows_that_there_was_a_device(tmp_path):
    path = tmp_path / "list.json"
    arrow = {"name": "aten::mm", "ph": "s", "ts": 5, "tid": 1, "pid": "CPU functions", "id": 0, "cat": "cpu_to_cuda"}
    path.write_text(json.dumps([legacy("CPU functions", "aten::mm", 0.5, 30.5), arrow]))
    assert trace_report(path).device_use == "launches work on cuda"


@pytest.mark.parametrize(
    ("events", "metadata", "named"),
    [
        ([event("FEE", "f (a.py:1)", 0, 5)], {"viztracer_metadata": {"version": "1"}}, "FEE"),
        ([event("", "MatMul", 0, 5)], {"metadata": {"highres-ticks": True}}, "torch.profiler"),
        ([{"ph": "B", "cat": "toplevel", "name": "f", "pid": 1, "tid": 1, "ts": 1}], {}, "torch.profiler"),
    ],
    ids=["VizTracer", "TensorFlow", "Chrome"],
)
def test_a_trace_of_another_program_is_refused_in_one_line(tmp_path, events, metadata, named):
    with pytest.raises(ArtifactError, match="another program") as refused:
        report(tmp_path, *events, **metadata)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trace_of_torch_may_have_no_event_that_is_known(tmp_path):
    found = report(tmp_path, event("Trace", "PyTorch Profiler (0)", 0, 5), schemaVersion=1)
    assert found.host_events == 0
