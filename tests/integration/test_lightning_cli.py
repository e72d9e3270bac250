"""LightningCLI, and programs that know nothing of us: each really fits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

import pytest
import torch

from training import only_run, program, rows_of

CONFIGS = Path(__file__).parents[2] / "configs"
SUPPORT = Path(__file__).parents[1] / "support"
COMMON = (
    "fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false", "--trainer.enable_model_summary=false",
    "--trainer.logger.class_path=CSVLogger", "--trainer.logger.init_args.save_dir=logs",
)  # fmt: skip

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PROGRAM = dedent(f"""
    import sys
    sys.path.insert(0, {str(SUPPORT)!r})
    from {{package}}.cli import LightningCLI
    import {{package}} as pl
    from training import Steps, loader

    class Perceptron(Steps, pl.LightningModule):
        pass

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader(12)

        def val_dataloader(self):
            return loader(2)

    LightningCLI(Perceptron, Data, save_config_callback=None)
    """)

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path, run_program: Run) -> Run:
    """Run a LightningCLI program with the given arguments in ``tmp_path``."""

    def run(*arguments: str, package: str = "lightning.pytorch", **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(PROGRAM.format(package=package))
        done = run_program("train.py", *COMMON, *arguments, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


def recorded_steps(directory: Path) -> list[list[int]]:
    return [row["steps"] for row in rows_of(only_run(directory), "window") if row["event"] == "close"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_profilers_name_in_yaml(tmp_path: Path, cli: Run, package: str) -> None:
    (tmp_path / "memprof.yaml").write_text("trainer:\n  profiler: memprof\n")
    done = cli("--config=memprof.yaml", package=package)
    assert recorded_steps(tmp_path) == [[2, 3]]
    assert done.stdout.startswith("verdict")


def test_the_profilers_name_in_lightnings_environment_variable(tmp_path: Path, run_program: Run) -> None:
    (tmp_path / "train.py").write_text(
        program("""
        trainer(Path("logs")).fit(Perceptron(), loader())
        """)
    )
    done = run_program("train.py", PL_TRAINER_PROFILER="memprof")
    assert done.returncode == 0, done.stderr[-3000:]
    assert recorded_steps(tmp_path) == [[2, 3]]
    assert "verdict" in done.stdout


def test_the_profiler_by_class_path_with_its_schedule(tmp_path: Path, cli: Run) -> None:
    (tmp_path / "memprof.yaml").write_text(
        dedent("""
        trainer:
          profiler:
            class_path: lightning_memprof.ExtendedPyTorchProfiler
            init_args:
              schedule: {wait: 1, warmup: 1, active: 2, repeat: 2}
        """)
    )
    cli("--config=memprof.yaml")
    assert recorded_steps(tmp_path) == [[2, 3], [6, 7]]


def test_the_callback_by_class_path_with_schedule_and_collectors(tmp_path: Path, cli: Run) -> None:
    (tmp_path / "memprof.yaml").write_text(
        dedent("""
        trainer:
          callbacks:
            - class_path: lightning_memprof.MemProfilerCallback
              init_args:
                schedule: {wait: 2, active: 1}
                collectors:
                  - class_path: lightning_memprof.collectors.Pulse
                  - class_path: lightning_memprof.collectors.OperatorTrace
                    init_args: {record_shapes: true, activities: [cpu]}
        """)
    )
    done = cli("--config=memprof.yaml")
    assert recorded_steps(tmp_path) == [[3]]
    assert "verdict" in done.stdout
    assert not (only_run(tmp_path) / "window000/rank00000.host.jsonl").exists()


def test_a_fragment_leaves_the_users_own_callbacks(tmp_path: Path, cli: Run) -> None:
    (tmp_path / "mine.yaml").write_text(
        "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.LearningRateMonitor\n"
    )
    done = cli("--config=mine.yaml", f"--config={CONFIGS / 'overview'}.yaml", "--print_config")
    assert "lightning.pytorch.callbacks.LearningRateMonitor" in done.stdout
    assert "lightning_memprof.MemProfilerCallback" in done.stdout


@pytest.mark.parametrize(
    ("fragment", "steps"), [("overview", [[2, 3]]), ("trace", [[2, 3], [6, 7]]), ("large_runs", [[3, 4, 5]])]
)
def test_a_shipped_fragment(tmp_path: Path, cli: Run, fragment: str, steps: list[list[int]]) -> None:
    cli(f"--config={CONFIGS / fragment}.yaml")
    assert recorded_steps(tmp_path) == steps
    assert list(tmp_path.rglob("*.pt.trace.json.gz"))


def test_the_fragment_for_curves_draws_them_and_records_nothing_else(tmp_path: Path, cli: Run) -> None:
    cli(f"--config={CONFIGS / 'curves'}.yaml")
    run = only_run(tmp_path)
    listed = {row["path"] for row in rows_of(run, "artifact")}
    assert listed == {
        "memprofiler/actions.rank00000.jsonl",
        "memprofiler/pulse.rank00000.csv",
        *(f"memprofiler/tb/rank0/{file.name}" for file in (run / "tb/rank0").iterdir()),
    }
    assert "memprof/step_time_ms" in (run.parent / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("fragment", "collectors"),
    [
        ("modules", ["pulse", "host", "operator_trace", "module_memory"]), ("leaks", ["pulse", "holders"]),
        ("hangs", ["pulse", "hangs"]), ("hangs_abort", ["pulse", "hangs"]), ("workers", ["pulse", "host"]),
    ],
)  # fmt: skip
def test_a_fragment_for_one_question_has_its_collectors(
    tmp_path: Path, cli: Run, fragment: str, collectors: list[str]
) -> None:
    cli(f"--config={CONFIGS / fragment}.yaml")
    (row,) = rows_of(only_run(tmp_path), "run")
    # That for modules adds its collector to the default set.
    assert set(collectors) <= set(row["collectors"]) if fragment == "modules" else row["collectors"] == collectors


def test_the_snapshot_fragment_fails_clearly_without_cuda_and_dumps_with_it(
    tmp_path: Path, run_program: Run, cli: Run
) -> None:
    fragment = f"--config={CONFIGS / 'snapshot'}.yaml"
    if torch.cuda.is_available():
        cli(fragment, "--trainer.accelerator=gpu", "--trainer.devices=1")
        assert list(tmp_path.rglob("cuda_alloc_rank_0.training_step.*.pickle"))
        return
    (tmp_path / "train.py").write_text(PROGRAM.format(package="lightning.pytorch"))
    done = run_program("train.py", *COMMON, fragment)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith(
            "ConfigError: not available in this run: AllocatorStats (no accelerator), "
            "AllocatorHistory (CUDA is not available); remove it from `collectors`"
        )
    )


def test_every_shipped_fragment_has_a_test() -> None:
    here = {"overview", "trace", "snapshot", "large_runs", "curves", "modules", "hangs", "hangs_abort", "leaks"}
    elsewhere = {"memprofiler_demo", "pytorch_profiler", "triggers"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == here | elsewhere | {"workers"}


PLAIN = dedent(f"""
    import sys
    sys.path.insert(0, {str(SUPPORT)!r})
    from pathlib import Path
    from training import Package, loader
    {{before}}
    package = Package({{package!r}})
    package.trainer(Path("logs"){{arguments}}).fit(package.Perceptron(), loader(), loader(2))
    """)


@pytest.fixture
def plain(tmp_path: Path, run_program: Run) -> Run:
    """Run a program that fits on its own, under an environment variable."""

    def run(
        value: str, before: str = "", arguments: str = "", package: str = "lightning.pytorch"
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(PLAIN.format(before=before, arguments=arguments, package=package))
        return run_program("train.py", LIGHTNING_MEMPROF=value)

    return run


@pytest.mark.parametrize("package", PACKAGES)
def test_the_environment_variable_attaches_to_a_program_that_knows_nothing_of_us(
    tmp_path: Path, plain: Run, package: str
) -> None:
    done = plain("1", "print('its own words')", package=package)
    assert done.returncode == 0, done.stderr[-3000:]
    assert recorded_steps(tmp_path) == [[2, 3]]
    assert list(tmp_path.rglob("*.pt.trace.json.gz"))
    assert "verdict" in done.stderr
    assert done.stdout == "its own words\n"


@pytest.mark.parametrize("value", ["0", "", "off"])
def test_the_environment_variable_can_say_no(tmp_path: Path, plain: Run, value: str) -> None:
    assert plain(value).returncode == 0
    assert not list(tmp_path.rglob("memprofiler"))


def test_the_name_and_the_environment_variable_attach_one_callback(tmp_path: Path, plain: Run) -> None:
    (tmp_path / "memprof.yaml").write_text("schedule: {wait: 3, active: 1}\n")
    done = plain(str(tmp_path / "memprof.yaml"), arguments=", profiler='memprof'")
    assert done.returncode == 0, done.stderr[-3000:]
    assert recorded_steps(tmp_path) == [[4]]
    assert "verdict" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_what_the_program_configured_itself_wins(tmp_path: Path, plain: Run, package: str) -> None:
    before = "from lightning_memprof import MemProfilerCallback, Schedule"
    done = plain("1", before, ", MemProfilerCallback(schedule=Schedule(wait=4, active=1)), profiler='simple'", package)
    assert done.returncode == 0, done.stderr[-3000:]
    assert recorded_steps(tmp_path) == [[5]]
    assert "Profiler Report" in done.stderr + done.stdout


def test_without_the_variable_a_program_loads_nothing_of_ours_but_the_entry_points(tmp_path: Path, plain: Run) -> None:
    before = "import atexit; atexit.register(lambda: print(sorted(m for m in sys.modules if 'memprof' in m)))"
    done = plain("", before)
    loaded = done.stdout.strip().splitlines()[-1]
    ours = ("", ".integration", ".integration.registration", ".logs", ".trial", ".trial.attach")
    assert loaded == str([f"lightning_memprof{name}" for name in ours])
