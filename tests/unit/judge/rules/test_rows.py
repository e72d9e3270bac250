"""Each row about the program's code, on time that is just enough, just too little, and in a training without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import recovery
from lightning_memprof.account.ledger.model import TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.artifacts.naming import processes_name
from lightning_memprof.judge import Facts, Finding, examine, verdict
from lightning_memprof.read.run.load import load_run

MS = 1_000_000
STEP_NS = 400 * MS
STEPS = 60
Make = Callable[[Path, float], Facts]


def with_lines(directory: Path, *lines: TimeLine) -> Facts:
    """The facts of a run whose step has these lines, and waits for data."""
    run = Facts.of(load_run(directory))
    rest = TimeLine(part=Part.DATA_WAIT, ns=STEP_NS - total(lines))
    facts = Facts(run=run.run, statistics=run.statistics)
    vars(facts)["ledgers"] = {0: replace(run.ledgers[0], step_ns=STEP_NS, lines=(*lines, rest))}
    return facts


def forward(share: float, operator: str | None, called: float = 0.0) -> TimeLine:
    ns = share * STEP_NS
    return TimeLine(part=Part.FORWARD, module="", operator=operator, ns=ns, called=called, count=called)


def looped(operator: str) -> Make:
    return lambda path, share: with_lines(make_run(path, FakeRun()), forward(share, operator, 1000))


def read(values: int) -> Make:
    return lambda path, share: with_lines(make_run(path, FakeRun()), forward(share, "aten::item", values))


def in_python(operators: int) -> Make:
    return lambda path, share: with_lines(
        make_run(path, FakeRun()), forward(share, ""), forward(1e-6, "aten::mm", operators)
    )


def sampled(**line: Any) -> Make:
    def make(path: Path, share: float) -> Facts:
        directory = make_run(path, FakeRun())
        usual = {"functions": ["Net.training_step"], "place": "net.py:7", "source": "f()", "looks": 40, "ns": 10**6}
        add_series(directory, "lines", [{**usual, **line}])
        return with_lines(directory, forward(share, None))

    return make


def small(samples: int) -> Make:
    def make(path: Path, share: float) -> Facts:
        directory = make_run(path, FakeRun(samples=samples, padding=(0, 0, 0)))
        update = TimeLine(part=Part.OPTIMIZER, ns=share * STEP_NS)
        return with_lines(directory, update, forward(1e-6, "aten::mm", 1))

    return make


def busy(asleep: float) -> Make:
    def make(path: Path, share: float) -> Facts:
        directory = make_run(path, FakeRun(training={"dataloaders": []}))
        times = {"cpu_ns": round(share * 10**9), "elapsed_ns": 10**9, "asleep_ns": round(asleep * 10**9)}
        row = {"kind": "thread", "step": 20, "thread": "Poll.run (train.py:7)", **times}
        (directory / processes_name(0)).write_text(json.dumps(row) + "\n")
        return Facts.of(load_run(directory))

    return make


def slower(longest: int) -> Make:
    def make(path: Path, share: float) -> Facts:
        length = 40_000_000
        added = 2 * share / (1 - share) * (length + sum(HEALTHY.values()) - HEALTHY["forward"]) / (STEPS - 7)
        fake = FakeRun(
            steps=STEPS,
            phases=lambda _, step: {**HEALTHY, "forward": length + round(min(step, longest) * added)},
        )
        return Facts.of(load_run(make_run(path, fake)))

    return make


ROWS = {row.id: row for row in chain.from_iterable(verdict.ROWS.values())}
CASES = [
    pytest.param("hot_line", looped("aten::add"), looped("aten::view"), id="a loop, and views"),
    pytest.param("hot_line", read(256), read(255), id="values, and few values"),
    pytest.param("hot_line", in_python(8), in_python(7), id="Python, and a forward of few operators"),
    pytest.param("hot_line", sampled(asleep_ns=10**6), sampled(), id="a wait, and work of the training step"),
    pytest.param("hot_line", sampled(called="save"), sampled(called="save", looks=5), id="a file, and few looks"),
    pytest.param("small_batch", small(8), small(9), id="a batch of few samples, and of more"),
    pytest.param("busy_thread", busy(0.9), busy(0.0), id="a thread, and one without the lock"),
    pytest.param("slower_steps", slower(STEPS), slower(15), id="steps that get slower, and a cache that fills"),
]


def test_each_row_that_its_time_alone_does_not_decide_is_named_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    alone = {row.id for row in verdict.ROWS["device"]}
    found = (row for row in chain.from_iterable(verdict.ROWS.values()) if row.is_of_time and row.id not in alone)
    missing = {row.id for row in found if (row.find or Part.FORWARD in row.of) and f'"{row.id}"' not in tests}
    assert missing == set()


@pytest.mark.parametrize(("rule", "make", "twin"), CASES)
def test_a_row_fires_from_its_share_on_and_is_silent_below_it_and_in_its_twin(
    tmp_path: Path, rule: str, make: Make, twin: Make
) -> None:
    def found(name: str, make: Make, share: float) -> list[Finding]:
        return list(ROWS[rule].findings(make(tmp_path / name, share)))

    least = ROWS[rule].note
    (finding,) = found("fires", make, 1.05 * least)
    assert finding.rule == rule
    assert 0 < recovery(finding).max <= finding.numbers["ns"] + 1
    assert finding.numbers["ns"] == pytest.approx(1.05 * least * recovery(finding).whole, rel=0.04)
    assert found("below", make, 0.95 * least) == []
    assert found("twin", twin, 1.05 * least) == []


def test_time_around_modules_and_in_them_are_two_hot_lines_and_time_of_one_kind_is_one(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    inside = [
        TimeLine(part=Part.FORWARD, module=module, operator=operator, ns=share * STEP_NS, count=count, called=count)
        for module, operator, share, count in (
            ("net", "", 1e-6, 1),
            ("net", "aten::mul", 0.2, 1000),
            ("other", "", 1e-6, 1),
            ("other", "aten::add", 0.15, 1000),
        )
    ]
    facts = with_lines(directory, forward(0.3, "aten::item", 1000), *inside)
    found = [finding for finding in examine(facts) if finding.rule == "hot_line"]
    assert [finding.owner for finding in found] == ["training_step", "net"]
    assert found[0].title == "Scalar loop: training_step reads 1,000 values one by one: 30% of each step."
    assert found[1].title == "Python loop: net runs aten::mul 1,000 times in each forward: 20% of each step."


def test_gc_pauses_belong_to_the_values_that_are_read_as_far_as_their_objects_start_them(tmp_path: Path) -> None:
    reads = TimeLine(part=Part.FORWARD, module="", operator="aten::item", ns=20 * MS, count=1400, called=1400)
    pauses = TimeLine(part=Part.GC_PAUSES, ns=60 * MS, count=4)
    made = with_lines(make_run(tmp_path, FakeRun()), reads, pauses)
    (finding,) = (finding for finding in examine(made) if finding.rule == "hot_line")
    assert (finding.numbers["reads"], finding.numbers["ns"]) == (1400, 20 * MS + 60 * MS / 2)
