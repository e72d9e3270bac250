from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_memprof.integration.driver import steps_ahead, unreachable
from lightning_memprof.schedule import Action, Schedule

INF = float("inf")


def trainer(batches: float = 10, **of: Any) -> Any:
    """What is asked of a Trainer: by default one epoch of a fit that has not begun."""
    progress = SimpleNamespace(ready=of.pop("ready", 0))
    module = SimpleNamespace(automatic_optimization=of.pop("automatic_optimization", True))
    given = {
        "num_training_batches": batches,
        "max_epochs": 1,
        "max_steps": -1,
        "current_epoch": 0,
        "global_step": 0,
        "accumulate_grad_batches": 1,
        "callbacks": [],
        **of,
    }
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=progress)))
    return SimpleNamespace(fit_loop=loop, lightning_module=module, **given)


@pytest.mark.parametrize(
    ("of", "steps"),
    [
        pytest.param({}, 10, id="one epoch"),
        pytest.param({"max_epochs": 3}, 30, id="three epochs"),
        pytest.param({"max_epochs": 3, "max_steps": 7}, 7, id="max_steps ends it"),
        pytest.param({"max_epochs": None, "max_steps": 7}, 7, id="no epochs"),
        pytest.param({"max_epochs": -1, "max_steps": 7}, 7, id="endless epochs"),
        pytest.param({"max_steps": 7, "accumulate_grad_batches": 2, "max_epochs": -1}, 14, id="accumulation"),
        pytest.param({"max_steps": 1, "automatic_optimization": False}, 10, id="the module steps when it wants"),
        pytest.param({"max_steps": 1, "callbacks": [GradientAccumulationScheduler({0: 8})]}, 10, id="scheduled"),
        pytest.param({"batches": INF}, None, id="a loader without length"),
        pytest.param({"batches": INF, "max_steps": 5}, 5, id="a loader without length, max_steps"),
        pytest.param({"max_epochs": -1}, None, id="no end"),
        pytest.param({"max_epochs": 3, "current_epoch": 1, "ready": 14}, 16, id="resumed inside of an epoch"),
        pytest.param({"max_epochs": 1, "current_epoch": 1, "ready": 10}, 0, id="resumed at its end"),
        pytest.param({"max_steps": 5, "global_step": 9}, 0, id="resumed beyond its end"),
        pytest.param({"batches": 0}, 0, id="no batches"),
    ],
)
def test_the_steps_of_a_fit_are_counted_where_they_can_be_known(of: dict[str, Any], steps: int | None) -> None:
    assert steps_ahead(trainer(**of), "fit") == steps


@pytest.mark.parametrize(
    ("stage", "name"),
    [("validate", "num_val_batches"), ("test", "num_test_batches"), ("predict", "num_predict_batches")],
)
def test_other_stages_count_the_batches_of_all_their_loaders(stage: str, name: str) -> None:
    of: Any = SimpleNamespace(**{name: [3, 4]})
    assert steps_ahead(of, stage) == 7
    of = SimpleNamespace(**{name: [3, INF]})
    assert steps_ahead(of, stage) is None


def test_a_schedule_that_comes_too_late_is_reported_with_its_numbers() -> None:
    message = unreachable(trainer(5), "fit", Schedule(skip_first=2, wait=3, warmup=1, active=2))
    assert message == (
        "nothing will be recorded: fit has 5 steps, but the first recorded step is 6 "
        "(skip_first=2, wait=3, warmup=1); use Schedule(wait=0, warmup=0, active=5)"
    )


@pytest.mark.parametrize(("batches", "late"), [(2, True), (3, False)])
def test_one_recorded_step_is_enough(batches: int, late: bool) -> None:
    assert (unreachable(trainer(batches), "fit", Schedule()) is not None) == late


def test_a_schedule_that_counts_by_epochs_is_compared_with_the_epoch() -> None:
    schedule = Schedule(wait=8, warmup=1, active=1, anchor="epoch")
    message = unreachable(trainer(5, max_epochs=4), "fit", schedule)
    assert message is not None
    assert "an epoch has 5 steps, but the first recorded step is 9" in message
    assert unreachable(trainer(5, max_epochs=4), "fit", Schedule(wait=8, warmup=1, active=1)) is None
    message = unreachable(trainer(5, max_epochs=4), "fit", Schedule(steps=(7,), anchor="epoch"))
    assert message == "nothing will be recorded: an epoch has 5 steps, but the first recorded step is 7"


@pytest.mark.parametrize(
    ("batches", "schedule"),
    [(3, Schedule(wait=5, warmup=1, active=1, skip_first_wait=1)), (INF, Schedule(wait=10**6))],
)
def test_leaving_out_the_first_wait_counts_and_an_unknown_length_claims_nothing(
    batches: float, schedule: Schedule
) -> None:
    assert unreachable(trainer(batches), "fit", schedule) is None


def test_a_schedule_function_is_not_called_ahead() -> None:
    def counting(_: int) -> Action:
        raise AssertionError

    assert unreachable(trainer(10), "fit", counting) is None


def test_listed_steps_are_compared_with_the_steps_of_the_run_even_if_resumed() -> None:
    schedule = Schedule(steps=(3, 12))
    assert unreachable(trainer(10), "fit", schedule) is None
    assert unreachable(trainer(10, max_epochs=2, current_epoch=1, ready=10), "fit", schedule) is None
    message = unreachable(trainer(10, max_epochs=3, current_epoch=2, ready=20), "fit", schedule)
    assert message == "nothing will be recorded: fit has 10 steps starting at step 20, none of them in steps=[3, 12]"
