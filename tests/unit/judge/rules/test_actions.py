from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, make_run, set_epochs
from lightning_memprof.account.ledger.memory import ByteLedger, ByteLine
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import Facts, Finding, Severity, examine, verdict_of
from lightning_memprof.judge.verdict import RULES
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.locate import shown_path
from lightning_memprof.units import MIB
from next_steps import step

STEPS = 29


def phases(**changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _rank, _step: {**HEALTHY, **changes}


def action(name: str, ns: int, phase: str = "other", count: int = STEPS) -> dict[str, Any]:
    """A row of the action totals: an action that takes ``ns`` in the mean step."""
    return {
        "kind": "total", "action": name, "phase": phase, "in_window": False, "steps": STEPS, "count": count,
        "total_ns": ns * STEPS, "max_ns": ns, "max_step": 3,
    }  # fmt: skip


def found(tmp_path: Path, fake: FakeRun, *rows: dict[str, Any]) -> dict[str, Finding]:
    directory = make_run(tmp_path, fake)
    if rows:
        (directory / "actions.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}


def test_a_healthy_run_says_what_it_is_bound_by_and_how_to_look_further(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    said = verdict_of(run)
    assert said.rule == "nothing_found"
    assert said.title.startswith("Compute-bound: forward and backward take 88% of each step (16.")
    assert f"lightning-memprof view {shown_path(run.directory)}" in said.next


def test_an_early_end_is_said(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(endings={0: "RuntimeError: boom"}))))
    assert said.why.startswith("The run ended early with RuntimeError: boom. ")


@pytest.mark.parametrize(
    "key", ["SlowCallback", "main.<locals>.SlowCallback", "SlowCallback{'monitor': 'val.loss', 'mode': 'a}.b'}"]
)
def test_a_slow_callback_is_found_by_the_name_of_its_class_and_hook(tmp_path: Path, key: str) -> None:
    row = action(f"[Callback]{key}.on_train_batch_end", 65_000_000, "callbacks")
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)), row)["callback_bound"]
    assert finding.severity is Severity.CRITICAL
    assert finding.title == "The callback SlowCallback.on_train_batch_end takes 78% of each step."
    assert "every N batches" in finding.next_steps[0]
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(65_000_000)


def test_without_action_totals_the_windows_name_the_callback(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)))["callback_bound"]
    assert finding.title == "The callback TQDMProgressBar.on_train_batch_end takes 78% of each step."


def test_callbacks_that_nothing_names_have_a_sentence_of_their_own(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000), windows=()))["callback_bound"]
    assert finding.title == "Callbacks take 78% of each step; which ones was not recorded."
    assert finding.next_steps[0].startswith("Do the work of these callbacks every N batches")


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
    assert finding.next_steps[0].endswith('or update it once per epoch: {"interval": "epoch"}.')


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


@pytest.mark.parametrize(("ms", "count", "is_found"), [(1.5, 3, False), (3, 3, True), (3, 1, False), (7, 1, True)])
def test_a_validation_that_takes_less_than_a_tenth_of_the_time_or_a_fifth_once_is_no_finding(
    tmp_path: Path, ms: float, count: int, is_found: bool
) -> None:
    ns = round(ms * 1e6)
    rules = found(tmp_path, FakeRun(phases=phases(other=500_000 + ns)), action("run_validation", ns, count=count))
    assert ("validation_bound" in rules) == is_found


def test_validation_that_runs_once_and_takes_most_of_the_run_is_not_called_untracked(tmp_path: Path) -> None:
    row = action("run_validation", 30_000_000, count=1)
    findings = found(tmp_path, FakeRun(phases=phases(other=31_000_000)), row)
    assert findings["nothing_found"].title.startswith("Host-bound: validation takes 6")
    assert findings["validation_bound"].severity is Severity.INFO


@pytest.mark.parametrize(("epochs", "remedy"), [(3, "validate_less_often"), (1, "validate_per_epoch")])
def test_validation_once_per_epoch_is_not_to_run_once_per_epoch(tmp_path: Path, epochs: int, remedy: str) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(other=21_000_000)))
    set_epochs(directory, -(-STEPS // epochs))
    row = action("run_validation", 20_000_000, count=3)
    (directory / "actions.rank00000.jsonl").write_text(json.dumps(row) + "\n")
    findings = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}
    assert next(each.id for each in findings["validation_bound"].remedies) == remedy


@pytest.mark.parametrize(("each_ms", "is_named"), [(900, True), (150, False)])
def test_a_checkpoint_that_takes_longer_than_its_tensors_may_hold_other_objects(
    tmp_path: Path, each_ms: int, is_named: bool
) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=each_ms * 1_000_000 * 3 // STEPS)))
    row = action("save_checkpoint", each_ms * 1_000_000 * 3 // STEPS, "callbacks", count=3)
    (directory / "actions.rank00000.jsonl").write_text(json.dumps(row) + "\n")
    facts = Facts.of(load_run(directory))
    lines = (ByteLine(category="parameter", bytes=2 * MIB),)
    vars(facts)["byte_ledgers"] = {0: ByteLedger(peak_bytes=2 * MIB, basis="", place="host", lines=lines)}
    (finding,) = [finding for finding in examine(facts) if finding.rule == "checkpoint_bound"]
    assert ("save_hyperparameters(ignore=" in finding.next_steps[0]) == is_named


@pytest.mark.parametrize("is_cpu", [True, False])
def test_batches_are_moved_to_a_device_only_where_there_is_one(tmp_path: Path, is_cpu: bool) -> None:
    row = action("[LightningModule]Net.on_before_batch_transfer", 20_000_000)
    fake = FakeRun(phases=phases(other=21_000_000), device_bytes=None if is_cpu else lambda _: MIB)
    finding = found(tmp_path, fake, row)["transfer_bound"]
    assert ("to the device" in finding.title) is not is_cpu
    assert "Net.on_before_batch_transfer" in finding.title


@pytest.mark.parametrize(("times", "is_said"), [(361, True), (2, False)])
def test_the_number_of_calls_is_said_where_it_explains_the_time(tmp_path: Path, times: int, is_said: bool) -> None:
    row = action("[LightningModule]Net.log", 9_000_000, count=times * STEPS)
    why = found(tmp_path, FakeRun(phases=phases(other=9_500_000)), row)["logging_bound"].why
    assert ("361 calls per step" in why) == is_said


def test_a_single_checkpoint_of_a_run_is_information(tmp_path: Path) -> None:
    row = action("save_checkpoint", 10_000_000, "callbacks", count=1)
    finding = found(tmp_path, FakeRun(phases=phases(callbacks=10_500_000)), row)["checkpoint_bound"]
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(("buffers", "is_named"), [(60, True), (40, False)])
def test_a_checkpoint_that_may_mostly_be_buffers_names_them(tmp_path: Path, buffers: int, is_named: bool) -> None:
    directory = make_run(tmp_path, FakeRun(phases=phases(callbacks=10_500_000)))
    row = action("save_checkpoint", 10_000_000, "callbacks", count=3)
    (directory / "actions.rank00000.jsonl").write_text(json.dumps(row) + "\n")
    facts = Facts.of(load_run(directory))
    sizes = {"buffer": buffers, "parameter": 20, "optimizer_state": 20, "activation": 90}
    lines = tuple(ByteLine(category=name, bytes=size * MIB) for name, size in sizes.items())
    facts.__dict__["byte_ledgers"] = {
        0: ByteLedger(peak_bytes=sum(sizes.values()), basis="", place="host", lines=lines)
    }
    (finding,) = [finding for finding in examine(facts) if finding.rule == "checkpoint_bound"]
    assert finding.next_steps[-1].startswith("Save in the background")
    if is_named:
        assert "60.0 MiB of buffers" in finding.why
        assert "persistent=False" in finding.next_steps[0]
    else:
        assert "every_n_train_steps" in finding.next_steps[0]


def test_time_outside_all_actions_is_found_and_recovers_at_most_that_time(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(other=30_000_000)))["between_steps"]
    assert "63% of each step is outside the tracked phases" in finding.title
    assert finding.recovers is not None
    assert finding.recovers.max <= 30_000_000


def test_gc_pauses_of_any_phase_are_one_finding(tmp_path: Path) -> None:
    rows = [action("gc_pause", 3_000_000, phase) for phase in ("forward", "backward", "data_wait")]
    finding = found(tmp_path, FakeRun(phases=phases(data_wait=5_000_000)), *rows)["gc_pauses"]
    assert finding.numbers["ns"] == pytest.approx(9_000_000)
    assert finding.numbers["count_per_step"] == pytest.approx(3)
    assert "gc.freeze()" in finding.next_steps[0]


def test_the_rank_that_waits_most_is_named(tmp_path: Path) -> None:
    fake = FakeRun(world_size=3, phases=lambda rank, _: {**HEALTHY, "data_wait": rank * 5_000_000})
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.numbers["rank"] == 2
    assert " on rank 2" in finding.title


def test_a_finding_that_recovers_more_comes_first(tmp_path: Path) -> None:
    rows = [
        action("[Callback]Slow.on_train_batch_end", 8_000_000, "callbacks"),
        action("[LightningModule]Net.on_train_batch_end", 20_000_000),
    ]
    findings = found(tmp_path, FakeRun(phases=phases(callbacks=8_000_000, other=20_000_000)), *rows)
    assert list(findings)[:2] == ["hook_bound", "callback_bound"]


def test_metrics_are_found_by_name_within_the_forward(tmp_path: Path) -> None:
    row = action("[Metric]MulticlassAUROC.compute", 6_000_000, "forward")
    finding = found(tmp_path, FakeRun(phases=phases(forward=12_000_000)), row)["metric_bound"]
    assert "mostly MulticlassAUROC.compute" in finding.title
    assert "MulticlassAUROC.compute() in on_train_epoch_end" in finding.next_steps[0]


@pytest.mark.parametrize(
    ("settings", "is_found"),
    [
        ({"num_workers": 2, "persistent_workers": False}, True),
        ({"num_workers": 2, "persistent_workers": True}, False),
        ({"num_workers": 0, "persistent_workers": False}, False),
    ],
)
def test_workers_that_restart_in_each_epoch_are_found_by_the_time_between_epochs(
    tmp_path: Path, settings: dict[str, Any], is_found: bool
) -> None:
    def between(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "other": 90_000_000 if step % 5 == 4 else 500_000}

    fake = FakeRun(steps=60, phases=between, training={"dataloaders": [settings]})
    directory = make_run(tmp_path, fake)
    set_epochs(directory, 5)
    findings = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}
    assert ("workers_restart" in findings) == is_found
    if is_found:
        assert "persistent_workers=True" in findings["workers_restart"].next_steps[0]
        assert "once every 5 steps" in findings["workers_restart"].why


def profiled(directory: Path, other_profiler: Callable[[int], int | None]) -> Finding | None:
    """Two of ten steps take six times as long as the others."""
    slow = {**HEALTHY, "callbacks": HEALTHY["callbacks"] + 5 * sum(HEALTHY.values())}
    fake = FakeRun(
        steps=60, phases=lambda _, step: slow if step % 10 in {4, 5} else HEALTHY, other_profiler=other_profiler
    )
    rules = {finding.rule: finding for finding in examine(Facts.of(load_run(make_run(directory, fake))))}
    return rules.get("other_profiler")


def test_a_profiler_that_records_some_steps_costs_what_they_and_the_next_ones_take_more(tmp_path: Path) -> None:
    finding = profiled(tmp_path, lambda step: 1 if step % 10 == 4 else None)
    assert finding is not None
    assert finding.recovers is not None
    assert "torch.profiler records the training in 6 of 57 steps" in finding.title
    assert finding.numbers["beyond_others_ns"] == pytest.approx(12 * 5 * sum(HEALTHY.values()) / 57)
    assert finding.recovers.max <= finding.numbers["beyond_others_ns"]


def test_a_python_profiler_that_records_all_steps_is_found_and_a_single_profiled_step_is_not(tmp_path: Path) -> None:
    finding = profiled(tmp_path / "all", lambda _: 2)
    assert finding is not None
    assert "cProfile, records the training." in finding.title
    assert 'Trainer(profiler="advanced")' in finding.next_steps[0]
    assert profiled(tmp_path / "two", lambda step: 1 if step in {30, 31} else None) is None
    assert profiled(tmp_path / "none", lambda _: None) is None


def test_a_rule_that_fails_is_a_finding_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Facts) -> list[Finding]:
        raise KeyError("lost")

    monkeypatch.setattr("lightning_memprof.judge.verdict.RULES", (broken, *RULES))
    row = action("[Callback]Slow.on_train_batch_end", 65_000_000, "callbacks")
    findings = found(tmp_path, FakeRun(phases=phases(callbacks=65_000_000)), row)
    assert findings["rule_failed"].why.startswith("KeyError: 'lost'.")
    assert "callback_bound" in findings


def test_a_function_is_reported_once_by_the_finding_that_is_worth_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claims(rule: str, owner: str, weight: float) -> Callable[[Facts], Finding]:
        does = step("Do less.")
        finding = Finding(
            rule=rule, owner=owner, severity=Severity.WARNING, title=rule, why="", remedies=(does,), weight=weight
        )
        return lambda _: finding

    rules = (claims("small", "Net.work", 0.2), claims("large", "Net.work", 0.5), claims("other", "Net.other", 0.1))
    monkeypatch.setattr("lightning_memprof.judge.verdict.RULES", (*rules, claims("no owner", "", 0.1)))
    assert [*found(tmp_path, FakeRun())] == ["large", "other", "no owner"]


def test_a_hook_inside_the_optimizer_step_is_not_the_optimizer(tmp_path: Path) -> None:
    row = action("[LightningModule]LitGPT.on_before_optimizer_step", 20_000_000, "optimizer")
    loops = {"optimizers": [{"name": "SGD", "foreach": None, "fused": None, "parameters": 900, "device": "cpu"}]}
    rules = found(tmp_path, FakeRun(phases=phases(optimizer=21_000_000), training=loops), row)
    assert rules["hook_bound"].title.startswith("The hook LitGPT.on_before_optimizer_step of the module takes 5")
    assert "all gradients in one call" in rules["hook_bound"].next_steps[0]
    assert "optimizer_bound" not in rules


def test_the_wait_for_a_core_comes_from_the_rest_of_a_phase_before_its_measured_actions(tmp_path: Path) -> None:
    # A logger that sleeps is not ready to run.
    logger, slept = "[Logger]CSVLogger.log_metrics", 10_000_000
    shared = FakeRun(phases=lambda _, __: {**HEALTHY, "other": 14_000_000}, core_wait_ns=lambda _: 3_000_000)
    assert found(tmp_path, shared, action(logger, slept))["logging_bound"].numbers["ns"] == slept


@pytest.mark.parametrize("waits_ns", [0, 10_000_000])
def test_other_processes_on_the_cores_do_not_hide_a_fault(tmp_path: Path, waits_ns: int) -> None:
    callback_ns = 1_800_000

    def shared(_: int, step: int) -> Mapping[str, int]:
        waits = waits_ns if step % 3 else 0
        return {**HEALTHY, "callbacks": callback_ns, "forward": HEALTHY["forward"] + waits}

    fake = FakeRun(phases=shared, core_wait_ns=lambda step: waits_ns if step % 3 else 0)
    row = action("[Callback]Slow.on_train_batch_end", callback_ns, "callbacks")
    rules = found(tmp_path, fake, row)
    assert {"callback_bound", *(["core_wait"] if waits_ns else [])} <= set(rules)
    worth = rules["callback_bound"].recovers
    assert worth is not None
    step_ns = sum(HEALTHY.values()) + callback_ns + waits_ns * 2 / 3
    assert worth.share == pytest.approx(0.75 * callback_ns / step_ns, rel=0.1)


def test_an_optimizer_whose_time_was_a_wait_for_a_core_breaks_no_rule(tmp_path: Path) -> None:
    training = {"optimizers": [{"name": "AdamW", "foreach": False, "fused": False, "parameters": 120, "device": "cpu"}]}
    run = load_run(make_run(tmp_path, FakeRun(phases=phases(optimizer=20_000_000), training=training)))
    facts = Facts.of(run)
    ledger = facts.ledgers[0]
    others = [line for line in ledger.lines if line.part != "optimizer"]
    nothing = TimeLine(part=Part.OPTIMIZER, name="AdamW", ns=0.0)
    vars(facts)["ledgers"] = {0: replace(ledger, lines=(*others, nothing))}
    assert "rule_failed" not in {finding.rule for finding in examine(facts)}
