from __future__ import annotations

import pytest
from msgspec.structs import replace

from drawn import columns
from lightning_memprof.compare.significance import PairedChange
from lightning_memprof.compare.trial import Equality, Outcome, Trial
from lightning_memprof.report.charts.trial import trial_chart


def test_a_trial_shows_the_interval_and_the_promise_of_each_remedy_that_was_measured():
    def tried(name: str, change: float, promised: tuple[float, float] | None = None) -> Outcome:
        interval = PairedChange(change=change, low=change - 0.1, high=change + 0.1)
        same = Equality(name="bit-equal", difference=0.0)
        return Outcome(remedy=name, time=interval, step_ns=1.0, promised=promised, equality=same)

    outcomes = (tried("workers=2", -0.4, (0.2, 0.5)), tried("threads=2", 0.05), Outcome(remedy="compile", problem="no"))
    given = Trial(program="train.py", rounds=5, steps=9, compared=9, step_ns=1.0, peak_bytes=1, outcomes=outcomes)
    chart = trial_chart(given)
    assert chart is not None
    assert "5 rounds" in chart.summary
    shown = columns(chart, "low")
    assert [(column["name"], column["change"]) for column in shown] == [
        (["workers=2"], [-0.4]),
        (["threads=2"], [0.05]),
    ]
    assert [column["low"] for column in shown] == [[pytest.approx(-0.5)], [pytest.approx(-0.05)]]
    (promise,) = columns(chart, "left")
    assert (promise["left"], promise["right"]) == ([-0.5], [-0.2])
    assert trial_chart(None) is None
    assert trial_chart(replace(given, outcomes=outcomes[2:])) is None
