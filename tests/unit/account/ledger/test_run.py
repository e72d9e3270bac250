from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runs import HEALTHY, FakeRun, make_run
from findings import phases
from known import known
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.ledger.run import run_ledger, without_stalls
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Rank


def lead(tmp_path: Path, fake: FakeRun) -> Rank:
    return load_run(make_run(tmp_path, fake)).lead


def ledger(rank: Rank) -> TimeLedger:
    return known(run_ledger(rank))


@settings(max_examples=25, deadline=None)
@given(
    spent=st.lists(
        st.fixed_dictionaries({phase: st.integers(0, 50_000_000) for phase in HEALTHY}), min_size=1, max_size=30
    ),
    is_recorded=st.booleans(),
)
def test_the_lines_sum_to_the_mean_step_whatever_the_steps_are(
    spent: list[dict[str, int]], is_recorded: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    windows = ((2, 3),) if is_recorded and len(spent) > 4 else ()
    fake = FakeRun(steps=len(spent), phases=lambda _, step: spent[step], windows=windows)
    rank = lead(tmp_path_factory.mktemp("run"), fake)
    typical = known(typical_steps(rank))
    mean = sum(duration for _, duration, _ in typical.steps) / len(typical.steps)
    found = ledger(rank)
    assert total(found.lines) == pytest.approx(mean, rel=1e-9, abs=1)
    assert all(line.ns > 0 for line in found.lines)
    assert list(found.lines) == sorted(found.lines, key=lambda line: -line.ns)


def test_a_run_without_a_timed_step_has_no_ledger(tmp_path: Path) -> None:
    assert run_ledger(lead(tmp_path, FakeRun(steps=0, windows=()))) is None


def test_a_single_long_backward_is_a_stall_and_not_the_backward_of_every_step(tmp_path: Path) -> None:
    def once(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": 710_000_000} if step == 20 else HEALTHY

    found = ledger(lead(tmp_path, FakeRun(phases=once)))
    (stall,) = found.stalls
    assert (stall.step, stall.excess_ns, stall.owner) == (20, 700_000_000, "backward")
    assert found.ns("stall") == pytest.approx(700_000_000 / found.steps)
    assert found.ns("backward") == pytest.approx(HEALTHY["backward"])


@pytest.mark.parametrize("steps", range(20, 40))
def test_a_phase_that_only_stalled_steps_have_leaves_nothing(tmp_path: Path, steps: int) -> None:
    # By rounding, the sum of the parts may exceed the mean.
    stalled = {number * 3 + 4: 171_000_001 + number * 333_333 for number in range(5)}

    def rarely(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": stalled.get(step, 0)}

    found = ledger(lead(tmp_path, FakeRun(steps=steps, phases=rarely)))
    assert len(found.stalls) == len(stalled)
    assert found.ns("backward") == pytest.approx(0, abs=1)


def test_long_backwards_in_every_second_step_are_the_backward_of_the_run(tmp_path: Path) -> None:
    def often(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": 710_000_000} if step % 2 == 0 else HEALTHY

    found = ledger(lead(tmp_path, FakeRun(phases=often)))
    assert found.stalls == ()
    assert found.share("backward") > 0.9


def test_a_long_fetch_is_data_wait_and_no_stall(tmp_path: Path) -> None:
    def once(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "data_wait": 900_000_000} if step == 20 else HEALTHY

    found = ledger(lead(tmp_path, FakeRun(phases=once)))
    assert found.stalls == ()
    assert found.ns("data_wait") > 900_000_000 / found.steps


def test_callbacks_have_a_line_each_that_takes_no_more_than_the_phase(tmp_path: Path) -> None:
    found = ledger(lead(tmp_path, FakeRun()))
    assert "TQDMProgressBar.on_train_batch_end" in {line.name for line in found.of("callback")}
    assert found.ns("callback") <= HEALTHY["callbacks"] * 1.1


def test_on_a_devices_clock_the_passes_have_their_kernels_and_the_wait_of_the_device(tmp_path: Path) -> None:
    rank = lead(tmp_path, FakeRun(device_bytes=lambda _: 1 << 30))
    kernels = (
        TimeLine(part=Part.FORWARD, module="net", operator="aten::mm", ns=4e6),
        TimeLine(part=Part.BACKWARD, module="net", operator="aten::mm", ns=50e6),
    )
    device = TimeLedger(step_ns=99e6, median_ns=99e6, steps=2, basis="", lines=(), passes=kernels)
    before, found = run_ledger(rank), run_ledger(rank, device=device)
    assert before is not None
    assert found is not None
    assert total(found.lines) == pytest.approx(total(before.lines))
    named = {(line.part, line.name, line.module): line.ns for line in found.of(Part.FORWARD, Part.BACKWARD)}
    assert named[Part.FORWARD, "", "net"] == 4e6
    assert named[Part.FORWARD, "device idle", None] == pytest.approx(before.ns("forward") - 4e6)
    # They never take more than the phase.
    assert named[Part.BACKWARD, "", "net"] == pytest.approx(before.ns("backward"))
    # Recorded steps that ended before the device had done their work have a part of it.
    ahead = known(run_ledger(rank, device=msgspec.structs.replace(device, step_ns=before.median_ns / 1.25)))
    assert next(line.ns for line in ahead.of("forward") if line.module == "net") == pytest.approx(5e6)


def forward(
    module: str, ms: float, longest_ms: float | None = None, *, count: float = 1, operator: str = ""
) -> TimeLine:
    longest_ns = None if longest_ms is None else round(longest_ms * 1e6)
    return TimeLine(
        part=Part.FORWARD, module=module, operator=operator, ns=ms * 1e6, count=count, longest_ns=longest_ns
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pause_ms", "count", "left_ms"),
    [
        pytest.param(180, 1, 1, id="a pause in one of two calls"),
        pytest.param(180, 0.5, 91, id="the only call"),
        pytest.param(5, 1, 3.5, id="less than three quarters of both calls"),
    ],
)
def test_a_pause_in_one_recorded_call_is_not_the_usual_time_of_its_module(
    pause_ms: float, count: float, left_ms: float
) -> None:
    # Two steps: 1 ms of Python in each call of the layer, 4 ms of products, and 10 ms outside of it.
    lines = [
        forward("", 10, 16 + pause_ms),
        forward("net.layer", 1 + pause_ms / 2, 5 + pause_ms, count=count),
        forward("net.layer", 4, 5, operator="aten::mm"),
        forward("net", 1, 6 + pause_ms),
    ]
    layer_ms = {line.module: line.ns / 1e6 for line in without_stalls(lines, 2) if not line.operator}
    assert layer_ms == pytest.approx({"": 10, "net.layer": left_ms, "net": 1})


def test_a_pause_in_a_layer_is_not_taken_from_the_python_around_it_too() -> None:
    # Two steps with 80 ms of Python each, and a layer that pauses for 180 ms in one of them.
    lines = [forward("", 80, 265), forward("layer", 91, 185), forward("layer", 4, 5, operator="aten::mm")]
    assert [line.ns / 1e6 for line in without_stalls(lines, 2)] == pytest.approx([80, 1, 4])


def test_a_call_that_other_parts_made_long_is_no_stall() -> None:
    # A garbage collection of 180 ms in one of the calls has a line of its own.
    lines = [forward("net", 1, 186), forward("net", 4, 5, operator="aten::mm")]
    assert without_stalls(lines, 2) == lines


def test_a_single_recorded_step_does_not_tell_a_pause_from_the_usual_time() -> None:
    # 49 ranges in the step, of which one is training_step.
    lines = [forward("", 180, 185, count=49), forward("net", 4, 5, operator="aten::mm")]
    assert without_stalls(lines, 1) == lines


def test_a_pause_in_a_window_is_in_no_modules_share_of_the_run(tmp_path: Path) -> None:
    rank = lead(tmp_path, FakeRun())
    lines = (forward("first", 91, 181), forward("second", 4, 4), forward("second", 4, 4, operator="aten::mm"))
    found = known(run_ledger(rank, TimeLedger(step_ns=99e6, median_ns=99e6, steps=2, basis="", lines=lines)))
    first, second = (sum(line.ns for line in found.lines if line.module == name) for name in ("first", "second"))
    assert first < second / 4


def test_repeated_blocks_are_one_line_and_the_sum_stays() -> None:
    lines = [
        TimeLine(
            part=Part.FORWARD, module=f"blocks.{block}.{name}", operator="aten::mm", ns=ns, count=1, longest_ns=block
        )
        for block in range(3)
        for name, ns in (("norm", 1.0), ("attention", 5.0))
    ]
    found = grouped([*lines, TimeLine(part=Part.FORWARD, module="head", operator="aten::mm", ns=2.0)])
    assert [(line.module, line.ns, line.count) for line in found] == [
        ("blocks.0-2.attention", 15.0, 3),
        ("blocks.0-2.norm", 3.0, 3),
        ("head", 2.0, 0.0),
    ]
    assert found[0].longest_ns == 2
    assert total(found) == total(lines) + 2.0


def test_the_wait_for_a_core_is_a_line_of_its_own_and_taken_from_all_phases_alike(tmp_path: Path) -> None:
    duration = sum(HEALTHY.values())
    fake = FakeRun(phases=phases(), training={"dataloaders": []})
    quiet = ledger(lead(tmp_path / "quiet", fake))
    found = ledger(lead(tmp_path / "waits", replace(fake, core_wait_ns=lambda _: duration // 2)))
    assert found.step_ns == pytest.approx(duration)
    assert found.ns("core_wait") == pytest.approx(duration / 2, rel=1e-3)
    parts = {line.part for line in quiet.lines}
    assert parts == {line.part for line in found.lines} - {"core_wait"}
    for part in parts:
        assert found.ns(part) == pytest.approx(quiet.ns(part) / 2, rel=1e-3)


def test_a_reading_of_the_wait_covers_the_steps_since_the_one_before(tmp_path: Path) -> None:
    fake = FakeRun(steps=33, phases=phases(), core_wait_ns=lambda step: 4_000_000 if step % 4 == 0 else None)
    assert ledger(lead(tmp_path, fake)).ns("core_wait") == pytest.approx(1_000_000, rel=1e-3)


def test_a_step_that_waits_for_a_core_is_no_stall(tmp_path: Path) -> None:
    def once(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": 710_000_000} if step == 20 else HEALTHY

    found = ledger(lead(tmp_path, FakeRun(phases=once, core_wait_ns=lambda step: 700_000_000 if step == 20 else 0)))
    assert found.stalls == ()
    assert found.ns("core_wait") * found.steps == pytest.approx(700_000_000)


def test_a_thread_that_waits_for_worker_processes_sleeps(tmp_path: Path) -> None:
    loader = {"num_workers": 2, "persistent_workers": True}
    fake = FakeRun(
        phases=phases(data_wait=20_000_000),
        core_wait_ns=lambda _: 9_000_000,
        training={"dataloaders": [loader]},
    )
    found = ledger(lead(tmp_path, fake))
    assert found.ns("data_wait") == pytest.approx(20_000_000)
    assert found.ns("core_wait") == pytest.approx(9_000_000)


def test_on_the_clock_of_a_device_the_wait_of_the_host_is_no_line(tmp_path: Path) -> None:
    fake = FakeRun(device_bytes=lambda _: 2**30, core_wait_ns=lambda _: 1_000_000)
    assert ledger(lead(tmp_path, fake)).of("core_wait") == ()


def test_the_transfers_of_a_run_are_those_of_its_trace_beside_the_waits_of_every_step(tmp_path: Path) -> None:
    transfer = TimeLine(part=Part.COLLECTIVE, name="all_reduce", ns=3_000_000)
    wait = TimeLine(part=Part.RANK_WAIT, name="all_reduce", ns=2_000_000)
    host = TimeLedger(step_ns=0, median_ns=0, steps=1, basis="", lines=(), communication=(transfer, wait))
    rank = lead(tmp_path, FakeRun(phases=phases()))

    def communicates(host: TimeLedger, waits_ns: Mapping[str, int] | None = None) -> tuple[float, float]:
        found = known(run_ledger(rank, host, waits_ns))
        assert total(found.lines) == pytest.approx(sum(HEALTHY.values()))
        return found.communicates("rank_wait"), found.communicates("collective")

    assert communicates(host) == (2_000_000, 3_000_000)
    assert communicates(host, {"backward": 6_000_000}) == (6_000_000, 3_000_000)
    # Of a trace without those of other ranks, the collectives have the wait in them.
    alone = msgspec.structs.replace(host, communication=(msgspec.structs.replace(transfer, ns=8_000_000),))
    assert communicates(alone, {"backward": 6_000_000}) == (6_000_000, 2_000_000)
    assert communicates(alone, {"backward": 9_000_000}) == (9_000_000, 0)
    long = msgspec.structs.replace(host, communication=(msgspec.structs.replace(transfer, ns=10**9),))
    assert sum(communicates(long)) < sum(HEALTHY.values())


def test_a_callback_of_few_steps_keeps_its_work_where_other_processes_take_the_cores(tmp_path: Path) -> None:
    """Each phase takes twice its time: half of it is a wait."""

    def shared(_: int, step: int) -> Mapping[str, int]:
        work = {**HEALTHY, "callbacks": 20_000_000 if step % 3 == 0 else 100_000}
        return {phase: round(ns * (2.2 if step % 2 else 1.8)) for phase, ns in work.items()}

    fake = FakeRun(steps=60, phases=shared, core_wait_ns=lambda step: sum(shared(0, step).values()) // 2)
    found = ledger(lead(tmp_path, fake))
    assert found.ns("callback") == pytest.approx(20_000_000 / 3, rel=0.35)
