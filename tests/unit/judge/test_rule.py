"""Each rule that is a row, on time that is just enough, just too little, and in a training without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import trace_reports
from fake_runs import FakeRun, make_run
from findings import recovery
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Copies, Synchronization, TraceReport
from lightning_memprof.judge import Facts, Finding, Severity
from lightning_memprof.judge.facts import facts_of_files
from lightning_memprof.judge.finding import shortened, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Rule
from lightning_memprof.judge.verdict import ROWS
from lightning_memprof.read.run.load import load_run
from trace_reports import gpu_times, kernel, trace

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
    part = next(part for part in Part if part == row.of[0])
    mine = TimeLine(part=part, name=owner, ns=ns, count=count, longest_ns=round(ns / max(count, 1)))
    rest = TimeLine(part=Part.FORWARD, ns=STEP_NS - ns)
    ledger = replace(facts.ledgers[0], step_ns=STEP_NS, lines=(rest, mine) if ns else (rest,))
    other = Facts(run=facts.run, statistics=facts.statistics)
    vars(other)["ledgers"] = {0: ledger}
    return list(row.findings(other))


# Rows about the device of a trace.
WINDOW_NS = 5 * trace_reports.STEP_NS


def with_idle(part: Part, ns: int, **changes: Any) -> TraceReport:
    causes = (trace_reports.idle(part, ns),) if ns else ()
    return trace(gpu_window=gpu_times(WINDOW_NS, ns), idle=causes, **changes)


def with_copies(ns: int, *, is_pageable: bool) -> TraceReport:
    copies = Copies(kind="HtoD", is_pageable=is_pageable, count=10, total_ns=ns, bytes=1)
    return trace(gpu_window=gpu_times(WINDOW_NS), idle=(), copies=(copies,) if ns else ())


def with_waits(ns: int) -> TraceReport:
    call = Synchronization(name="aten::item", count=50, total_ns=ns, gap_ns=ns, longest_gap_ns=ns // 50, own_ns=ns)
    return with_idle(Part.IDLE_PYTHON, ns, synchronizations=(call,))


def with_kernels(name: str, ns: int, each_ns: int) -> TraceReport:
    kernels = (kernel(name, ns // each_ns, each_ns), kernel("other", 100, (WINDOW_NS - ns) // 100))
    return trace(gpu_window=gpu_times(WINDOW_NS), idle=(), kernels=tuple(each for each in kernels if each.count))


def with_attention(ns: int) -> TraceReport:
    calls = {"aten::bmm": (24, WINDOW_NS - ns), "aten::_softmax": (12 if ns else 0, ns)}
    lines = tuple(
        TimeLine(part=Part.COMPUTE, operator=name, count=count, ns=part / 5) for name, (count, part) in calls.items()
    )
    return trace(idle=(), device_ledger=replace(trace_reports.time_ledger(5, compute=WINDOW_NS), lines=lines))


DEVICE: dict[str, Callable[[int], TraceReport]] = {
    "gpu_idle": lambda ns: with_idle(Part.IDLE_GC_PAUSES, ns),
    "cold_start": lambda ns: with_idle(Part.COLD_START, ns),
    "synchronization": with_waits,
    "blocking_transfers": lambda ns: with_copies(ns, is_pageable=True),
    "exposed_copies": lambda ns: with_copies(ns, is_pageable=False),
    "allocator_thrash": lambda ns: with_idle(Part.IDLE_ALLOCATOR, ns),
    "communication_exposed": lambda ns: trace(gpu_window=gpu_times(WINDOW_NS, exposed_ns=ns), idle=()),
    "tensor_cores_unused": lambda ns: with_kernels("volta_sgemm_64x64_nt", ns, trace_reports.MS // 10),
    "unfused_attention": with_attention,
    "recording_overhead": lambda ns: replace(
        with_idle(Part.IDLE_PYTHON, ns), host_events=10**7, recorded_with=("with_stack",)
    ),
}


@pytest.mark.parametrize("row", ROWS["device"], ids=lambda row: row.id)
def test_a_row_about_a_device_fires_from_its_share_on_and_is_silent_below_it_and_without_its_part(row: Rule) -> None:
    def found(share: float, **changes: Any) -> list[Finding]:
        report = replace(DEVICE[row.id](round(share * WINDOW_NS)), **changes)
        return list(row.findings(facts_of_files([report])))

    (finding,) = found(row.note * 1.02)
    assert finding.rule == row.id
    assert finding.numbers["share"] == pytest.approx(row.note * 1.02, rel=0.01)
    assert finding.remedies
    assert finding.evidence[0].artifact == "runs/rank0.pt.trace.json.gz"
    assert (finding.recovers is None) == (row.saves is None)
    assert found(row.note * 0.98) == []
    assert found(0.0) == []
    (severe,) = found(0.45, rank=13, world_size=64, steps=())
    assert severe.title.endswith(".")
    assert "…" not in severe.title


# Rows that need more of a run than its time have tests of their own.
OTHERS = {"workers_restart", "slow_steps", "dense_embedding", "unused_gradients", "repeated_backward"}
LINES = [
    row
    for row in chain.from_iterable(ROWS.values())
    if row.is_of_time and not (row.find or row.in_trace or Part.FORWARD in row.of or row.id in OTHERS)
]
rows = pytest.mark.parametrize("row", LINES, ids=lambda row: row.id)


@rows
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_without_its_part(facts: Facts, row: Rule) -> None:
    (finding,) = judged(facts, row, row.note * 1.01)
    assert finding.rule == row.id
    assert finding.remedies
    assert row.saves is not None
    assert (recovery(finding).min, recovery(finding).max) == pytest.approx(
        [row.note * 1.01 * STEP_NS * saved for saved in row.saves]
    )
    assert judged(facts, row, row.note * 0.99) == []
    assert judged(facts, row, 0.0) == []


@rows
def test_the_severity_of_a_row_follows_from_what_it_recovers(facts: Facts, row: Rule) -> None:
    assert row.saves is not None
    least, most = row.saves
    for taken, severity in (
        (POLICY.verdict / most, Severity.WARNING),
        (POLICY.severe * 2 / (least + most), Severity.CRITICAL),
    ):
        if taken < 1:
            (finding,) = judged(facts, row, max(taken, row.note) * 1.01)
            assert finding.severity >= severity
            assert all(below.severity < severity for below in judged(facts, row, taken * 0.99))
    findings = judged(facts, row, 0.9, count=2 / facts.ledgers[0].steps)
    assert {finding.severity for finding in findings} <= {Severity.INFO}


@rows
def test_the_title_of_a_row_fits_whatever_its_owner_is_called(facts: Facts, row: Rule) -> None:
    for owner in ("", "Owner.on_train_batch_end", "a_package.of_modules." * 8 + "Owner.method", "x" * 400):
        (finding,) = judged(facts, row, 0.5, owner=owner)
        assert len(finding.title) <= POLICY.title
        assert not finding.title.endswith("…")
        assert "{" not in finding.title + finding.why + "".join(finding.next_steps)


@pytest.mark.parametrize(("calls", "is_found"), [(1.02 * POLICY.repeated, True), (0.98 * POLICY.repeated, False)])
def test_the_longest_call_of_what_repeats_has_waited_for_a_core(facts: Facts, calls: float, is_found: bool) -> None:
    (row,) = (row for row in LINES if row.id == "recompilation")
    usual, waits = facts.ledgers[0], 0.6
    ns = 0.3 * STEP_NS
    longest_ns = round(ns * usual.steps / calls / (1 - waits))
    lines = (
        TimeLine(part=Part.COMPILE, ns=ns, count=0.5, longest_ns=longest_ns),
        TimeLine(part=Part.CORE_WAIT, ns=waits * STEP_NS),
        TimeLine(part=Part.FORWARD, ns=0.1 * STEP_NS),
    )
    other = Facts(run=facts.run, statistics=facts.statistics)
    vars(other)["ledgers"] = {0: replace(usual, step_ns=STEP_NS, lines=lines)}
    assert bool([*row.findings(other)]) == is_found


def test_the_ids_of_rows_and_their_descriptions_are_complete() -> None:
    found = [*chain.from_iterable(ROWS.values())]
    assert len({row.id for row in found}) == len(found)
    assert all(row.about and row.trade_off for row in found)


@given(
    st.text(st.characters(codec="ascii", categories=("L", "N"), include_characters="._"), max_size=300),
    st.integers(2, 200),
)
def test_a_shortened_name_is_the_end_of_the_name(name: str, characters: int) -> None:
    found = shortened(name, characters)
    assert len(found) <= max(characters, 1)
    assert name.endswith(found.removeprefix("…"))


def test_a_name_that_is_too_long_with_its_place_has_none() -> None:
    assert shortened("Premium.penalty (optimizers.py:410)", 20) == "Premium.penalty"


def test_a_title_keeps_its_figures_and_cuts_names() -> None:
    found = titled("The callback {owner} takes {share}.", owner="training.callbacks." * 9 + "Slow.end", share="53%")
    assert len(found) <= POLICY.title
    assert found.endswith("Slow.end takes 53%.")


def test_a_remedy_that_only_shows_more_promises_nothing() -> None:
    found = trace(gpu_window=gpu_times(WINDOW_NS, WINDOW_NS // 2), idle=())
    (finding,) = ROWS["device"][0].findings(facts_of_files((found,), ()))
    assert finding.remedies[0].is_look
    assert (finding.severity, finding.recovers, finding.saves) == (Severity.WARNING, None, "")
