from __future__ import annotations

import pytest

from lightning_memprof.judge.finding import Finding, Recovery, Severity
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.report.printers.json import encode


def test_the_steps_of_a_finding_are_ids_and_texts_that_json_takes() -> None:
    remedy = Remedy(id="less_often", text="Save less often.", needs=frozenset({"training"}))
    found = Finding(rule="a", severity=Severity.INFO, title="b", why="c", remedies=(remedy,))
    assert encode(found.steps) == [{"id": "less_often", "text": "Save less often."}]


@pytest.mark.parametrize(
    ("least", "most", "severity", "text"),
    [
        (0, 1000, Severity.CRITICAL, "up to 100% of each step"),
        (300, 300, Severity.CRITICAL, "30% of each step"),
        (0, 590, Severity.WARNING, "up to 59% of each step"),
        (20, 100, Severity.WARNING, "2% to 10% of each step"),
        (90, 99, Severity.INFO, "9% to 10% of each step"),
        (0, 99, Severity.NONE, "up to 10% of each step"),
        (40, 60, Severity.INFO, "4% to 6% of each step"),
        (0, 9, Severity.NONE, ""),
    ],
)
def test_a_verdict_may_save_a_tenth_and_a_severe_one_saves_a_third_of_the_whole(
    least: int, most: int, severity: Severity, text: str
) -> None:
    recovery = Recovery(unit="ns", min=least, max=most, whole=1000)
    assert recovery.severity == severity
    assert recovery.text == text


def test_nothing_is_saved_of_nothing() -> None:
    recovery = Recovery(unit="bytes", min=0, max=0, whole=0, of="the peak")
    assert (recovery.severity, recovery.text) == (Severity.NONE, "")
