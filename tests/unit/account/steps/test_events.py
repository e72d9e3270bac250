from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from known import known
from lightning_memprof import load_run
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import (
    ACTION_PARTS,
    classify,
    event_totals,
    exclusive_times,
    part_of,
    rank_events,
    window_events,
)
from lightning_memprof.account.steps.pauses import pauses
from lightning_memprof.artifacts.series import PHASES, HookRow
from lightning_memprof.read.run.model import RecordedWindow

CHECKPOINTER = "[Callback]ModelCheckpoint{'monitor': 'a.b'}"
ACTIONS = [
    "[_TrainingEpochLoop].train_dataloader_next",
    "[DataLoader]Noise.fetch",
    "[Strategy]DDPStrategy.batch_to_device",
    f"{CHECKPOINTER}.on_train_batch_end",
    "run_training_batch",
    "[Strategy]DDPStrategy.training_step",
    "[Precision]Precision.backward",
    "[Optimizer]AdamW.step",
    "run_validation",
    "save_checkpoint",
    "logging",
    "[MemProfiler]batch_end",
    "step",
]


@pytest.mark.parametrize(
    ("action", "around", "stage", "part"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", Part.UNTRACKED, "fit", Part.DATA_WAIT),
        ("[DataLoader]Noise.fetch", Part.DATA_WAIT, "fit", Part.DATA_WAIT),
        ("[_EvaluationLoop].val_next", Part.VALIDATION, "fit", Part.VALIDATION),
        ("[_EvaluationLoop].val_next", Part.UNTRACKED, "validate", Part.DATA_WAIT),
        ("[_PredictionLoop].predict_next", Part.UNTRACKED, "predict", Part.DATA_WAIT),
        ("[Strategy]X.batch_to_device", Part.UNTRACKED, "fit", Part.TRANSFER),
        ("[Strategy]X.batch_to_device", Part.VALIDATION, "fit", Part.VALIDATION),
        ("[LightningModule]M.on_after_batch_transfer", Part.TRANSFER, "fit", Part.TRANSFER),
        ("[Precision]MixedPrecision.convert_input", Part.UNTRACKED, "fit", Part.TRANSFER),
        ("[Strategy]X.training_step", Part.OPTIMIZER, "fit", Part.FORWARD),
        ("[Strategy]X.validation_step", Part.VALIDATION, "fit", Part.VALIDATION),
        ("[Strategy]X.validation_step", Part.UNTRACKED, "validate", Part.FORWARD),
        ("[Strategy]X.backward", Part.OPTIMIZER, "fit", Part.BACKWARD),
        ("[Precision]Precision.backward", Part.FORWARD, "fit", Part.BACKWARD),
        ("[LightningModule]M.on_after_backward", Part.BACKWARD, "fit", Part.BACKWARD),
        ("[LightningModule]M.backward", Part.FORWARD, "fit", Part.FORWARD),
        ("[Optimizer]AdamW.step", Part.FORWARD, "fit", Part.OPTIMIZER),
        ("[Optimizer]AdamW.zero_grad", Part.FORWARD, "fit", Part.OPTIMIZER),
        ("[LightningModule]M.lr_scheduler_step", Part.UNTRACKED, "fit", Part.OPTIMIZER),
        ("[Callback]X.on_train_batch_end", Part.UNTRACKED, "fit", Part.CALLBACK),
        ("[Callback]X.on_validation_end", Part.VALIDATION, "fit", Part.CALLBACK),
        ("[Callback]X.on_validation_batch_end", Part.VALIDATION, "fit", Part.VALIDATION),
        ("[Callback]X.on_validation_batch_end", Part.UNTRACKED, "validate", Part.CALLBACK),
        ("run_validation", Part.UNTRACKED, "fit", Part.VALIDATION),
        ("save_checkpoint", Part.CALLBACK, "fit", Part.CHECKPOINT),
        ("[Strategy]X.save_checkpoint", Part.CHECKPOINT, "fit", Part.CHECKPOINT),
        ("[CheckpointIO]TorchCheckpointIO.remove_checkpoint", Part.CALLBACK, "fit", Part.CHECKPOINT),
        ("logging", Part.VALIDATION, "fit", Part.LOGGING),
        ("[Logger]CSVLogger.save", Part.UNTRACKED, "fit", Part.LOGGING),
        ("[MemProfiler]after_forward", Part.OPTIMIZER, "fit", Part.UNTRACKED),
        ("run_training_batch", Part.UNTRACKED, "fit", Part.UNTRACKED),
        ("[LightningModule]M.on_train_batch_start", Part.UNTRACKED, "fit", Part.UNTRACKED),
    ],
)
def test_an_action_belongs_to_its_part(action: str, around: Part, stage: str, part: Part) -> None:
    assert part_of(action, around, stage) == part


@pytest.mark.parametrize(
    ("action", "stage", "phase"),
    [
        # Parts of a step that the pulse has in the phase around them.
        ("[Strategy]X.pre_backward", "fit", None),
        ("[LightningModule]M.lr_scheduler_step", "fit", None),
        ("run_validation", "fit", None),
        ("save_checkpoint", "fit", None),
        ("[Strategy]X.validation_step", "fit", "other"),
        ("[Callback]X.on_validation_batch_end", "fit", "other"),
        ("[Callback]X.on_validation_batch_end", "validate", "callbacks"),
        ("[Strategy]X.validation_step", "validate", "forward"),
    ],
)
def test_an_action_belongs_to_its_phase(action: str, stage: str, phase: str | None) -> None:
    assert classify(action, stage) == phase


def row(action: str, start: int, duration: int, depth: int = 0, step: int = 2) -> dict[str, Any]:
    return {
        "step": step,
        "global_step": step,
        "recorded": True,
        "action": action,
        "start_ns": start,
        "duration_ns": duration,
        "depth": depth,
    }


def window(directory: Path, rows: list[dict[str, Any]]) -> RecordedWindow:
    path = directory / "rank00000.hooks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recorded_window(4, (2,), {"hooks": path})


def recorded_window(index: int, steps: tuple[int, ...], series: dict[str, Path]) -> RecordedWindow:
    return RecordedWindow(
        rank=0,
        index=index,
        steps=steps,
        planned_steps=steps,
        warmup_steps=(),
        closed=True,
        truncated=False,
        reason=None,
        series=series,
    )


def test_a_step_is_shared_among_its_events_and_callbacks_are_named(tmp_path: Path) -> None:
    rows = [
        row("step", 100, 200, -1),
        row("[_TrainingEpochLoop].train_dataloader_next", 100, 10),
        row("run_training_batch", 115, 80),
        row("[LightningModule]M.optimizer_step", 116, 70, 1),
        row("[Strategy]S.training_step", 120, 20, 2),
        row("[Strategy]S.backward", 140, 30, 2),
        row("[Callback]C.on_after_backward", 160, 5, 3),
        row(f"{CHECKPOINTER}.on_train_batch_end", 200, 40),
        row("save_checkpoint", 210, 20, 1),
        row("[Callback]C.on_save_checkpoint", 212, 3, 2),
        row("run_validation", 250, 40),
        row("[Callback]C.on_validation_end", 280, 7, 1),
        row("logging", 287, 2, 1),
    ]
    made = window(tmp_path, rows)
    (step,) = window_events(made, "fit")
    assert made.problems == []
    assert (step.window, step.step, step.start_ns, step.duration_ns) == (4, 2, 100, 200)
    assert step.parts_ns == {
        "data_wait": 10,
        "transfer": 0,
        "forward": 20,
        "backward": 25,
        "optimizer": 20,
        "callback": 5 + 20 + 3 + 7,
        "validation": 31,
        "checkpoint": 17,
        "logging": 2,
        "untracked": 200 - 160,
    }
    assert step.callbacks_ns == {"ModelCheckpoint{'monitor': 'a.b'}": 20, "C": 15}
    times = exclusive_times([HookRow(**each) for each in rows], 100, 300, "fit")
    assert times == {"data_wait": 10, "forward": 20, "backward": 25, "optimizer": 20, "callbacks": 52, "other": 73}
    assert [
        (event.action, event.offset_ns, event.duration_ns, event.self_ns, event.depth) for event in step.events[:3]
    ] == [
        ("[_TrainingEpochLoop].train_dataloader_next", 0, 10, 10, 0),
        ("run_training_batch", 15, 80, 10, 0),
        ("[LightningModule]M.optimizer_step", 16, 70, 20, 1),
    ]


nested_rows = st.lists(
    st.builds(row, st.sampled_from(ACTIONS), st.integers(-100, 1_100), st.integers(-5, 1_500), st.integers(0, 4)),
    max_size=30,
)


@pytest.mark.slow
@given(nested_rows, st.integers(0, 1_000))
def test_parts_sum_to_the_step_for_any_rows(tmp_path_factory: Any, rows: list[dict[str, Any]], length: int) -> None:
    made = window(tmp_path_factory.mktemp("run"), [*rows, row("step", 0, length, -1)])
    (step,) = window_events(made, "fit")
    assert tuple(step.parts_ns) == ACTION_PARTS
    assert sum(step.parts_ns.values()) == length
    assert min(step.parts_ns.values()) >= 0
    assert sum(step.callbacks_ns.values()) == step.parts_ns[Part.CALLBACK]
    times = exclusive_times([HookRow(**each) for each in rows], 0, length, "fit")
    assert tuple(times) == PHASES
    assert sum(times.values()) == length
    assert min(times.values()) >= 0
    offsets = [event.offset_ns for event in step.events]
    assert offsets == sorted(offsets)
    for event in step.events:
        assert 0 <= event.self_ns <= event.duration_ns
        assert 0 <= event.offset_ns <= event.offset_ns + event.duration_ns <= length


def test_damaged_rows_hide_only_themselves(tmp_path: Path) -> None:
    made = window(tmp_path, [row("step", 0, 10, -1), row("a", 0, 5), {"step": 2, "action": None}, {"step": "x"}])
    path = made.series["hooks"]
    path.write_text("{broken\n" + path.read_text())
    (step,) = window_events(made, "fit")
    assert [event.action for event in step.events] == ["a"]
    assert "rows could be read" in made.problems[0].message


def test_a_step_that_has_no_span_is_left_out(tmp_path: Path) -> None:
    assert window_events(window(tmp_path, [row("a", 0, 5)]), "fit") == []


def test_totals_count_each_action_of_all_steps(tmp_path: Path) -> None:
    steps = rank_events(load_run(make_run(tmp_path, FakeRun(windows=((2, 3), (9,))))).lead)
    assert [step.step for step in steps] == [2, 3, 9]
    totals = {total.action: total for total in event_totals(steps)}
    batch, step = totals["run_training_batch"], totals["[LightningModule]LitGPT.optimizer_step"]
    assert (batch.count, batch.self_ns, batch.max_self_ns) == (3, 0, 0)
    assert (
        step.total_ns
        == batch.total_ns
        == sum(sum(step.parts_ns[part] for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER)) for step in steps)
    )
    assert step.self_ns == sum(step.parts_ns[Part.OPTIMIZER] for step in steps)
    assert step.max_self_ns <= step.max_ns <= step.total_ns


def test_pauses_are_summed_over_recorded_steps(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=((2, 3),)))
    run = load_run(directory)
    assert pauses(run.lead) is None
    rows = [
        {"step": 1, "recorded": False, "duration_ns": 10**9, "generation": 2, "collected": 5, "uncollectable": 0},
        {"step": 2, "recorded": True, "duration_ns": 30, "generation": 0, "collected": 5, "uncollectable": 0},
        {"step": 3, "recorded": True, "duration_ns": 50, "generation": 2, "collected": 1, "uncollectable": 1},
    ]  # fmt: skip
    path = directory / "window000" / "rank00000.garbage.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series = {**run.lead.windows[0].series, "garbage": path}
    made = recorded_window(0, (2, 3), series)
    found = known(pauses(replace(run.lead, windows=(made,))))
    assert (found.count, found.total_ns, found.max_ns, found.collected, found.uncollectable) == (2, 80, 50, 6, 1)
    assert found.generations == {0: (1, 30), 2: (1, 50)}
