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
from lightning_memprof.judge.byte_rule import ByteDetail, ByteFact, ByteRule, RankBytes
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.verdict import BYTE_ROWS, ROWS
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


def judged(
    facts: Facts, report: SnapshotReport, row: ByteRule, share: float, *, filled: float = 0.1, owner: str = OWNER
) -> list[Finding]:
    """Return the findings of a row about a peak of which its owner has a share, in a run and in a snapshot."""
    peak = round(filled * LIMIT)
    size = round(share * peak)
    mine = [ByteLine(category=row.of[0], bytes=size, name=owner)] if row.of and size else []
    lines: Any = (ByteLine(category="unattributed", bytes=peak - size), *mine)
    ledger = replace(facts.byte_ledgers[0], peak_bytes=peak, lines=lines, limit_bytes=LIMIT)
    of_run = Facts(run=facts.run, statistics=facts.statistics)
    vars(of_run)["byte_ledgers"] = {0: ledger}
    fields = {name for text in (row.says, row.unnamed) for _, name, *_ in string.Formatter().parse(text) if name}
    detail = ByteDetail(fields=dict.fromkeys(fields - {"owner", "size", "share", "place", "rank"}, "x"))
    fact = RankBytes(owner=owner, bytes=size, whole=peak, ledger=ledger, rank=facts.run.lead)
    found = ByteFact(owner=owner, bytes=size, whole=peak)
    if row.find is not None:
        row = replace(row, find=lambda _: (fact, detail))
    if row.in_snapshot is None:
        return list(row.findings(of_run))
    in_snapshot = replace(row, in_snapshot=lambda *_: (found, lambda: detail))
    return [*(row.findings(of_run) if row.find else ()), *in_snapshot.on_device(report, report.devices[0])]


rows = pytest.mark.parametrize("row", [*chain.from_iterable(BYTE_ROWS.values())], ids=lambda row: row.id)


@rows
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_without_its_bytes(
    facts: Facts, report: SnapshotReport, row: ByteRule
) -> None:
    found = judged(facts, report, row, row.note * 1.01)
    assert found
    for finding in found:
        assert finding.rule == row.id
        assert finding.severity > Severity.NONE
    if row.of and not row.in_snapshot:
        held = row.note * 1.01 * 0.1 * LIMIT
        assert (recovery(found[0]).min, recovery(found[0]).max) == pytest.approx([held * saved for saved in row.saves])
    assert judged(facts, report, row, row.note * 0.99) == []
    assert judged(facts, report, row, 0.0) == []
    assert judged(facts, report, replace(row, least=LIMIT), 0.5) == []


@rows
def test_memory_is_severe_where_it_is_nearly_full_and_at_most_what_the_row_says_elsewhere(
    facts: Facts, report: SnapshotReport, row: ByteRule
) -> None:
    if row.in_snapshot is None:
        severities = [finding.severity for finding in judged(facts, report, row, 0.8, filled=0.9)]
        assert severities == [Severity.CRITICAL]
    assert {finding.severity for finding in judged(facts, report, row, max(row.note, 0.9))} == {row.at_most}


@rows
def test_the_title_of_a_row_fits_whatever_its_owner_is_called(
    facts: Facts, report: SnapshotReport, row: ByteRule
) -> None:
    for owner in ("", "Owner.on_train_batch_end", "a_package.of_modules." * 8 + "Owner.method", "x" * 400):
        for finding in judged(facts, report, row, 1.0, owner=owner):
            assert len(finding.title) <= POLICY.title
            assert "{" not in finding.title + finding.why + "".join(finding.next_steps)


def test_ids_of_rows_are_not_those_of_rows_about_time_and_each_is_described() -> None:
    time, size = ([row.id for row in chain.from_iterable(rows.values())] for rows in (ROWS, BYTE_ROWS))
    assert not {*time} & {*size}
    assert len({*size}) == len(size)
    assert all(row.about and row.trade_off for row in chain(*BYTE_ROWS.values()))
