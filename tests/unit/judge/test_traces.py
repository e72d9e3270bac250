from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Program
from lightning_memprof.judge import Severity, examine_files
from lightning_memprof.judge.traces import shorter_name
from trace_reports import MS, START, STEP_NS, call, collective, copies, found_in, gpu_times, idle, kernel, trace, waits


def test_a_healthy_trace_has_no_findings() -> None:
    assert not found_in(trace())
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


def test_evidence_is_the_file_and_the_longest_stretch_with_its_steps() -> None:
    moment = START + 2 * STEP_NS + MS
    said = found_in(trace(loading_ns=200 * MS, causes=(idle(Part.IDLE_DATA, 180 * MS, at_ns=moment),), rank=3))
    whole, longest = said["input_bound"].evidence
    assert (whole.artifact, whole.rank, whole.steps) == ("runs/rank0.pt.trace.json.gz", 3, (3, 7))
    assert (whole.start_ns, whole.end_ns) == (START, START + 5 * STEP_NS)
    assert (longest.start_ns, longest.end_ns, longest.steps) == (moment, moment + 36 * MS, (5, 5))


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
    findings = [finding for report in reports for finding in found_in(replace(report, program=program)).values()]
    assert {finding.rule for finding in findings} >= {
        "gpu_idle", "tensor_cores_unused", "synchronization", "blocking_transfers", "allocator_thrash",
        "communication_exposed",
    }  # fmt: skip
    for finding in findings:
        assert finding.next_steps
        for step in finding.next_steps:
            assert not [word for word in banned if word in step], (finding.rule, step)


@pytest.mark.parametrize("folder", ["", f"/home/a/{'project/' * 12}"])
def test_a_long_place_keeps_its_file_line_and_function(folder: str) -> None:
    assert shorter_name(f"{folder}data_pipeline.py(123): transform_batch") == "data_pipeline.py(123): transform_batch"
