from __future__ import annotations

from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.analysis.findings import Facts, Finding, examine
from lightning_memprof.analysis.run.load import load_run


def found(tmp_path: Path, fake: FakeRun) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(Facts.of(load_run(make_run(tmp_path, fake))))}


@pytest.mark.parametrize(("padded", "is_found"), [(0, False), (150, False), (250, True), (900, True)])
def test_batches_of_which_a_fifth_is_padding_are_found(tmp_path: Path, padded: int, is_found: bool) -> None:
    findings = found(tmp_path, FakeRun(padding=(1000, padded, 0)))
    assert ("padding" in findings) == is_found


def test_padding_recovers_its_share_of_forward_and_backward_at_most(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(padding=(1000, 500, 0)))["padding"]
    assert finding.sentence == "Padding: 50% of the positions in a batch are padding."
    assert finding.recovers is not None
    assert finding.recovers.most == pytest.approx((6e6 + 10e6) * 0.5, rel=0.05)
    assert finding.recovers.least == pytest.approx(finding.recovers.most * 0.4)


@pytest.mark.parametrize(("beyond", "advice"), [(0, "similar length"), (400, "longest sample in collate_fn")])
def test_the_remedy_depends_on_where_the_padding_is(tmp_path: Path, beyond: int, advice: str) -> None:
    finding = found(tmp_path, FakeRun(padding=(1000, 500, beyond)))["padding"]
    assert advice in finding.next_steps[0]
