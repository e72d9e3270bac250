"""The benchmark of fits: what it makes of what it measures, and one real pair of fits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmarks are scripts: their directory is on the path while one of them runs.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import aims
import bench
import configurations
import figures
import measuring
import pair
import part
import told
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


def told_of(found: dict[str, figures.Row]) -> told.Told:
    return told.Told(60, {"gpt": found}, {"gpt": [20.0]}, {"gpt": 1})


def by_name(found: dict[str, figures.Row]) -> dict[str, part.Target]:
    return {aim.target.split(":", 1)[1].strip(): aim for aim in aims.of_workload("gpt", found)}


def test_a_step_that_is_slower_than_the_null_pair_misses_its_target():
    found = by_name(rows(fit("bare", step=0.0201), fit("default", step=0.021, active=0.021, closing=0.021)))
    assert [aim.met for name, aim in found.items() if "`default`: 1.00" in name] == [False, False]


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


def test_a_stall_that_is_lost_in_its_own_spread_is_neither_shown_nor_judged():
    found = rows(
        fit("hand-gz", closing=1.12), fit("default", closing=0.42), fit("hand-gz", closing=1.12),
        # The step beside it stood still for longer: this round says that saving took less than nothing.
        fit("default", closing=-9.0),
    )  # fmt: skip
    aim = next(aim for aim in by_name(found).values() if "`default`, `stop_trace` counted in both" in aim.target)
    assert (aim.met, aim.verdict) == (None, "not measurable")
    assert aim.measured == "-4310 ± 4710 ms, by hand 1100 ± 0 ms"
    page = told.markdown(told_of(found), {"gpt": "a GPT"}, configurations.configurations())
    cells = next(line for line in page.splitlines() if line.startswith("| `default`")).split(" | ")
    assert cells[told.HEADINGS.index("window end, ms")] == "-"
    cells = next(line for line in page.splitlines() if line.startswith("| `hand-gz`")).split(" | ")
    assert cells[told.HEADINGS.index("window end, ms")] == "1100 ± 0"


def test_a_trial_judges_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("measured.MEASURED", tmp_path)

    class Quick(measuring.Bench):
        """Fits nothing: what was fitted is given."""

        def __init__(self, plan, known):
            slow = [(fit("bare", step=0.0201), fit("bare")), (fit("default", step=0.021, closing=0.9), fit("bare"))]
            self.found = measuring.Rounds(slow, 1)

        def warm_up(self, stretches): ...
        def rounds(self, tick): ...
        def close(self): ...

    monkeypatch.setattr(measuring, "Bench", Quick)
    plan = measuring.Plan("gpt", 1, ["bare", "default"], 60, 1, 0.0)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", "--peers", sys.executable])
    options = bench.parse()
    for trial, word in ((False, "**missed**"), (True, "not judged")):
        found = told.Told(60, is_trial=trial)
        with bench.progress() as drawn:
            bench.measure_workload(drawn, plan, found)
        assert {aim.verdict for aim in found.aims} == {word}
        bench.publish(options, found)
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("A trial: nothing was written.")
    assert [path.name for path in tmp_path.iterdir()] == ["fits.md"]
    assert "not judged" not in (tmp_path / "fits.md").read_text(encoding="utf-8")


def test_the_end_of_a_fit_is_compared_with_that_of_lightnings_profiler():
    found = by_name(rows(fit("default", end=0.3), fit("lightning", end=2.2)))
    aim = next(aim for name, aim in found.items() if name.startswith("end of fit"))
    assert (aim.measured, aim.met) == ("0.095", True)


def test_growth_is_what_a_process_has_beyond_one_that_records_nothing():
    apart = aims.Apart(rss_bytes={"bare": [100, 110, 120], "default": [150], "lightning": [210, 310]})
    assert apart.growth("default") == 40
    verdict = next(aim for aim in aims.of_apart(apart, 0.018) if "`default`" in aim.target)
    assert (verdict.measured.split()[0], verdict.met) == ("0.27", True)


@pytest.mark.parametrize("name", configurations._of_ours())
def test_every_configuration_of_this_package_can_be_made(name, tmp_path):
    assert configurations.configurations()[name].arguments(tmp_path)["callbacks"]


@pytest.mark.slow
def test_a_pair_of_real_fits_gives_every_figure_and_one_that_fails_says_why_and_leaves_no_process():
    workers = pair.Pair()
    ours, bare = workers.fit(workload.Job("default", "small", 32), workload.Job("bare", "small", 32))
    assert len(ours.wall.steps) == len(bare.wall.steps) == 31
    assert 0 < ours.stop < ours.wall.steps[STRETCHES.closing]
    assert bare.stop == 0
    assert ours.size_bytes > 10_000
    assert bare.size_bytes == 0
    assert ours.faults == ()
    with pytest.raises(RuntimeError, match="no such configuration"):
        workers.fit(workload.Job("no such configuration", "small", 32), workload.Job("bare", "small", 32))
    assert not any(process.is_alive() for process in workers._processes)
