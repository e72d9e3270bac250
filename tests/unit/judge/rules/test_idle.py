from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import KERNEL_US, KERNELS, STEPS, Recording, training
from findings import found_in_trace, recovery
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Severity, examine_files, nothing_in_files
from trace_reports import MS, START, STEP_NS, call, found_in, gpu_times, idle, kernel, trace


def test_a_host_that_is_ahead_of_its_device_has_nothing_wrong(tmp_path: Path) -> None:
    assert not found_in_trace(training(tmp_path / "healthy.pt.trace.json"))


def test_idle_time_beside_loading_does_not_contain_it(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(4):
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(15_000)
        made.python(15_000)
        for _ in range(KERNELS):
            made.work(20, "aten::linear")
            made.launch(200)
        made.synchronize()
    findings = found_in_trace(made.write(tmp_path / "bare.pt.trace.json"))
    idle, data = (findings[rule].numbers["share"] for rule in ("gpu_idle", "input_bound"))
    assert idle == pytest.approx(data, rel=0.1)
    assert idle + data < 1


def test_idle_time_in_a_cold_start_is_not_the_programs(tmp_path: Path) -> None:
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step}"):
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(KERNEL_US)
                if step == 0 and kernel == 3:
                    made.call("cuModuleLoadDataEx", 90_000)
                elif kernel == 3:
                    made.call("cuModuleLoadDataEx", 5)
    findings = found_in_trace(made.write(tmp_path / "cold.pt.trace.json"))
    assert findings.keys() == {"cold_start"}
    assert findings["cold_start"].severity is Severity.INFO
    assert "cuModuleLoadDataEx" in findings["cold_start"].title
    assert findings["cold_start"].remedies[0].id == "record_later"


def test_one_call_that_blocks_for_most_of_the_idle_time_is_named(tmp_path: Path) -> None:
    def block(made: Recording) -> None:
        made.call("hipMemcpyWithStream", 463_000 if 1_500 < made.now < 100_000 else 20)

    finding = found_in_trace(training(tmp_path / "blocked.pt.trace.json", before=block, kernel_us=4))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    assert finding.title.endswith("while the host waits in hipMemcpyWithStream.")
    assert "non_blocking=True" in finding.next_steps[0]


@pytest.mark.parametrize("seen", [True, False])
def test_one_long_gap_in_each_step_is_not_launch_bound(tmp_path: Path, seen: bool) -> None:
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step}"):
            made.python(8_000)
            for _ in range(40):
                made.work(5, "aten::linear")
                made.launch(15)
            made.call("cudaDeviceSynchronize", max(made.free - made.now, 0))
    if not seen:
        made.events = [event for event in made.events if event["cat"] in {"kernel", "cuda_runtime"}]
    finding = found_in_trace(made.write(tmp_path / "long.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    doing = "is in Python outside operators" if seen else "does unrecorded work"
    assert f"while the host {doing}." in finding.title
    assert finding.next_steps[0].startswith("Record the Python stacks" if seen else "Record host and device")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("save_checkpoint", "Save checkpoints less often"),
        ("plot_samples", "Move this out of the step: plot_samples."),
        ("training_step", "See every operator on a timeline"),
    ],
)
def test_a_range_that_has_most_of_long_gaps_is_moved(tmp_path: Path, name: str, first: str) -> None:
    def save(made: Recording) -> None:
        with made.inside(name):
            made.python(25_000)
        with made.inside("train.py(3): go", "python_function"):
            pass

    finding = found_in_trace(training(tmp_path / "range.pt.trace.json", before=save))["gpu_idle"]
    assert finding.title.endswith(f" while the host is in {name}.")
    assert finding.next_steps[0].startswith(first)


def test_python_with_recorded_stacks_names_its_line(tmp_path: Path) -> None:
    def think(made: Recording, _kernel: int) -> None:
        with made.inside("train.py(23): augment", "python_function"):
            made.python(900)

    finding = found_in_trace(training(tmp_path / "stacks.pt.trace.json", think))["gpu_idle"]
    assert finding.next_steps == ("Move this out of the step: train.py(23): augment.",)


def test_before_the_first_kernel_as_long_as_the_longest_one_is_unsure_and_the_rest_is_idle(tmp_path: Path) -> None:
    def prepare(made: Recording) -> None:
        with made.inside("images.py(9): normalize", "python_function"):
            made.python(200_000 if made.now < 2_000 else 10)

    path = training(tmp_path / "prepared.pt.trace.json", before=prepare)
    finding = found_in_trace(path)["gpu_idle"]
    report = trace_report(path)
    assert report.device_ledger is not None
    assert report.window is not None
    assert report.device_ledger.step_ns * report.device_ledger.steps == report.window.window_ns
    assert report.window.idle_ns == pytest.approx(200_000_000, rel=0.01)
    # 200 of the 240 ms until the device is done.
    assert finding.numbers["share"] == pytest.approx(200 / 240, rel=0.01)
    assert sum(cause.total_ns for cause in report.idle) == report.window.idle_ns
    assert finding.next_steps == ("Move this out of the step: images.py(9): normalize.",)


@pytest.mark.slow
def test_idle_time_that_the_recording_explains_is_not_the_programs(tmp_path: Path) -> None:
    def slowed(made: Recording, _kernel: int, functions: int) -> None:
        for _ in range(functions):
            with made.inside("module.py(1): call", "python_function"):
                made.python(1)
        made.python(600 - functions)

    def severity(functions: int) -> Severity:
        path = tmp_path / f"{functions}.pt.trace.json"
        findings = found_in_trace(training(path, lambda made, kernel: slowed(made, kernel, functions)))
        return findings["gpu_idle"].severity if "gpu_idle" in findings else Severity.NONE

    assert severity(5) is Severity.WARNING
    assert severity(240) < Severity.WARNING


@pytest.mark.parametrize(
    ("operator", "step"),
    [
        ("aten::mul", "Run aten::mul on the GPU"),
        ("aten::randn", "Run aten::randn on the GPU"),
    ],
)
def test_an_operator_that_computes_on_the_host_while_a_few_kernels_wait_is_named(
    tmp_path: Path, operator: str, step: str
) -> None:
    made = Recording()
    for number in range(4):
        with made.inside(f"ProfilerStep#{number}"):
            with made.inside(operator, "cpu_op"):
                made.python(5)
                made.work(9_000, "aten::inner_")
            with made.inside("aten::mm", "cpu_op"):
                made.launch(3_000)
    finding = found_in_trace(made.write(tmp_path / "host.pt.trace.json"))["gpu_idle"]
    assert finding.severity > Severity.INFO
    assert finding.numbers["launch_bound"] is False
    assert finding.next_steps[0].startswith(step)


def test_long_gaps_of_python_between_a_few_kernels_are_not_launch_bound(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("train.py(3): main", "python_function"):
        for _ in range(4):
            made.python(26_000)
            made.work(20, "aten::add")
            made.launch(4)
    finding = found_in_trace(made.write(tmp_path / "python.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    # The launches are in it: it cannot move.
    assert not finding.next_steps[0].startswith("Move")
    assert "train.py(3): main" in finding.next_steps[0]


def test_a_function_that_runs_before_each_launch_is_not_in_the_launches(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(100):
        with made.inside("loop.py(9): log", "python_function"):
            made.python(120)
        made.work(5, "aten::mm")
        made.launch(60)
    finding = found_in_trace(made.write(tmp_path / "log.pt.trace.json", with_stack=1))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    assert finding.next_steps[0] == "Move this out of the step: loop.py(9): log."


def test_a_place_that_contains_the_launches_cannot_be_moved(tmp_path: Path) -> None:
    def forward(made: Recording) -> None:
        with made.inside("model.py(36): forward", "python_function"):
            for _ in range(KERNELS):
                made.python(45)
                with made.inside("aten::addmm", "cpu_op"):
                    made.python(6)
                    made.launch(26)

    made = Recording()
    for number in range(STEPS):
        with made.inside(f"ProfilerStep#{number}"):
            forward(made)
    finding = found_in_trace(made.write(tmp_path / "forward.pt.trace.json", with_stack=1))["gpu_idle"]
    assert finding.numbers["launch_bound"] is True
    assert finding.next_steps[0].startswith("Launch fewer and longer kernels")


def test_python_inside_a_compiled_region_is_idle_time_of_one_cause(tmp_path: Path) -> None:
    made = Recording()
    with (
        made.inside("ProfilerStep#3"),
        made.inside("Torch-Compiled Region: 0/0", "cpu_op"),
        made.inside("/tmp/torchinductor/x.py(25): call", "python_function"),
    ):
        for _ in range(90):
            made.python(100)
            with made.inside("aten::mm", "cpu_op"):
                made.launch(70)
    finding = found_in_trace(made.write(tmp_path / "compiled.pt.trace.json"))["gpu_idle"]
    assert finding.severity is Severity.WARNING
    assert recovery(finding).max / recovery(finding).whole == pytest.approx(finding.numbers["share"], rel=0.1)
    assert finding.remedies[0].id == "launch_less"


@pytest.mark.parametrize("copies", [False, True])
def test_a_gap_in_which_launched_work_waits_although_nothing_runs_is_left_out(tmp_path: Path, copies: bool) -> None:
    made = Recording()
    for number in range(100):
        made.work(20, "aten::linear")
        if number == 50:
            made.free = made.now + 400_000  # the device does nothing that is recorded
            if copies:
                made.now += 5
                made.copy(2, "Memcpy DtoH (Device -> Pageable)", 4)
                made.events[-2].update(name="hipMemcpyWithStream", dur=made.free - made.events[-2]["ts"] + 1)
                made.now = made.free
        made.launch(30)
        if number == 50 and not copies:
            made.call("hipMemcpyWithStream", 400_000)
    path = made.write(tmp_path / "queued.pt.trace.json")
    report = trace_report(path)
    assert "gpu_idle" not in found_in_trace(path)
    assert report.device_ledger is not None
    assert report.gpu_window is not None
    assert report.device_ledger.step_ns == report.gpu_window.window_ns < 5_000_000
    assert report.gpu_window.busy_ns > 0.9 * report.gpu_window.window_ns
    assert any("400 ms" in text for text in report.missing)


def test_short_kernels_that_are_queued_are_too_many(tmp_path: Path) -> None:
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"):
            for _ in range(100):
                made.work(2, "aten::add")
                made.free += 12  # the device takes time to begin
                made.launch(5)
    finding = found_in_trace(made.write(tmp_path / "many.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["main_cause"] == "idle_queue"
    assert finding.title.endswith(" in the short gaps between queued kernels.")
    assert "Launch fewer and longer kernels" in finding.next_steps[0]


def test_a_launch_bound_optimizer_is_named(tmp_path: Path) -> None:
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"), made.inside("Optimizer.step#SGD.step"):
            for _ in range(KERNELS):
                made.work(20, "aten::add_")
                made.launch(4)
    finding = found_in_trace(made.write(tmp_path / "sgd.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["launch_bound"] is True
    assert finding.title.endswith(" between the optimizer's launches.")
    assert finding.next_steps[0] == "Update all parameters at once: torch.optim.SGD(..., fused=True)."


@pytest.mark.parametrize("how", ["compiler", "capture"])
def test_compiling_and_the_recording_of_a_graph_are_a_cold_start(how: str, tmp_path: Path) -> None:
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step}"):
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(KERNEL_US)
                if step == 1 and kernel == 3 and how == "compiler":
                    with made.inside("entire_frame_compile (dynamo_timed)"):
                        made.work(200_000, "Torch-Compiled Region: 0/0")
                elif step == 1 and kernel == 3:
                    made.work(200_000, "Torch-Compiled Region: 0/0")
                    made.call("cudaGraphInstantiateWithFlags", 300)
    finding = found_in_trace(made.write(tmp_path / "compiled.pt.trace.json"))["cold_start"]
    assert finding.severity is Severity.INFO
    cause = {"compiler": "torch.compile compiles", "capture": "the host records a CUDA graph"}
    assert cause[how] in finding.title


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_trace_of_the_recording_of_a_graph_is_judged_as_that(tmp_path: Path, vendor: str) -> None:
    made = Recording()
    made.launch(3)
    for _ in range(2):
        made.call(f"{vendor}StreamBeginCapture", 5)
        for _ in range(40):
            with made.inside("aten::mm", "cpu_op"):
                made.call(f"{vendor}LaunchKernel", 60)
        made.call(f"{vendor}StreamEndCapture", 40)
        made.call(f"{vendor}GraphInstantiate", 900)
        made.launch(3)
    report = trace_report(made.write(tmp_path / "capture.pt.trace.json"))
    assert not [finding for finding in examine_files([report], []) if finding.severity > Severity.INFO]
    finding = nothing_in_files([report], ())
    assert f"the host records a {vendor.upper()} graph" in finding.title
    assert finding.remedies[0].id == "record_later"
    assert report.idle[0].cause == "cold_start"


def test_graphs_that_are_recorded_in_each_step_are_no_cold_start(tmp_path: Path) -> None:
    def record(made: Recording) -> None:
        made.call("cudaStreamBeginCapture", 5)
        made.python(20_000)
        made.call("cudaGraphInstantiate", 900)

    finding = found_in_trace(training(tmp_path / "each.pt.trace.json", before=record))["gpu_idle"]
    assert finding.severity > Severity.INFO


def test_compiling_in_every_step_is_no_cold_start(tmp_path: Path) -> None:
    def compiles(made: Recording) -> None:
        with made.inside("_compile.compile_inner (dynamo_timed)"):
            made.python(90_000)

    finding = found_in_trace(training(tmp_path / "recompiled.pt.trace.json", before=compiles))["gpu_idle"]
    assert finding.severity is Severity.CRITICAL
    assert "while torch.compile compiles" in finding.title
    assert finding.remedies[0].id == "dynamic_shapes"


KEEPS = {
    "other call": ("cudaIpcOpenMemHandle", "the host is in cudaIpcOpenMemHandle", "move_out_of_step"),
    "graph": ("cudaGraphInstantiate", "the host is in cudaGraphInstantiate", "few_shapes"),
    "operator": ("torchvision::nms", "in torchvision::nms", "run_on_gpu"),
}


@pytest.mark.parametrize("what", KEEPS)
def test_what_keeps_the_host_from_launching_has_a_next_step_of_its_own(tmp_path: Path, what: str) -> None:
    name, says, first = KEEPS[what]

    def keep(made: Recording) -> None:
        with made.inside(name, "cuda_runtime" if name.startswith("cuda") else "cpu_op"):
            made.python(20_000)

    finding = found_in_trace(training(tmp_path / "kept.pt.trace.json", before=keep, kernel_us=100))["gpu_idle"]
    assert says in finding.title
    assert finding.remedies[0].id == first


def test_short_kernels_and_a_busy_host_are_launch_bound() -> None:
    causes = (idle(Part.IDLE_OPERATORS, 200 * MS, "aten::linear", at_ns=START), idle(Part.IDLE_PYTHON, 100 * MS))
    said = found_in(trace(causes=causes, kernels=(kernel("void at::native::vectorized_layer_norm(int)", 200, 5_000),)))
    finding = said["gpu_idle"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "Launch-bound: the GPU is idle 61% of each step between kernel launches."
    assert "200 ms while the host is in operators (mostly aten::linear)" in finding.why
    assert finding.numbers["launch_bound"] is True
    assert "torch.compile" in finding.next_steps[0]


def test_an_idle_device_with_long_kernels_names_what_the_host_does() -> None:
    finding = found_in(trace(causes=(idle(Part.IDLE_GC_PAUSES, 80 * MS, "gen 2"),)))["gpu_idle"]
    assert finding.severity is Severity.WARNING
    assert finding.title == "The GPU is idle 16% of each step while the host is in GC pauses."
    assert "gc.freeze" in finding.next_steps[0]
    assert finding.numbers["main_cause"] == Part.IDLE_GC_PAUSES


def test_the_profiler_is_a_note_of_at_most_the_time_in_which_the_device_waits_for_the_host() -> None:
    asked, driver = call("Activity Buffer Request", 3, 80 * MS), call("Lazy Function Loading", 3, 80 * MS)
    causes = (idle(Part.IDLE_PYTHON, 60 * MS),)
    finding = found_in(trace(profiler_overhead=(asked,), causes=causes))["recording_overhead"]
    assert finding.severity is Severity.INFO
    assert finding.numbers["share"] == pytest.approx(65 / 500)
    assert not found_in(trace(profiler_overhead=(driver,)))
    assert "recording_overhead" not in found_in(trace(causes=causes, events=3_000_000, host_events=1_000))
    dense = trace(causes=(idle(Part.IDLE_PYTHON, 300 * MS),), host_events=300_000, recorded_with=("with_stack",))
    finding = found_in(dense)["recording_overhead"]
    assert finding.numbers["share"] == pytest.approx(0.6)
    assert "with_stack=False" in finding.next_steps[0]


def test_idle_time_that_another_rule_is_about_is_in_the_evidence() -> None:
    causes = (idle(Part.IDLE_LAUNCH, 300 * MS), idle(Part.IDLE_ALLOCATOR, 100 * MS), idle(Part.IDLE_DATA, MS))
    why = found_in(trace(causes=causes))["gpu_idle"].why
    assert "100 ms while the host is in allocator calls" in why
    assert "data wait" not in why


def test_a_device_that_idles_for_unknown_reasons_is_not_called_launch_bound() -> None:
    window_ns = 5 * STEP_NS
    finding = found_in(trace(gpu_window=gpu_times(window_ns, window_ns // 2), idle=()))["gpu_idle"]
    assert finding.numbers["main_cause"] == Part.IDLE_UNKNOWN
    assert "while the host" not in finding.title
    assert finding.remedies[0].id == "record_device"


def test_kernels_that_wait_in_a_queue_of_one_process_wait_for_no_other_rank() -> None:
    (step,) = found_in(trace(causes=(idle(Part.IDLE_QUEUE, 300 * MS),)))["gpu_idle"].next_steps
    assert step == "See every operator on a timeline: lightning-memprof view runs/rank0.pt.trace.json.gz"
