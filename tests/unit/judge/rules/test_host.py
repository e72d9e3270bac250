from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, add_series, make_run, set_epochs
from findings import STEPS, action, found, found_in_run, found_with_lines, ids, phases, recovery, write_rows
from lightning_memprof.account.ledger.memory import ByteLedger, ByteLine
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Facts, Severity, examine, verdict_of
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

MS = 1_000_000


@pytest.mark.parametrize("phase", ["other", "callbacks"])
def test_advice_for_a_validation_names_no_setting_of_a_training(tmp_path: Path, phase: str) -> None:
    fake = FakeRun(stage="validate", phases=lambda *_: {**HEALTHY, "backward": 0, "optimizer": 0, phase: 30 * MS})
    said = verdict_of(load_run(make_run(tmp_path, fake)))
    assert said.rule in ("between_steps", "callback_bound")
    assert "on_train_epoch_end" not in said.next
    assert "val_check" not in said.next
    assert "log_every" not in said.next
    assert "every_n" not in said.next


@pytest.mark.parametrize(
    "key", ["SlowCallback", "main.<locals>.SlowCallback", "SlowCallback{'monitor': 'val.loss', 'mode': 'a}.b'}"]
)
def test_a_slow_callback_is_found_by_the_name_of_its_class_and_hook(tmp_path: Path, key: str) -> None:
    row = action(f"[Callback]{key}.on_train_batch_end", 65_000_000, "callbacks")
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)), row)["callback_bound"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "The callback SlowCallback.on_train_batch_end takes 78% of each step."
    assert "every N batches" in finding.next_steps[0]
    assert recovery(finding).max == pytest.approx(65_000_000)


def test_without_action_totals_the_windows_name_the_callback(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)))["callback_bound"]
    assert finding.title == "The callback TQDMProgressBar.on_train_batch_end takes 78% of each step."


def test_our_own_callback_is_profiler_overhead(tmp_path: Path) -> None:
    row = action("[Callback]MemProfilerCallback.on_train_batch_end", 65_000_000, "callbacks")
    assert "callback_bound" not in found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)), row)


@pytest.mark.parametrize(("callbacks", "step"), [(100_000, {}), (1_500_000, {"forward": 0, "backward": 0})])
def test_cheap_callbacks_are_no_finding(tmp_path: Path, callbacks: int, step: dict[str, int]) -> None:
    row = action("[Callback]TQDMProgressBar.on_train_batch_end", callbacks, "callbacks")
    assert "callback_bound" not in found(tmp_path, FakeRun(phases=phases(callbacks=callbacks, **step)), row)


def test_a_slow_hook_of_the_module_is_named(tmp_path: Path) -> None:
    row = action("[LightningModule]LitGPT.on_train_batch_end", 25_000_000)
    findings = found(tmp_path, FakeRun(phases=phases(other=26_000_000)), row)
    assert "LitGPT.on_train_batch_end of the module takes 57%" in findings["hook_bound"].title
    assert "between_steps" not in findings


def test_the_learning_rate_schedules_are_a_hook(tmp_path: Path) -> None:
    row = action("[LightningModule]LitGPT.lr_scheduler_step", 1_500_000)
    finding = found(tmp_path, FakeRun(phases=phases(other=1_600_000, forward=0, backward=2_000_000)), row)["hook_bound"]
    assert finding.title.startswith("The hook LitGPT.lr_scheduler_step of the module takes ")
    assert finding.remedies[0].id == "less_often"


@pytest.mark.parametrize(
    ("name", "phase", "rule", "fix"),
    [
        ("run_validation", "other", "validation_bound", "val_check_interval"),
        ("save_checkpoint", "callbacks", "checkpoint_bound", "every_n_train_steps"),
        ("[Logger]JsonLogger.log_metrics", "other", "logging_bound", "log_every_n_steps"),
    ],
)
def test_what_runs_every_tenth_step_counts_with_its_share_of_all_steps(
    tmp_path: Path, name: str, phase: str, rule: str, fix: str
) -> None:
    row = action(name, 10_000_000, phase, count=3)
    finding = found(tmp_path, FakeRun(phases=phases(**{phase: 10_500_000})), row)[rule]
    assert finding.severity is Severity.WARNING
    assert finding.numbers["share"] == pytest.approx(10 / 28, rel=0.05)
    assert ": 3 calls in 26 steps" in finding.why
    assert fix in finding.next_steps[0]


@pytest.mark.parametrize(("epochs", "setting"), [(3, "check_val_every_n_epoch=5"), (1, "val_check_interval=1.0")])
def test_validation_once_per_epoch_is_not_to_run_once_per_epoch(tmp_path: Path, epochs: int, setting: str) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=21_000_000)))
    set_epochs(directory, -(-STEPS // epochs))
    row = action("run_validation", 20_000_000, count=3)
    write_rows(directory / "actions.rank00000.jsonl", row)
    findings = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}
    assert setting in findings["validation_bound"].next_steps[0]


@pytest.mark.parametrize("is_cpu", [True, False])
def test_batches_are_moved_to_a_device_only_where_there_is_one(tmp_path: Path, is_cpu: bool) -> None:
    row = action("[LightningModule]Net.on_before_batch_transfer", 20_000_000)
    fake = FakeRun(phases=phases(other=21_000_000), device_bytes=None if is_cpu else lambda _: MIB)
    finding = found(tmp_path, fake, row)["transfer_bound"]
    assert ("to the device" in finding.title) is not is_cpu
    assert "Net.on_before_batch_transfer" in finding.title


@pytest.mark.parametrize(("buffers", "is_named"), [(60, True), (40, False)])
def test_a_checkpoint_that_may_mostly_be_buffers_names_them(tmp_path: Path, buffers: int, is_named: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=10_500_000)))
    row = action("save_checkpoint", 10_000_000, "callbacks", count=3)
    write_rows(directory / "actions.rank00000.jsonl", row)
    facts = Facts.of(load_run(directory))
    sizes = {"buffer": buffers, "parameter": 20, "optimizer_state": 20, "activation": 90}
    lines = tuple(ByteLine(category=name, bytes=size * MIB) for name, size in sizes.items())
    ledger = ByteLedger(peak_bytes=sum(sizes.values()), basis="", place="host", lines=lines)
    vars(facts)["byte_ledgers"] = {0: ledger}
    (finding,) = [finding for finding in examine(facts) if finding.rule == "checkpoint_bound"]
    assert finding.next_steps[-1].startswith("Save in the background")
    if is_named:
        assert "60.0 MiB of buffers" in finding.why
        assert "persistent=False" in finding.next_steps[0]
    else:
        assert "every_n_train_steps" in finding.next_steps[0]


def test_large_hyperparameters_are_left_out_of_checkpoints(tmp_path: Path) -> None:
    training = {"large_hyperparameters": ["catalogue", "vocabulary"]}
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=10_500_000), training=training))
    write_rows(directory / "actions.rank00000.jsonl", action("save_checkpoint", 10_000_000, "callbacks", count=3))
    finding = found_in_run(directory)["checkpoint_bound"]
    assert ids(finding.remedies)[0] == "no_hyperparameters"
    assert "ignore=['catalogue', 'vocabulary']" in finding.next


@pytest.mark.parametrize(
    ("phase", "remedy"), [("optimizer", "rarer_work"), ("forward", "compare_steps"), ("backward", "compare_steps")]
)
def test_slow_steps_in_the_optimizer_are_not_those_of_their_batches(tmp_path: Path, phase: str, remedy: str) -> None:
    def slow(_: int, step: int) -> dict[str, int]:
        return {**HEALTHY, phase: HEALTHY[phase] + 100 * MS * (step % 5 == 0)}

    finding = found(tmp_path, FakeRun(steps=60, phases=slow, trace=False, memory=None))["slow_steps"]
    assert ids(finding.remedies)[0] == remedy


def test_an_optimizer_that_waits_is_not_one_that_computes(tmp_path: Path) -> None:
    training = {"optimizers": [{"name": "Paced", "parameters": 10, "device": "cpu"}]}
    fake = FakeRun(phases=phases(optimizer=5 * MS), trace=False, memory=None, training=training)
    wait = {"functions": ["Paced.step", "Paced.pause"], "place": "a.py:9", "source": "sleep(1)", "looks": 40}
    closure = {"functions": ["Paced.step"], "place": "a.py:5", "inside": "_engine_run_backward", "looks": 40}
    directory = make_run(tmp_path, fake)
    add_series(directory, "lines", [{**wait, "ns": 5 * MS, "asleep_ns": 5 * MS}, {**closure, "ns": 40 * MS}])
    finding = found_in_run(directory)["optimizer_bound"]
    assert "Paced.pause (a.py:9) waits" in finding.title
    assert ids(finding.remedies) == ["wait_outside"]
    assert recovery(finding).max == pytest.approx(5 * MS, rel=0.01)


def test_gc_pauses_of_any_phase_are_one_finding(tmp_path: Path) -> None:
    rows = [action("gc_pause", 3_000_000, phase) for phase in ("forward", "backward", "data_wait")]
    finding = found(tmp_path, FakeRun(phases=phases(data_wait=5_000_000)), *rows)["gc_pauses"]
    assert finding.numbers["ns"] == pytest.approx(9_000_000)
    assert finding.numbers["count_per_step"] == pytest.approx(3)
    assert "gc.freeze()" in finding.next_steps[0]


def test_the_wait_for_a_core_comes_from_the_rest_of_a_phase_before_its_measured_actions(tmp_path: Path) -> None:
    # A logger that sleeps is not ready to run.
    logger, slept = "[Logger]CSVLogger.log_metrics", 10_000_000
    shared = FakeRun(phases=lambda _, __: {**HEALTHY, "other": 14_000_000}, core_wait_ns=lambda _: 3_000_000)
    assert found(tmp_path, shared, action(logger, slept))["logging_bound"].numbers["ns"] == slept


HOOK = "[LightningModule]Net.on_after_batch_transfer"
TRANSFER = "[Strategy]SingleDeviceStrategy.batch_to_device"


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
    rules = found_with_lines(directory, host=(ours, others))
    assert ("optimizer_bound" in rules) == is_loop
    if is_loop:
        assert rules["optimizer_bound"].title.startswith("Lion updates 300 tensors one by one: ")
        assert rules["optimizer_bound"].next_steps[0].startswith("Update all tensors at once in Lion.step")


@pytest.mark.parametrize(("called", "is_loop"), [(64, True), (2, False)])
def test_a_hook_that_calls_an_operator_many_times_is_a_loop(tmp_path: Path, called: int, is_loop: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    name = "Net.on_after_batch_transfer"
    host = (line(name, "aten::cumsum", 5e6, called=called), line(name, "aten::select", 9e6, called=900))
    finding = found_with_lines(directory, action(HOOK, 18 * MS), host=host)["transfer_bound"]
    assert name in finding.title
    assert ("aten::cumsum 64 times" in finding.why) == is_loop
    assert finding.next_steps[0].startswith("Handle the whole batch at once" if is_loop else "Do the work of")
    assert recovery(finding).max == pytest.approx(18e6)


@pytest.mark.parametrize(("on_device", "is_told"), [(True, True), (False, False)])
def test_a_hook_that_reads_many_values_from_a_gpu_waits_for_each(
    tmp_path: Path, on_device: bool, is_told: bool
) -> None:
    device_bytes = (lambda _: MIB) if on_device else None
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS), device_bytes=device_bytes))
    name = "Net.on_after_backward"
    host = (line(name, "aten::is_nonzero", 9e6, part=Part.MODULE_HOOK, called=302),)
    finding = found_with_lines(directory, action(f"[LightningModule]{name}", 18 * MS), host=host)["hook_bound"]
    assert ("302 values" in finding.why) is is_told
    assert (finding.remedies[0].id == "whole_tensors") is is_told


def test_a_hook_that_copies_many_tensors_is_to_copy_less(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=9 * MS)))
    name = "Average.on_train_batch_end"
    host = (
        line(name, "aten::copy_", 8e6, part=Part.CALLBACK, called=64),
        line(name, "aten::mul", 1e6, part=Part.CALLBACK),
    )
    finding = found_with_lines(directory, action(f"[Callback]{name}", 9 * MS, "callbacks"), host=host)["callback_bound"]
    assert "aten::copy_ 64 times and copies tensors" in finding.why
    assert finding.remedies[0].id == "copy_less"


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
    finding = found_with_lines(directory, action(f"[Callback]{name}", 9 * MS, "callbacks"), host=host)["callback_bound"]
    assert ("copies the model" in finding.why) is is_model
    assert (finding.remedies[0].id == "copy_less") is is_model


def test_a_transfer_without_a_device_visits_objects(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    finding = found_with_lines(directory, action(TRANSFER, 18 * MS))["transfer_bound"]
    assert "to the device" not in finding.title
    assert "each object of a batch" in finding.why
    assert finding.next_steps[0].startswith("Return tensors from collate_fn")


@pytest.mark.parametrize(("ms", "is_most"), [(9, True), (13, False)])
def test_a_callback_that_runs_the_model_for_most_of_its_time_says_so(tmp_path: Path, ms: int, is_most: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=ms * MS)))
    name = "Accuracy.on_train_batch_end"
    host = tuple(line(name, "aten::addmm", 2e6, part=Part.CALLBACK, module=f"net.{i}", called=1) for i in range(3))
    other = line(name, "aten::argmax", 1e6, part=Part.CALLBACK, called=1)
    finding = found_with_lines(directory, action(f"[Callback]{name}", ms * MS, "callbacks"), host=(*host, other))[
        "callback_bound"
    ]
    assert ("runs net" in finding.why) is is_most
    assert finding.next_steps[0].startswith(f"Use the outputs of the step in {name}") is is_most


@pytest.mark.parametrize(("max_ms", "is_found"), [(60, True), (600, False)])
def test_compiling_in_many_steps_is_a_fault_and_once_is_none(tmp_path: Path, max_ms: int, is_found: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(forward=40 * MS)))
    rules = found_with_lines(directory, action("torch.compile", 30 * MS, "forward", count=15, max_ns=max_ms * MS))
    assert ("recompilation" in rules) == is_found
    if is_found:
        finding = rules["recompilation"]
        assert finding.severity is Severity.CRITICAL
        assert finding.title == "torch.compile recompiles: compiling takes 57% of each step."
        assert recovery(finding).max == pytest.approx(30e6)


def test_steps_that_compile_are_no_stalls(tmp_path: Path) -> None:
    directory = make_run(
        tmp_path, FakeRun(phases=lambda _rank, step: {**HEALTHY, "forward": (126 if step % 5 == 4 else 6) * MS})
    )
    rows = [action("torch.compile", 24 * MS, "forward", count=6, max_ns=120 * MS)]
    write_rows(directory / "actions.rank00000.jsonl", *rows)
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
    rules = found_with_lines(directory, action("gc_pause", 25 * MS, "data_wait", count=80))
    one_by_one = [rule for rule, each in rules.items() if each.remedies[0].id == "fetch_at_once"]
    assert sorted(one_by_one) == (["gc_pauses", "input_bound"] if is_found else [])
    assert ("one by one, 4,096 in a batch" in rules["gc_pauses"].why) == is_found
    assert ("one by one, 4,096 in a batch" in rules["input_bound"].why) == is_found


def test_pauses_outside_fetches_are_not_the_samples(tmp_path: Path) -> None:
    loaders = [{"num_workers": 0, "batch_size": 4096, "is_iterable": False}]
    directory = make_run(tmp_path, FakeRun(phases=phases(forward=60 * MS), training={"dataloaders": loaders}))
    finding = found_with_lines(directory, action("gc_pause", 25 * MS, "forward", count=80))["gc_pauses"]
    assert finding.remedies[0].id == "freeze_objects"


@pytest.mark.parametrize("synced", [36, 1])
def test_collectives_of_logged_values_are_counted(tmp_path: Path, synced: int) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=20 * MS)))
    log = TimeLine(part=Part.RANK_WAIT, name="Net.log", ns=1e6, count=synced)
    finding = found_with_lines(directory, action("[LightningModule]Net.log", 18 * MS), host=(log,))["logging_bound"]
    assert ("36 collectives per step" in finding.why) == (synced == 36)
    assert ("sync_dist=True" in finding.next_steps[0]) == (synced == 36)
