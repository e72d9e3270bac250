"""Steps, phases and points of loops without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_memprof import Collector, OutputOptions, Schedule, load_run, record
from lightning_memprof.collectors import Pulse
from plain_loops import (
    EVERY,
    QUIET,
    Loop,
    Net,
    accumulated,
    batches,
    closure,
    compiled,
    facts,
    plain,
    plain_epoch,
    scaled,
    seeded,
    trained,
    two_optimizers,
)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("loop", [plain, accumulated, closure, two_optimizers, scaled, compiled])
def test_weights_and_random_numbers_are_those_of_the_loop_alone(tmp_path: Path, loop: Loop) -> None:
    weights, state = trained(loop, None, seeded())
    model = seeded()
    with record(model, dirpath=tmp_path, schedule=EVERY, output=QUIET) as recording:
        recorded, after = trained(loop, recording, model)
    assert all(map(torch.equal, weights, recorded))
    assert torch.equal(state, after)
    assert load_run(tmp_path).status == "finished"
    assert not model._forward_hooks
    assert "__call__" not in vars(Net)
    assert type(torch.autograd.backward).__name__ == "function"


def test_steps_have_their_phases_epochs_and_the_facts_of_the_training(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, schedule=EVERY, output=QUIET) as recording:
        plain(recording.steps, model)
    run = load_run(tmp_path)
    rows = run.lead.pulse
    assert [row["step"] for row in rows] == list(range(12))
    assert [row["global_step"] for row in rows] == list(range(12))
    assert [row["epoch"] for row in rows] == [0] * 6 + [1] * 6
    phases = ("data_wait", "forward", "backward", "optimizer")
    assert all((row[f"{phase}_ns"] or 0) > 0 for row in rows for phase in phases)
    assert [window.steps for window in run.lead.windows] == [(2, 3), (6, 7)]
    found = facts(run)
    assert (found["model"], found["precision"], found["dataloaders"][0]["batch_size"]) == ("Net", "32-true", 2)
    assert [optimizer["name"] for optimizer in found["optimizers"]] == ["AdamW"]


def test_a_schedule_by_epoch_counts_from_the_first_step_of_each(tmp_path: Path) -> None:
    model, schedule = seeded(), Schedule(wait=0, warmup=0, active=1, repeat=1, anchor="epoch")
    with record(model, dirpath=tmp_path, schedule=schedule, output=QUIET) as recording:
        plain(recording.steps, model)
    run = load_run(tmp_path)
    assert [window.steps for window in run.lead.windows] == [(0,), (6,)]
    assert [row["step"] for row in run.lead.pulse] == list(range(12))


def test_a_step_of_an_accumulation_is_a_batch_and_of_several_optimizers_each_step_counts(tmp_path: Path) -> None:
    for name, loop, steps in (("a", accumulated, [0, 0, 0, 1, 1, 1]), ("b", two_optimizers, [0, 2, 4, 6, 8, 10])):
        model = seeded()
        with record(model, dirpath=tmp_path / name, collectors=[Pulse()], output=QUIET) as recording:
            loop(recording.steps, model)
        assert [row["global_step"] for row in load_run(tmp_path / name).lead.pulse] == steps


def test_mixed_precision_is_seen_where_the_model_is_called(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        scaled(recording.steps, model)
    assert facts(load_run(tmp_path))["precision"] == "bf16-mixed"


def test_a_validation_is_part_of_the_step_around_it_and_no_step(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        for _ in range(2):
            plain_epoch(recording, model)
            model.eval()
            with recording.validation(), torch.no_grad():
                for batch in batches():
                    model(batch)
            model.train()
    run = load_run(tmp_path)
    assert [row["step"] for row in run.lead.pulse] == list(range(12))
    assert "run_validation" in {row.action for row in run.lead.actions}


def test_a_loop_that_is_left_ends_its_step_there(tmp_path: Path) -> None:
    model = seeded()
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        for number, batch in enumerate(recording.steps(batches())):
            model(batch).backward()
            if number == 2:
                break
        assert recording._live is not None
        assert recording._live.run.position is None
    assert load_run(tmp_path).lead.steps == 3


def test_iterations_without_a_loader_are_steps_after_the_first(tmp_path: Path) -> None:
    model = seeded()
    optimizer = SGD(model.parameters(), lr=0.01)
    with record(model, optimizer, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        for _ in range(5):
            model(torch.randn(2, 8)).backward()
            optimizer.step()
            recording.step()
    rows = load_run(tmp_path).lead.pulse
    assert [row["step"] for row in rows] == list(range(4))
    assert all((row["backward_ns"] or 0) > 0 for row in rows)


def test_a_collector_that_fails_does_not_stop_the_loop(tmp_path: Path) -> None:
    class Bad(Collector):
        name = "bad"

        def record(self, run: Any, window: Any) -> Any:
            raise RuntimeError("not today")

    model = seeded()
    with record(
        model, dirpath=tmp_path, schedule=EVERY, collectors=["default", Bad()], output=OutputOptions(summary=False)
    ) as recording:
        plain_epoch(recording, model)
    assert load_run(tmp_path).lead.steps == 6


def test_several_models_in_a_dictionary_have_their_forwards(tmp_path: Path) -> None:
    models = nn.ModuleDict({"one": seeded(), "other": Net()})
    with record(models, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        for batch in recording.steps(batches()):
            (models["one"](batch) + models["other"](batch)).backward()
    assert all((row["forward_ns"] or 0) > 0 for row in load_run(tmp_path).lead.pulse)


def test_a_compiled_model_has_its_forward_and_its_own_name(tmp_path: Path) -> None:
    model: Any = torch.compile(seeded(), backend="eager")
    optimizer = SGD(model.parameters(), lr=0.01)
    with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        for batch in recording.steps(batches()):
            model(batch).backward()
            optimizer.step()
    run = load_run(tmp_path)
    assert all((row["forward_ns"] or 0) > 0 for row in run.lead.pulse)
    assert facts(run)["model"] == "Net"
