"""The page of a trial."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lightning_memprof.compare.significance import PairedChange
from lightning_memprof.compare.trial import Equality, Outcome, Trial
from lightning_memprof.report.printers.text import full_page, plain
from lightning_memprof.report.sections.trial import trial_document

FIGURES: Any = {"steps": 20, "compared": 25, "step_ns": 1e8, "peak_bytes": 1 << 20}


def tried(low: float, change: float, high: float, name: str = "threads=2", code: tuple[str, ...] = ()) -> Outcome:
    interval, same = PairedChange(change=change, low=low, high=high), Equality(name="bit-equal", difference=0.0)
    return Outcome(remedy=name, time=interval, step_ns=9e7, rounds=5, equality=same, code=code)


def page(*outcomes: Outcome) -> str:
    trial = Trial(program="train.py --lr 1", rounds=5, outcomes=outcomes, **FIGURES)
    return " ".join(plain(full_page(trial_document(trial), 100)).split())


def test_an_interval_with_no_gain_and_a_gain_in_it_is_not_decided():
    found = tried(-0.56, -0.26, 0.24)
    shown = page(tried(-0.2, 0.1, 0.3, "gc_freeze"), found)
    assert "Not decided: threads=2 changes the step time by -26% (95% interval: -56% to +24%)." in shown
    assert f"Its 5 rounds differ: about {found.needed} would decide" in shown
    assert f"next lightning-memprof try --rounds {found.needed} --remedy threads=2 train.py --lr 1" in shown


def test_less_memory_says_nothing_of_the_steps_where_those_are_not_decided():
    less = replace(tried(-0.56, -0.26, 0.24), peak=-0.2, is_smaller=True)
    assert "threads=2 lowers the peak memory by 20%; whether steps are shorter is not decided." in page(less)
    equal = replace(tried(-0.03, 0.0, 0.03), peak=-0.2, is_smaller=True)
    assert "threads=2 lowers the peak memory by 20%; the steps are not shorter." in page(equal)
    longer = replace(tried(0.06, 0.08, 0.1), peak=-0.2, is_smaller=True)
    assert "threads=2 lowers the peak memory by 20%; each step takes 8% longer." in page(longer)


def test_less_memory_that_costs_more_time_is_no_gain():
    dear = replace(tried(0.24, 0.25, 0.27), peak=-0.05, is_smaller=True)
    assert "None of the remedies makes the steps shorter, or lowers the peak memory by more than it costs." in page(
        dear
    )


def test_without_a_gain_a_remedy_that_changes_the_training_is_told_with_what_it_changes():
    changes = Equality(name="changes the training", difference=0.051)
    faster = replace(tried(-0.23, -0.19, -0.15, "precision=bf16-mixed", ("Trainer(...)",)), equality=changes)
    shown = page(tried(-0.05, 0.01, 0.07, "compile"), faster)
    assert "precision=bf16-mixed makes each step 19% shorter, but changes the training: it is not recommended." in shown
    assert "Compared over 25 steps: losses differ by up to 5.1%." in shown
    assert "next" not in shown
    assert "threads=2 makes each step 50% shorter" in page(tried(-0.6, -0.5, -0.4), faster)


def test_without_a_gain_in_any_interval_there_is_none():
    assert "None of the remedies makes the steps shorter" in page(tried(-0.03, 0.0, 0.03))
    assert "None of the remedies could be tried." in page(Outcome(remedy="pin_memory", problem="on the CPU"))
    nothing = trial_document(Trial(program="train.py", rounds=0, notes=("Nothing.",), **FIGURES))
    assert (nothing.verdict, nothing.why) == ("There was no remedy to try.", "Nothing.")


def test_a_gain_comes_before_what_is_not_decided_and_its_change_is_shown_once():
    shown = page(tried(-0.6, -0.5, -0.4, code=("torch.set_num_threads(2)",)), tried(-0.9, -0.5, 0.5, "compile"))
    assert "threads=2 makes each step 50% shorter (95% interval: 40% to 60%)." in shown
    assert "bit-equal; not decided: about" in shown
    assert shown.count("torch.set_num_threads(2)") == shown.count("100 ms") == 1
    long = page(tried(-0.6, -0.5, -0.4, code=("one", "two", "three")))
    assert "Paste the lines below." in long
    assert all(long.count(f"change {word}") == 1 for word in ("one", "two", "three"))
