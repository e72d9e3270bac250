from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import Position
from lightning_memprof.capture.session import Session
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.driver import StageActions, StepDriver, calling, position_source, stage_actions
from lightning_memprof.schedule import Action, Point, Schedule
from lightning_memprof.testing import FakeCollector
from sessions import POINTS, context, session
from training import Noise, Package, Perceptron, trainer

FIT = StageActions(
    fetch="fetch",
    batch_start="batch_start",
    batch_end="batch_end",
    forward="forward",
    before_backward="before_backward",
    after_backward="after_backward",
    before_optimizer_step="before_optimizer_step",
    optimizer=("optimizer_step", "zero_grad"),
    callbacks=("callback",),
)


class Trainer:
    """Calls the handlers of a driver as a Trainer's profiler would."""

    def __init__(self, made: Session, actions: StageActions = FIT) -> None:
        self.asked: list[int] = []
        starts, stops = StepDriver(made, actions, self.position).handlers()
        self.starts = {name: calling(made.clock.log, handler) for name, handler in starts.items()}
        self.stops = {name: calling(made.clock.log, handler) for name, handler in stops.items()}

    def position(self, counted: int) -> Position:
        self.asked.append(counted)
        step = len(self.asked) - 1
        return Position(step, step, 0, step)

    def do(self, *actions: str | tuple[Any, ...]) -> None:
        """Run actions one after the other; a tuple is an action and those in it."""
        for action in actions:
            name, *inner = (action,) if isinstance(action, str) else action
            self.starts.get(name, lambda: None)()
            self.do(*inner)
            self.stops.get(name, lambda: None)()

    def batch(self, *extra: str) -> None:
        """One batch of Lightning's automatic optimization."""
        self.do(
            "fetch",
            "callback",
            "batch_start",
            (
                "optimizer_step",
                "forward",
                "zero_grad",
                "before_backward",
                "after_backward",
                "before_optimizer_step",
            ),
            "batch_end",
            *extra,
        )


@pytest.fixture
def fake() -> FakeCollector:
    return FakeCollector(follows=True)


@pytest.fixture
def made(tmp_path: Path, fake: FakeCollector) -> Iterator[Session]:
    with context(tmp_path) as run, session(run, lambda _: Action.RECORD, [fake]) as opened:
        yield opened


def test_a_batch_passes_every_point_in_order(made: Session, fake: FakeCollector) -> None:
    trainer = Trainer(made)
    trainer.batch()
    trainer.batch()
    made.close()
    points = [Point.STEP_START, *POINTS, Point.STEP_END]
    assert [(mark.step, mark.point) for mark in fake.marks] == [(step, point) for step in (0, 1) for point in points]


def test_every_phase_of_a_batch_gets_its_time(made: Session, fake: FakeCollector) -> None:
    Trainer(made).batch()
    made.close()
    (record,) = fake.steps
    spent = dict(zip(PHASES, record.phases_ns, strict=True))
    assert all(ns > 0 for ns in spent.values()), spent
    assert sum(spent.values()) == record.duration_ns


def test_a_hook_at_a_point_of_a_step_is_an_action_of_the_phase_around_it(made: Session, fake: FakeCollector) -> None:
    hooks = ("before_backward", "after_backward", "before_optimizer_step", "batch_end")
    trainer = Trainer(made, replace(FIT, within=hooks))
    trainer.batch()
    made.close()
    (record,) = fake.steps
    ran = {
        action: PHASES[phase]
        for (action, phase), count in zip(made.clock.actions, record.times.actions[1], strict=True)
        if count
    }
    assert {hook: ran[hook] for hook in hooks} == dict.fromkeys(hooks[:3], "optimizer") | {"batch_end": "other"}
    assert ran["backward"] == "backward"
    assert sum(record.times.actions[0]) == record.duration_ns
    assert [mark.point for mark in fake.marks if mark.point in POINTS] == list(POINTS)


def test_a_transfer_after_the_batch_belongs_to_the_validation_around_it(made: Session, fake: FakeCollector) -> None:
    trainer = Trainer(made, replace(FIT, transfers=("to_device",), within=("run_validation",)))
    trainer.do("fetch", "to_device")
    trainer.batch(("run_validation", "to_device", "to_device"))  # type: ignore[arg-type]
    made.close()
    (record,) = fake.steps
    _, entries = record.times.actions
    assert entries[[action for action, _ in made.clock.actions].index("to_device")] == 1


def test_what_comes_after_the_batch_belongs_to_it_and_the_fetch_to_the_next(made: Session, fake: FakeCollector) -> None:
    trainer = Trainer(made)
    trainer.batch("callback", "save_checkpoint")
    assert made._run.position == Position(0, 0, 0, 0)
    trainer.do("fetch")
    assert made._run.position == Position(1, 1, 0, 1)
    assert [record.step for record in fake.steps] == [0]


def test_several_fetches_in_front_of_a_batch_begin_one_step(made: Session, fake: FakeCollector) -> None:
    trainer = Trainer(made)
    trainer.do("fetch", "fetch")
    trainer.batch()
    trainer.batch()
    made.close()
    assert [record.step for record in fake.steps] == [0, 1]
    assert trainer.asked == [0, 0]


def test_a_training_step_that_fetches_its_own_batches_begins_with_the_hook_in_front(
    made: Session, fake: FakeCollector
) -> None:
    trainer = Trainer(made)
    for _ in range(2):
        trainer.do("batch_start", ("forward", "fetch"), "batch_end")
    made.close()
    assert trainer.asked == [1, 1]
    assert [record.step for record in fake.steps] == [0, 1]
    assert all(record.phases_ns[PHASES.index("data_wait")] > 0 for record in fake.steps)


def test_without_a_backward_no_point_of_one_is_passed(made: Session, fake: FakeCollector) -> None:
    actions = StageActions(
        fetch="fetch",
        batch_start="batch_start",
        batch_end="batch_end",
        forward="forward",
        before_backward=None,
        after_backward=None,
        before_optimizer_step=None,
        optimizer=(),
        callbacks=(),
    )
    Trainer(made, actions).batch()
    made.close()
    points = (Point.STEP_START, Point.BATCH_START, Point.AFTER_FORWARD, Point.BATCH_END, Point.STEP_END)
    assert tuple(mark.point for mark in fake.marks) == points


def lightning(ready: int = 0, epoch: int = 0, global_step: int = 0) -> Any:
    progress = SimpleNamespace(total=SimpleNamespace(ready=ready))
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=progress),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(completed=epoch)),
    )
    return SimpleNamespace(fit_loop=loop, global_step=global_step)


def test_a_resumed_fit_counts_its_steps_from_the_run_and_the_schedule_from_this_process() -> None:
    trainer = lightning(ready=40, epoch=2, global_step=20)
    position = position_source(trainer, "fit", Schedule())
    assert position(0) == Position(40, 20, 2, 0)
    trainer.fit_loop.epoch_loop.batch_progress.total.ready = 42
    trainer.global_step = 21
    assert position(1) == Position(41, 21, 2, 1)


def test_with_the_anchor_in_the_epoch_the_count_begins_again_in_each() -> None:
    trainer = lightning()
    position = position_source(trainer, "fit", Schedule(anchor="epoch"))
    counts = []
    for epoch in (0, 0, 0, 1, 1):
        trainer.fit_loop.epoch_progress.current.completed = epoch
        counts.append(position(0).schedule_step)
    assert counts == [0, 1, 2, 0, 1]


def test_other_stages_count_their_own_steps() -> None:
    position = position_source(lightning(ready=40), "test", Schedule())
    assert [position(0).step for _ in range(3)] == [0, 1, 2]


def test_listed_steps_are_those_of_the_run_and_with_the_anchor_in_the_epoch_those_of_the_epoch() -> None:
    assert position_source(lightning(ready=40), "fit", Schedule(steps=(50,)))(0) == Position(40, 0, 0, 40)
    in_epoch = Schedule(steps=(50,), anchor="epoch")
    assert position_source(lightning(ready=40), "fit", in_epoch)(0) == Position(40, 0, 0, 0)


def test_a_validation_and_a_checkpoint_make_a_step_unusual(made: Session, fake: FakeCollector) -> None:
    trainer = Trainer(made, replace(FIT, unusual=("on_validation_start", "save_checkpoint")))
    trainer.batch()
    trainer.batch("on_validation_start")
    trainer.batch("save_checkpoint")
    trainer.batch()
    made.close()
    assert [record.usual for record in fake.steps] == [True, False, False, True]


def test_actions_outside_the_steps_are_followed_and_those_of_each_step_are_not(
    made: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(made, "rare_action", found.append)
    hooks = ("[Callback]Slow.on_validation_end", "[Callback]Slow.on_train_batch_end")
    trainer = Trainer(made, replace(FIT, callbacks=hooks, within=("[LightningModule]Net.on_train_epoch_end",)))
    trainer.batch(*hooks, "run_validation", "save_checkpoint", "[LightningModule]Net.on_train_epoch_end")
    assert found[1::2] == [None] * 4
    assert found[::2] == [hooks[0], "run_validation", "save_checkpoint", "[LightningModule]Net.on_train_epoch_end"]


def test_the_hooks_that_a_model_or_a_callback_overrides_are_actions_of_the_program(
    tmp_path: Path, package: Package
) -> None:
    # A name of the program's that Lightning's base class has, too.
    kind = type("Callback", (package.pl.Callback,), {"on_train_end": print, "on_train_batch_end": unheard})
    model = type("Net", (package.Perceptron,), {"on_before_zero_grad": print})()
    training = package.trainer(tmp_path, kind())
    training.strategy.connect(model)
    actions = stage_actions(training, "fit", MemProfilerCallback)
    hooks = [f"[Callback]Callback.{name}" for name in ("on_train_batch_end", "on_save_checkpoint")]
    assert list(actions.callbacks) == hooks
    assert [name for name in actions.within if ".on_" in name] == ["[LightningModule]Net.on_before_zero_grad"]


def unheard(*_: Any) -> None:
    """Has the qualified name of the hook of Lightning's."""


unheard.__qualname__ = "Callback.on_train_batch_end"


def test_a_step_is_unusual_before_the_workers_of_its_validation_start(tmp_path: Path) -> None:
    happened: list[str] = []

    class Names(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            happened.append(action_name)

    class Validation(DataLoader[Any]):
        def __iter__(self) -> Any:
            happened.append("workers start")
            return super().__iter__()

    fitted = trainer(tmp_path, profiler=Names(), num_sanity_val_steps=0)
    fitted.fit(Perceptron(), DataLoader(Noise(2), batch_size=1), Validation(Noise(2), batch_size=1))
    unusual = stage_actions(fitted, "fit", MemProfilerCallback).unusual
    assert any(name in unusual for name in happened[: happened.index("workers start")])
