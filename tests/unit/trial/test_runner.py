"""What a trial decides between its runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_memprof.compare.significance import PairedChange
from lightning_memprof.compare.trial import Equality, Measured, Outcome
from lightning_memprof.judge import Finding, Severity
from lightning_memprof.judge import remedies as judge_remedies
from lightning_memprof.report.printers.text import full_page, plain
from lightning_memprof.report.sections.trial import trial_document
from lightning_memprof.trial import runner
from lightning_memprof.trial.changes import parse_change
from lightning_memprof.trial.process import LateError
from lightning_memprof.trial.runner import TrialOptions, advice, try_program, winners
from lightning_memprof.trial.task import Task
from pages import words


def labels(**changes: float) -> list[str]:
    names = {"fused": "fused_optimizer", "foreach": "foreach_optimizer", "two": "workers=2", "four": "workers=4"}
    remedies = [parse_change(names.get(name, name)) for name in changes]
    outcomes = [
        Outcome(
            remedy=remedy.label,
            time=PairedChange(change=change, low=change - 0.05, high=change + 0.05),
            equality=Equality(name="bit-equal"),
        )
        for remedy, change in zip(remedies, changes.values(), strict=True)
    ]
    return [remedy.label for remedy in winners(remedies, outcomes)]


def test_of_remedies_that_replace_each_other_the_best_is_tried_with_the_others():
    assert labels(fused=-0.1, two=-0.2, foreach=-0.3, four=-0.4) == ["workers=4", "foreach_optimizer"]


def test_what_may_be_noise_has_not_won():
    assert labels(gc_freeze=-0.04, two=-0.2) == ["workers=2"]
    assert labels(gc_freeze=0.3) == []


def test_a_remedy_without_a_change_is_not_tried_and_the_first_of_a_kind_counts():
    few, many = (judge_remedies.WORKERS.filled(workers=number) for number in (2, 8))
    nothing = judge_remedies.Remedy(id="look", text="Find the slow function.")
    remedies = (nothing, few, many)
    found = Finding(rule="input_bound", severity=Severity.CRITICAL, title="It waits.", why="", remedies=remedies)
    assert [candidate.label for candidate in advice([found])] == ["workers=2"]


Played = Callable[..., list[list[str]]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Give a function that replaces the program's processes, and returns the remedies of each round as they run."""

    def play(
        noise: float, gains: dict[str, float], stop_after: int = 1000, seconds: float = 0.0, stop_in_check: str = "-"
    ) -> list[list[str]]:
        rng, ran = random.Random(4), []
        now = [0.0]

        @contextmanager
        def started(_program: object, task: Task, _limit_s: object, _variables: object, end_s: float):
            now[0] += seconds
            if now[0] > end_s:
                raise LateError("late")
            yield task

        def run_in_turns(tasks: Sequence[Task]) -> list[Measured]:
            names = ["+".join(task.remedies) for task in tasks]
            if tasks[0].is_check and names == [stop_in_check]:
                raise KeyboardInterrupt
            if not tasks[0].is_check:
                ran.append(names)
                if len(ran) > stop_after:
                    raise KeyboardInterrupt
            times = [1e8 * (1 + gains.get(name, 0.0)) * rng.lognormvariate(0, noise) for name in names]
            return [Measured(step_ns=time, rss_bytes=1, losses=[1.0], weights="a", is_in_group=True) for time in times]

        monkeypatch.setattr(runner, "started", started)
        monkeypatch.setattr(runner, "run_in_turns", run_in_turns)
        monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
        return ran

    return play


def test_a_clear_gain_leaves_the_rounds_and_the_others_go_on_until_they_are_decided(played):
    ran = played(0.02, {"workers=2": -0.5, "gc_freeze": 0.0})
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2", "gc_freeze"]))
    workers, frozen = trial.outcomes
    assert (workers.rounds, workers.is_faster) == (3, True)
    assert 5 <= frozen.rounds < 30
    assert frozen.is_clear
    assert not frozen.is_undecided
    assert ran == [["", "workers=2", "gc_freeze"]] * 3 + [["", "gc_freeze"]] * (frozen.rounds - 3)
    assert trial.rounds == frozen.rounds


def test_rounds_end_with_the_minutes_and_a_number_of_rounds_is_kept(played):
    ran = played(0.5, {})
    ran = played(0.5, {}, seconds=10)
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2"], minutes=2))
    # Three runs to compare and four rounds of two runs take 110 of 120 seconds.
    assert (len(ran), trial.outcomes[0].is_undecided) == (4, True)
    ran.clear()
    try_program(["train.py"], TrialOptions(remedies=["workers=2"], rounds=7, minutes=2))
    assert len(ran) == 7
    ran.clear()
    # Also where the first three decide.
    played(0.001, {"workers=2": -0.5})
    assert try_program(["train.py"], TrialOptions(remedies=["workers=2"], rounds=7)).outcomes[0].rounds == 7


def test_as_many_remedies_are_tried_as_the_minutes_allow(played):
    # Four runs to compare and three rounds of three runs take 130 of 132 seconds.
    names = ["workers=2", "gc_freeze", "fused_optimizer", "foreach_optimizer"]
    ran = played(0.5, {}, seconds=10)
    trial = try_program(["train.py"], TrialOptions(remedies=names, minutes=2.2))
    assert [found.rounds for found in trial.outcomes] == [3, 3, 0, 0]
    assert [found.problem.partition(":")[0] for found in trial.outcomes[2:]] == ["2.2 minutes are too few"] * 2
    assert ran == [["", *names[:2]]] * 3


def test_a_run_that_would_end_after_the_minutes_is_ended_and_the_rounds_before_it_count(played):
    ran = played(0.5, {}, seconds=10)
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2"], minutes=1))
    assert (trial.is_stopped, len(ran), trial.outcomes[0].problem) == (False, 1, "stopped after 1 of 3 rounds")
    assert trial.notes[0].endswith("(--minutes). Nothing was measured: raise it.")
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2"], minutes=0.1))
    assert (trial.step_ns, trial.outcomes[0].problem) == (None, "the trial ended before its first run")
    assert "Nothing was measured" in words(plain(full_page(trial_document(trial), 80)))
    assert trial_document(trial).status == "tried"


def test_the_number_of_rounds_that_a_page_names_decides(played):
    played(0.1, {"workers=2": -0.06})
    first = try_program(["train.py"], TrialOptions(remedies=["workers=2"], rounds=4)).outcomes[0]
    assert first.needed is not None
    again = try_program(["train.py"], TrialOptions(remedies=["workers=2"], rounds=first.needed)).outcomes[0]
    assert again.rounds == first.needed > 4
    assert not again.is_undecided


@pytest.mark.parametrize(("after", "rounds", "problem"), [(4, 4, ""), (2, 0, "stopped after 2 of 3 rounds")])
def test_ctrl_c_in_a_round_keeps_the_rounds_before_it(played, after, rounds, problem):
    played(0.5, {}, stop_after=after)
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2"]))
    (found,) = trial.outcomes
    assert (trial.is_stopped, trial.rounds) == (True, after)
    assert (found.rounds, found.problem) == (rounds, problem)


def test_ctrl_c_between_the_comparisons_keeps_them(played):
    played(0.5, {}, stop_in_check="gc_freeze")
    trial = try_program(["train.py"], TrialOptions(remedies=["workers=2", "gc_freeze"]))
    assert (trial.is_stopped, trial.rounds, trial.compared) == (True, 0, 1)
    problems = [found.problem for found in trial.outcomes]
    assert problems == ["stopped after 0 of 3 rounds", "the trial ended before its first run"]


def test_the_time_left_is_shown(played):
    shown: list[str] = []
    played(0.5, {})
    wanted = TrialOptions(remedies=["workers=2"], minutes=2, progress=lambda text, *_: shown.append(text))
    try_program(["train.py"], wanted)
    assert shown[0] == "comparison of losses: unchanged, about 120 seconds left"
    assert "round 1: workers=2, about 120 seconds left" in shown
