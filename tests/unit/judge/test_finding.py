from __future__ import annotations

from lightning_memprof.judge.finding import Finding, Severity
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.report.printers.json import encode


def test_the_steps_of_a_finding_are_ids_and_texts_that_json_takes() -> None:
    remedy = Remedy(id="less_often", text="Save less often.", needs=frozenset({"training"}))
    found = Finding(rule="a", severity=Severity.INFO, title="b", why="c", remedies=(remedy,))
    assert encode(found.steps) == [{"id": "less_often", "text": "Save less often."}]
