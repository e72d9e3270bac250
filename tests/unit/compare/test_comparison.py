from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from fake_memory import FakeMemory
from fake_runs import HEALTHY, FakeRun, make_run
from kineto import Made, event_fields, write_trace
from known import known
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.compare import significance
from lightning_memprof.compare.comparison import check, compare, parse_limit
from lightning_memprof.compare.model import Comparison, Measure, Side
from lightning_memprof.compare.sides import (
    holder_bytes,
    over_traces,
    peak,
    run_side,
    severities,
    site_bytes,
    snapshots_side,
    traces_side,
    typical,
)
from lightning_memprof.compare.significance import rank_test
from lightning_memprof.errors import ConfigError
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB
from snapshots import MODEL, TRAIN, block, event, segment, snapshot, write_snapshot

MS = 1_000_000


def steps(milliseconds: float, spread: float = 0.02, count: int = 40, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [milliseconds * 1e6 * chance.gauss(1, spread) for _ in range(count)]


def side(label: str = "a", samples: Sequence[float] = (), size: Measure | None = None) -> Side:
    step = typical("step_ns", samples, "the pulse", of_steps=True)
    return Side(
        label=label, kind="run", measures={measure.name: measure for measure in (step, size) if measure is not None}
    )


def size(name: str, value: float, source: str = "the allocator") -> Measure:
    return known(peak(name, [value], source))


def run(directory: Path, fake: FakeRun | None = None) -> Side:
    return run_side(load_run(make_run(directory, fake)), directory.name)


def changed(comparison: Comparison, group: str) -> dict[str, str]:
    return {change.name: change.kind for change in comparison.changes if change.group == group}


def slower(phase: str, factor: float):
    def phases(rank: int, step: int) -> dict[str, int]:
        base = {
            "data_wait": 400,
            "forward": 6000,
            "backward": 10_000,
            "optimizer": 1200,
            "callbacks": 100,
            "other": 500,
        }
        wobble = 1 + (step % 5) * 0.01
        return {name: round(us * 1000 * wobble * (factor if name == phase else 1)) for name, us in base.items()}

    return phases


@pytest.mark.slow
def test_steps_that_differ_by_less_than_they_vary_are_noise() -> None:
    comparison = compare(side("a", steps(20, seed=1)), side("b", steps(20, seed=2)))
    assert comparison.is_same
    (found,) = comparison.differences
    assert found.change != 0


def test_steps_that_differ_by_more_than_they_vary_are_above_noise() -> None:
    comparison = compare(side("a", steps(20, seed=1)), side("b", steps(22, seed=2)))
    assert not comparison.is_same
    (found,) = comparison.differences
    assert found.relative == pytest.approx(0.1, abs=0.03)


def test_a_few_steps_prove_less_than_many() -> None:
    few = compare(side("a", steps(20, 0.05, 4)), side("b", steps(21.5, 0.05, 4, seed=2)))
    many = compare(side("a", steps(20, 0.05, 400)), side("b", steps(21.5, 0.05, 400, seed=2)))
    assert few.is_same
    assert not many.is_same


def test_one_hiccup_is_no_noise_and_a_slow_half_is() -> None:
    calm = typical("step_ns", [*steps(20), 10_000e6], "the pulse")
    loaded = typical("step_ns", [*steps(20), *steps(40)], "the pulse")
    assert calm is not None
    assert loaded is not None
    assert calm.noise < 0.05 * calm.value
    assert loaded.noise > 0.4 * loaded.value


def test_a_single_time_is_taken_to_vary_by_a_tenth() -> None:
    found = known(typical("step_ns", [20e6], "one step"))
    assert found.noise == pytest.approx(2e6)


def test_every_step_slower_is_a_change_however_much_the_steps_vary() -> None:
    # The medians differ by 49%, each side's steps by as much.
    a, b = [7e6, 8e6, 9.4e6, 10.6e6, 12e6, 13e6], [13.4e6, 14e6, 14.5e6, 15.3e6, 17e6, 20e6]
    (found,) = compare(side("a", a), side("b", b)).differences
    assert found.relative == pytest.approx(0.49)
    assert found.is_above_noise
    assert found.rank_test is not None
    assert found.rank_test.confidence == pytest.approx(1 - 2 / 924)
    assert check(compare(side("a", a), side("b", b)), parse_limit("step_ns>10%")).status == "fail"


@pytest.mark.parametrize(("count", "ms", "is_known"), [(3, 13, False), (3, 15, True), (4, 13, True)])
def test_three_steps_of_each_side_are_enough_for_a_large_change_only(count: int, ms: int, is_known: bool) -> None:
    comparison = compare(side("a", [10e6] * count), side("b", [ms * 1e6] * count))
    (found,) = comparison.differences
    assert (found.is_above_noise, found.has_too_few_steps) == (is_known, not is_known)
    outcome = check(comparison, parse_limit("step_ns>10%"))
    assert outcome.status == "fail"
    assert outcome.title == (
        "step_ns increases" if is_known else "step_ns cannot be checked: not enough steps (3 in A, 3 in B)"
    )


def test_a_thousand_steps_do_not_turn_a_part_of_their_spread_into_a_change() -> None:
    comparison = compare(side("a", steps(20, 0.1, 1000)), side("b", steps(20.6, 0.1, 1000, seed=2)))
    (found,) = comparison.differences
    assert found.rank_test is not None
    assert found.rank_test.confidence == pytest.approx(1, abs=1e-6)
    assert comparison.is_same


def test_a_change_smaller_than_the_drift_of_a_side_is_noise() -> None:
    comparison = compare(side("a", [*steps(20, 0.001), *steps(24, 0.001)]), side("b", steps(24.5, 0.001)))
    assert comparison.is_same


@pytest.mark.parametrize(
    ("a", "b", "confidence", "share"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 1 - 2 / 70, 1.0),
        ([5, 6, 7, 8], [1, 2, 3, 4], 1 - 2 / 70, 0.0),
        # From the tables of Mann and Whitney: U = 2 of 5 and 5.
        ([1, 2, 3, 4, 7], [5, 6, 8, 9, 10], 1 - 8 / 252, 23 / 25),
        ([1, 1, 1, 1], [1, 1, 1, 1], 0.0, 0.5),
        ([1, 2], [3, 4], None, 1.0),
        (list(range(20)), list(range(20)), 0.0, 0.5),
    ],
)
def test_the_rank_test_is_exact_for_few_steps(
    a: list[float], b: list[float], confidence: float | None, share: float
) -> None:
    found = rank_test(a, b)
    assert found.confidence == (None if confidence is None else pytest.approx(confidence))
    assert found.higher_share == pytest.approx(share)


def test_the_normal_approximation_agrees_with_the_exact_test_where_both_apply(monkeypatch) -> None:
    chance = random.Random(3)
    for _ in range(20):
        a, b = ([round(chance.gauss(mean, 2)) for _ in range(10)] for mean in (10, 11))
        exact = rank_test(a, b)
        monkeypatch.setattr(significance, "_MOST_EXACT_PAIRS", 0)
        assert rank_test(a, b).confidence == pytest.approx(exact.confidence, abs=0.02)
        monkeypatch.undo()


@pytest.mark.parametrize(("a", "b", "is_above"), [(763.0, 281.0, True), (281.0, 763.0, True), (763.0, 700.0, False)])
def test_a_rate_changes_by_more_than_noise_where_its_steps_do(a: float, b: float, is_above: bool) -> None:
    rates = [
        Measure(
            name="samples_per_s",
            unit="per_s",
            value=value,
            noise=0.2 * value,
            samples=40,
            source="the pulse",
            steps=tuple(value * 20e6 / ns for ns in steps(20, 0.2, seed=seed)),
        )
        for seed, value in ((1, a), (2, b))
    ]
    comparison = compare(*(Side(label="a", kind="run", measures={"samples_per_s": rate}) for rate in rates))
    (found,) = comparison.differences
    assert found.is_above_noise is is_above
    assert json.dumps(msgspec.to_builtins(comparison), allow_nan=False)


def test_a_quantity_that_was_measured_in_two_ways_is_not_compared() -> None:
    a = side("a", size=size("peak_allocated_bytes", 100 * MIB, "the trace"))
    b = side("b", size=size("peak_allocated_bytes", 900 * MIB, "the allocator"))
    comparison = compare(a, b)
    (found,) = comparison.differences
    assert found.problem == "different sources: A the trace, B the allocator"
    assert found.change is None
    assert comparison.is_same


def test_two_kinds_of_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="x is a run and y a trace"):
        compare(side("x"), replace(side("y"), kind="traces"))


def test_what_only_one_side_recorded_is_left_out_with_the_reason() -> None:
    comparison = compare(replace(side("x"), named={"operators": {"aten::mm": 1e9}}), side("y"))
    assert comparison.changes == ()
    assert comparison.left_out == {"operators": "only in x"}


def test_operators_appear_disappear_and_change_but_not_by_what_windows_differ_by() -> None:
    before = {"aten::mm": 5e6, "aten::add": 2e6, "aten::relu": 1e6, "aten::tiny": 30_000.0}
    after = {"aten::mm": 9e6, "aten::add": 3.5e6, "aten::item": 2e6}
    a = replace(side("a", steps(20)), named={"operators": before}, spreads={"operators": {"aten::add": 2e6}})
    b = replace(side("b", steps(20)), named={"operators": after})
    found = changed(compare(a, b), "operators")
    assert found == {"aten::mm": "changed", "aten::item": "appeared", "aten::relu": "disappeared"}
    assert next(iter(found)) == "aten::mm"


def test_times_of_operators_are_those_of_the_middle_window_and_their_spread_its_range() -> None:
    times, spreads = over_traces([(None, {"mm": 10, "add": 2}), (None, {"mm": 12}), (None, {"mm": 30})])
    assert times == {"mm": 12, "add": 0}
    assert spreads == {"mm": 20, "add": 2}


@pytest.mark.parametrize(
    ("given", "amount", "is_relative"),
    [
        ("peak_allocated_bytes>5%", 0.05, True),
        ("peak_allocated_bytes > 100MiB", 100 * MIB, False),
        ("step_ns>2ms", 2e6, False),
        ("step_ns>1.5us", 1500, False),
        ("samples_per_s<-5%", -0.05, True),
        ("warnings>0", 0, False),
        ("peak_rss_bytes>0B", 0, False),
    ],
)
def test_a_limit_is_a_quantity_and_an_amount_in_its_unit(given: str, amount: float, is_relative: bool) -> None:
    limit = parse_limit(given)
    assert limit.amount == pytest.approx(amount)
    assert limit.is_relative is is_relative


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("peak_allocated_bytes", "in quotes"),
        ("peak_alocated_bytes>5%", "peak_allocated_bytes, "),
        ("step_ns>5MiB", "use % or ns, us, ms, s"),
        ("step_ns>5", "use % or ns, us, ms, s"),
        ("warnings>1ms", "a number alone"),
        ("step_ns>-5%", "must not be negative"),
        ("step_ns<5%", "must not be positive"),
        ("step_ns>nan%", "not a limit"),
        ("step_ns>" + "9" * 4000, "not a limit"),
    ],
)
def test_what_is_no_limit_is_refused_with_the_way_out(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--fail-on") as caught:
        parse_limit(given)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_limit_breaks_above_its_amount_and_only_above_noise() -> None:
    comparison = compare(
        side("a", steps(20), size("peak_allocated_bytes", 100 * MIB)),
        side("b", steps(20.2, seed=2), size("peak_allocated_bytes", 110 * MIB)),
    )
    assert check(comparison, parse_limit("peak_allocated_bytes>5%")).status == "fail"
    assert check(comparison, parse_limit("peak_allocated_bytes>8MiB")).status == "fail"
    assert check(comparison, parse_limit("peak_allocated_bytes>11%")).status == "pass"
    assert check(comparison, parse_limit("peak_allocated_bytes<-5%")).status == "pass"
    within = check(comparison, parse_limit("step_ns>0%"))
    assert within.status == "inconclusive"
    assert "within noise" in within.title


def test_what_falls_too_far_breaks_a_limit_too() -> None:
    comparison = compare(side(size=size("reserved_bytes", 100 * MIB)), side(size=size("reserved_bytes", 80 * MIB)))
    assert check(comparison, parse_limit("reserved_bytes<-10%")).status == "fail"
    assert check(comparison, parse_limit("reserved_bytes>10%")).status == "pass"


def test_a_limit_on_what_was_not_measured_is_broken() -> None:
    comparison = compare(side(size=size("peak_allocated_bytes", MIB)), side())
    assert check(comparison, parse_limit("peak_allocated_bytes>5%")).title.endswith("not measured in B")
    outcome = check(comparison, parse_limit("peak_reserved_bytes>5%"))
    assert outcome.status == "fail"
    assert outcome.title.endswith("not measured in either")


def test_growth_from_nothing_is_beyond_every_share() -> None:
    comparison = compare(side(size=size("inactive_bytes", 0)), side(size=size("inactive_bytes", MIB)))
    assert check(comparison, parse_limit("inactive_bytes>500%")).status == "fail"


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    found = compare(run_side(load_run(directory), "a"), run_side(load_run(directory), "b"))
    assert found.is_same
    assert found.left_out == {}
    assert {"step_ns", "peak_allocated_bytes", "peak_rss_bytes", "activation_bytes", "warnings"} <= set(
        found.a.measures
    )
    assert {"operators", "modules", "parameters", "stacks", "findings"} <= set(found.a.named)


def test_a_slower_phase_is_named_with_the_step_and_the_samples_a_second(tmp_path: Path) -> None:
    a = run(tmp_path / "a", FakeRun(phases=slower("backward", 1)))
    b = run(tmp_path / "b", FakeRun(phases=slower("backward", 1.5)))
    found = [difference.name for difference in compare(a, b).differences if difference.is_above_noise]
    assert found == ["step_ns", "mean_step_ns", "backward_ns"]


def test_a_run_that_waits_for_data_has_a_finding_more(tmp_path: Path) -> None:
    a = run(tmp_path / "a", FakeRun(phases=slower("data_wait", 1)))
    b = run(tmp_path / "b", FakeRun(phases=slower("data_wait", 100), training={"dataloaders": [{"num_workers": 0}]}))
    comparison = compare(a, b)
    assert changed(comparison, "findings") == {"input_bound": "appeared"}
    (finding,) = [change for change in comparison.changes if change.group == "findings"]
    assert finding.title
    assert check(comparison, parse_limit("warnings>0")).status == "fail"
    assert changed(compare(b, a), "findings") == {"input_bound": "disappeared"}


def test_larger_activations_are_named_by_module_and_at_the_peak(tmp_path: Path) -> None:
    a = run(tmp_path / "a", FakeRun(memory=FakeMemory(kept_bytes=MIB)))
    b = run(tmp_path / "b", FakeRun(memory=FakeMemory(kept_bytes=2 * MIB)))
    comparison = compare(a, b)
    above = {difference.name for difference in comparison.differences if difference.is_above_noise}
    assert {"peak_allocated_bytes", "activation_bytes"} <= above
    assert "parameter_bytes" not in above
    assert changed(comparison, "modules")
    assert set(changed(comparison, "stacks")) == {"aten::addmm"}
    assert check(comparison, parse_limit("peak_allocated_bytes>5%")).status == "fail"


def test_the_device_s_own_peak_is_preferred_and_the_largest_rank_s_counts(tmp_path: Path) -> None:
    fake = FakeRun(world_size=2, device_bytes=lambda step: (step + 1) * MIB)
    found = run(tmp_path, fake).measures["peak_allocated_bytes"]
    assert (found.value, found.source) == (30 * MIB, "the device's allocator")


def waiting(is_slow: Callable[[int], bool]) -> FakeRun:
    """Some steps wait 300 ms for their data."""

    def phases(_rank: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "data_wait": 300 * MS} if is_slow(step) else HEALTHY

    return FakeRun(steps=60, phases=phases)


def test_what_happens_now_and_then_is_in_the_mean_and_a_hiccup_is_noise(tmp_path: Path) -> None:
    fine = run(tmp_path / "fine", waiting(lambda _: False))
    often = run(tmp_path / "often", waiting(lambda step: step % 5 == 0))
    once = run(tmp_path / "once", waiting(lambda step: step == 41))
    found = {each.name: each for each in compare(often, fine).differences}
    assert not found["step_ns"].is_above_noise
    assert found["mean_step_ns"].is_above_noise
    assert found["mean_step_ns"].a.value - found["mean_step_ns"].b.value == pytest.approx(60 * MS, rel=0.1)
    found = {each.name: each for each in compare(once, fine).differences}
    assert found["mean_step_ns"].a.value > found["mean_step_ns"].b.value
    assert not found["mean_step_ns"].is_above_noise


def test_a_run_without_a_pulse_is_compared_by_its_recorded_steps(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "pulse.rank00000.csv").unlink()
    found = run_side(load_run(directory), "a").measures["step_ns"]
    assert found.samples == 2
    assert "recorded steps" in found.source


def test_traces_are_compared_by_their_steps_and_operators(tmp_path: Path) -> None:
    def trace(name: str, operator: str, length: int) -> Path:
        made = []
        for step in range(4):
            start = step * 10_000
            made += [
                Made(f"ProfilerStep#{step}", start, start + 5_000 + length, "user_annotation"),
                Made(operator, start + 100, start + 100 + length),
            ]
        return write_trace(tmp_path / name, [event_fields(ring_event) for ring_event in made])

    a = traces_side([trace("a.pt.trace.json", "aten::mm", 2000)], "a")
    b = traces_side([trace("b.pt.trace.json", "aten::bmm", 4000)], "b")
    assert compare(a, a).is_same
    comparison = compare(a, b)
    assert {difference.name for difference in comparison.differences if difference.is_above_noise} >= {"step_ns"}
    assert changed(comparison, "operators") == {"aten::mm": "disappeared", "aten::bmm": "appeared"}


def test_snapshots_are_compared_by_their_sizes_and_by_who_holds_the_peak(tmp_path: Path) -> None:
    def dump(name: str, count: int, frame: dict[str, object]) -> Path:
        ring = [event("alloc", 4096, count, frame)]
        return write_snapshot(tmp_path / name, snapshot([segment(block(4096, count, frame))], ring))

    a = snapshots_side([dump("a.pickle", MIB, MODEL)], "a")
    b = snapshots_side([dump("b.pickle", 3 * MIB, TRAIN)], "b")
    assert compare(a, a).is_same
    comparison = compare(a, b)
    assert comparison.difference("peak_requested_bytes").change == 2 * MIB
    assert changed(comparison, "stacks") == {"a/model.py: forward": "disappeared", "a/train.py: <module>": "appeared"}


def test_a_line_is_known_wherever_it_stands_now() -> None:
    here = Holder(("x",), "/home/a/project/model.py(12): forward", 5, 1)
    there = Holder(("y",), "/tmp/b/project/model.py(99): forward", 7, 1)
    assert holder_bytes([here, there]) == {"project/model.py: forward": 12}
    assert holder_bytes([Holder((), "", 3, 1)]) == {"allocated before the history was on": 3}
    assert site_bytes([]) == {}


def test_only_findings_that_warn_are_compared(tmp_path: Path) -> None:
    from lightning_memprof.judge import Finding, Severity

    found, sentences = severities(
        [
            Finding(rule="a", severity=Severity.INFO, title="by the way", why="", remedies=()),
            Finding(rule="b", severity=Severity.CRITICAL, title="bad", why="", remedies=()),
            Finding(rule="b", severity=Severity.WARNING, title="less bad", why="", remedies=()),
        ]
    )
    assert found == {"b": 3.0}
    assert sentences == {"b": "bad"}
