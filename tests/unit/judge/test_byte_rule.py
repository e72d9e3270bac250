"""Each rule about memory that is a row, on bytes that are just enough, just too few, and in a run without them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ledger.memory import ByteLine
from lightning_memprof.judge import Facts, Finding, Severity
from lightning_memprof.judge.byte_rule import ByteRule
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.verdict import BYTE_ROWS, ROWS
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB

LIMIT = 10 * GIB
OWNER = "Owner.method"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    fake = FakeRun(rss_bytes=lambda _: GIB, training={"dataloaders": [{"data_bytes": 1, "data_largest": OWNER}]})
    return Facts.of(load_run(make_run(tmp_path_factory.mktemp("rows"), fake)))


def judged(facts: Facts, row: ByteRule, share: float, *, filled: float = 0.1, owner: str = OWNER) -> list[Finding]:
    """Return the findings of a row about a peak of which its category has a share."""
    peak = round(filled * LIMIT)
    size = round(share * peak)
    mine = ByteLine(category=row.of, bytes=size, name=owner)
    lines: Any = (ByteLine(category="unattributed", bytes=peak - size), *((mine,) if size else ()))
    ledger = replace(facts.byte_ledgers[0], peak_bytes=peak, lines=lines, limit_bytes=LIMIT)
    other = Facts(run=facts.run, statistics=facts.statistics)
    vars(other)["byte_ledgers"] = {0: ledger}
    return list(row.findings(other))


rows = pytest.mark.parametrize("row", [*chain.from_iterable(BYTE_ROWS.values())], ids=lambda row: row.id)


@rows
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_without_its_bytes(
    facts: Facts, row: ByteRule
) -> None:
    (finding,) = judged(facts, row, row.note * 1.01)
    assert finding.rule == row.id
    assert finding.remedies
    assert finding.recovers is not None
    assert (finding.recovers.min, finding.recovers.max) == pytest.approx(
        [row.note * 1.01 * 0.1 * LIMIT * saved for saved in row.saves]
    )
    assert judged(facts, row, row.note * 0.99) == []
    assert judged(facts, row, 0.0) == []


@rows
def test_memory_is_severe_where_it_is_nearly_full_and_a_fault_or_a_note_elsewhere(facts: Facts, row: ByteRule) -> None:
    assert [finding.severity for finding in judged(facts, row, 0.8, filled=0.9)] == [Severity.CRITICAL]
    (elsewhere,) = judged(facts, row, 0.8)
    is_fault = row.id in {"validation_memory", "peak_elsewhere"}
    assert elsewhere.severity is (Severity.WARNING if is_fault else Severity.INFO)


@rows
def test_the_title_of_a_row_fits_whatever_its_owner_is_called(facts: Facts, row: ByteRule) -> None:
    for owner in ("", "Owner.on_train_batch_end", "a_package.of_modules." * 8 + "Owner.method", "x" * 400):
        (finding,) = judged(facts, row, 0.5, owner=owner)
        assert len(finding.title) <= POLICY.title
        assert "{" not in finding.title + finding.why + "".join(finding.next_steps)


def test_ids_of_rows_are_not_those_of_rows_about_time() -> None:
    time, size = ({row.id for row in chain.from_iterable(rows.values())} for rows in (ROWS, BYTE_ROWS))
    assert not time & size
