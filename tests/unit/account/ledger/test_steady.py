"""A device's time outside windows, from a recording that slowed the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.steady import in_steady_state
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import Facts, Severity, examine, examine_files
from lightning_memprof.read.run.load import load_run
from trace_reports import MS, START, STEP_NS, call, gpu_times, idle, trace

STEPS = 5


def device_ledger(**parts: float) -> TimeLedger:
    """Of each part so many ms per step."""
    kinds: dict[str, Part] = {
        "compute": Part.COMPUTE, "copy": Part.COPY, "python": Part.IDLE_PYTHON, "operators": Part.IDLE_OPERATORS,
        "queue": Part.IDLE_QUEUE, "cold": Part.COLD_START, "allocator": Part.IDLE_ALLOCATOR,
    }  # fmt: skip
    lines = tuple(TimeLine(part=kinds[name], ns=ms * MS) for name, ms in parts.items() if ms)
    return TimeLedger(step_ns=total(lines), median_ns=total(lines), steps=STEPS, basis="5 recorded steps", lines=lines)


def recorded(
    compute: float, python: float, operators: float = 0.0, cold: float = 0.0, allocator: float = 0.0
) -> TraceReport:
    """Five steps, each with so many ms of each part; the idle time of all steps is in the causes too."""
    ledger = device_ledger(compute=compute, python=python, operators=operators, cold=cold, allocator=allocator)
    waits = round((python + operators + allocator) * STEPS * MS)
    causes = [
        idle(Part.IDLE_ALLOCATOR, round(allocator * STEPS * MS), "cudaMalloc"),
        replace(idle(Part.IDLE_PYTHON, round(python * STEPS * MS), "[pl][profile]run_training_batch"), launches=True),
        idle(Part.IDLE_OPERATORS, round(operators * STEPS * MS), "aten::linear"),
    ]
    return trace(
        STEPS,
        gpu_window=gpu_times(round(compute * STEPS * MS) + waits, waits),
        idle=tuple(cause for cause in causes if cause.total_ns),
        device_ledger=ledger,
    )


def parts(report: TraceReport) -> dict[str, float]:
    assert report.device_ledger is not None
    return {line.part: round(line.ns / MS, 6) for line in report.device_ledger.lines}


def test_the_devices_work_stays_and_its_idle_time_is_the_rest_of_a_step_outside_windows() -> None:
    found = in_steady_state(recorded(compute=25, python=30, operators=45), 29 * MS)
    assert parts(found) == {"compute": 25, "idle_python": 1.6, "idle_operators": 2.4}
    assert found.is_steady
    assert found.device_ledger is not None
    assert found.device_ledger.step_ns == 29 * MS
    assert found.gpu_window is not None
    assert found.gpu_window.idle_ns / found.gpu_window.window_ns == pytest.approx(4 / 29)
    assert sum(cause.total_ns for cause in found.idle) == pytest.approx(found.gpu_window.idle_ns, abs=2)


def test_a_device_that_works_as_long_as_a_step_is_never_idle() -> None:
    found = in_steady_state(recorded(compute=30, python=40), 28 * MS)
    assert parts(found) == {"compute": 28}
    assert "gpu_idle" not in {finding.rule for finding in examine_files((found,), ())}


def test_recorded_steps_that_are_no_longer_than_the_others_keep_their_shares() -> None:
    # A host that is ahead ends its recorded steps before the device has done their work.
    found = in_steady_state(recorded(compute=140, python=2), 160 * MS)
    assert parts(found) == {"compute": pytest.approx(140 * 160 / 142), "idle_python": pytest.approx(2 * 160 / 142)}


def test_the_driver_takes_as_long_for_memory_as_it_was_recorded() -> None:
    # Recording slows what Python and operators do, not what the driver does.
    found = in_steady_state(recorded(compute=25, python=30, operators=45, allocator=28), 60 * MS)
    assert parts(found) == {"idle_allocator": 28, "compute": 25, "idle_python": 2.8, "idle_operators": 4.2}
    assert found.gpu_window is not None
    assert sum(cause.total_ns for cause in found.idle) == pytest.approx(found.gpu_window.idle_ns, abs=2)
    assert next(cause.total_ns for cause in found.idle if cause.cause == Part.IDLE_ALLOCATOR) == 28 * STEPS * MS


def test_of_a_device_that_waits_for_several_causes_the_largest_is_first() -> None:
    # The allocator's calls are more than the operators, which are the most of what remains.
    report = recorded(compute=25, python=24, operators=30, allocator=16)
    calls = (call("cudaMalloc", 40 * STEPS, 8 * STEPS * MS), call("cudaFree", 40 * STEPS, 8 * STEPS * MS))
    apart = tuple(replace(cause, long_ns=cause.longest_ns) for cause in report.idle)
    found = in_steady_state(replace(report, steady_allocations=calls, idle=apart), 65 * MS)
    assert [finding.rule for finding in examine_files((found,), ())][:2] == ["allocator_thrash", "gpu_idle"]


@pytest.mark.parametrize(("step", "allocator"), [(45, 20), (25, 0), (256, 56)])
def test_the_driver_has_at_most_the_idle_time(step: float, allocator: float) -> None:
    found = in_steady_state(recorded(compute=25, python=30, operators=45, allocator=28), step * MS)
    assert parts(found).get("idle_allocator", 0) == allocator
    assert total(found.device_ledger.lines if found.device_ledger else ()) == pytest.approx(step * MS)


def test_a_cold_start_is_not_part_of_a_steady_state() -> None:
    found = in_steady_state(recorded(compute=20, python=10, cold=50), 25 * MS)
    assert parts(found) == {"compute": 20, "idle_python": 5}


def test_a_device_that_did_nothing_in_the_recorded_steps_stays_as_it_was_recorded() -> None:
    slow = recorded(compute=1, python=0, cold=50)
    assert slow.device_ledger is not None
    start = replace(slow, device_ledger=replace(slow.device_ledger, lines=slow.device_ledger.of("cold_start")))
    assert in_steady_state(start, 25 * MS) is start


def test_a_gap_in_which_a_recorded_step_ends_is_the_collectors() -> None:
    slow = recorded(compute=20, python=20, operators=20)
    python, operators = slow.idle
    between = replace(python, longest_ns=20 * MS, longest_start_ns=START + STEP_NS - 5 * MS)
    # All four ends of steps with a step after them: 80 of the 100 ms in Python.
    found = in_steady_state(replace(slow, idle=(between, operators)), 44 * MS)
    assert parts(found) == {"compute": 20, "idle_operators": 20, "idle_python": 4}
    inside = replace(between, longest_start_ns=START + 5 * MS)
    found = in_steady_state(replace(slow, idle=(inside, operators)), 44 * MS)
    assert parts(found) == {"compute": 20, "idle_operators": 12, "idle_python": 12}


MILLISECONDS = st.floats(0.01, 500)


@given(compute=MILLISECONDS, python=MILLISECONDS, operators=MILLISECONDS, cold=st.floats(0, 50), step=MILLISECONDS)
def test_the_lines_always_sum_to_the_step(
    compute: float, python: float, operators: float, cold: float, step: float
) -> None:
    found = in_steady_state(recorded(compute, python, operators, cold), step * MS)
    assert found.device_ledger is not None
    assert total(found.device_ledger.lines) == pytest.approx(step * MS)
    assert found.gpu_window is not None
    assert found.gpu_window.busy_ns + found.gpu_window.idle_ns == found.gpu_window.window_ns
    assert all(line.ns >= 0 for line in found.device_ledger.lines)


def test_a_page_says_the_time_outside_windows_and_what_to_do_about_many_short_gaps() -> None:
    found = in_steady_state(recorded(compute=25, python=45, operators=30), 50 * MS)
    scattered = tuple(replace(cause, longest_ns=MS) for cause in found.idle)
    (finding,) = (
        each for each in examine_files((replace(found, idle=scattered),), ()) if each.rule == "gpu_idle"
    )  # fmt: skip
    assert finding.severity is Severity.CRITICAL
    assert (finding.numbers["launch_bound"], finding.numbers["share"]) == (True, pytest.approx(0.5))
    assert "is idle for 25.0 ms of a 50.0 ms step" in finding.why
    assert "15.0 ms while the host is in Python" in finding.why
    assert "10.0 ms while the host is in operators" in finding.why
    assert "it runs 100 kernels" in finding.why
    assert finding.next_steps[0].startswith("Launch fewer and longer kernels")


def test_what_waits_for_hooks_and_data_is_apart_from_what_waits_for_launches() -> None:
    found = in_steady_state(recorded(compute=25, python=45, operators=30), 50 * MS, 15 * MS)
    assert parts(found) == {"compute": 25, "idle_data": 15, "idle_python": 6, "idle_operators": 4}
    finding = next(each for each in examine_files((found,), ()) if each.rule == "gpu_idle")
    assert finding.title == "The GPU is idle 20% of each step between kernel launches."
    assert finding.numbers["ns"] == 10 * MS


def test_one_gap_per_step_is_code_that_can_move() -> None:
    report = recorded(compute=25, python=45, operators=30)
    report = replace(report, idle=tuple(replace(cause, long_ns=cause.longest_ns) for cause in report.idle))
    found = in_steady_state(report, 50 * MS)
    finding = next(each for each in examine_files((found,), ()) if each.rule == "gpu_idle")
    assert "with_stack=True" in finding.next_steps[0]


def test_a_run_is_judged_by_its_steps_outside_windows(tmp_path: Path) -> None:
    # Its steps take 18.5 ms; recorded ones took 100 ms, and the GPU worked for 17 ms in each.
    run = load_run(make_run(tmp_path, FakeRun(device_bytes=lambda _: 1 << 30)))
    report = recorded(compute=17, python=45, operators=38)
    assert report.device_ledger is not None
    line = TimeLine(part=Part.COMPUTE, module="net.attention", operator="aten::mm", ns=17 * MS, count=9)
    lines = (line, *report.device_ledger.lines[1:])
    ledger = replace(report.device_ledger, lines=lines, passes=(replace(line, part=Part.FORWARD),))
    facts = Facts.of(run, (replace(report, device_ledger=ledger),))
    assert all(finding.severity < Severity.WARNING for finding in examine(facts))
    first = examine(facts)[0]
    assert first.title == ("Compute-bound: net.attention takes 92% of each step (17.0 ms of 18.5 ms).")
    assert not facts.traces[0].is_steady


def test_a_run_that_was_recorded_whole_has_no_other_steps_to_be_judged_by(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(steps=12, windows=(tuple(range(1, 12)),))))
    facts = Facts.of(run, (recorded(compute=17, python=45, operators=38),))
    assert not facts.steady_traces[0].is_steady
    assert "gpu_idle" in {finding.rule for finding in examine(facts)}
