from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_runs import HEALTHY, FakeRun, make_run
from known import known
from lightning_memprof.account.ledger.model import Stall
from lightning_memprof.account.ledger.run import run_ledger
from lightning_memprof.account.steps.statistics import (
    held_up,
    pulse_statistics,
    typical_in,
    typical_steps,
    window_steps,
)
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.artifacts.naming import manifest_name
from lightning_memprof.artifacts.series import PHASES, PULSE_COLUMNS
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import MIB


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=6, max_size=6), min_size=1, max_size=20))
def test_the_mean_breakdown_of_the_pulse_sums_to_its_mean_step(tmp_path_factory: Any, rows: list[list[int]]) -> None:
    fake = FakeRun(
        steps=len(rows),
        windows=(),
        trace=False,
        phases=lambda _rank, step: dict(zip(PHASES, rows[step], strict=True)),
    )
    statistics = known(pulse_statistics(load_run(make_run(tmp_path_factory.mktemp("run"), fake)).lead))
    assert sum(ns or 0 for ns in statistics.breakdown_ns.values()) == statistics.mean_ns
    assert statistics.median_ns <= statistics.p90_ns <= statistics.max_ns or statistics.used < 3


@pytest.mark.parametrize("source", ["pulse", "hooks"])
def test_a_window_reports_each_recorded_step(tmp_path: Path, source: str) -> None:
    directory = make_run(tmp_path)
    pulse = load_run(directory).lead.pulse
    if source == "hooks":
        (directory / "pulse.rank00000.csv").unlink()
    rank = load_run(directory).lead
    steps = window_steps(rank, rank.windows[0])
    assert rank.windows[0].problems == []
    assert [(step.step, step.clock, step.source) for step in steps] == [(2, "host", source), (3, "host", source)]
    for step in steps:
        row = pulse[step.step]
        assert step.duration_ns == row["duration_ns"]
        assert step.breakdown_ns == {phase: row[f"{phase}_ns"] for phase in PHASES}
        assert step.host.rss_bytes == step.host.max_rss_bytes == (row["rss_bytes"] or 0) + 5 * MIB
        assert step.host.peak_rss_bytes == step.host.rss_bytes + 8 * MIB
        assert step.host.uss_bytes == step.host.rss_bytes // 2
        assert step.device is None


def test_without_pulse_and_hooks_nothing_times_the_step(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "window000" / "rank00000.hooks.jsonl").unlink()
    (directory / "pulse.rank00000.csv").unlink()
    rank = load_run(directory).lead
    first, _ = window_steps(rank, rank.windows[0])
    assert (first.duration_ns, first.breakdown_ns, first.clock) == (None, None, None)
    assert first.host.rss_bytes is not None
    assert pulse_statistics(rank) is None


def test_without_host_series_the_pulse_has_the_resident_size_and_the_peak_is_unknown(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "window000" / "rank00000.host.jsonl").unlink()
    rank = load_run(directory).lead
    host = window_steps(rank, rank.windows[0])[0].host
    assert host.rss_bytes == rank.pulse[2]["rss_bytes"]
    assert host.peak_rss_bytes is host.uss_bytes is None


def test_a_damaged_series_is_a_problem_and_its_other_rows_count(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    series = directory / "window000" / "rank00000.host.jsonl"
    lines = series.read_text().split("\n")
    series.write_text("\n".join(["{broken", *lines]))
    rank = load_run(directory).lead
    steps = window_steps(rank, rank.windows[0])
    assert "18 rows could be read" in rank.windows[0].problems[0].message
    assert steps[0].host.rss_bytes is not None


def test_on_an_accelerator_the_devices_clock_and_memory_are_taken(tmp_path: Path) -> None:
    rank = load_run(make_run(tmp_path, FakeRun(device_bytes=lambda step: (100 + step) * MIB))).lead
    first, _ = window_steps(rank, rank.windows[0])
    assert (first.clock, first.source) == ("device", "pulse")
    assert first.breakdown_ns is not None
    assert first.breakdown_ns["callbacks"] is None
    assert sum(ns or 0 for ns in first.breakdown_ns.values()) == first.duration_ns
    assert first.device is not None
    assert first.device.device == "cuda:0"
    assert first.device.allocated_bytes == 102 * MIB
    assert first.device.reserved_bytes == 230 * MIB
    assert first.device.peak_allocated_bytes == 166 * MIB
    statistics = known(pulse_statistics(rank))
    assert statistics.clock == "device"
    assert statistics.breakdown_ns["callbacks"] is None


@pytest.mark.parametrize(("every", "clock"), [(1, "device"), (2, "host")])
def test_the_devices_clock_is_used_where_most_steps_have_it(tmp_path: Path, every: int, clock: str) -> None:
    pulse = load_run(make_run(tmp_path, FakeRun(device_bytes=lambda _: MIB))).lead.pulse
    empty: dict[str, Any] = {name: None for name in PULSE_COLUMNS if name.startswith("device_")}
    rows = [row if (row["step"] or 0) % every == 0 else msgspec.structs.replace(row, **empty) for row in pulse]
    found = known(typical_in(rows))
    assert found.clock == clock
    assert len(found.steps) == 26  # without the first step and those of a window


def test_a_step_that_waits_for_the_profiler_on_another_rank_is_neither_typical_nor_a_stall(tmp_path: Path) -> None:
    step, pause = 20, 3_000_000_000

    def phases(rank: int, at: int) -> dict[str, int]:
        waits = {"backward": 40_000_000 + pause * ((rank, at) == (0, step))}
        return dict.fromkeys(PHASES, 10_000_000) | waits

    directory = make_run(tmp_path, FakeRun(world_size=2, phases=phases))
    waiting = load_run(directory).lead
    assert [stall.step for stall in stalls_of(waiting)] == [step]
    before = waiting.pulse[step]["start_ns"] or 0
    with closing(ManifestWriter(directory / manifest_name(1))) as manifest:
        manifest.append("pause", time_ns=before + pause, ns=pause)
    waiting = load_run(directory).lead
    assert sorted(held_up(waiting)) == [step]
    assert stalls_of(waiting) == ()
    statistics = known(pulse_statistics(waiting))
    without = "the first, those in windows and those that waited for the profiler on another rank"
    assert statistics.basis == f"25 of 30 steps, without {without}"


def test_where_nearly_all_steps_wait_for_another_rank_they_count(tmp_path: Path) -> None:
    pulse = load_run(make_run(tmp_path, FakeRun(windows=()))).lead.pulse
    counts = [len(found.steps) for held in (25, 26) if (found := typical_in(pulse, range(held)))]
    assert counts == [5, 29]


def stalls_of(rank: Rank) -> tuple[Stall, ...]:
    ledger = known(run_ledger(rank))
    return ledger.stalls


@pytest.mark.parametrize(
    ("steps", "windows", "basis"),
    [
        (30, ((2, 3),), "26 of 30 steps, without the first and those in windows"),
        (9, ((2, 3),), "5 of 9 steps, without the first and those in windows"),
        (7, ((2, 3),), "6 of 7 steps, without the first"),
        (4, ((2, 3),), "3 of 4 steps, without the first"),
        (3, (), "all steps"),
        (1, (), "the only step"),
    ],
)
def test_statistics_say_which_steps_they_rest_on(
    tmp_path: Path, steps: int, windows: tuple[tuple[int, ...], ...], basis: str
) -> None:
    statistics = known(pulse_statistics(load_run(make_run(tmp_path, FakeRun(steps=steps, windows=windows))).lead))
    assert statistics.basis == basis
    assert statistics.steps == steps
    if "first" in basis:
        assert statistics.max_ns < 40_000_000


def test_steps_without_device_timestamps_are_left_out_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, FakeRun(device_bytes=lambda _: MIB))
    path = run / "pulse.rank00000.csv"
    lines = path.read_text().splitlines()
    at = lines[0].split(",").index("device_duration_ns")
    fields = lines[-1].split(",")
    fields[at] = ""
    path.write_text("\n".join([*lines[:-1], ",".join(fields)]) + "\n")
    statistics = known(pulse_statistics(load_run(tmp_path).lead))
    assert statistics.clock == "device"
    assert statistics.basis == ("25 of 30 steps, without the first, those in windows and 1 without device timestamps")


def test_a_run_without_a_step_has_no_statistics(tmp_path: Path) -> None:
    assert pulse_statistics(load_run(make_run(tmp_path, FakeRun(steps=0, windows=()))).lead) is None
    assert typical_steps(load_run(tmp_path).lead) is None


def test_a_validation_has_neither_backward_nor_optimizer(tmp_path: Path) -> None:
    evaluation = {**HEALTHY, "backward": 0, "optimizer": 0}
    rank = load_run(make_run(tmp_path, FakeRun(stage="validate", phases=lambda *_: evaluation))).lead
    statistics = known(pulse_statistics(rank))
    assert (statistics.breakdown_ns["backward"], statistics.breakdown_ns["optimizer"]) == (None, None)
    assert statistics.breakdown_ns["forward"] == HEALTHY["forward"]
    step, *_ = window_steps(rank, rank.windows[0])
    assert step.breakdown_ns is not None
    assert step.breakdown_ns["backward"] is None
    assert sum(ns or 0 for ns in step.breakdown_ns.values()) == step.duration_ns
