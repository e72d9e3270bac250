"""The rules about traces on files: each fault in the events of a training, and the same training without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_traces import BASE_NS, GEMM, Recording, paired_ranks
from ledger_lines import out_of_bounds
from lightning_memprof.account.ledger.ranks import across_ranks
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Finding, Severity, examine_files, nothing_in_files
from lightning_memprof.judge.traces import sure_ledger

STEPS = 4
KERNELS = 25
KERNEL_US = 400
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def found(path: Path) -> dict[str, Finding]:
    """The findings; each recovers something, and no more than its lines hold, if they hold any."""
    report = trace_report(path)
    findings = {finding.rule: finding for finding in examine_files((report,), ())}
    assert not out_of_bounds(findings.values(), report.host_ledger, sure_ledger(report))
    for rule, finding in findings.items():
        assert (finding.recovers is None) == (rule in {"recording_overhead", "cold_start"})
    return findings


def training(
    path: Path,
    fault: Callable[[Recording, int], None] = lambda _made, _kernel: None,
    before: Callable[[Recording], None] = lambda _made: None,
    kernel_us: int = KERNEL_US,
) -> Path:
    """Four steps of 25 kernels; ``fault`` is called after each kernel, ``before`` before each step's first one."""
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"):
            before(made)
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(kernel_us)
                fault(made, kernel)
    return made.write(path)


def test_a_host_that_is_ahead_of_its_device_has_nothing_wrong(tmp_path: Path) -> None:
    assert not found(training(tmp_path / "healthy.pt.trace.json"))


def test_loading_that_outlasts_the_devices_work_is_input_bound(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(15_000)

    finding = found(training(tmp_path / "slow.pt.trace.json", before=load))["input_bound"]
    assert finding.severity is Severity.CRITICAL
    whole, longest = finding.evidence
    assert (whole.steps, whole.start_ns) == ((5, 8), BASE_NS + 1_000_000)
    assert longest.steps is not None
    assert longest.start_ns is not None
    assert longest.start_ns >= BASE_NS + 1_000_000


@pytest.mark.parametrize(
    ("iterator", "slow", "first"),
    [
        ("_SingleProcess", (15_000, 15_000), "Load in worker processes: DataLoader(num_workers=4"),
        ("_MultiProcessing", (15_000, 15_000), "Use more worker processes"),
        ("_MultiProcessing", (90_000, 10), "Look at the samples of the slow batch"),
        ("_Other", (15_000, 15_000), "Load in worker processes: DataLoader(num_workers=4"),
    ],
)
def test_the_next_step_for_loading_knows_the_workers(
    tmp_path: Path, iterator: str, slow: tuple[int, int], first: str
) -> None:
    batches = iter((10, slow[0], slow[1], slow[1]))

    def load(made: Recording) -> None:
        with made.inside(f"enumerate(DataLoader)#{iterator}DataLoaderIter.__next__"):
            made.python(next(batches))

    finding = found(training(tmp_path / "workers.pt.trace.json", before=load))["input_bound"]
    assert finding.next_steps[0].startswith(first)
    assert not any("{" in step or "pin_memory" in step for step in finding.next_steps)


def test_loading_while_the_device_works_is_not(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        with made.inside("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            made.python(4_000)

    assert not found(training(tmp_path / "hidden.pt.trace.json", before=load))


def test_short_kernels_leave_the_device_idle(tmp_path: Path) -> None:
    finding = found(training(tmp_path / "short.pt.trace.json", kernel_us=4))["gpu_idle"]
    assert finding.numbers["launch_bound"] is True
    assert finding.severity is Severity.CRITICAL
    causes_ns = finding.numbers["causes_ns"]
    assert causes_ns["idle_operators"] > sum(causes_ns.values()) / 2
    assert finding.recovers is not None
    # Before the first kernel, 4 us in four steps are unsure.
    assert (finding.recovers.min, finding.recovers.whole) == (finding.recovers.max / 2, KERNELS * 25_000 - 1_000)
    # 20 of 25 us at each kernel, without 1 us for the recording of its launch and its operator each.
    assert 0.74 < finding.recovers.max / finding.recovers.whole < 0.78


def test_values_that_are_read_in_a_step_leave_the_device_idle_after_them(tmp_path: Path) -> None:
    def read(made: Recording, kernel: int) -> None:
        if kernel % 5 == 0:
            made.synchronize("aten::item")
            made.python(600)

    finding = found(training(tmp_path / "item.pt.trace.json", read))["synchronization"]
    assert finding.severity is Severity.WARNING
    assert finding.title.startswith("Waits for the GPU (5 times per step) leave it idle ")
    assert finding.numbers["by_name"]["aten::item"]["calls"] == STEPS * 5
    assert "loss.detach()" in finding.next_steps[0]


def test_an_idle_device_names_the_call_that_the_host_waits_in(tmp_path: Path) -> None:
    def read(made: Recording, _kernel: int) -> None:
        made.synchronize("aten::item")
        made.call("cudaStreamSynchronize", 900)

    sentence = found(training(tmp_path / "item.pt.trace.json", read))["gpu_idle"].title
    assert sentence.endswith(" while the host waits in cudaStreamSynchronize.")


def test_batches_that_are_loaded_after_a_value_was_read_are_not_its_cost(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        made.synchronize("aten::item")
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(6_000)

    finding = found(training(tmp_path / "both.pt.trace.json", before=load))
    assert finding["input_bound"].severity is Severity.WARNING
    assert "synchronization" not in finding


def test_waiting_at_the_end_costs_nothing(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        for _ in range(50):
            made.work(20)
            made.launch(KERNEL_US)
        made.synchronize()
        made.synchronize()
    assert "synchronization" not in found(made.write(tmp_path / "end.pt.trace.json"))


def test_copies_from_pageable_memory_are_found_and_pinned_ones_are_not(tmp_path: Path) -> None:
    def copy(memory: str) -> Callable[[Recording], None]:
        return lambda made: made.copy(2_500, f"Memcpy HtoD ({memory} -> Device)", 16 << 20)

    findings = found(training(tmp_path / "pageable.pt.trace.json", before=copy("Pageable")))
    assert "exposed_copies" not in findings
    finding = findings["blocking_transfers"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["bytes"] == STEPS * (16 << 20)
    assert "blocking_transfers" not in found(training(tmp_path / "pinned.pt.trace.json", before=copy("Pinned")))


@pytest.mark.parametrize(
    ("copy_us", "saved_us", "severity", "first"),
    [
        (2_500, 2_500, Severity.WARNING, "Overlap copies with kernels"),
        (80_000, 40_000, Severity.CRITICAL, "Copy fewer bytes"),
    ],
)
def test_pinned_copies_that_kernels_wait_for_are_found(
    tmp_path: Path, copy_us: int, saved_us: int, severity: Severity, first: str
) -> None:
    def copy(made: Recording) -> None:
        made.copy(copy_us, "Memcpy HtoD (Pinned -> Device)", 16 << 20)

    finding = found(training(tmp_path / "pinned.pt.trace.json", before=copy))["exposed_copies"]
    # 25 kernels of 400 us in each step.
    share = copy_us / (copy_us + 10_000)
    assert finding.numbers["share"] == pytest.approx(share, rel=0.01)
    assert finding.severity is severity
    assert finding.title.startswith("Transfer-bound: ") is (share > 0.5)
    assert finding.next_steps[0].startswith(first)
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(1_000 * saved_us, rel=0.02)


def test_pinned_copies_beside_kernels_are_not(tmp_path: Path) -> None:
    def copy(made: Recording) -> None:
        made.launch(3_000)
        before = made.free
        made.copy(2_900, "Memcpy HtoD (Pinned -> Device)", 16 << 20)
        made.events[-1]["ts"], made.events[-1]["tid"], made.free = before - 2_950, 21, before

    assert not found(training(tmp_path / "beside.pt.trace.json", before=copy))


def communicating(path: Path, long_us: int, *, freeing: bool, overlapped: bool = True) -> Path:
    """A collective for each fifth kernel, of which the last one takes ``long_us``."""
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"):
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(KERNEL_US)
                if kernel % 5 == 0:
                    last = step == STEPS - 1 and kernel == KERNELS - 5
                    made.launch(long_us if last else 300, NCCL, 21, (made.free - 350) if overlapped else None)
                    if last and freeing:
                        made.call("cudaFree", made.free - made.now + 900)
                        made.call("cudaMalloc", 300)
    return made.write(path, distributedInfo={"backend": "nccl", "rank": 1, "world_size": 8})


def test_collectives_beside_kernels_are_hidden_and_those_between_them_are_not(tmp_path: Path) -> None:
    assert not found(communicating(tmp_path / "hidden.pt.trace.json", 300, freeing=False))
    finding = found(communicating(tmp_path / "exposed.pt.trace.json", 300, freeing=False, overlapped=False))
    assert finding["communication_exposed"].severity is Severity.INFO
    assert "on rank 1" in finding["communication_exposed"].title


def test_a_collective_that_waits_while_memory_is_given_back_is_thrash(tmp_path: Path) -> None:
    finding = found(communicating(tmp_path / "thrash.pt.trace.json", 60_000, freeing=True))["allocator_thrash"]
    assert finding.severity is Severity.CRITICAL
    assert "took 60.0 ms (median 300 µs) during an allocator call" in finding.title
    assert finding.numbers["freed"] == 1
    assert "expandable_segments" in finding.next_steps[0]


def test_a_collective_that_waits_for_something_else_is_not(tmp_path: Path) -> None:
    assert "allocator_thrash" not in found(communicating(tmp_path / "late.pt.trace.json", 60_000, freeing=False))


@pytest.mark.parametrize("names", [("cudaMalloc", "cudaFree"), ("cuMemCreate", "cuMemUnmap"), ("hipMalloc", "hipFree")])
def test_memory_that_comes_and_goes_in_each_step_is_thrash(tmp_path: Path, names: tuple[str, str]) -> None:
    def churn(made: Recording, kernel: int) -> None:
        if kernel == 3:
            for name in names:
                made.call(name, max(made.free - made.now, 0) + 900)

    finding = found(training(tmp_path / "churn.pt.trace.json", churn))["allocator_thrash"]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["calls"] == dict.fromkeys(names, STEPS)


def test_the_start_of_the_driver_and_a_first_pass_are_no_thrash(tmp_path: Path) -> None:
    made = Recording()
    made.call("cudaFree", 900_000)
    with made.inside("ProfilerStep#1"):
        for _ in range(KERNELS):
            made.call("cudaMalloc", 300)
            made.work(20, "aten::linear")
            made.launch(KERNEL_US)
    assert "allocator_thrash" not in found(made.write(tmp_path / "cold.pt.trace.json"))


def test_a_tensor_that_is_a_call_to_the_driver_shows_that_the_caching_allocator_is_off(tmp_path: Path) -> None:
    def uncached(made: Recording, _kernel: int) -> None:
        for _ in range(3):
            made.call("hipMalloc", 40)
            made.call("hipFree", 60)

    finding = found(training(tmp_path / "uncached.pt.trace.json", uncached, kernel_us=100))["allocator_thrash"]
    assert finding.title.startswith("The caching allocator is off: 75 hipMalloc calls per step")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in finding.next_steps[0]


def test_a_step_that_empties_the_cache_requests_less_than_once_for_four_kernels(tmp_path: Path) -> None:
    def emptied(made: Recording, kernel: int) -> None:
        for _ in range(60 if kernel == 0 else 0):
            made.call("cudaMalloc", 40)
            made.call("cudaFree", 60)
        for _ in range(10):
            made.launch(1)

    finding = found(training(tmp_path / "emptied.pt.trace.json", emptied))["allocator_thrash"]
    assert "cache" not in finding.title
    assert any("empty_cache()" in step for step in finding.next_steps)


def test_a_tensor_from_the_drivers_pool_is_cached_and_its_return_waits_for_no_kernel(tmp_path: Path) -> None:
    def pooled(made: Recording, _kernel: int) -> None:
        for _ in range(3):
            made.call("cudaMallocAsync", 40)
            made.call("cudaFreeAsync", 60)

    finding = found(training(tmp_path / "pooled.pt.trace.json", pooled, kernel_us=100))["allocator_thrash"]
    assert finding.title.startswith("Memory from the driver's pool: 75 cudaMallocAsync calls per step")
    assert "waits for all kernels" not in finding.why
    assert finding.next_steps == (
        "Use PyTorch's native allocator: unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF.",
    )


def test_loading_is_found_without_steps(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(4):
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(15_000)
        for _ in range(KERNELS):
            made.work(20, "aten::linear")
            made.launch(200)
        made.synchronize()
    findings = found(made.write(tmp_path / "bare.pt.trace.json"))
    assert findings["input_bound"].severity is Severity.CRITICAL
    assert "of the recorded time" in findings["input_bound"].title
    assert "gpu_idle" not in findings


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
    findings = found(made.write(tmp_path / "bare.pt.trace.json"))
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
    findings = found(made.write(tmp_path / "cold.pt.trace.json"))
    finding = findings["cold_start"]
    assert findings.keys() == {"cold_start"}
    assert finding.severity is Severity.INFO
    assert "cuModuleLoadDataEx" in finding.title
    assert "torch.profiler.schedule" in finding.next_steps[0]


def test_one_call_that_blocks_for_most_of_the_idle_time_is_named(tmp_path: Path) -> None:
    def block(made: Recording) -> None:
        made.call("hipMemcpyWithStream", 463_000 if 1_500 < made.now < 100_000 else 20)

    finding = found(training(tmp_path / "blocked.pt.trace.json", before=block, kernel_us=4))["gpu_idle"]
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
    finding = found(made.write(tmp_path / "long.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    doing = "is in Python outside operators" if seen else "does unrecorded work"
    assert f"while the host {doing}." in finding.title
    assert finding.next_steps[0].startswith("Record the Python stacks" if seen else "Record host and device")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("save_checkpoint", "Save checkpoints less often"),
        ("plot_samples", "Move this code out of the step: plot_samples."),
        ("training_step", "See every operator on a timeline"),
    ],
)
def test_a_range_that_has_most_of_long_gaps_is_moved(tmp_path: Path, name: str, first: str) -> None:
    def save(made: Recording) -> None:
        with made.inside(name):
            made.python(25_000)
        with made.inside("train.py(3): go", "python_function"):
            pass

    finding = found(training(tmp_path / "range.pt.trace.json", before=save))["gpu_idle"]
    assert finding.title.endswith(f" while the host is in {name}.")
    assert finding.next_steps[0].startswith(first)


def test_a_range_with_little_of_the_idle_time_is_not_named(tmp_path: Path) -> None:
    def think(made: Recording) -> None:
        made.python(KERNELS * KERNEL_US)  # the device still works
        for name, us in (("Optimizer.step#AdamW.step", 12_000), ("augment", 9_000), ("log", 6_000)):
            with made.inside(name):
                made.python(us)

    assert (
        "outside operators (mostly"
        not in found(training(tmp_path / "little.pt.trace.json", before=think))["gpu_idle"].why
    )


@pytest.mark.parametrize(("kernel_us", "first"), [(400, "synchronization"), (20, "gpu_idle")])
def test_idle_time_after_values_are_read_belongs_to_the_reading_up_to_the_wait(
    tmp_path: Path, kernel_us: int, first: str
) -> None:
    def read(made: Recording, kernel: int) -> None:
        if kernel % 5 == 0:
            made.synchronize("aten::item")
            made.python(600)

    path = training(tmp_path / "item.pt.trace.json", read, kernel_us=kernel_us)
    report = trace_report(path)
    findings = {finding.rule: finding for finding in examine_files([report], [])}
    # Five times per step the device is idle for about 600 us, and the host waits for what is queued.
    assert {*findings} == {first}
    if first == "synchronization":
        worth = findings[first].recovers
        assert worth is not None
        assert worth.max <= sum(call.total_ns for call in report.synchronizations) / STEPS


def test_a_pause_after_one_of_many_waits_is_theirs_as_far_as_the_host_would_be_ahead_without_them(
    tmp_path: Path,
) -> None:
    steps, pause_us = 8, 400_000
    made = Recording()
    for step in range(steps):
        with made.inside(f"ProfilerStep#{step}"):
            for _ in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(KERNEL_US)
            made.synchronize("aten::item")
            made.python(pause_us if step == 3 else 10)
    findings = found(made.write(tmp_path / "pause.pt.trace.json"))
    worth = findings["synchronization"].recovers
    assert next(iter(findings)) == "gpu_idle"
    # In each of the four steps before it the host waits for the device but for its own 25 calls.
    ahead_us = 4 * KERNELS * (KERNEL_US - 25)
    assert worth is not None
    assert worth.max == pytest.approx(1000 * ahead_us / steps, rel=0.02)
    idle = findings["gpu_idle"].recovers
    assert idle is not None
    assert idle.max == pytest.approx(1000 * (pause_us - ahead_us) / steps, rel=0.02)


def test_a_value_that_is_read_when_the_device_is_done_costs_its_call(tmp_path: Path) -> None:
    def read(made: Recording, _kernel: int) -> None:
        with made.inside("aten::item", "cpu_op"):
            made.copy(2, "Memcpy DtoH (Device -> Pinned)", 4)
            made.python(10)
            made.call("cudaStreamSynchronize", 30)

    finding = found(training(tmp_path / "item.pt.trace.json", read, kernel_us=2))["synchronization"]
    assert finding.severity > Severity.INFO
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(KERNELS * 20_000, rel=0.02)


def test_waits_for_copies_to_pageable_memory_are_those_of_the_copies(tmp_path: Path) -> None:
    def move(made: Recording, kernel: int) -> None:
        if kernel % 5 == 0:
            with made.inside("aten::to", "cpu_op"):
                made.copy(500, "Memcpy DtoH (Device -> Pageable)", 1 << 20)
                made.call("cudaStreamSynchronize", made.free - made.now)
            made.python(600)

    findings = found(training(tmp_path / "moved.pt.trace.json", move, kernel_us=20))
    assert "synchronization" not in findings
    assert findings["blocking_transfers"].severity > Severity.INFO


def test_a_long_gap_at_each_kernel_is_launch_bound(tmp_path: Path) -> None:
    finding = found(training(tmp_path / "slow.pt.trace.json", lambda made, _: made.python(300), kernel_us=5))[
        "gpu_idle"
    ]
    assert finding.numbers["launch_bound"] is True


def test_python_with_recorded_stacks_names_its_line(tmp_path: Path) -> None:
    def think(made: Recording, _kernel: int) -> None:
        with made.inside("train.py(23): augment", "python_function"):
            made.python(900)

    finding = found(training(tmp_path / "stacks.pt.trace.json", think))["gpu_idle"]
    assert finding.next_steps == ("Move this code out of the step: train.py(23): augment.",)


def test_before_the_first_kernel_as_long_as_the_longest_one_is_unsure_and_the_rest_is_idle(tmp_path: Path) -> None:
    def prepare(made: Recording) -> None:
        with made.inside("images.py(9): normalize", "python_function"):
            made.python(200_000 if made.now < 2_000 else 10)

    path = training(tmp_path / "prepared.pt.trace.json", before=prepare)
    finding = found(path)["gpu_idle"]
    report = trace_report(path)
    assert report.unsure_ns == KERNEL_US * 1_000
    assert report.window is not None
    assert report.window.idle_ns == pytest.approx(200_000_000, rel=0.01)
    # 200 of the 240 ms until the device is done.
    assert finding.numbers["share"] == pytest.approx(200 / 240, rel=0.01)
    assert sum(cause.total_ns for cause in report.idle) == report.window.idle_ns
    assert finding.next_steps == ("Move this code out of the step: images.py(9): normalize.",)


@pytest.mark.slow
def test_idle_time_that_the_recording_explains_is_not_the_programs(tmp_path: Path) -> None:
    def slowed(made: Recording, _kernel: int, functions: int) -> None:
        for _ in range(functions):
            with made.inside("module.py(1): call", "python_function"):
                made.python(1)
        made.python(600 - functions)

    def severity(functions: int) -> Severity:
        path = tmp_path / f"{functions}.pt.trace.json"
        findings = found(training(path, lambda made, kernel: slowed(made, kernel, functions)))
        return findings["gpu_idle"].severity if "gpu_idle" in findings else Severity.NONE

    assert severity(5) is Severity.WARNING
    assert severity(240) < Severity.WARNING


@pytest.mark.parametrize(
    ("operator", "step"),
    [
        ("aten::mul", "Run aten::mul on the GPU: move its tensors there once"),
        ("aten::randn", 'Make the tensor on the GPU: torch.randn(..., device="cuda")'),
        ("aten::zeros_like", 'Make the tensor on the GPU: torch.zeros(..., device="cuda")'),
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
    finding = found(made.write(tmp_path / "host.pt.trace.json"))["gpu_idle"]
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
    finding = found(made.write(tmp_path / "python.pt.trace.json"))["gpu_idle"]
    assert finding.numbers["launch_bound"] is False
    # The launches are in it: it cannot move.
    assert not finding.next_steps[0].startswith("Move")
    assert "train.py(3): main" in finding.next_steps[0]


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
    finding = found(made.write(tmp_path / "forward.pt.trace.json", with_stack=1))["gpu_idle"]
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
    finding = found(made.write(tmp_path / "compiled.pt.trace.json"))["gpu_idle"]
    assert finding.severity is Severity.WARNING
    assert finding.recovers is not None
    assert finding.recovers.max / finding.recovers.whole == pytest.approx(finding.numbers["share"], rel=0.1)
    assert finding.next_steps[0].startswith("Launch each compiled part at once")


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
    assert "gpu_idle" not in found(path)
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
    finding = found(made.write(tmp_path / "many.pt.trace.json"))["gpu_idle"]
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
    finding = found(made.write(tmp_path / "sgd.pt.trace.json"))["gpu_idle"]
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
    finding = found(made.write(tmp_path / "compiled.pt.trace.json"))["cold_start"]
    assert finding.severity is Severity.INFO
    cause = {"compiler": "torch.compile compiles", "capture": "the host records a CUDA graph"}
    assert cause[how] in finding.title
    steps = {"compiler": "Record later steps", "capture": "Record a replay of the graph"}
    assert finding.next_steps[0].startswith(steps[how])


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
    assert finding.next_steps[0].startswith("Record a replay of the graph")
    assert report.idle[0].cause == "cold_start"


def test_graphs_that_are_recorded_in_each_step_are_no_cold_start(tmp_path: Path) -> None:
    def record(made: Recording) -> None:
        made.call("cudaStreamBeginCapture", 5)
        made.python(20_000)
        made.call("cudaGraphInstantiate", 900)

    finding = found(training(tmp_path / "each.pt.trace.json", before=record))["gpu_idle"]
    assert finding.severity > Severity.INFO


def test_compiling_in_every_step_is_no_cold_start(tmp_path: Path) -> None:
    def compiles(made: Recording) -> None:
        with made.inside("_compile.compile_inner (dynamo_timed)"):
            made.python(90_000)

    finding = found(training(tmp_path / "recompiled.pt.trace.json", before=compiles))["gpu_idle"]
    assert finding.severity is Severity.CRITICAL
    assert "while torch.compile compiles" in finding.title
    assert finding.next_steps[0].startswith("Compile once, not in each step: TORCH_LOGS=recompiles")


KEEPS = {
    "other call": ("cudaIpcOpenMemHandle", "the host is in cudaIpcOpenMemHandle", "Call cudaIpcOpenMemHandle once"),
    "graph": ("cudaGraphInstantiate", "the host is in cudaGraphInstantiate", "Record each graph of kernels once"),
    "operator": ("torchvision::nms", "in torchvision::nms", "Run torchvision::nms on the GPU"),
    "guards": ("TorchDynamo Cache Lookup", "in TorchDynamo Cache Lookup", "Check fewer guards"),
}


@pytest.mark.parametrize("what", KEEPS)
def test_what_keeps_the_host_from_launching_has_a_next_step_of_its_own(tmp_path: Path, what: str) -> None:
    name, says, first = KEEPS[what]

    def keep(made: Recording) -> None:
        with made.inside(name, "cuda_runtime" if name.startswith("cuda") else "cpu_op"):
            made.python(20_000)

    finding = found(training(tmp_path / "kept.pt.trace.json", before=keep, kernel_us=100))["gpu_idle"]
    assert says in finding.title
    assert finding.next_steps[0].startswith(first)


def test_pinned_memory_of_each_step_is_a_call_of_the_allocator(tmp_path: Path) -> None:
    def pin(made: Recording) -> None:
        made.call("cudaHostAlloc", 20_000)

    findings = found(training(tmp_path / "pinned.pt.trace.json", before=pin, kernel_us=100))
    assert findings.keys() == {"allocator_thrash"}
    assert findings["allocator_thrash"].severity > Severity.INFO
    assert findings["allocator_thrash"].next_steps[0].startswith("Keep pinned memory from step to step")


@pytest.mark.parametrize(("operator", "expected"), [("aten::add_", True), ("aten::_foreach_add_", False)])
def test_a_faster_optimizer_is_advised_where_the_recorded_one_loops(
    operator: str, expected: bool, tmp_path: Path
) -> None:
    def update(made: Recording) -> None:
        with made.inside("Optimizer.step#SGD.step"):
            made.work(20, operator)

    report = trace_report(training(tmp_path / "sgd.pt.trace.json", before=update, kernel_us=4))
    steps = [step for finding in examine_files([report], []) for step in finding.next_steps]
    assert ("Update all parameters at once: torch.optim.SGD(..., fused=True)." in steps) is expected
    assert not any("AdamW" in step for step in steps)


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


def ranks(directory: Path, late: int | None, offset_us: int = 0) -> list[Path]:
    """Traces of 8 ranks with 8 all-reduces; before 5 of them rank ``late`` computes for 1.5 ms longer."""
    paths = []
    for rank in range(8):
        made = Recording()
        made.now += rank * offset_us
        with made.inside("ProfilerStep#3"):
            for index in range(8):
                arrives = index * 4_000 + 2_000 + rank * offset_us + 10 * (rank == index)
                ends = index * 4_000 + 2_100 + rank * offset_us
                if late is not None and index < 5:
                    arrives, ends = arrives + 1_500 * (rank == late), ends + 1_500
                made.launch(arrives - 500 - index * 4_000 - rank * offset_us, at=index * 4_000 + 500 + rank * offset_us)
                made.launch(ends - arrives, NCCL, 21, arrives)
            made.now += 33_000
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        paths.append(made.write(directory / f"rank{rank}.pt.trace.json", distributedInfo=info))
    return paths


@pytest.mark.parametrize("offset_us", [0, 700_000])
def test_the_rank_that_arrives_last_in_bare_traces_is_the_straggler(tmp_path: Path, offset_us: int) -> None:
    reports = [trace_report(path) for path in ranks(tmp_path, late=3, offset_us=offset_us)]
    finding = examine_files(reports, [])[0]
    assert finding.rule == "straggler"
    assert finding.title.startswith("Rank 3 is the straggler: last at 5 of 8 collectives, the others wait 7.5")
    assert finding.numbers["own_wait_ns"] < 100_000
    assert "computation" in finding.next_steps[0]
    assert "lightning-memprof merge -o merged.json.gz " in finding.next_steps[1]


def test_a_rank_that_makes_its_partner_in_tensor_parallelism_late_is_the_straggler(tmp_path: Path) -> None:
    reports = []
    for rank, calls in paired_ranks(lambda rank, step: 20.0 if rank == 5 else 10.0).items():
        made = Recording()
        for before, call in zip([made.now, *(call.end_us for call in calls)], calls, strict=False):
            if call.start_us > before:
                made.launch(call.start_us - before, at=before)
            made.launch(call.end_us - call.start_us, NCCL, 21, call.start_us)
            made.events[-1]["args"] |= {"Collective name": "allreduce", "Process Group Name": call.group}
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        path = made.write(tmp_path / f"rank{rank}.pt.trace.json", distributedInfo=info)
        reports.append(trace_report(path))
    finding = next(finding for finding in across(reports) if finding.rule == "straggler")
    # At six of its own pair; its partner and it are last at the six of each half.
    assert finding.title.startswith("Rank 5 is the straggler: last at 12 of 36 collectives")
    assert "because of it at 6" in finding.why


@pytest.mark.parametrize(
    ("late_us", "is_found"),
    [
        ([(0, 5_000)] * 6, True),  # rank 1 in each step
        ([(0, 6_000), (5_000, 0)] * 3, False),  # one after the other
        ([(0, 0), (0, 30_000), *[(0, 0)] * 4], False),  # once
    ],
)
def test_equal_ranks_that_take_turns_and_a_hiccup_have_no_straggler(
    tmp_path: Path, late_us: list[tuple[int, int]], *, is_found: bool
) -> None:
    reports = []
    for rank in range(2):
        made = Recording()
        for step, late in enumerate(late_us):
            with made.inside(f"ProfilerStep#{step}"):
                made.launch(5_000 + late[rank])
                made.launch(max(late) - late[rank] + 1_000, NCCL, 21, made.free)
                made.free = made.now = made.free + max(late) - late[rank] + 1_000
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        path = made.write(tmp_path / f"rank{rank}.pt.trace.json", distributedInfo=info)
        reports.append(trace_report(path))
    found = {finding.rule: finding for finding in across(reports)}
    assert ("straggler" in found) == is_found
    if is_found:
        worth = found["straggler"].recovers
        assert worth is not None
        assert (worth.min, worth.max) == (5_000_000, 5_000_000)


def test_of_one_severity_the_finding_that_recovers_most_comes_first(tmp_path: Path) -> None:
    def read(made: Recording, kernel: int) -> None:
        made.copy(150, "Memcpy HtoD (Pageable -> Device)", 16 << 20)
        if kernel % 5 == 0:
            made.synchronize("aten::item")
            made.python(800)

    path = training(tmp_path / "both.pt.trace.json", read)
    findings = [each for each in examine_files([trace_report(path)], []) if each.severity is Severity.WARNING]
    shares = [each.recovers.share for each in findings if each.recovers]
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True) == [each.weight for each in findings]


def across(reports: list[TraceReport]) -> tuple[Finding, ...]:
    return examine_files(across_ranks(reports), [])


def test_ranks_that_take_turns_have_no_straggler(tmp_path: Path) -> None:
    reports = [trace_report(path) for path in ranks(tmp_path, late=None)]
    assert "straggler" not in {finding.rule for finding in examine_files(reports, [])}
    assert "straggler" not in {finding.rule for finding in examine_files(reports[:1], [])}
