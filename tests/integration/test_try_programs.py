"""``lightning-memprof try`` on programs that start, limit and write their training in unusual ways."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from lightning_memprof.compare.trial import Measured
from lightning_memprof.trial.process import run_task
from lightning_memprof.trial.task import Task

SUPPORT = Path(__file__).parents[1] / "support"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "ranked")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> Path:
    """The program alone in the working directory."""
    directory = tmp_path / "work"
    directory.mkdir()
    shutil.copy(SUPPORT / "tried_programs.py", directory / "train.py")
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path):
    numbers = itertools.count()

    def runs(*program: str, remedy: str = "", steps: int = 6, is_check: bool = True) -> Measured:
        names = (remedy,) if remedy else ()
        task = Task(directory=str(tmp_path / f"run-{next(numbers)}"), steps=steps, remedies=names, is_check=is_check)
        return run_task(program, task, 120.0)

    return runs


def test_spawned_ranks_are_changed_and_measured(run):
    bare, changed = run("train.py", "spawned"), run("train.py", "spawned", remedy="workers=2")
    assert (bare.problem, changed.problem, len(bare.losses)) == ("", "", 11)
    assert (bare.losses, bare.weights) == (changed.losses, changed.weights)
    refused = run("train.py", "spawned", remedy="persistent_workers")
    assert refused.problem == "the DataLoader has no workers"


@pytest.mark.parametrize("program", [("train.py", "child"), TORCHRUN])
def test_a_training_in_processes_that_the_program_starts_is_measured_and_writes_nothing(program, run, place):
    found = run(*program)
    assert (found.problem, len(found.losses), found.is_in_group) == ("", 11, program is not TORCHRUN)
    assert [*place.iterdir()] == [place / "train.py"]


def test_an_exception_of_another_rank_is_the_problem(run):
    assert run("train.py", "rank").problem == "RuntimeError: only here"


def test_limits_of_the_training_do_not_limit_the_measurement(run):
    # Six batches in an epoch, a schedule that ends with it, early stopping after it, and a second of time.
    found = run("train.py", "limits", steps=30)
    assert (found.problem, len(found.losses)) == ("", 35)


def test_loggers_that_write_or_connect_when_they_are_made_do_neither(run, place):
    # Neither of their libraries is needed, and a folder that exists before the fit is a temporary one.
    (place / "helper.py").write_text("")
    (place / "main.py").write_text("import sys, helper, train\ntrain.KIND = sys.argv[1]\ntrain.main()\n")
    found = run("main.py", "loggers")
    assert found.problem == ""
    assert sorted(path.name for path in place.iterdir()) == ["helper.py", "main.py", "train.py"]


def test_a_quick_check_and_a_search_for_a_learning_rate_are_not_the_training(run, place):
    found = run("train.py", "checked", steps=8)
    assert (found.problem, len(found.losses)) == ("", 13)
    assert [*place.iterdir()] == [place / "train.py"]


def test_random_samplers_batches_and_spawned_workers_read_the_same_data(run):
    bare, changed = run("train.py", "random"), run("train.py", "random", remedy="workers=2")
    assert (bare.problem, changed.problem) == ("", "")
    assert (bare.losses, bare.weights) == (changed.losses, changed.weights)


def test_a_remedy_between_epochs_needs_epochs_in_the_measured_steps(run):
    few = run("train.py", "short", remedy="persistent_workers", steps=5, is_check=False)
    assert few.problem == "acts between epochs of 6 steps, and 5 are measured: use more --steps"
    enough = run("train.py", "short", remedy="persistent_workers", steps=6, is_check=False)
    assert (enough.problem, enough.code) == ("", ["DataLoader(..., persistent_workers=True)"])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("program", [("child",), ("spawned",), TORCHRUN])
def test_a_program_of_the_other_package_of_lightning_is_measured_the_same(program, run, place):
    line = program if program is TORCHRUN else ("train.py", *program)
    expected = run(*line)
    train = place / "train.py"
    train.write_text(train.read_text().replace("lightning.pytorch", "pytorch_lightning"))
    found = run(*line)
    assert (found.problem, len(found.losses), found.losses) == ("", 11, expected.losses)
    assert not (place / "after.txt").exists()
