"""What a trial concludes from its runs: gains, equality, the best remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from known import known
from lightning_memprof.compare.significance import PairedChange
from lightning_memprof.compare.trial import Equality, Measured, Outcome, Trial, equality, equality_words, outcome

SAME = Equality(name="bit-equal", difference=0.0)
LOSSES = st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1, max_size=30)


def run(losses: list[float | None] | None = None, weights: str = "a", **values: float) -> Measured:
    return Measured(losses=losses if losses is not None else [2.0, 1.0], weights=weights, **values)  # type: ignore[arg-type]


def tried(name: str, change: float, equal: Equality = SAME, **values: object) -> Outcome:
    interval = PairedChange(change=change, low=change - 0.02, high=change + 0.02)
    return Outcome(remedy=name, time=interval, step_ns=1e9 * (1 + change), equality=equal, **values)  # type: ignore[arg-type]


def trial(*outcomes: Outcome, together: Outcome | None = None) -> Trial:
    return Trial(
        program="train.py",
        rounds=3,
        steps=9,
        compared=25,
        step_ns=1e9,
        peak_bytes=1,
        outcomes=outcomes,
        together=together,
    )


@pytest.mark.parametrize(
    ("bare", "changed", "tolerance", "name", "difference"),
    [
        pytest.param(run(), run(), 0.0, "bit-equal", 0.0, id="equal losses and parameters"),
        pytest.param(run(), run(weights="b"), 0.0, "changes the training", 0.0, id="other parameters"),
        # The mean loss is 1.5, the second step's losses are 0.15 apart.
        pytest.param(run(), run([2.0, 1.15], "b"), 0.11, "within tolerance", 0.1, id="a small difference"),
        pytest.param(run(), run([2.0, 1.15], "b"), 0.09, "changes the training", 0.1, id="a large difference"),
        pytest.param(run(), run([2.0], "b"), 0.5, "changes the training", None, id="a missing loss"),
        pytest.param(run(), run([2.0, None], "b"), 0.5, "changes the training", 0.0, id="a loss that is not finite"),
        pytest.param(run([2.0, None]), run([2.0, None]), 0.0, "bit-equal", 0.0, id="not finite in both"),
        pytest.param(run([]), run([]), 0.0, "bit-equal", None, id="equal parameters without losses"),
        pytest.param(run([]), run([], "b"), 0.0, "changes the training", None, id="other parameters without losses"),
        # Manual optimization returns no loss: nothing says how far apart rounding has led.
        pytest.param(run([]), run([], "b"), 0.5, "not comparable", None, id="rounding without losses"),
    ],
)
def test_a_training_is_compared_by_its_losses_and_parameters(
    bare: Measured, changed: Measured, tolerance: float, name: str, difference: float | None
) -> None:
    found = equality(bare, bare, changed, tolerance)
    assert (found.name, found.difference) == (name, difference and pytest.approx(difference))


def test_without_a_loss_the_words_say_so() -> None:
    unknown = Outcome(remedy="a", equality=Equality(name="not comparable"))
    assert equality_words(unknown) == "not comparable: no loss is known"


def test_a_training_that_does_not_repeat_itself_is_not_comparable_but_may_be_recommended():
    found = equality(run(), run([2.0, 1.5]), run(), 0.0)
    assert (found.name, found.is_kept) == ("not comparable", True)


def test_the_mean_losses_are_compared_where_other_random_numbers_are_drawn():
    # Steps differ by half of the mean loss, the means of 1.5 and 1.53 by 2%.
    assert equality(run(), run(), run([1.25, 1.81], "b"), 0.03).name == "changes the training"
    found = equality(run(), run(), run([1.25, 1.81], "b"), 0.03, is_mean=True)
    assert (found.name, found.is_mean) == ("within tolerance", True)
    assert found.difference == pytest.approx(0.02)
    assert equality(run(), run(), run([1.25, 1.81], "b"), 0.01, is_mean=True).name == "changes the training"


@pytest.mark.slow
@given(LOSSES, st.floats(min_value=0.0, max_value=0.5))
def test_the_difference_is_a_share_of_the_mean_loss_whatever_its_unit(losses, apart):
    mean = sum(losses) / len(losses)
    found = equality(run(losses), run(losses), run([loss + apart * mean for loss in losses], "b"), 1.0)
    assert found.difference == pytest.approx(apart, abs=1e-6)


def rounds(step_ns: list[float], rss_bytes: list[int]) -> list[Measured]:
    return [Measured(step_ns=time, rss_bytes=size) for time, size in zip(step_ns, rss_bytes, strict=True)]


def test_a_remedy_is_faster_where_its_whole_interval_is_below_zero():
    bare = rounds([100.0, 110.0, 105.0], [1000] * 3)
    faster = outcome(Outcome(remedy="a"), bare, rounds([80.0, 88.0, 84.0], [1000] * 3), SAME)
    unsure = outcome(Outcome(remedy="a"), bare, rounds([80.0, 140.0, 84.0], [1000] * 3), SAME)
    assert faster.is_faster
    assert faster.time is not None
    assert faster.time.change == pytest.approx(-0.2)
    assert not unsure.is_faster


@pytest.mark.parametrize(
    ("sizes", "saves"), [([900, 940, 930], True), ([960, 970, 980], False), ([900, 1001, 900], False)]
)
def test_memory_is_saved_where_every_peak_is_below_every_other_and_the_median_by_a_twentieth(sizes, saves):
    bare = rounds([100.0] * 3, [1000, 1010, 1005])
    assert outcome(Outcome(remedy="a"), bare, rounds([100.0] * 3, sizes), SAME).saves_memory is saves


def between(low: float, change: float, high: float, rounds: int = 5, **values: object) -> Outcome:
    interval = PairedChange(change=change, low=low, high=high)
    return Outcome(remedy="a", time=interval, rounds=rounds, equality=SAME, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "is_undecided", "is_clear"),
    [
        # Both no gain and a gain of 5% are in the interval.
        (between(-0.56, -0.26, 0.24), True, False),
        (between(-0.056, -0.01, 0.03), True, False),
        (between(-0.04, -0.01, 0.02), False, True),
        # 3 rounds of equal programs may lie close by chance.
        (between(-0.04, -0.01, 0.02, rounds=3), False, False),
        # The interval reaches more than half of the way to 0.
        (between(-0.3, -0.2, -0.01), False, False),
        (between(-0.3, -0.2, -0.11, rounds=3), False, True),
        (between(0.01, 0.1, 0.2), False, True),
        # The promise is less than 5%, or far more.
        (between(-0.04, -0.01, 0.02, promised=(0.03, 0.1)), True, False),
        (between(-0.056, -0.01, 0.03, promised=(0.3, 0.4)), True, False),
        (replace(between(-0.56, -0.26, 0.24), equality=Equality(name="changes the training")), False, True),
    ],
)
def test_a_remedy_is_undecided_where_its_interval_contains_no_gain_and_a_gain_that_is_worth_it(
    found, is_undecided, is_clear
):
    assert (found.is_undecided, found.is_clear, found.needed is not None) == (is_undecided, is_clear, is_undecided)


def test_more_noise_needs_more_rounds():
    quiet, noisy = between(-0.06, -0.02, 0.02).needed, between(-0.3, -0.02, 0.3).needed
    assert quiet is not None
    assert noisy is not None
    assert 5 < quiet < noisy


def test_a_remedy_that_was_decided_early_is_compared_with_the_first_rounds():
    bare = rounds([100.0, 100.0, 100.0, 200.0, 200.0], [1000] * 5)
    found = outcome(Outcome(remedy="a"), bare, rounds([50.0, 50.0, 50.0], [1000] * 3), SAME)
    assert found.time is not None
    assert found.time.change == pytest.approx(-0.5)
    assert found.rounds == 3
    few = outcome(Outcome(remedy="a"), bare, rounds([50.0, 50.0], [1000] * 2), SAME)
    assert few.problem == "stopped after 2 of 3 rounds"


def test_the_workers_memory_and_the_devices_count():
    host = Measured(step_ns=1.0, rss_bytes=700, worker_bytes=300)
    assert host.peak_bytes == 1000
    assert Measured(step_ns=1.0, rss_bytes=700, worker_bytes=300, device_bytes=50).peak_bytes == 50


def test_a_failed_run_is_a_problem_of_the_remedy():
    found = outcome(Outcome(remedy="a"), rounds([1.0] * 3, [1] * 3), [Measured(problem="killed")] * 3, SAME)
    assert (found.problem, found.is_faster, found.saves_memory) == ("killed", False, False)


def test_the_best_remedy_gains_most_whenever_it_was_measured():
    # The machine was faster when the winners were measured together.
    later = replace(tried("a+b", -0.2), step_ns=0.5e9)
    found = known(trial(tried("a", -0.3), tried("b", -0.1), together=later).best)
    assert found.remedy == "a"


def test_the_best_remedy_leaves_the_training_the_same():
    other = Equality(name="changes the training", difference=0.3)
    found = trial(tried("a", -0.1), tried("b", -0.3, other), tried("c", -0.2), together=tried("a+c", -0.15))
    assert found.best is not None
    assert found.best.remedy == "c"


def test_without_a_faster_remedy_the_best_one_lowers_the_peak():
    found = trial(
        tried("a", 0.1, is_smaller=True, peak=-0.2), tried("b", 0.2, is_smaller=True, peak=-0.4), tried("c", 0.0)
    )
    assert found.best is not None
    assert found.best.remedy == "b"
    assert trial(tried("c", 0.0)).best is None
