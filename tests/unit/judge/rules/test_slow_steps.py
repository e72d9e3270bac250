"""What the rules about runs say, and where they are silent, of made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_memory import FakeMemory
from fake_runs import HEALTHY, FakeRun, make_run
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import pulse_statistics, window_steps
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, Severity, examine, verdict_of
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB

MS = 1_000_000


def found(tmp_path: Path, fake: FakeRun) -> dict[str, Finding]:
    return found_in(make_run(tmp_path, fake))


def found_in(directory: Path) -> dict[str, Finding]:
    run = load_run(directory)
    return {finding.rule: finding for finding in examine(Facts.of(run, memory=memory_report(run)))}


def in_some(steps: Callable[[int], bool], **changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _, step: {**HEALTHY, **changes} if steps(step) else HEALTHY


def test_what_is_info_comes_behind_what_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(memory=FakeMemory(kept_bytes=64 * MIB))))
    findings = examine(Facts.of(run, memory=memory_report(run)))
    assert [finding.rule for finding in findings] == ["nothing_found", "activation_peak"]
    assert verdict_of(run).rule == "nothing_found"


def test_what_activations_hold_names_the_blocks_to_checkpoint(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(memory=FakeMemory(kept_bytes=64 * MIB)))["activation_peak"]
    assert finding.numbers["checkpointed"] == "net.blocks.0-3"
    assert "checkpointing net.blocks.0-3 (4 blocks) would save" in finding.why
    assert finding.evidence[0].artifact.endswith("window000/rank00000.saved_tensors.jsonl")


def test_the_activations_of_the_model_itself_have_a_name(tmp_path: Path) -> None:
    run = make_run(tmp_path, FakeRun(memory=FakeMemory(kept_bytes=64 * MIB)))
    path = run / "window000" / "rank00000.saved_tensors.jsonl"
    path.write_text(path.read_text().replace('"net.blocks.0.norm"', '""'))
    loaded = load_run(tmp_path)
    (finding,) = [
        finding
        for finding in examine(Facts.of(loaded, memory=memory_report(loaded)))
        if finding.rule == "activation_peak"
    ]
    assert "the largest: the model itself (64.0 MiB), " in finding.why


@pytest.mark.parametrize(("precision", "is_advised"), [("32-true", True), ("bf16-mixed", False), ("16-true", False)])
def test_half_precision_is_not_advised_to_those_who_train_in_it(
    tmp_path: Path, precision: str, is_advised: bool
) -> None:
    memory = FakeMemory(kept_bytes=64 * MIB)
    fake = FakeRun(memory=memory, device_bytes=lambda _: 1024 * MIB, training={"precision": precision})
    steps = found(tmp_path, fake)["activation_peak"].next_steps
    assert any("bf16-mixed" in step for step in steps) == is_advised
    assert not any("FSDP" in step for step in steps)


def test_a_validation_has_neither_backward_nor_optimizer(tmp_path: Path) -> None:
    evaluation = {**HEALTHY, "backward": 0, "optimizer": 0}
    rank = load_run(make_run(tmp_path, FakeRun(stage="validate", phases=lambda *_: evaluation))).lead
    statistics = pulse_statistics(rank)
    assert statistics is not None
    assert (statistics.breakdown_ns["backward"], statistics.breakdown_ns["optimizer"]) == (None, None)
    assert statistics.breakdown_ns["forward"] == HEALTHY["forward"]
    step, *_ = window_steps(rank, rank.windows[0])
    assert step.breakdown_ns is not None
    assert step.breakdown_ns["backward"] is None
    assert sum(ns or 0 for ns in step.breakdown_ns.values()) == step.duration_ns


@pytest.mark.parametrize("phase", ["other", "callbacks"])
def test_advice_for_a_validation_names_no_setting_of_a_training(tmp_path: Path, phase: str) -> None:
    fake = FakeRun(stage="validate", phases=lambda *_: {**HEALTHY, "backward": 0, "optimizer": 0, phase: 30 * MS})
    said = verdict_of(load_run(make_run(tmp_path, fake)))
    assert said.rule in ("between_steps", "callback_bound")
    assert "on_train_epoch_end" not in said.next
    assert "val_check" not in said.next
    assert "log_every" not in said.next
    assert "every_n" not in said.next


def test_few_batches_of_a_validation_are_not_told_to_train(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(stage="validate", steps=2, windows=()))))
    assert said.next == "Run at least 20 steps."


def test_slow_steps_are_told_with_their_rhythm_their_phase_and_a_schedule_that_sees_one(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, phases=in_some(lambda step: step % 8 == 7, forward=150 * MS))
    finding = found(tmp_path, fake)["slow_steps"]
    assert finding.title == "Every 8th step takes 8.9 times as long as the median, mostly in forward."
    assert finding.numbers["steps"] == [7, 15, 23, 31, 39, 47, 55]
    assert "steps=(7,)" in finding.next_steps[-1]
    assert (7, 55) in {evidence.steps for evidence in finding.evidence}


@pytest.mark.parametrize("tries", [True, False])
def test_slow_steps_of_a_gpu_whose_cudnn_tries_its_algorithms_may_have_new_shapes(tmp_path: Path, tries: bool) -> None:
    slow = in_some(lambda step: step % 8 == 7, forward=150 * MS)
    fake = FakeRun(steps=60, phases=slow, device_bytes=lambda _: MIB, training={"cudnn_benchmark": tries})
    finding = found(tmp_path, fake)["slow_steps"]
    assert ("cuDNN" in finding.why) is tries
    assert ("Trainer(benchmark=False)" in finding.next_steps[0]) is tries


@pytest.mark.parametrize(("operator", "tries"), [("aten::cudnn_convolution", True), ("aten::mm", False)])
def test_cudnns_benchmark_is_named_where_a_model_convolves(tmp_path: Path, operator: str, tries: bool) -> None:
    slow = in_some(lambda step: step % 8 == 7, forward=150 * MS)
    fake = FakeRun(steps=60, phases=slow, device_bytes=lambda _: MIB, training={"cudnn_benchmark": True})
    line = TimeLine(part=Part.FORWARD, module="net", operator=operator, ns=MS)
    ledger = TimeLedger(step_ns=9 * MS, median_ns=9 * MS, steps=2, basis="", lines=(), passes=(line,))
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), device_ledger=ledger)
    run = load_run(make_run(tmp_path / "log", fake))
    (finding,) = (each for each in examine(Facts.of(run, (trace,))) if each.rule == "slow_steps")
    assert ("cuDNN" in finding.why) is tries


def test_one_step_that_a_busy_machine_holds_up_is_information(tmp_path: Path) -> None:
    findings = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step == 30, forward=400 * MS)))
    assert findings["slow_steps"].severity is Severity.INFO
    assert next(iter(findings)) == "nothing_found"


@pytest.mark.parametrize("slow", [(30,), (17, 31), (13, 26, 39), (9, 17, 31, 50)])
def test_slow_steps_without_a_rhythm_that_nothing_explains_are_information(
    tmp_path: Path, slow: tuple[int, ...]
) -> None:
    findings = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step in slow, forward=9000 * MS)))
    assert findings["slow_steps"].severity is Severity.INFO
    assert findings["slow_steps"].title.startswith(f"{len(slow)} of 56 steps" if len(slow) != 3 else "Every 13th")
    assert "a busy machine may be the cause" in findings["slow_steps"].why
    assert "triggers=Triggers(anomalies=[SlowStep()])" in findings["slow_steps"].next_steps[-1]
    assert next(iter(findings)) == "nothing_found"


def test_slow_steps_in_a_rhythm_matter_without_an_explanation(tmp_path: Path) -> None:
    slow = (13, 26, 39, 52)
    finding = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step in slow, forward=9000 * MS)))
    assert finding["slow_steps"].severity is Severity.CRITICAL
    assert "busy machine" not in finding["slow_steps"].why
    assert "SlowStep" not in " ".join(finding["slow_steps"].next_steps)


def test_a_hiccup_does_not_hide_the_rhythm_of_the_slow_steps(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "backward": 200 * MS if step % 6 == 5 else 45 * MS if step in (8, 20, 21) else 10 * MS}

    assert found(tmp_path, FakeRun(steps=60, phases=phases))["slow_steps"].numbers["period"] == 6


def test_steps_that_are_slow_by_chance_between_them_do_not_hide_a_rhythm(tmp_path: Path) -> None:
    slow = {step for step in range(60) if step % 9 == 8} | {11, 22, 31}
    finding = found(tmp_path, FakeRun(steps=60, phases=in_some(lambda step: step in slow, forward=400 * MS)))
    assert finding["slow_steps"].numbers["period"] == 9
    assert finding["slow_steps"].severity is Severity.CRITICAL


@pytest.mark.parametrize(
    "fake",
    [
        pytest.param(
            FakeRun(steps=60, phases=lambda _, step: {**HEALTHY, "forward": (step * 7919 % 60) ** 2 * 100_000}),
            id="batches of different lengths",
        ),
        pytest.param(
            FakeRun(
                steps=60,
                phases=in_some(lambda step: step % 4 == 3, optimizer=90 * MS),
                training={"accumulate_grad_batches": 4},
            ),
            id="accumulation",
        ),
        pytest.param(FakeRun(steps=60, phases=in_some(lambda step: step % 6 == 5, forward=40 * MS)), id="a little"),
        pytest.param(FakeRun(steps=60, phases=in_some(lambda step: step % 2 == 1, forward=90 * MS)), id="half of all"),
    ],
)
def test_steps_that_are_not_few_apart_and_long_are_no_finding(tmp_path: Path, fake: FakeRun) -> None:
    assert "slow_steps" not in found(tmp_path, fake)


def with_checkpoint(directory: Path, step: int, duration_ns: int) -> Path:
    row = {"step": step, "global_step": step, "recorded": True, "depth": 1}
    hook = {"action": "[Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end", "start_ns": 10**18}
    saving = {"action": "[Strategy]SingleDeviceStrategy.save_checkpoint", "start_ns": 10**18}
    series = directory / "window000" / "rank00000.hooks.jsonl"
    rows = [json.loads(line) for line in series.read_text().splitlines()]
    end = max(row["start_ns"] + row["duration_ns"] for row in rows if row["step"] == step and row["depth"] == 0)
    rows += [{**row, **event, "start_ns": end, "duration_ns": duration_ns} for event in (hook, saving)]
    for entry in rows:
        if entry["step"] == step and entry["depth"] == -1:
            entry["duration_ns"] = end + duration_ns - entry["start_ns"]
    series.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_checkpoint_that_only_one_step_of_many_saved_is_no_finding(tmp_path: Path) -> None:
    fake = FakeRun(steps=300, windows=((20, 21),), phases=in_some(lambda step: step == 20, callbacks=100 * MS))
    assert "checkpoint_bound" not in found_in(with_checkpoint(make_run(tmp_path, fake), 20, 100 * MS))


def set_peak(directory: Path, rank: int, size: int, column: str = "device_peak_bytes") -> None:
    pulse = directory / f"pulse.rank{rank:05d}.csv"
    header, *lines = pulse.read_text().splitlines()
    index = header.split(",").index(column)
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[index] = str(size)
    pulse.write_text("\n".join([header, *map(",".join, rows)]) + "\n")


@pytest.mark.parametrize(
    ("size", "severity"), [(GIB + 400 * MIB, Severity.WARNING), (3 * GIB, Severity.CRITICAL), (GIB + 100 * MIB, None)]
)
def test_a_device_that_is_fuller_than_the_others_is_named(tmp_path: Path, size: int, severity: Severity | None) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=4, device_bytes=lambda _: GIB))
    set_peak(directory, 2, size)
    finding = found_in(directory).get("memory_imbalance")
    assert (finding.severity if finding else None) is severity
    if finding is not None:
        assert finding.numbers["rank"] == 2
        assert "on its device" in finding.title


@pytest.mark.parametrize(("more", "is_found"), [(0.31, True), (0.2, False)])
def test_without_a_device_a_rank_that_needs_more_of_the_host_is_named(
    tmp_path: Path, more: float, is_found: bool
) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2, rss_bytes=lambda _: 2 * GIB))
    set_peak(directory, 0, round((1 + more) * 2 * GIB), "rss_bytes")
    finding = found_in(directory).get("memory_imbalance")
    assert (finding is not None and "Rank 0 peaks at 2.62 GiB on the host" in finding.title) == is_found


def test_evidence_of_a_window_has_its_file_its_steps_and_their_time(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    facts = Facts.of(run)
    (evidence,) = facts.recorded(run.lead, "hooks", (3,))
    rows = {row["step"]: row for row in run.lead.pulse}
    start, duration = rows[3]["start_ns"], rows[3]["duration_ns"]
    assert start is not None
    assert duration is not None
    assert evidence.artifact == "memprofiler/window000/rank00000.hooks.jsonl"
    assert (evidence.window, evidence.steps) == (0, (3, 3))
    assert (evidence.start_ns, evidence.end_ns) == (start, start + duration)
    assert facts.recorded(run.lead, "hooks", (17,)) == ()
    assert facts.recorded(run.lead, "nobody") == ()


@pytest.mark.parametrize(
    ("name", "tensors", "size", "is_found"),
    [("SGD", 4, 64, False), ("SGD", 400, 64, True), ("AdamW", 4, 64, True), ("AdamW", 4, 1, False)],
)
def test_a_loop_over_few_tensors_costs_where_each_operator_reads_them_again(
    tmp_path: Path, name: str, tensors: int, size: int, *, is_found: bool
) -> None:
    optimizer = {"name": name, "foreach": None, "fused": None, "parameters": tensors, "device": "cpu"}
    training = {"optimizers": [optimizer], "largest_parameters": [{"name": "head.weight", "bytes": size * MIB}]}
    fake = FakeRun(phases=lambda *_: {**HEALTHY, "optimizer": 8 * MS}, training=training)
    assert ("optimizer_bound" in found(tmp_path, fake)) is is_found
