"""Hot lines of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import found_with_lines, ids, recovery
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.read.run.load import load_run
from passes import BUSY, calls, event, found

MS = 1_000_000
STEP, MODULE = "Net.training_step", "()"
FORWARD = HEALTHY["forward"] / sum(HEALTHY.values())
HELPER = {"functions": [STEP, "Net.penalty"], "place": "net.py:9", "source": "return penalty(self.weight)"}
OTHER = {"functions": [STEP, MODULE], "place": "net.py:20", "source": "loss = self.net(x).sum()"}
BACKWARD = {"functions": [STEP], "place": "net.py:30", "source": "self.manual_backward(loss)"}


def line(like: dict[str, Any], ms: float, looks: int = 40, **changes: Any) -> dict[str, Any]:
    return {**like, "looks": looks, "ns": ms * MS, **changes}


def facts_of(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> Facts:
    directory = make_run(tmp_path, FakeRun(trace=False, memory=None, **changes))
    add_series(directory, "lines", lines)
    return Facts.of(load_run(directory))


def findings_of(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(facts_of(tmp_path, *lines, **changes))}


@pytest.mark.parametrize(("copies", "looks", "is_found"), [(60, 40, True), (60, 5, False), (10, 40, False)])
def test_a_line_that_calls_what_has_a_remedy_is_named_with_its_place_its_source_and_the_call(
    tmp_path: Path, copies: int, looks: int, is_found: bool
) -> None:
    copied = {"functions": [STEP], "place": "net.py:7", "source": "kept = copy(self.net)", "called": "deepcopy"}
    found = findings_of(tmp_path, line(copied, copies, looks), line(OTHER, 100 - copies)).get("hot_line")
    assert (found is not None) == (is_found and POLICY.verdict <= 0.6 * FORWARD)
    if found is not None:
        assert (found.owner, found.numbers["place"]) == (STEP, "net.py:7")
        assert "`kept = copy(self.net)`; it calls deepcopy" in found.why
        assert ids(found.remedies) == ["copy_less", "work_less"]
        assert recovery(found).max == pytest.approx(0.95 * 0.6 * HEALTHY["forward"], rel=0.05)


@pytest.mark.parametrize(("asleep", "waits"), [(50, True), (10, False)])
def test_a_line_in_which_the_thread_sleeps_waits_and_is_not_what_computes(
    tmp_path: Path, asleep: int, waits: bool
) -> None:
    sleeping = {"functions": [STEP], "place": "net.py:7", "source": "time.sleep(0.02)"}
    heavy = {**HEALTHY, "forward": 20 * MS}
    rows = line(sleeping, 60, asleep_ns=asleep * MS), line(OTHER, 40)
    findings = findings_of(tmp_path, *rows, phases=lambda *_: heavy)
    assert ("hot_line" in findings) == waits
    if waits:
        found = findings["hot_line"]
        assert next(iter(findings)) == "hot_line"
        assert found.severity > Severity.INFO
        assert found.title.startswith("Net.training_step (net.py:7) waits ")
        assert "sleeps 83%" in found.why
        assert ids(found.remedies)[0] == "wait_outside"


def test_python_code_that_sleeps_waits(tmp_path: Path) -> None:
    asks = {"functions": [STEP, "Net.ask"], "place": "net.py:7", "source": "self.connection.recv(64)"}
    facts = facts_of(tmp_path, line(asks, 60, asleep_ns=60 * MS), line(OTHER, 40))
    ledger = facts.ledgers[0]
    whole = ledger.ns(Part.FORWARD)
    lines = (
        TimeLine(part=Part.FORWARD, operator="", ns=0.7 * whole),
        TimeLine(part=Part.FORWARD, operator="aten::mm", ns=0.3 * whole, called=1),
    )
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(*lines, *others))}
    found = next(each for each in examine(facts) if each.rule == "hot_line")
    assert "Python" in found.why
    assert found.title.startswith("Net.ask (net.py:7) waits ")
    assert ids(found.remedies)[0] == "wait_outside"


@pytest.mark.parametrize("share", [0.9, 0.2])
def test_a_line_in_whose_operators_the_thread_sleeps_is_no_wait(tmp_path: Path, share: float) -> None:
    sleeping = {"functions": [STEP], "place": "net.py:7", "source": "distances = (points - others).abs()"}
    facts = facts_of(tmp_path, line(sleeping, 90, asleep_ns=80 * MS), line(OTHER, 10))
    ledger = facts.ledgers[0]
    spent = ledger.ns(Part.FORWARD)
    computes = TimeLine(part=Part.FORWARD, module="", operator="aten::abs", ns=share * spent)
    python = TimeLine(part=Part.FORWARD, module="", ns=(1 - share) * spent)
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(computes, python, *others))}
    found = {finding.rule: finding for finding in examine(facts)}
    waits = found["hot_line"].numbers["ns"] if "hot_line" in found else 0
    assert waits <= (1 - share) * spent * 1.01
    wanted = {name for name, finding in found.items() if "wait_outside" in ids(finding.remedies)}
    assert wanted == ({"hot_line"} if share < 0.5 else set())


def test_lines_of_one_function_that_do_the_same_are_one_cost(tmp_path: Path) -> None:
    parts = [line({**HELPER, "place": f"net.py:{at}", "called": "deepcopy"}, 30) for at in range(2)]
    found = findings_of(tmp_path, *parts, line(OTHER, 40))["hot_line"]
    assert found.numbers["ns"] == pytest.approx(0.6 * HEALTHY["forward"], rel=0.05)


def test_a_line_that_calls_a_module_is_not_blamed_for_it(tmp_path: Path) -> None:
    assert "hot_line" not in findings_of(tmp_path, line({**OTHER, "called": "deepcopy"}, 90), line(HELPER, 10))


@pytest.mark.parametrize(("ms", "is_found"), [(99, True), (30, False)])
@pytest.mark.parametrize("is_helper", [True, False])
def test_a_helper_with_a_third_of_the_step_is_named_whatever_it_does(
    tmp_path: Path, ms: int, is_found: bool, is_helper: bool
) -> None:
    functions = [STEP, "Net.table"] if is_helper else [STEP, MODULE, "Block.forward"]
    table = {"functions": functions, "place": "net.py:4", "source": "return torch.sin(places)"}
    forward = {**HEALTHY, "forward": 7 * MS}
    found = findings_of(tmp_path, line(table, ms), line(OTHER, 100 - ms), phases=lambda *_: forward).get("hot_line")
    assert (found is not None) == (is_found and is_helper)
    if found is not None:
        assert ids(found.remedies) == ["work_less"]


@pytest.mark.parametrize(
    ("operator", "share", "remedy"),
    [("aten::_linalg_svd", 0.5, "decompose_less"), ("aten::sort", 0.5, "sort_less"), ("aten::_linalg_svd", 0.1, None)],
)
def test_a_helper_whose_time_a_family_of_operators_explains_has_its_remedy(
    tmp_path: Path, operator: str, share: float, remedy: str | None
) -> None:
    facts = facts_of(tmp_path, line(HELPER, 50), line(OTHER, 50))
    ledger = facts.ledgers[0]
    whole, spent = ledger.ns(Part.FORWARD), share * ledger.ns(Part.FORWARD)
    lines = (
        TimeLine(part=Part.FORWARD, module="", operator=operator, ns=spent),
        TimeLine(part=Part.FORWARD, module="", operator="aten::mm", ns=whole - spent),
    )
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(*others, *lines))}
    found = {finding.rule: finding for finding in examine(facts)}.get("hot_line")
    assert (ids(found.remedies)[0] if found else None) == remedy


def test_a_loop_outside_modules_is_named_after_the_function_that_has_most_of_the_code_there(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, line(HELPER, 15), line(OTHER, 85))
    ledger = facts.ledgers[0]
    whole = ledger.ns(Part.FORWARD)
    lines = (
        TimeLine(part=Part.FORWARD, module="", operator="aten::sum", ns=0.5 * whole, count=700, called=700),
        TimeLine(part=Part.FORWARD, module="net", operator="aten::mm", ns=0.5 * whole, count=1, called=1),
    )
    others = tuple(each for each in ledger.lines if each.part != Part.FORWARD)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(*others, *lines))}
    finding = next(finding for finding in examine(facts) if finding.rule == "hot_line")
    assert finding.owner == "Net.penalty"
    assert "Net.penalty (net.py:9) has 100% of the forward outside modules" in finding.why
    assert ids(finding.remedies)[0] == "vectorize"


def test_the_page_of_a_healthy_run_has_the_function_with_much_of_the_forward(tmp_path: Path) -> None:
    events = [
        ("ProfilerStep#2", 0, 4000),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 0, 2000),
        ("aten::mul", 10, 1990),
        ("[pl][profile][Strategy]SingleDeviceStrategy.backward", 2000, 4000),
        ("aten::mul", 2000, 3990),
    ]
    rows = [
        {"ph": "X", "cat": "user_annotation" if "#" in name else "cpu_op", "name": name, "pid": 9, "tid": 9}
        | {"ts": start, "dur": end - start, "args": {}}
        for name, start, end in events
    ]
    directory = make_run(tmp_path / "log", FakeRun())
    table = {"functions": [STEP, "Net.table"], "place": "net.py:4", "source": "return torch.sin(self.places())"}
    add_series(directory, "lines", [line(table, 30), line(OTHER, 70)])
    trace = trace_report(write_trace(tmp_path / "made.json", rows))
    first, *_ = examine(Facts.of(load_run(directory), (trace,)))
    assert "Net.table (net.py:4) has 30% of the forward" in first.why
    assert "Net.table" in first.next


def test_a_backward_in_training_step_is_not_in_the_forward(tmp_path: Path) -> None:
    copied = line(HELPER, 20, called="deepcopy")
    found = findings_of(tmp_path, line(BACKWARD, 80, called="LightningModule.manual_backward"), copied)
    assert found["hot_line"].numbers["ns"] == pytest.approx(HEALTHY["forward"], rel=0.05)
    helper = {**BACKWARD, "functions": [STEP, "Net.learn"], "called": "Tensor.backward"}
    assert "hot_line" not in findings_of(tmp_path / "helper", line(helper, 80), line(OTHER, 20))


@pytest.mark.parametrize(("times", "is_found"), [(4, False), (18, True)])
def test_a_forward_that_calls_an_operator_many_times_is_a_python_loop(
    tmp_path: Path, times: int, is_found: bool
) -> None:
    findings = found(tmp_path, *calls("attention", "aten::bmm", times))
    assert ("hot_line" in findings) == is_found
    if is_found:
        assert "attention runs aten::bmm 18 times in each forward" in findings["hot_line"].title
        assert "Vectorize the loop in the forward of attention" in findings["hot_line"].next_steps[0]


def test_operators_that_an_operator_calls_are_no_loop(tmp_path: Path) -> None:
    module, *inside = calls("rnn", "aten::addmm", 18)
    findings = found(tmp_path, module, event("aten::lstm", 5, 1900), *inside)
    assert "hot_line" not in findings


def test_what_ddp_marks_of_its_own_work_is_no_loop(tmp_path: Path) -> None:
    assert "hot_line" not in found(tmp_path, *calls("net", "torch.distributed.ddp.reducer::copy_bucket_to_grad", 18))


@pytest.mark.parametrize("view", ["slice", "as_strided"])
def test_views_are_no_loop(tmp_path: Path, view: str) -> None:
    assert "hot_line" not in found(tmp_path, *calls("split", f"aten::{view}", 18))


def test_a_submodule_that_runs_many_times_in_each_forward_is_a_loop(tmp_path: Path) -> None:
    cells = [
        made
        for at in range(18)
        for made in (
            event("[pl][module]Cell: net.cell", 10 + 100 * at, 100 + 100 * at),
            event("aten::addmm", 11 + 100 * at, 99 + 100 * at),
        )
    ]
    sentence = found(tmp_path, event("[pl][module]Net: net", 0, 1900), *cells)["hot_line"].title
    assert "net runs net.cell 18 times" in sentence


def test_long_calls_are_no_loop(tmp_path: Path) -> None:
    assert "hot_line" in found(tmp_path / "short", *calls("net", "aten::bmm", 8, each=BUSY))
    assert "hot_line" not in found(tmp_path / "long", *calls("net", "aten::bmm", 8, each=1000))


# The step is three times as long as its trace.
@pytest.mark.parametrize(("each", "work"), [(25, 0), (BUSY, BUSY / (BUSY + 10))], ids=["mostly dispatch", "computes"])
def test_a_loop_recovers_up_to_all_of_its_shortest_calls_and_a_part_of_those_that_compute(
    tmp_path: Path, each: float, work: float
) -> None:
    _, *looped = calls("net", "aten::bmm", 18, each=each)
    finding = found(tmp_path, event("[pl][module]Net: net", 10, 10 + 18 * (each + 10)), *looped)["hot_line"]
    worth, loop = recovery(finding), finding.numbers["ns"]
    assert worth.min == pytest.approx(0.2 * loop)
    assert worth.max == pytest.approx(loop * (1 - 0.3 * work), rel=0.01)


def test_what_runs_beside_a_loop_is_not_in_it(tmp_path: Path) -> None:
    module, (_, *looped) = event("[pl][module]Net: net", 0, 1900), calls("net", "aten::mul", 8)
    alone = found(tmp_path / "alone", module, *looped)["hot_line"].numbers["ns"]
    both = found(tmp_path / "both", module, *looped, event("aten::mm", 1000, 1800))["hot_line"].numbers["ns"]
    python = 1900 - 8 * BUSY - 800
    assert both / alone == pytest.approx((8 * BUSY + python * 8 / 9) / 1900, rel=0.02)


def test_a_loop_outside_of_submodules_has_the_line_with_most_of_the_forward(tmp_path: Path) -> None:
    line = {"functions": ["Net.training_step", "Net.penalty"], "place": "net.py:9", "source": "p.pow(2)", "looks": 40}
    _, *looped = calls("net", "aten::pow", 18)
    module = event("[pl][module]Net: net", 1900, 1990)
    finding = found(tmp_path, module, *looped, lines=[{**line, "ns": 1_000_000}])["hot_line"]
    assert "Net.penalty (net.py:9)" in finding.why
    assert finding.owner == "Net.penalty"
    assert "Vectorize the loop in Net.penalty:" in finding.next_steps[0]


def test_modules_whose_own_time_is_below_the_cost_of_recording_are_no_loop(tmp_path: Path) -> None:
    layers = [
        made
        for at in range(20)
        for made in (
            event(f"[pl][module]Net: blocks.{at}.reduce", 90 * at, 90 * at + 80),
            event("aten::linear", 90 * at + 1, 90 * at + 79),
        )
    ]
    fake = FakeRun(phases=lambda _rank, _step: {**dict.fromkeys(HEALTHY, 0), "forward": 1_000_000})
    assert "hot_line" not in found(tmp_path, *layers, fake=fake)


def test_python_outside_operators_is_found_with_its_module(tmp_path: Path) -> None:
    finding = found(tmp_path, *calls("tokenizer", "aten::add", 12, each=1))
    assert "Python code in training_step" in finding["hot_line"].title
    assert finding["hot_line"].recovers is not None
    slow = [event("[pl][module]Net: tokenizer", 0, 1990), *calls("tokenizer", "aten::add", 12, each=1)[1:]]
    assert "the forward of tokenizer" in found(tmp_path / "module", *slow)["hot_line"].title


@pytest.mark.parametrize(("times", "reads"), [(100, 0), (300, 300)])
def test_values_that_are_read_one_by_one_are_named_with_their_number(tmp_path: Path, times: int, reads: int) -> None:
    values = [
        made
        for at in range(times)
        for made in (
            event("aten::item", 10 + 5 * at, 12 + 5 * at),
            event("aten::_local_scalar_dense", 11 + 5 * at, 11.5 + 5 * at),
        )
    ]
    finding = found(tmp_path, *values)["hot_line"]
    assert finding.numbers["reads"] == reads
    assert ("Scalar loop: training_step reads 300 values one by one" in finding.title) == (times == 300)
    assert (finding.remedies[0].id == "whole_tensors") == (times == 300)


def test_a_forward_hook_is_named_with_its_line_and_its_modules_are_not_accused(tmp_path: Path) -> None:
    hooked = [event("[pl][forward_hook]look (train.py:7)", 100 * at, 100 * at + 60) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *hooked)
    hook = findings["registered_hook_bound"]
    assert hook.title.startswith("The forward hook look (train.py:7) takes ")
    assert "18 calls per step" in hook.why
    assert "Remove the hook look (train.py:7)" in hook.next_steps[0]
    assert "hot_line" not in findings


def test_self_log_in_the_training_step_is_logging_and_not_python_of_the_model(tmp_path: Path) -> None:
    logs = [event("[pl][profile][LightningModule]Net.log", 100 * at, 100 * at + 80) for at in range(1, 19)]
    findings = found(tmp_path, event("[pl][module]Net: net", 0, 2000), *logs)
    assert "18 calls per step" in findings["logging_bound"].why
    assert "hot_line" not in findings


@pytest.mark.parametrize(("times", "is_anew"), [(12, True), (1, False)])
def test_a_loop_over_a_parameter_that_is_made_anew_has_its_own_remedy(
    tmp_path: Path, times: int, is_anew: bool
) -> None:
    directory = make_run(tmp_path, FakeRun())
    made = "cell.parametrizations.weight.0"
    host = (
        TimeLine(part=Part.FORWARD, name="", module="cell", operator="", ns=1e5, count=12),
        TimeLine(part=Part.FORWARD, name="", module="", operator="", ns=1e5, count=1),
        TimeLine(part=Part.FORWARD, name="", module=made, operator="", ns=1e5, count=times),
        TimeLine(part=Part.FORWARD, name="", module=made, operator="aten::linalg_solve", ns=9e6, called=times),
        TimeLine(part=Part.FORWARD, name="", module="cell", operator="aten::addmm", ns=6e6, called=12, count=12),
    )
    finding = found_with_lines(directory, host=host)["hot_line"]
    assert ("parametrize.cached()" in finding.next_steps[0]) == is_anew
    assert ("computing parameters takes" in finding.why) == is_anew
    # Of 6 ms of forward, without what is made once.
    assert finding.numbers["ns"] == pytest.approx(6e6 if is_anew else 6e6 * 6 / 15.3, rel=0.1)
