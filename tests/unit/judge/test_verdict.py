from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runs import HEALTHY, FakeRun, make_run
from findings import action, found, phases
from lightning_memprof.judge import Facts, Finding, Severity, examine, verdict_of
from lightning_memprof.judge.verdict import RULES
from lightning_memprof.read.run.load import load_run
from next_steps import step


def test_without_a_trace_the_next_step_is_to_record_one(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(trace=False))))
    assert 'profiler="memprof"' in said.next


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(steps=0, windows=()))))
    assert said.title == "No step was measured."
    assert [remedy.id for remedy in said.remedies] == ["more_steps"]


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_up_to_10_steps_outside_windows_are_too_few_to_judge_step_time(tmp_path: Path, steps: int) -> None:
    slow = phases(data_wait=10**9, callbacks=10**8)
    (few,) = examine(Facts.of(load_run(make_run(tmp_path / "few", FakeRun(steps=steps, windows=(), phases=slow)))))
    assert (few.rule, few.severity) == ("nothing_found", Severity.INFO)
    assert few.title == "Too few steps to judge."
    judged = verdict_of(load_run(make_run(tmp_path / "judged", FakeRun(steps=11, windows=(), phases=slow))))
    assert judged.rule == "input_bound"


def test_steps_of_windows_are_no_steps_outside_windows(tmp_path: Path) -> None:
    fake = FakeRun(steps=14, windows=((2, 3, 4, 5),), phases=phases(data_wait=10**9))
    assert verdict_of(load_run(make_run(tmp_path, fake))).rule == "nothing_found"


def test_a_rank_of_few_steps_is_not_judged_beside_one_of_many(tmp_path: Path) -> None:
    fake = FakeRun(world_size=2, windows=(), phases=lambda rank, _: {**HEALTHY, "data_wait": rank * 10**9})
    run = make_run(tmp_path, fake)
    pulse = run / "pulse.rank00001.csv"
    pulse.write_text("".join(pulse.read_text().splitlines(keepends=True)[:6]))
    assert "input_bound" not in {finding.rule for finding in examine(Facts.of(load_run(run)))}


def test_an_early_end_is_said(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(endings={0: "RuntimeError: boom"}))))
    assert said.why.startswith("The run ended early with RuntimeError: boom. ")


def test_a_finding_that_recovers_more_comes_first(tmp_path: Path) -> None:
    rows = [
        action("[Callback]Slow.on_train_batch_end", 8_000_000, "callbacks"),
        action("[LightningModule]Net.on_train_batch_end", 20_000_000),
    ]
    findings = found(tmp_path, FakeRun(phases=phases(callbacks=8_000_000, other=20_000_000)), *rows)
    assert list(findings)[:2] == ["hook_bound", "callback_bound"]


def test_a_rule_that_fails_is_a_finding_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Facts) -> list[Finding]:
        raise KeyError("lost")

    monkeypatch.setattr("lightning_memprof.judge.verdict.RULES", (broken, *RULES))
    row = action("[Callback]Slow.on_train_batch_end", 65_000_000, "callbacks")
    findings = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)), row)
    assert findings["rule_failed"].why.startswith("KeyError: 'lost'.")
    assert "callback_bound" in findings


def test_a_function_is_reported_once_by_the_finding_that_is_worth_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claims(rule: str, owner: str, weight: float) -> Callable[[Facts], Finding]:
        does = step("Do less.")
        finding = Finding(
            rule=rule, owner=owner, severity=Severity.WARNING, title=rule, why="", remedies=(does,), weight=weight
        )
        return lambda _: finding

    rules = (claims("small", "Net.work", 0.2), claims("large", "Net.work", 0.5), claims("other", "Net.other", 0.1))
    monkeypatch.setattr("lightning_memprof.judge.verdict.RULES", (*rules, claims("no owner", "", 0.1)))
    assert [*found(tmp_path, FakeRun())] == ["large", "other", "no owner"]
