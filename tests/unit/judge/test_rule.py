"""Each rule that is a row, on time that is just enough, just too little, and in a training without it."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Facts, Finding, Severity
from lightning_memprof.judge.finding import shortened, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Rule
from lightning_memprof.judge.verdict import ROWS
from lightning_memprof.read.run.load import load_run

MS = 1_000_000
# So long that a note is more than the Trainer's own millisecond, and what the Trainer itself takes is little.
STEP_NS = 400 * MS
OWNER = "Owner.method"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return Facts.of(load_run(make_run(tmp_path_factory.mktemp("rows"), FakeRun())))


def judged(facts: Facts, row: Rule, share: float, *, count: float = 1.0, owner: str = OWNER) -> list[Finding]:
    """Return the findings of a row about a step of which its part takes a share."""
    ns = share * STEP_NS
    mine = TimeLine(part=row.of[0], name=owner, ns=ns, count=count, longest_ns=round(ns / max(count, 1)))
    rest = TimeLine(part=Part.FORWARD if Part.FORWARD not in row.of else Part.BACKWARD, ns=STEP_NS - ns)
    ledger = replace(facts.ledgers[0], step_ns=STEP_NS, lines=(rest, mine) if ns else (rest,))
    other = Facts(run=facts.run, statistics=facts.statistics)
    vars(other)["ledgers"] = {0: ledger}
    return list(row.findings(other))


# A row that finds its time itself has tests of its own.
LINES = [row for row in chain.from_iterable(ROWS.values()) if row.find is None]
rows = pytest.mark.parametrize("row", LINES, ids=lambda row: row.id)


@rows
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_without_its_part(facts: Facts, row: Rule) -> None:
    (finding,) = judged(facts, row, row.note * 1.01)
    assert finding.rule == row.id
    assert finding.remedies
    assert row.saves is not None
    assert finding.recovers is not None
    assert (finding.recovers.min, finding.recovers.max) == pytest.approx(
        [row.note * 1.01 * STEP_NS * saved for saved in row.saves]
    )
    assert judged(facts, row, row.note * 0.99) == []
    assert judged(facts, row, 0.0) == []


@rows
def test_the_severity_of_a_row_follows_from_what_it_recovers(facts: Facts, row: Rule) -> None:
    assert row.saves is not None
    saved = sum(row.saves) / 2
    for share, severity in ((POLICY.verdict, Severity.WARNING), (POLICY.severe, Severity.CRITICAL)):
        taken = max(share / saved, row.note) * 1.01
        if taken < 1:
            (finding,) = judged(facts, row, taken)
            assert finding.severity >= severity
    findings = judged(facts, row, 0.9, count=2 / facts.ledgers[0].steps)
    assert {finding.severity for finding in findings} <= {Severity.INFO}


@rows
def test_the_title_of_a_row_fits_whatever_its_owner_is_called(facts: Facts, row: Rule) -> None:
    for owner in ("", "Owner.on_train_batch_end", "a_package.of_modules." * 8 + "Owner.method", "x" * 400):
        (finding,) = judged(facts, row, 0.5, owner=owner)
        assert len(finding.title) <= POLICY.title
        assert not finding.title.endswith("…")
        assert "{" not in finding.title + finding.why + "".join(finding.next_steps)


def test_the_ids_of_rows_and_their_descriptions_are_complete() -> None:
    found = [*chain.from_iterable(ROWS.values())]
    assert len({row.id for row in found}) == len(found)
    assert all(row.about and row.trade_off and (row.remedies or row.offers) for row in found)


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="._"), max_size=300),
    st.integers(2, 200),
)
def test_a_shortened_name_is_the_end_of_the_name(name: str, characters: int) -> None:
    found = shortened(name, characters)
    assert len(found) <= max(characters, 1)
    assert name.endswith(found.removeprefix("…"))


def test_a_title_keeps_its_figures_and_cuts_names() -> None:
    found = titled("The callback {owner} takes {share}.", owner="training.callbacks." * 9 + "Slow.end", share="53%")
    assert len(found) <= POLICY.title
    assert found.endswith("Slow.end takes 53%.")
