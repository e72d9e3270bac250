"""A short form of ``make compatibility``: one row of a kind that nothing else here runs, and the runner itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.base import RunContext, no_training_step
from lightning_memprof.schedule import Window
from training import Perceptron, loader, rows_of, trainer

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = Path(__file__).resolve().parents[1] / "compatibility" / "every_row.py"
# Stands for Lightning's module: a test that both classes pass, one that differs for a reason that is known, one that
# differs in part, two that fail with both, one that differs without a reason, one of another profiler.
TESTS = """
import pytest
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from tests_pytorch.helpers.runif import RunIf

def test_profiler_invalid_table_kwargs(tmp_path):
    with pytest.raises(KeyError):
        PyTorchProfiler(table_kwargs={"row_limit": None})

def test_pytorch_profiler_trainer():
    assert PyTorchProfiler.__name__ == "PyTorchProfiler"

@pytest.mark.parametrize("name", ["PyTorchProfiler", "ExtendedPyTorchProfiler"])
def test_pytorch_profiler_trainer_fit(name):
    assert PyTorchProfiler.__name__ in ("PyTorchProfiler", name)

@pytest.mark.xfail(PyTorchProfiler.__name__ == "PyTorchProfiler", reason="Lightning's own")
def test_pytorch_profiler_describe():
    raise AssertionError(PyTorchProfiler)

def test_pytorch_profiler_deepcopy():
    assert not PyTorchProfiler, "it fails with any"

def test_unknown():
    assert PyTorchProfiler.__name__ == "PyTorchProfiler"

@RunIf(min_cuda_gpus=99, standalone=True)
def test_pytorch_profiler_trainer_ddp():
    PyTorchProfiler()

def test_simple():
    assert not SimpleProfiler
"""


class OfTrainingSteps(Collector):
    """Available in a fit only."""

    name: ClassVar[str] = "of_training_steps"

    def unavailable(self, run: RunContext) -> str | None:
        return no_training_step(run)

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[None]:
        yield None


def test_what_was_asked_for_a_fit_does_not_stop_the_test_after_it(tmp_path: Path) -> None:
    ours = MemProfilerCallback(
        Schedule(wait=0, warmup=1, active=1), [OfTrainingSteps()], output=OutputOptions(summary=False)
    )
    made = trainer(tmp_path, ours)
    model = Perceptron()
    made.fit(model, loader(4))
    assert ours.run_directory is not None
    assert rows_of(ours.run_directory, "unavailable") == []
    made.test(model, loader(4), verbose=False)
    (row,) = rows_of(ours.run_directory, "unavailable")
    assert (row["collector"], row["reason"]) == ("of_training_steps", "test has no training step")


def test_lightnings_own_tests_meet_our_class_and_each_difference_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "test_profiler.py").write_text(TESTS)
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from lightning_tests import compare, reasons\n"
        "for row in compare(Path(sys.argv[2])): print(row.verdict.name, row.what, row.saw, sep='|')\n"
        "print(reasons())"
    )
    arguments = [sys.executable, "-c", program, str(PROGRAM.parent), str(tmp_path / "test_profiler.py")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        name.strip("`"): (verdict, saw)
        for verdict, name, saw in (row.split("|") for row in done.stdout.splitlines() if "|" in row)
    }
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "test_profiler_invalid_table_kwargs": "RAN",
        "test_pytorch_profiler_trainer": "DIFFERS",
        "test_pytorch_profiler_trainer_fit": "IN_PART",
        "test_pytorch_profiler_describe": "FAILS",
        "test_pytorch_profiler_deepcopy": "FAILS",
        "test_unknown": "RED",
        "test_pytorch_profiler_trainer_ddp": "UNTESTED",
    }
    assert found["test_pytorch_profiler_trainer"][1] == "Lightning's 1 passed, ours 1 failed: reason 2"
    fit = found["test_pytorch_profiler_trainer_fit"][1]
    assert fit == "Lightning's 2 passed, ours 1 failed, 1 passed: reasons 2 and 3"
    assert found["test_pytorch_profiler_deepcopy"][1].startswith("1 failed with each: ")
    first, second = [line for line in done.stdout.splitlines() if line.startswith(("1. ", "2. "))]
    assert "outside of a Trainer" in first
    assert "`*.pt.trace.json.gz`" in second
    assert found["test_pytorch_profiler_trainer_ddp"][1].endswith("needs 99 GPUs, standalone")


def test_the_command_runs_rows_by_name_and_says_what_became_of_each(run_program: Run) -> None:
    done = run_program(str(PROGRAM), "--only", "features/manual")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "manual optimization" in line]
    assert lines[0].split()[0] == "ran"
    assert "bit-identical" in lines[0]
    assert "1 rows, 0 red" in done.stderr


def test_names_that_no_row_has_are_refused_in_one_line(run_program: Run) -> None:
    done = run_program(str(PROGRAM), "--only", "features/plain", "nosuch", "lightning-tests")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("no row's name begins with 'nosuch' or 'lightning-tests'; rows: features/plain, ")
    assert line.endswith(", and with --lightning-tests FILE lightning-tests")


def test_a_class_path_of_ours_in_the_other_cli_is_seen_to_be_refused_in_one_line(run_program: Run) -> None:
    done = run_program(str(PROGRAM), "--only", "distributions/class path MemProfilerCallback")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "    refused in one line  CLI of `pytorch_lightning`" in done.stderr


def test_without_a_gpu_what_a_gpu_has_measured_stays(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv.pop(1))\n"
        "import torch; torch.accelerator.is_available = lambda: False\n"
        "import gpu, measured; measured.MEASURED = Path(sys.argv.pop(1))\n"
        "path = measured.MEASURED / 'gpu.md'\n"
        "for text in ('', 'Not measured yet.', 'From another day\\n\\n' + gpu.NONE, 'Made\\n\\nDevice: A GPU.'):\n"
        "    path.write_text(text)\n"
        "    gpu.main()\n"
        "    print(path.read_text() == text)\n"
        "path.unlink()\n"
        "sys.argv.append('--help')\n"
        "try:\n"
        "    gpu.main()\n"
        "finally:\n"
        "    print(path.exists())\n"
    )
    command = [sys.executable, "-c", program, str(PROGRAM.parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    told, asked = done.stdout.partition("usage: ")[::2]
    none = "No GPU was at hand: nothing was run. docs/measured/gpu.md"
    says, left = (f"{none} says so.", f"{none} is left as it is.")
    assert told.splitlines() == [says, "False", says, "False", left, "True", left, "True"]
    assert "[ARGUMENTS OF PYTEST]" in asked
    assert asked.splitlines()[-1] == "False"


def test_another_python_is_red_for_what_fails_without_asking_for_torch(tmp_path: Path) -> None:
    (tmp_path / "test_torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (tmp_path / "test_reads.py").write_text("def test_reads():\n    assert True\n")
    said = tmp_path / "said.xml"
    pytest = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), f"--junitxml={said}"]
    pytest += ["-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from pythons import outcome; print(*outcome(Path(sys.argv[2])))"
    )

    def judged() -> str:
        subprocess.run(pytest, capture_output=True, check=False, timeout=120)
        command = [sys.executable, "-c", program, str(PROGRAM.parent), str(said)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    assert judged() == "Verdict.IN_PART 1 passed, 0 skipped, 1 need torch"
    (tmp_path / "test_ours.py").write_text("def test_with_torch_in_its_name():\n    assert not 'ours'\n")
    told = judged()
    assert told.startswith("Verdict.RED 1 passed, 0 skipped, 1 need torch, 1 failed: test_ours test_with_torch_in_its_")


def test_another_torch_gets_the_other_packages_of_this_environment_and_doctor_says_what_it_misses() -> None:
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from torches import internals, needed\n"
        "print(*needed('lightning', '3.13'))\n"
        "print(*internals(Path(sys.executable)))"
    )
    command = [sys.executable, "-c", program, str(PROGRAM.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    packages, said = done.stdout.splitlines()
    names = {package.partition("==")[0] for package in packages.split()}
    # What torch needs of Python's packages comes with it, torch itself does not.
    assert {"torchmetrics", "pyyaml", "sympy"} <= names
    assert "torch" not in names
    assert said.startswith("Verdict.RAN all ")
    assert said.endswith(" private APIs of torch are there")
