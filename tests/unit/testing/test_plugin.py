from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from warm_python import WarmPython

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.slow

# The entry point is of the installed wheel, which may be another version than the module.
PLUGIN = ("-p", "no:lightning_memprof", "-p", "lightning_memprof.testing.plugin", "-p", "no:cacheprovider")
SUPPORT = Path(__file__).parents[2] / "support"

PROJECT = """
import sys
sys.path.insert(0, {support!r})
import pytest, torch
from torch import nn
from training import Perceptron, loader, trainer

class Gate(nn.Module):
    "x * sigmoid(x): SiLU saves its input, and the regression its sigmoid too."
    def __init__(self, twice):
        super().__init__()
        self.twice = twice
    def forward(self, x):
        return x * torch.sigmoid(x) if self.twice else nn.functional.silu(x)

class Gated(Perceptron):
    def __init__(self, twice=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), Gate(False), nn.Linear(64, 64), Gate(twice), nn.Linear(64, 1))

def fit(directory, model=None, **options):
    trainer(directory, **{{"logger": False, "max_steps": 2, **options}}).fit(model or Perceptron(), loader(4))
"""


SESSION = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


class Project:
    """A project of a user: its tests run in a process that has imported Lightning already."""

    def __init__(self, pytester: pytest.Pytester, warm: WarmPython, environment: dict[str, str]) -> None:
        self.path = pytester.path
        self._pytester = pytester
        self._warm = warm
        paths = os.pathsep.join(filter(None, sys.path))
        self._environment = environment | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        pytester.makepyfile(project=PROJECT.format(support=str(SUPPORT)), session=SESSION)

    def write(self, tests: str) -> None:
        self._pytester.makepyfile(test_it=f"from project import *\n{tests}")

    def run(self, tests: str, *options: str) -> pytest.RunResult:
        self.write(tests)
        arguments = ["session.py", *PLUGIN, "--show-capture=no", *options]
        done = self._warm.run(arguments, self.path, self._environment, 120)
        print(done.stdout, done.stderr)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    def run_cold(self, *options: str) -> pytest.RunResult:
        return self.run_command(sys.executable, "-m", "pytest", *options)

    def run_command(self, *command: str, **variables: str) -> pytest.RunResult:
        environment = self._environment | variables
        done = subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        print(done.stdout, done.stderr)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


@pytest.fixture
def project(pytester: pytest.Pytester, warm_python: WarmPython, environment: dict[str, str]) -> Project:
    return Project(pytester, warm_python, environment)


def text(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


def test_budgets_that_hold_pass_and_the_summary_shows_the_figures(project):
    result = project.run(
        """
@pytest.mark.memprof(peak="600 KiB", saved_activations="8 KiB", operators=500, collectives=0, syncs=0)
def test_training(tmp_path):
    fit(tmp_path)
def test_without_a_mark(tmp_path):
    fit(tmp_path)
    assert [*tmp_path.rglob("memprofiler*")] == []
"""
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*= memprof =*", "test_it.py::test_training: peak * KiB, saved_activations *, operators *"]
    )
    assert "test_without_a_mark:" not in text(result)
    assert list(project.path.rglob("memprofiler*")) == []


def test_a_synchronization_fails_with_its_line_and_those_of_lightning_itself_are_not_counted(project):
    result = project.run(
        """
class Logging(Perceptron):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

class Reading(Logging):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss + self.net(batch)[batch[:, :1] > 0].sum()

@pytest.mark.memprof(syncs=0)
@pytest.mark.parametrize("model", [Logging, Reading])
def test_logged(tmp_path, model):
    fit(tmp_path, model(), enable_progress_bar=True)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    lines = (project.path / "test_it.py").read_text().splitlines()
    item, mask = (next(n for n, line in enumerate(lines, 1) if word in line) for word in ("item()", "> 0"))
    result.stdout.fnmatch_lines_random(
        [
            "memprof: syncs 3 is 3 over *",
            f"  test_it.py:{item}: aten::_local_scalar_dense: 1",
            f"  test_it.py:{mask}: aten::nonzero: 1",
            "  torch/autograd/graph.py:*: aten::nonzero: 1",
            "  not counted: * of Lightning's own code",
        ]
    )


def test_a_regression_against_a_baseline_fails_and_its_module_or_operator_is_named(project):
    test = """
NOW = {}
@pytest.mark.memprof(baseline="baselines/gated.json", tolerance="1%")
@pytest.mark.parametrize("change", ["none", "twice", "less"])
def test_gated(tmp_path, change):
    fit(tmp_path, Gated(twice=NOW if change == "twice" else not NOW if change == "less" else False))

@pytest.mark.memprof(baseline="baselines/exact.json")
def test_operator(tmp_path):
    model = Perceptron()
    if NOW:
        model.on_before_zero_grad = lambda optimizer: torch.zeros(1)
    fit(tmp_path, model)
"""
    written = project.run(test.format(False), "--memprof-update")
    written.assert_outcomes(passed=4)
    written.stdout.fnmatch_lines(["test_it.py::test_gated*(baseline written: *gated.json)"])
    assert list(json.loads((project.path / "baselines" / "gated.json").read_text())["tests"]) == [
        f"test_it.py::test_gated[{change}]" for change in ("less", "none", "twice")
    ]
    result = project.run(test.format(True))
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*saved_activations 5.02 KiB is 1.00 KiB (24.9%) over its baseline of 4.02 KiB; 1% is allowed",
            "  net.3: +1.00 KiB (1.00 KiB to 2.00 KiB)",
            "operators * over its baseline of *",
            "  aten::mul in net.3: +3 (0 to 3)",
            "memprof: operators * is 1 (*%) over its baseline of *",
            "  aten::zeros: +1 (0 to 1)",
            "test_it.py::test_gated[[]less]: *(below its baseline: *saved_activations -1.00 KiB*)",
        ]
    )


def test_each_mistake_is_one_line(project):
    result = project.run(
        """
@pytest.mark.memprof(peak="600 TB")
def test_unit(): ...
@pytest.mark.memprof(peek=3)
def test_quantity(): ...
@pytest.mark.memprof("600 MiB")
def test_position(): ...
@pytest.mark.memprof(baseline="none.json")
def test_baseline(): ...
@pytest.mark.memprof
def test_no_trainer(): ...
@pytest.mark.memprof
def test_no_fit(tmp_path):
    trainer(tmp_path)
@pytest.mark.memprof(kernels=3)
def test_no_device(tmp_path):
    fit(tmp_path, fast_dev_run=True)
""",
    )
    result.assert_outcomes(errors=4, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "memprof: peak '600 TB': must be a positive number and a unit, as in 24GiB or 16GB",
            "memprof: peek=3: unknown quantity; did you mean peak?",
            "memprof: '600 MiB': name the quantity, as in peak='600 MiB'",
            "memprof: baseline *none.json does not exist: pytest --memprof-update writes it",
            "memprof: the test creates no Trainer; *",
            "memprof: no Trainer of the test was recorded: *",
            "memprof: kernels was not measured: the training ran without an accelerator",
        ]
    )


def test_the_error_of_a_test_wins_over_its_budget(project):
    result = project.run(
        """
@pytest.mark.memprof(operators=1)
def test_own_error(tmp_path):
    fit(tmp_path)
    assert 1 == 2
@pytest.mark.memprof(operators=1)
def test_training_error(tmp_path):
    model = Perceptron()
    model.training_step = None
    fit(tmp_path, model)
@pytest.mark.memprof(operators=1)
def test_skipped(tmp_path):
    fit(tmp_path)
    pytest.skip("for a reason")
@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception)
@pytest.mark.memprof(operators=1)
def test_expected(tmp_path):
    fit(tmp_path)
""",
    )
    result.assert_outcomes(failed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2"])
    assert "memprof: operators" not in text(result)


def test_trainers_in_fixtures_and_several_in_one_test_are_recorded(project):
    result = project.run(
        """
@pytest.fixture
def trained(tmp_path):
    fit(tmp_path)
@pytest.fixture
def idle(tmp_path):
    return trainer(tmp_path, logger=False, fast_dev_run=True)
@pytest.mark.memprof(operators=1)
def test_in_a_fixture(trained): ...
@pytest.mark.memprof(operators=500)
class TestAll:
    def test_of_a_fixture(self, idle):
        idle.fit(Perceptron(), loader())
    @pytest.mark.memprof(parameters=644)
    def test_several(self, tmp_path, idle):
        idle.fit(Perceptron(), loader())
        fit(tmp_path, Gated())
        trainer(tmp_path, logger=False).validate(Perceptron(), loader())
@pytest.mark.memprof(operators=1)
def test_inference(tmp_path):
    trainer(tmp_path, logger=False).predict(Perceptron(), loader())
""",
    )
    result.assert_outcomes(failed=3, passed=1)
    result.stdout.fnmatch_lines(
        [
            "memprof: operators * over the budget of 1",
            "memprof: training 2 of 2: parameters * over the budget of 644 B",
            "memprof: operators * over the budget of 1",
        ]
    )


def test_a_training_that_raises_counts_until_there_and_another_profiler_stays(project):
    result = project.run(
        """
class Raising(Perceptron):
    def training_step(self, batch, batch_idx):
        if batch_idx == self.at:
            raise ValueError("too much")
        return super().training_step(batch, batch_idx)

@pytest.mark.memprof(operators=1)
@pytest.mark.parametrize("at", [0, 1])
def test_raising(tmp_path, at):
    model = Raising()
    model.at = at
    with pytest.raises(ValueError, match="too much"):
        fit(tmp_path, model)

@pytest.mark.memprof(operators=1)
def test_profiler(tmp_path):
    fit(tmp_path, profiler="pytorch")

@pytest.mark.memprof(operators=1)
def test_callback(tmp_path):
    from lightning_memprof import MemProfilerCallback, OutputOptions
    callback = MemProfilerCallback(output=OutputOptions(summary=False, report=False))
    trainer(tmp_path, callback, fast_dev_run=True).fit(Perceptron(), loader())
"""
    )
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "memprof: operators was not measured: no recorded step has ended",
            "memprof: operators * over the budget of 1",
            "memprof: operators was not measured: Lightning's PyTorchProfiler owns torch.profiler in this run",
            "memprof: no Trainer of the test was recorded: none runs fit, or each has a MemProfilerCallback of its own",
        ]
    )


def test_runs_and_pages_are_kept_on_request_and_replaced_by_the_next_session(project):
    test = """
@pytest.mark.memprof(operators=500)
@pytest.mark.parametrize("name", ["a/b", "a:b"])
def test_training(tmp_path, name):
    fit(tmp_path, fast_dev_run=True)
"""
    for option in ("-q", "-ka:b"):
        project.run(test, "--memprof-report", "kept", option)
        pages = sorted((project.path / "kept").rglob("report.html"))
        assert len(pages) == 2
        assert {page.parent.parent.parent for page in pages} == {project.path / "kept"}
        assert "Perceptron" in pages[0].read_text()


def test_ranks_that_lightning_starts_as_sessions_of_their_own_are_those_of_one_training(project, pytester):
    project.write(
        """
@pytest.mark.memprof(peak="600 KiB", collectives=3, baseline="baseline.json")
def test_ranks(tmp_path):
    fit(tmp_path, strategy="ddp", devices=2)
"""
    )
    pytester.makeconftest(
        """
        import os, pathlib

        def pytest_sessionfinish(exitstatus):
            pathlib.Path(f"exit-{os.environ.get('LOCAL_RANK', '0')}").write_text(str(int(exitstatus)))
        """
    )
    other = project.path / "exit-1"
    for options in ((), ("--memprof-report", "kept")):
        other.unlink(missing_ok=True)
        project.run_cold(*PLUGIN, "--memprof-update", *options).assert_outcomes(passed=1)
        deadline = time.monotonic() + 60
        while not (other.exists() and other.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert other.read_text() == "0"
    (run,) = project.path.glob("kept/*/memprofiler")
    assert {path.name for path in run.glob("manifest*")} == {f"manifest.rank0000{rank}.jsonl" for rank in (0, 1)}


def test_the_recipe_for_github_with_a_worker_of_xdist(project, pytester):
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "budgets.md").read_text()
    recipe, gitlab = re.findall(r"```{code-block} yaml\n(.*?)```", guide, flags=re.DOTALL)
    steps = [step["run"] for step in yaml.safe_load(recipe)["jobs"]["budgets"]["steps"] if "run" in step]
    test = """
from project import *
@pytest.mark.memprof(baseline="b.json")
def test_training(tmp_path):
    fit(tmp_path, Gated({}), fast_dev_run=True)
"""
    for name, twice in (("old", False), ("new", True)):
        directory = pytester.mkdir(name)
        (directory / "pytest.ini").write_text("[pytest]")
        (directory / "project.py").write_text((pytester.path / "project.py").read_text())
        (directory / "test_it.py").write_text(test.format(twice))
    (pip := pytester.mkdir("bin") / "pip").write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    variables = {
        "GITHUB_STEP_SUMMARY": str(pytester.path / "summary.md"),
        "PATH": os.pathsep.join([str(pip.parent), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTEST_ADDOPTS": " ".join([*PLUGIN, "-p", "xdist", "-n", "1", "--memprof-update"]),
    }
    results = [project.run_command("bash", "-e", "-c", step, **variables) for step in steps]
    assert [result.ret for result in results] == [0, 0, 0, 0, 0]
    results[3].stdout.fnmatch_lines(["test_it.py::test_training: peak * (baseline written: *b.json)"])
    # GitLab has no file for a summary, and no directory of its own for the new version.
    (comparison,) = yaml.safe_load(gitlab)["budgets"]["after_script"]
    assert comparison.strip() == steps[-1].strip().replace('"$GITHUB_STEP_SUMMARY"', "compare.md")
    summary = (pytester.path / "summary.md").read_text()
    assert summary.count("## Quantities") == 1
    assert "net.3" in summary
    assert len(json.loads((pytester.path / "new" / "b.json").read_text())["tests"]) == 1
    properties = (pytester.path / "budgets.xml").read_text()
    assert properties.count('<property name="memprof.peak" value=') == 1


def test_unmarked_tests_load_neither_torch_nor_lightning(project, pytester):
    pytester.makepyfile(
        test_it="""
        import sys

        def test_modules():
            assert {"torch", "lightning", "numpy", "msgspec", "yaml"} & {*sys.modules} == set()
    """
    )
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            assert {"torch", "lightning", "numpy", "msgspec", "yaml"} & {*sys.modules} == set()
            print("\\nnothing loaded")
        """
    )
    result = project.run_cold(*PLUGIN)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["nothing loaded"])
    assert "= memprof =" not in text(result)


@pytest.mark.wheel
def test_the_entry_point_loads_the_plugin_and_can_be_switched_off(project):
    pytest_ = (sys.executable, "-m", "pytest", "--markers")
    loaded = project.run_command(*pytest_, PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    loaded.stdout.fnmatch_lines(["@pytest.mark.memprof(*"])
    without = project.run_command(*pytest_, "-p", "no:lightning_memprof", PYTEST_DISABLE_PLUGIN_AUTOLOAD="")
    assert without.ret == 0
    assert "memprof" not in text(without)
