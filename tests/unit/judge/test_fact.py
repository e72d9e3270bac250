"""Each rule about memory that is a row, on bytes that are just enough, just too few, and without them."""

from __future__ import annotations

import string
from itertools import chain
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from findings import recovery
from lightning_memprof.account.ledger.memory import ByteLine
from lightning_memprof.account.snapshot.report import SnapshotReport, snapshot_report
from lightning_memprof.judge import Facts, Finding, Severity
from lightning_memprof.judge.fact import ByteFact, on_device
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Rule
from lightning_memprof.judge.verdict import ROWS
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB
from snapshots import block, segment, snapshot, write_snapshot

LIMIT = 100 * GIB
OWNER = "Owner.method"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    fake = FakeRun(rss_bytes=lambda _: GIB, training={"dataloaders": [{"data_bytes": 1, "data_largest": OWNER}]})
    return Facts.of(load_run(make_run(tmp_path_factory.mktemp("rows"), fake)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> SnapshotReport:
    path = tmp_path_factory.mktemp("rows") / "full.pickle"
    return snapshot_report(write_snapshot(path, snapshot([segment(block(0, LIMIT))], [])))


def judged(facts: Facts, row: Rule, share: float, *, filled: float = 0.1, owner: str = OWNER) -> list[Finding]:
    """Return the findings of a row about the peak of a run of which its owner has a share."""
    peak = round(filled * LIMIT)
    size = round(share * peak)
    mine = [ByteLine(category=row.of[0], bytes=size, name=owner)] if row.of and size else []
    lines: Any = (ByteLine(category="unattributed", bytes=peak - size), *mine)
    ledger = replace(facts.byte_ledgers[0], peak_bytes=peak, lines=lines, limit_bytes=LIMIT)
    of_run = Facts(run=facts.run, statistics=facts.statistics)
    vars(of_run)["byte_ledgers"] = {0: ledger}
    fact = ByteFact(source=facts.run.lead, owner=owner, bytes=size, whole=peak, ledger=ledger)
    return list((with_fact(row, fact) if row.find is not None else row).findings(of_run))


def with_fact(row: Rule, *found: ByteFact) -> Rule:
    """Return the row that finds these facts, with what its title needs beside them."""
    fields = {name for text in (row.says, row.unnamed) for _, name, *_ in string.Formatter().parse(text) if name}
    detail = Detail(fields=dict.fromkeys(fields - {"owner", "size", "share", "place", "rank"}, "x"))
    return replace(row, find=lambda _: [(fact, detail) for fact in found])


ROWS_OF_MEMORY = [row for row in chain.from_iterable(ROWS.values()) if not row.is_of_time]
rows = pytest.mark.parametrize("row", ROWS_OF_MEMORY, ids=lambda row: row.id)


@rows
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_without_its_bytes(facts: Facts, row: Rule) -> None:
    row = replace(row, least=0)
    assert row.saves is not None
    # What is recovered is at least a note, too.
    share = max(row.note, 2 * POLICY.note / sum(row.saves)) * 1.01
    (finding,) = judged(facts, row, share)
    assert finding.rule == row.id
    assert finding.severity > Severity.NONE
    if row.of and row.saves[1] <= 1:
        held = share * 0.1 * LIMIT
        assert (recovery(finding).min, recovery(finding).max) == pytest.approx([held * saved for saved in row.saves])
    assert judged(facts, row, row.note * 0.99) == []
    assert judged(facts, row, 0.0) == []
    assert judged(facts, replace(row, least=LIMIT), 1.0) == []


@rows
def test_memory_is_severe_where_it_is_nearly_full_and_at_most_what_the_row_says_elsewhere(
    facts: Facts, row: Rule
) -> None:
    assert [finding.severity for finding in judged(facts, row, 1.0, filled=0.9)] == [Severity.CRITICAL]
    assert [finding.severity for finding in judged(facts, row, 1.0)] == [row.at_most]


@rows
def test_the_title_of_a_row_fits_whatever_its_owner_is_called(facts: Facts, row: Rule) -> None:
    for owner in ("", "Owner.on_train_batch_end", "a_package.of_modules." * 8 + "Owner.method", "x" * 400):
        (finding,) = judged(facts, row, 1.0, owner=owner)
        assert len(finding.title) <= POLICY.title
        assert "{" not in finding.title + finding.why + "".join(finding.next_steps)


def test_bytes_of_a_snapshot_are_reported_where_a_run_has_no_such_fact(facts: Facts, report: SnapshotReport) -> None:
    (row,) = (row for row in ROWS_OF_MEMORY if row.id == "memory_growth")
    device = on_device(report, report.devices[0], LIMIT // 2, LIMIT, owner=OWNER)
    (finding,) = with_fact(row, device).findings(facts)
    assert finding.numbers["device"] == 0
    assert finding.evidence == device.evidence
    of_run = ByteFact(source=facts.run.lead, owner=OWNER, bytes=LIMIT // 10, whole=LIMIT)
    (finding,) = with_fact(row, device, of_run).findings(facts)
    assert finding.numbers["rank"] == 0
