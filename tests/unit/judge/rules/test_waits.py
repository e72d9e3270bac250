from __future__ import annotations

from pathlib import Path

import pytest

from device_traces import KERNEL_US, KERNELS, STEPS, Recording, training
from findings import found_in_trace, recovery
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Severity, examine_files
from trace_reports import MS, copies, found_in, trace


def test_values_that_are_read_in_a_step_leave_the_device_idle_after_them(tmp_path: Path) -> None:
    def read(made: Recording, kernel: int) -> None:
        if kernel % 5 == 0:
            made.synchronize("aten::item")
            made.python(600)

    finding = found_in_trace(training(tmp_path / "item.pt.trace.json", read))["synchronization"]
    assert finding.severity is Severity.WARNING
    assert finding.title.startswith("Waits for the GPU (5 times per step) leave it idle ")
    assert finding.numbers["by_name"]["aten::item"]["calls"] == STEPS * 5
    assert "loss.detach()" in finding.next_steps[0]


def test_batches_that_are_loaded_after_a_value_was_read_are_not_its_cost(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        made.synchronize("aten::item")
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(6_000)

    finding = found_in_trace(training(tmp_path / "both.pt.trace.json", before=load))
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
    assert "synchronization" not in found_in_trace(made.write(tmp_path / "end.pt.trace.json"))


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

    finding = found_in_trace(training(tmp_path / "pinned.pt.trace.json", before=copy))["exposed_copies"]
    # 25 kernels of 400 us in each step.
    share = copy_us / (copy_us + 10_000)
    assert finding.numbers["share"] == pytest.approx(share, rel=0.01)
    assert finding.severity is severity
    assert finding.title.startswith("Transfer-bound: ") is (share > 0.5)
    assert finding.next_steps[0].startswith(first)
    assert recovery(finding).max == pytest.approx(1_000 * saved_us, rel=0.02)


def test_pinned_copies_beside_kernels_are_not(tmp_path: Path) -> None:
    def copy(made: Recording) -> None:
        made.launch(3_000)
        before = made.free
        made.copy(2_900, "Memcpy HtoD (Pinned -> Device)", 16 << 20)
        made.events[-1]["ts"], made.events[-1]["tid"], made.free = before - 2_950, 21, before

    assert not found_in_trace(training(tmp_path / "beside.pt.trace.json", before=copy))


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
        worth = recovery(findings[first])
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
    findings = found_in_trace(made.write(tmp_path / "pause.pt.trace.json"))
    worth = recovery(findings["synchronization"])
    assert next(iter(findings)) == "gpu_idle"
    # In each of the four steps before it the host waits for the device but for its own 25 calls.
    ahead_us = 4 * KERNELS * (KERNEL_US - 25)
    assert worth.max == pytest.approx(1000 * ahead_us / steps, rel=0.02)
    idle = recovery(findings["gpu_idle"])
    assert idle.max == pytest.approx(1000 * (pause_us - ahead_us) / steps, rel=0.02)


def test_a_value_that_is_read_when_the_device_is_done_costs_its_call(tmp_path: Path) -> None:
    def read(made: Recording, _kernel: int) -> None:
        with made.inside("aten::item", "cpu_op"):
            made.copy(2, "Memcpy DtoH (Device -> Pinned)", 4)
            made.python(10)
            made.call("cudaStreamSynchronize", 30)

    finding = found_in_trace(training(tmp_path / "item.pt.trace.json", read, kernel_us=2))["synchronization"]
    assert finding.severity > Severity.INFO
    assert recovery(finding).max == pytest.approx(KERNELS * 20_000, rel=0.02)


def test_waits_for_copies_to_pageable_memory_are_those_of_the_copies(tmp_path: Path) -> None:
    def move(made: Recording, kernel: int) -> None:
        if kernel % 5 == 0:
            with made.inside("aten::to", "cpu_op"):
                made.copy(500, "Memcpy DtoH (Device -> Pageable)", 1 << 20)
                made.call("cudaStreamSynchronize", made.free - made.now)
            made.python(600)

    findings = found_in_trace(training(tmp_path / "moved.pt.trace.json", move, kernel_us=20))
    assert "synchronization" not in findings
    assert findings["blocking_transfers"].severity > Severity.INFO


def test_copies_in_two_directions_are_one_finding() -> None:
    both = trace(copies=(copies(), copies(kind="DtoH", total_ns=20 * MS, bytes=40 << 20)))
    (finding,) = [finding for finding in examine_files([both, both], []) if finding.rule == "blocking_transfers"]
    assert finding.numbers["kinds"] == ["HtoD", "DtoH"]
    assert finding.numbers["share"] == pytest.approx(60 / 500)
    assert "pin_memory=True" in finding.next_steps[0]
    assert any(".cpu()" in step for step in finding.next_steps)


def test_copies_from_pageable_memory_are_told_by_direction() -> None:
    finding = found_in(trace(copies=(copies(),)))["blocking_transfers"]
    assert finding.severity is Severity.INFO
    assert finding.title == "Blocking copies to the GPU take 8% of each step."
    assert "400 MiB in 40.0 ms, 9.77 GiB/s" in finding.why
    assert "pin_memory=True" in finding.next_steps[0]
    back = found_in(trace(copies=(copies(kind="DtoH", total_ns=200 * MS),)))["blocking_transfers"]
    assert back.severity is Severity.CRITICAL
    assert ".cpu()" in back.next_steps[0]


@pytest.mark.parametrize(("back_bytes", "stays"), [(410 << 20, True), (40 << 20, False)])
def test_what_moves_back_and_forth_in_each_step_can_stay_on_the_gpu(back_bytes: int, stays: bool) -> None:
    report = trace(copies=(copies(), copies(kind="DtoH", bytes=back_bytes)))
    for finding in (each for each in examine_files((report,), ()) if each.rule == "blocking_transfers"):
        assert finding.why.endswith("The same number of bytes moves to the GPU and back.") is stays
        assert finding.next_steps[0].startswith("Leave it on the GPU") is stays
        assert len(finding.next_steps) > 1


def test_copies_that_are_pinned_hidden_or_short_are_no_finding() -> None:
    assert not found_in(trace(copies=(copies(is_pageable=False, exposed_ns=20 * MS), copies(is_pageable=None))))
    assert not found_in(trace(copies=(copies(exposed_ns=MS), copies(kind="DtoH", total_ns=MS))))
