"""A short form of ``make compatibility``: one row of a kind that nothing else here runs, and the runner itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_memprof import MemProfilerCallback, ModuleMemory, Output, Schedule
from training import Perceptron, loader, rows_of, trainer

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = Path(__file__).resolve().parents[1] / "compatibility" / "run.py"
# Stands for Lightning's module: a test that both classes pass, one that differs for a reason that is known, one that
# differs without, one of another profiler.
TESTS = """
import pytest
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from tests_pytorch.helpers.runif import RunIf

def test_profiler_invalid_table_kwargs(tmp_path):
    with pytest.raises(KeyError):
        PyTorchProfiler(table_kwargs={"row_limit": None})

def test_profile_callbacks():
    assert PyTorchProfiler.__name__ == "PyTorchProfiler"

def test_unknown():
    assert PyTorchProfiler.__name__ == "PyTorchProfiler"

@RunIf(min_cuda_gpus=99, standalone=True)
def test_pytorch_profiler_trainer_ddp():
    PyTorchProfiler()

def test_simple():
    assert not SimpleProfiler
"""


def test_what_was_asked_for_a_fit_does_not_stop_the_test_after_it(tmp_path: Path) -> None:
    ours = MemProfilerCallback(Schedule(wait=0, warmup=1, active=1), [ModuleMemory()], output=Output(summary=False))
    made = trainer(tmp_path, ours)
    model = Perceptron()
    made.fit(model, loader(4))
    assert ours.run_directory is not None
    assert rows_of(ours.run_directory, "unavailable") == []
    made.test(model, loader(4), verbose=False)
    (row,) = rows_of(ours.run_directory, "unavailable")
    assert (row["collector"], row["reason"]) == ("module_memory", "test has no training step")


def test_lightnings_own_tests_meet_our_class_and_each_difference_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_profiler.py").write_text(TESTS)
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from lightning_tests import compare\n"
        "for row in compare(Path(sys.argv[2])): print(row.verdict.name, row.what, row.saw, sep='|')"
    )
    arguments = [sys.executable, "-c", program, str(PROGRAM.parent), str(tmp_path / "test_profiler.py")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        name.strip("`"): (verdict, saw) for verdict, name, saw in (row.split("|") for row in done.stdout.splitlines())
    }
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_profiler_invalid_table_kwargs": "RAN",
        "test_profile_callbacks": "IN_PART",
        "test_unknown": "RED",
        "test_pytorch_profiler_trainer_ddp": "UNTESTED",
    }
    assert "function_events" in found["test_profile_callbacks"][1]
    assert found["test_pytorch_profiler_trainer_ddp"][1].endswith("needs 99 GPUs, standalone")


def test_the_command_runs_rows_by_name_and_says_what_became_of_each(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--only", "features/manual"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "manual optimization" in line]
    assert lines[0].split()[0] == "ran"
    assert "bit-identical" in lines[0]
    assert "1 rows, 0 red" in done.stderr
