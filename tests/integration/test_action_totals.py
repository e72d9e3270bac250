"""Who takes the time of a step, known for every step of a real Trainer."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from torchmetrics.classification import MulticlassAccuracy

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.collectors import HookTimings, Pulse
from lightning_memprof.read.run.load import load_run
from training import Perceptron, Raises, loader, manifest, only_run, rows_of, trainer

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.read.run.model import Rank

MS = 1_000_000


def recorder() -> MemProfilerCallback:
    """The pulse, and a window of one step."""
    return MemProfilerCallback(
        schedule=Schedule(wait=2, warmup=0, active=1),
        collectors=[Pulse(), HookTimings()],
        output=OutputOptions(summary=False, report=False, on_error="raise"),
    )


def lead(directory: Path) -> Rank:
    run = load_run(directory)
    assert not run.problems
    assert not run.errors
    return run.lead


def total_ms(rank: Rank, action: str, phase: str | None = None, *, in_window: bool = False) -> float:
    """Milliseconds that the actions whose names end so took in all steps."""
    return sum(
        (row.total_ns or 0) / MS
        for row in rank.actions
        if (row.action or "").endswith(action) and row.in_window == in_window and phase in (None, row.phase)
    )


def counts(rank: Rank, *, in_window: bool = False) -> dict[str, int]:
    """Calls of each action, without the module's or callback's name."""
    found: dict[str, int] = {}
    for row in rank.actions:
        if row.in_window == in_window:
            name = (row.action or "").rpartition(".")[2]
            found[name] = found.get(name, 0) + (row.count or 0)
    return found


def assert_sums(rank: Rank) -> None:
    """The actions of each phase sum to the columns of the pulse, in windows and outside."""
    for in_window in (False, True):
        steps = [row for row in rank.pulse[1:] if (row["window"] is not None) == in_window]
        actions = [row for row in rank.actions if row.in_window == in_window]
        assert {row.steps for row in actions} <= {len(steps)}
        for phase in PHASES:
            mine = sum(row.total_ns or 0 for row in actions if row.phase == phase)
            assert mine == sum(row[f"{phase}_ns"] or 0 for row in steps), phase
        assert sum(row.total_ns or 0 for row in actions) == sum(row["duration_ns"] or 0 for row in steps)


class Measured(Perceptron):
    """Updates and computes a metric in each step, and copies itself in one."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(torch.tensor([[0.9, 0.1]]), torch.tensor([batch_idx % 2]))
        time.sleep(0.002)
        self.log("accuracy", self.accuracy.compute())
        if batch_idx == 1:
            twin = copy.deepcopy(self.accuracy)
            twin.update(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
            pickle.loads(pickle.dumps(self.accuracy))  # noqa: S301 made here


def test_metrics_are_actions_of_every_step_and_can_be_copied(tmp_path: Path) -> None:
    model = Measured()
    trainer(tmp_path, recorder(), max_steps=8).fit(model, loader(8))
    rank = lead(only_run(tmp_path))
    assert counts(rank)["compute"] == counts(rank)["update"] == 6
    assert_sums(rank)
    assert "wrapper" not in repr(model.accuracy.compute)
    assert model.accuracy.compute() == 0.5


class Slow(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.004)


class Busy(Perceptron):
    """Takes its time in hooks, in every twelfth step several times as long as in any before."""

    began = longest = 0.0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        time.sleep(0.003)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)
        if batch_idx % 12 == 11:
            time.sleep(max(0.3, 4 * self.longest))
        else:
            self.longest = max(self.longest, time.perf_counter() - self.began)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()
        gc.collect()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(0.005)


def test_the_totals_name_callbacks_hooks_validations_checkpoints_loggers_and_gc_pauses(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=7, save_top_k=-1)
    training = trainer(
        tmp_path,
        recorder(),
        Slow(),
        checkpoint,
        enable_checkpointing=True,
        val_check_interval=5,
        num_sanity_val_steps=0,
    )
    gc.collect()
    gc.freeze()
    try:
        training.fit(Busy(), loader(40), loader(2))
    finally:
        gc.unfreeze()
    rank = lead(only_run(tmp_path))
    assert_sums(rank)
    called = counts(rank)
    # Of 40 steps the first and the window's are not in the totals.
    assert {row.steps for row in rank.actions if not row.in_window} == {38}
    assert called["run_validation"] == 8
    assert called["save_checkpoint"] == 5
    assert called["on_before_zero_grad"] == called["batch_to_device"] == called["log_metrics"] == called["save"] == 38
    assert called["gc_pause"] >= 38
    assert total_ms(rank, "Slow.on_train_batch_end", "callbacks") >= 38 * 4
    assert total_ms(rank, "Busy.on_before_zero_grad", "optimizer") >= 38 * 3
    assert total_ms(rank, "run_validation", "other") >= 8 * 2 * 5
    assert total_ms(rank, "gc_pause", "other") > total_ms(rank, "Busy.on_train_batch_start", "other")
    assert total_ms(rank, "save_checkpoint", "callbacks") > 0
    stalls = {row.step: row for row in rank.stalls}
    assert {11, 23, 35} <= stalls.keys()
    # A busy machine may take longer in one of them.
    named = [stalls[step] for step in (11, 23, 35) if stalls[step].action == "[LightningModule]Busy.on_train_batch_end"]
    assert len(named) >= 2
    assert all((stall.action_ns or 0) >= 300 * MS for stall in named)


@pytest.mark.parametrize("alone", [True, False])
def test_the_profiler_alone_and_both_together_have_the_same_totals(tmp_path: Path, alone: bool) -> None:
    schedule = Schedule(wait=2, warmup=0, active=1)
    callbacks = [] if alone else [recorder()]
    profiler = ExtendedPyTorchProfiler(schedule=schedule)
    trainer(tmp_path, *callbacks, Slow(), profiler=profiler).fit(Perceptron(), loader(8))
    rank = lead(only_run(tmp_path))
    assert_sums(rank)
    assert total_ms(rank, "Slow.on_train_batch_end") >= 6 * 4
    assert total_ms(rank, "Slow.on_train_batch_end", in_window=True) >= 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_have_totals_too(tmp_path: Path, stage: str) -> None:
    hook = f"on_{'validation' if stage == 'validate' else stage}_batch_end"

    def slow(*_: Any) -> None:
        time.sleep(0.003)

    model = type("Model", (Perceptron,), {hook: slow})()
    getattr(trainer(tmp_path, recorder()), stage)(model, loader(8))
    rank = lead(next(tmp_path.rglob("memprofiler")))
    assert_sums(rank)
    assert total_ms(rank, f"Model.{hook}", "other") >= 6 * 3


def test_gradient_accumulation_puts_a_hook_in_each_phase_that_it_interrupts(tmp_path: Path) -> None:
    class Hooked(Perceptron):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            time.sleep(0.002)

    trainer(tmp_path, recorder(), accumulate_grad_batches=2).fit(Hooked(), loader(12))
    rank = lead(only_run(tmp_path))
    assert_sums(rank)
    assert counts(rank)["on_before_backward"] == 10
    assert total_ms(rank, "Hooked.on_before_backward", "other") >= 4 * 2
    assert total_ms(rank, "Hooked.on_before_backward", "optimizer") >= 4 * 2


def test_a_fit_inside_a_fit_counts_its_own_actions_only(tmp_path: Path) -> None:
    class Outer(Perceptron):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer(tmp_path / "inner", recorder(), Slow(), limit_val_batches=1, val_check_interval=2).fit(
                    Perceptron(), loader(6), loader(1)
                )

    trainer(tmp_path / "outer", recorder(), limit_val_batches=1, val_check_interval=4).fit(
        Outer(), loader(8), loader(1)
    )
    outer, inner = lead(only_run(tmp_path / "outer")), lead(only_run(tmp_path / "inner"))
    assert_sums(outer)
    assert_sums(inner)
    assert counts(outer)["run_validation"] == 2
    assert counts(inner)["run_validation"] == 3
    assert total_ms(inner, "Slow.on_train_batch_end") >= 4 * 4
    assert total_ms(outer, "Slow.on_train_batch_end") == 0
    assert total_ms(outer, "Outer.on_train_batch_end") >= 4 * 4


def test_an_exception_leaves_the_totals_and_nothing_of_ours(tmp_path: Path) -> None:
    methods, before = (CSVLogger.log_metrics, _EvaluationLoop.run), list(gc.callbacks)
    with pytest.raises(RuntimeError, match="mine"):
        trainer(tmp_path, recorder(), Slow()).fit(Raises(RuntimeError("mine"), 6), loader(8))
    assert (CSVLogger.log_metrics, _EvaluationLoop.run) == methods
    assert gc.callbacks == before
    run = only_run(tmp_path)
    rank = lead(run)
    assert_sums(rank)
    assert {row.steps for row in rank.actions if not row.in_window} == {5}
    assert "memprofiler/actions.rank00000.jsonl" in [row["path"] for row in rows_of(run, "artifact")]
    assert manifest(run)[-1]["status"] == "exception"


def test_a_run_without_the_file_has_no_actions_and_no_stalls(tmp_path: Path) -> None:
    trainer(tmp_path, recorder()).fit(Perceptron(), loader(5))
    run = only_run(tmp_path)
    (run / "actions.rank00000.jsonl").unlink()
    rank = load_run(run).lead
    assert (rank.actions, rank.stalls) == ((), ())
