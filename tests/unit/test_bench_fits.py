"""The benchmark of fits: what it makes of what it measures, and one real pair of fits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# The benchmarks are scripts: their directory is on the path while one of them runs.
sys.path.append(str(BENCHMARKS))

if TYPE_CHECKING:
    from tests.benchmarks import aims, figures, misses, pair, workload
else:
    import aims
    import figures
    import misses
    import pair
    import workload

STRETCHES = figures.Stretches(20, 1, 3)


def fit(name: str, *, step: float = 0.02, active: float = 0.02, closing: float = 0.02, end: float = 0.1):
    steps = [step] * 40
    steps[21:23] = [active] * 2
    steps[23] = closing
    times = workload.Times(start=1.0, steps=steps, end=end, paused=0.0)
    return workload.Fit(name, times, times, stop=0.1 if closing > step else 0.0)


def rows(*fits: workload.Fit) -> dict[str, figures.Row]:
    return figures.rows([(each, fit("bare")) for each in fits], STRETCHES, ["default", "hand-gz", "memory"])


def by_name(found: dict[str, figures.Row]) -> dict[str, aims.Aim]:
    return {aim.target.split(":", 1)[1].strip(): aim for aim in aims.of_workload("gpt", found)}


def test_a_step_that_is_slower_than_the_null_pair_misses_its_target_and_is_profiled_once():
    found = by_name(rows(fit("bare", step=0.0201), fit("default", step=0.021, active=0.021, closing=0.021)))
    assert [aim.met for name, aim in found.items() if "`default`: 1.00" in name] == [False, False]
    assert misses.of(found.values()) == [
        misses.Miss("gpt", "default", "after"),
        misses.Miss("gpt", "default", "waiting"),
    ]


def test_a_step_within_the_null_pairs_distance_meets_its_target():
    found = by_name(rows(fit("bare", step=0.0202), fit("default", step=0.0201)))
    assert [aim.met for name, aim in found.items() if "`default`: 1.00" in name] == [True, True]


def test_the_stall_at_the_end_of_a_window_is_compared_with_and_without_torchs_own_stop():
    found = rows(fit("hand-gz", closing=1.12), fit("default", closing=0.42))
    assert found["hand-gz"].closing_ms == pytest.approx([1100])
    assert found["default"].saving_ms == pytest.approx([300])
    measured = {
        aim.target.split(", ")[2].split(":")[0]: aim for aim in by_name(found).values() if "window end" in aim.target
    }
    assert measured["without `stop_trace`"].measured == "0.300"
    assert measured["without `stop_trace`"].met is False
    assert measured["`stop_trace` counted in both"].measured == "0.364"
    assert measured["`stop_trace` counted in both"].met is True


def test_the_end_of_a_fit_is_compared_with_that_of_lightnings_profiler():
    found = by_name(rows(fit("default", end=0.3), fit("lightning", end=2.2)))
    aim = next(aim for name, aim in found.items() if name.startswith("end of fit"))
    assert (aim.measured, aim.met, aim.stretch) == ("0.095", True, "end")


def test_growth_is_what_a_process_has_beyond_one_that_records_nothing():
    apart = aims.Apart(rss_bytes={"bare": [100, 110, 120], "default": [150], "lightning": [210, 310]})
    assert apart.growth("default") == 40
    verdict = next(aim for aim in aims.of_apart(apart, 0.018) if "`default`" in aim.target)
    assert (verdict.measured.split()[0], verdict.met) == ("0.27", True)


def test_a_pair_of_real_fits_gives_every_figure_and_one_that_fails_says_why_and_leaves_no_process():
    profiled = misses.steps("closing", STRETCHES, 32)
    workers = pair.Pair()
    ours, bare = workers.fit(workload.Job("default", "small", 32, profiled=profiled), workload.Job("bare", "small", 32))
    assert len(ours.wall.steps) == len(bare.wall.steps) == 31
    assert 0 < ours.stop < ours.wall.steps[STRETCHES.closing]
    assert bare.stop == 0
    assert ours.size_bytes > 10_000
    assert bare.size_bytes == 0
    assert ours.pulse_us
    assert ours.faults == ()
    assert any(name.startswith("lightning_memprof/capture/operator_trace.py") for name in ours.profile)
    assert bare.profile == {}
    with pytest.raises(RuntimeError, match="no such configuration"):
        workers.fit(workload.Job("no such configuration", "small", 32), workload.Job("bare", "small", 32))
    assert not any(process.is_alive() for process in workers._processes)
