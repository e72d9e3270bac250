"""Facts that name the owner of time in an action, in compiling, in fetches and in other threads, in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.artifacts.naming import processes_name
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

MS = 1_000_000
STEPS = 29
HOOK = "[LightningModule]Net.on_after_batch_transfer"
TRANSFER = "[Strategy]SingleDeviceStrategy.batch_to_device"


def phases(**changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _rank, _step: {**HEALTHY, **changes}


def action(name: str, ns: int, phase: str = "other", *, count: int = STEPS, max_ns: int | None = None) -> Any:
    """A row of the action totals: an action that takes ``ns`` in the mean step."""
    return {
        "kind": "total", "action": name, "phase": phase, "in_window": False, "steps": STEPS, "count": count,
        "total_ns": ns * STEPS, "max_ns": max_ns or ns, "max_step": 3,
    }  # fmt: skip


def found(directory: Path, *rows: dict[str, Any], host: tuple[TimeLine, ...] = ()) -> dict[str, Finding]:
    """The findings of a run with these action totals, and a trace with these lines."""
    (directory / "actions.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = TimeLedger(step_ns=20e6, median_ns=20e6, steps=2, basis="", lines=host)
    trace = replace(trace_report(write_trace(directory.parent / "made.json", [])), host_ledger=ledger if host else None)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory), (trace,)))}


def line(name: str, operator: str, ns: float, **more: Any) -> TimeLine:
    return TimeLine(**{"part": Part.TRANSFER, "name": name, "module": "", "operator": operator, "ns": ns, **more})


@pytest.mark.parametrize(
    ("name", "parameters", "called", "is_loop"),
    [
        pytest.param("Lion", 300, 600, True, id="two calls for each tensor"),
        pytest.param("Lion", 300, 590, False, id="fewer"),
        pytest.param("Lion", 19, 600, False, id="few tensors"),
        pytest.param("Muon", 300, 600, False, id="one of torch"),
    ],
)
def test_an_optimizer_of_the_program_that_calls_operators_for_each_tensor_updates_them_one_by_one(
    name: str, parameters: int, called: int, is_loop: bool, tmp_path: Path
) -> None:
    training = {"optimizers": [{"name": name, "parameters": parameters, "device": "cpu"}]}
    directory = make_run(tmp_path, FakeRun(phases=phases(optimizer=5 * MS), training=training))
    ours = TimeLine(part=Part.OPTIMIZER, name=name, operator="aten::mul_", ns=4e6, called=called)
    others = TimeLine(part=Part.OPTIMIZER, name="Adam", operator="aten::mul_", ns=1e6, called=1000)
    rules = found(directory, host=(ours, others))
    assert ("optimizer_bound" in rules) == is_loop
    if is_loop:
        assert rules["optimizer_bound"].title.startswith("Lion updates 300 tensors one by one: ")
        assert rules["optimizer_bound"].next_steps[0].startswith("Update all tensors at once in Lion.step")


@pytest.mark.parametrize(("called", "is_loop"), [(64, True), (2, False)])
def test_a_hook_that_calls_an_operator_many_times_is_a_loop(tmp_path: Path, called: int, is_loop: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    name = "Net.on_after_batch_transfer"
    host = (line(name, "aten::cumsum", 5e6, called=called), line(name, "aten::select", 9e6, called=900))
    finding = found(directory, action(HOOK, 18 * MS), host=host)["transfer_bound"]
    assert name in finding.title
    assert ("aten::cumsum 64 times" in finding.why) == is_loop
    assert finding.next_steps[0].startswith("Handle the whole batch at once" if is_loop else "Do the work of")
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(18e6)


@pytest.mark.parametrize(("on_device", "is_told"), [(True, True), (False, False)])
def test_a_hook_that_reads_many_values_from_a_gpu_waits_for_each(
    tmp_path: Path, on_device: bool, is_told: bool
) -> None:
    device_bytes = (lambda _: MIB) if on_device else None
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS), device_bytes=device_bytes))
    name = "Net.on_after_backward"
    host = (line(name, "aten::is_nonzero", 9e6, part=Part.MODULE_HOOK, called=302),)
    finding = found(directory, action(f"[LightningModule]{name}", 18 * MS), host=host)["hook_bound"]
    assert ("302 values" in finding.why) is is_told
    assert finding.next_steps[0].startswith(f"Read one value in {name}") is is_told


def test_a_hook_that_copies_many_tensors_is_to_copy_less(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=9 * MS)))
    name = "Average.on_train_batch_end"
    host = (
        line(name, "aten::copy_", 8e6, part=Part.CALLBACK, called=64),
        line(name, "aten::mul", 1e6, part=Part.CALLBACK),
    )
    finding = found(directory, action(f"[Callback]{name}", 9 * MS, "callbacks"), host=host)["callback_bound"]
    assert "aten::copy_ 64 times and copies tensors" in finding.why
    assert finding.next_steps[0].startswith(f"Copy less in {name}")


@pytest.mark.parametrize(("clones", "is_model"), [(40, True), (39, False)])
def test_a_hook_that_copies_as_many_tensors_as_the_model_has_copies_the_model(
    tmp_path: Path, clones: int, is_model: bool
) -> None:
    training = {"optimizers": [{"name": "SGD", "parameters": 40, "device": "cpu"}]}
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=9 * MS), training=training))
    name = "Average.on_train_batch_end"
    host = (
        line(name, "aten::mul", 7e6, part=Part.CALLBACK, called=80),
        line(name, "aten::clone", 1e6, part=Part.CALLBACK, called=clones),
    )
    finding = found(directory, action(f"[Callback]{name}", 9 * MS, "callbacks"), host=host)["callback_bound"]
    assert ("copies the model" in finding.why) is is_model
    assert finding.next_steps[0].startswith(f"Copy less in {name}") is is_model


def test_work_before_the_transfer_may_be_the_gpus(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS), device_bytes=lambda _: MIB))
    finding = found(directory, action("[LightningModule]Net.on_before_batch_transfer", 18 * MS))["transfer_bound"]
    assert "to the device" in finding.title
    assert finding.next_steps[0].startswith("Do the work of Net.on_before_batch_transfer on the GPU")


def test_a_transfer_without_a_device_visits_objects(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    finding = found(directory, action(TRANSFER, 18 * MS))["transfer_bound"]
    assert "to the device" not in finding.title
    assert "each object of a batch" in finding.why
    assert finding.next_steps[0].startswith("Return tensors from collate_fn")


@pytest.mark.parametrize(("ms", "is_most"), [(9, True), (13, False)])
def test_a_callback_that_runs_the_model_for_most_of_its_time_says_so(tmp_path: Path, ms: int, is_most: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=ms * MS)))
    name = "Accuracy.on_train_batch_end"
    host = tuple(line(name, "aten::addmm", 2e6, part=Part.CALLBACK, module=f"net.{i}", called=1) for i in range(3))
    other = line(name, "aten::argmax", 1e6, part=Part.CALLBACK, called=1)
    finding = found(directory, action(f"[Callback]{name}", ms * MS, "callbacks"), host=(*host, other))["callback_bound"]
    assert ("runs net" in finding.why) is is_most
    assert finding.next_steps[0].startswith(f"Use the outputs of the step in {name}") is is_most


@pytest.mark.parametrize(("max_ms", "is_found"), [(60, True), (600, False)])
def test_compiling_in_many_steps_is_a_fault_and_once_is_none(tmp_path: Path, max_ms: int, is_found: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(forward=40 * MS)))
    rules = found(directory, action("torch.compile", 30 * MS, "forward", count=15, max_ns=max_ms * MS))
    assert ("recompilation" in rules) == is_found
    if is_found:
        finding = rules["recompilation"]
        assert finding.severity is Severity.CRITICAL
        assert finding.title == "torch.compile recompiles: compiling takes 57% of each step."
        assert finding.recovers is not None
        assert finding.recovers.max == pytest.approx(30e6)


def test_steps_that_compile_are_no_stalls(tmp_path: Path) -> None:
    directory = make_run(
        tmp_path, FakeRun(phases=lambda _rank, step: {**HEALTHY, "forward": (126 if step % 5 == 4 else 6) * MS})
    )
    rows = [action("torch.compile", 24 * MS, "forward", count=6, max_ns=120 * MS)]
    (directory / "actions.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = Facts.of(load_run(directory)).ledgers[0]
    assert ledger.ns("compile") == pytest.approx(24e6)
    assert ledger.stalls
    assert ledger.ns("stall") == pytest.approx(6 * 120e6 / 26 - 24e6)
    assert ledger.ns("forward") == pytest.approx(6e6, rel=0.1)


@pytest.mark.parametrize(("batch_size", "is_found"), [(4096, True), (32, False)])
def test_many_samples_of_little_work_are_fetched_one_by_one(tmp_path: Path, batch_size: int, is_found: bool) -> None:
    loaders = [{"num_workers": 0, "batch_size": batch_size, "is_iterable": False}]
    wait = phases(data_wait=60 * MS)
    directory = make_run(tmp_path, FakeRun(phases=wait, loading=("Table.fetch",), training={"dataloaders": loaders}))
    rules = found(directory, action("gc_pause", 25 * MS, "data_wait", count=80))
    one_by_one = [rule for rule, each in rules.items() if each.next_steps[0].startswith("Fetch all samples of a batch")]
    assert sorted(one_by_one) == (["gc_pauses", "input_bound"] if is_found else [])
    assert ("one by one, 4,096 in a batch" in rules["gc_pauses"].why) == is_found
    assert ("one by one, 4,096 in a batch" in rules["input_bound"].why) == is_found


def test_pauses_outside_fetches_are_not_the_samples(tmp_path: Path) -> None:
    loaders = [{"num_workers": 0, "batch_size": 4096, "is_iterable": False}]
    directory = make_run(tmp_path, FakeRun(phases=phases(forward=60 * MS), training={"dataloaders": loaders}))
    finding = found(directory, action("gc_pause", 25 * MS, "forward", count=80))["gc_pauses"]
    assert finding.next_steps[0].startswith("Exempt permanent objects")


@pytest.mark.parametrize("synced", [36, 1])
def test_collectives_of_logged_values_are_counted(tmp_path: Path, synced: int) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    log = TimeLine(part=Part.RANK_WAIT, name="Net.log", ns=1e6, count=synced)
    finding = found(directory, action("[LightningModule]Net.log", 18 * MS), host=(log,))["logging_bound"]
    assert ("36 collectives per step" in finding.why) == (synced == 36)
    assert ("sync_dist=True" in finding.next_steps[0]) == (synced == 36)


@pytest.mark.parametrize(
    ("cpu_ms", "asleep_ms", "most"),
    [(400, 500, 0.4), (400, 200, 0.2), (400, 0, None), (45, 500, None)],
    ids=["sleeps longer", "sleeps for a part of it", "a library without the lock", "a little work"],
)
def test_a_busy_thread_costs_at_most_its_time_and_the_sleep_of_the_training(
    tmp_path: Path, cpu_ms: int, asleep_ms: int, most: float | None
) -> None:
    directory = make_run(tmp_path, FakeRun(training={"dataloaders": []}))
    row = {
        "kind": "thread", "step": 20, "thread": "Poll.run (train.py:7)", "cpu_ns": cpu_ms * MS,
        "elapsed_ns": 1000 * MS, "asleep_ns": asleep_ms * MS,
    }  # fmt: skip
    quiet = {**row, "thread": "quiet", "cpu_ns": 10 * MS}
    path = directory / processes_name(0)
    path.write_text("".join(json.dumps(each) + "\n" for each in ({**row, "elapsed_ns": 10 * MS}, quiet, row)))
    rules = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}
    assert ("busy_thread" in rules) == (most is not None)
    if most is not None:
        worth = rules["busy_thread"].recovers
        assert worth is not None
        assert worth.max / worth.whole == pytest.approx(most)
        assert rules["busy_thread"].title.startswith("Busy thread: Poll.run uses 40% of a core;")


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
    finding = found(directory, host=host)["hot_line"]
    assert ("parametrize.cached()" in finding.next_steps[0]) == is_anew
    assert ("computing parameters takes" in finding.why) == is_anew
    # Of 6 ms of forward, without what is made once.
    assert finding.numbers["ns"] == pytest.approx(6e6 if is_anew else 6e6 * 6 / 15.3, rel=0.1)
