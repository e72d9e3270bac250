from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from lightning_memprof import ConfigError, ExtendedPyTorchProfiler, MemProfilerCallback
from lightning_memprof.cli.main import main
from lightning_memprof.compat.fts import MemProfiler, MemProfilerCfg
from lightning_memprof.integration.callback import AttachedCallback, load_options
from lightning_memprof.integration.registration import OPTIONS
from lightning_memprof.integration.settings import OutputOptions

Run = Callable[..., subprocess.CompletedProcess[str]]

# One program for all: importing torch and Lightning is most of the time that each takes.
CLI = """
    import sys
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringModel
    paths, sys.argv[1:] = sys.argv[1:], []
    for path in paths:
        try:
            LightningCLI(BoringModel, run=False, save_config_callback=None, args=[path])
        except SystemExit as error:
            print(error.code, file=sys.stderr)
"""
HIDDEN = """
    import importlib.abc, sys
    class Hidden(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "lightning":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.modules["lightning"] = None
    sys.meta_path.insert(0, Hidden())
"""
ASKED = """
    import pytorch_lightning as pl
    import lightning_memprof
    for ask in (lambda: lightning_memprof.MemProfilerCallback, lambda: pl.Trainer(profiler="memprof")):
        try:
            ask()
        except Exception as error:
            print(type(error).__name__, error)
"""


LIGHTNINGS = ("lightning.pytorch", "pytorch_lightning")
Make = partial[Any]


@pytest.fixture(params=LIGHTNINGS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a function that makes a quiet Trainer of one of Lightning's packages."""
    lightning = pytest.importorskip(request.param)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    return partial(lightning.Trainer, **quiet)


@pytest.fixture
def model(make: Make) -> Any:
    return importlib.import_module(
        f"{make.func.__module__.partition('.trainer')[0]}.demos.boring_classes"
    ).BoringModel()


def attached(trainer: Any) -> list[type]:
    return [type(callback) for callback in trainer.callbacks if isinstance(callback, MemProfilerCallback)]


def test_one_name_gives_callback_and_profiler_and_the_other_the_profiler_alone(make: Make) -> None:
    for name, callbacks in {"memprof": [AttachedCallback], "MemProf": [AttachedCallback], "FTS_extended": []}.items():
        trainer = make(profiler=name)
        assert isinstance(trainer.profiler, ExtendedPyTorchProfiler)
        assert attached(trainer) == callbacks
        assert trainer.callbacks[-1] is trainer.checkpoint_callback
    assert attached(make(profiler="simple")) == attached(make()) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_one_name_records_every_stage_and_prints_its_page(
    make: Make, model: Any, call: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = {f"limit_{stage}_batches": 6 for stage in ("train", "test", "predict")}
    limits["limit_val_batches"] = 0 if call == "fit" else 6
    trainer = make(profiler="memprof", max_epochs=1, **limits)
    getattr(trainer, call)(model)
    (run,) = tmp_path.rglob("memprofiler")
    assert "lightning-memprof" in capsys.readouterr().out
    assert list(run.glob("window000/*"))
    assert list(run.parent.glob(f"{call}-*.pt.trace.json.gz"))


def test_a_callback_of_the_program_takes_precedence_whenever_it_is_added(
    make: Make, model: Any, tmp_path: Path
) -> None:
    own = MemProfilerCallback(output=OutputOptions(dirpath=tmp_path / "own", summary=False))
    early = make(profiler="memprof", callbacks=[own], max_steps=1, enable_checkpointing=False)
    assert attached(early) == [MemProfilerCallback]
    late = make(profiler="memprof", max_steps=1, enable_checkpointing=False)
    late.callbacks.append(own)
    late.fit(model)
    assert own.run_directory == tmp_path / "own/memprofiler"
    assert len(list(tmp_path.rglob("memprofiler"))) == 1


def test_a_disabled_memprofiler_of_finetuning_scheduler_does_not_keep_the_name_from_recording(make: Make) -> None:
    assert attached(make(profiler="memprof", callbacks=[MemProfiler(MemProfilerCfg())])) == [
        MemProfiler,
        AttachedCallback,
    ]


@pytest.mark.parametrize("name", ["memprf", "fts_extend", "simpel"])
def test_a_name_that_does_not_exist_is_lightnings_error_with_all_names(make: Make, name: str) -> None:
    with pytest.raises(Exception, match="'simple'") as refusal:
        make(profiler=name)
    exceptions = make.func.__module__.partition(".trainer")[0] + ".utilities.exceptions"
    assert type(refusal.value) is importlib.import_module(exceptions).MisconfigurationException
    assert "'memprof'" in str(refusal.value)
    assert "'fts_extended'" in str(refusal.value)


def test_barebones_refuses_the_name_as_it_refuses_every_profiler(make: Make) -> None:
    bare = {"barebones": True, "enable_progress_bar": None, "logger": None}
    said = []
    for name in ("simple", "memprof"):
        with pytest.raises(ValueError, match="barebones") as refusal:
            make(profiler=name, **bare)
        said.append(str(refusal.value).replace(name, "NAME"))
    assert said[0] == said[1]


def test_a_trainer_with_the_name_can_be_copied_and_pickled(make: Make) -> None:
    trainer = make(profiler="memprof", enable_checkpointing=False)
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):  # noqa: S301 our own
        assert attached(copied) == [AttachedCallback]
        assert isinstance(copied.profiler, ExtendedPyTorchProfiler)


def program(directory: Path, *texts: str) -> str:
    (directory / "train.py").write_text("".join(dedent(text) for text in texts))
    return "train.py"


@pytest.mark.slow
def test_a_class_path_in_the_cli_of_pytorch_lightning_is_refused_in_one_line(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("pytorch_lightning")
    named = {
        "MemProfilerCallback": "callbacks",
        "compat.fts.MemProfiler": "callbacks",
        "ExtendedPyTorchProfiler": "profiler",
    }
    paths = [f"--trainer.{option}=lightning_memprof.{name}" for name, option in named.items()]
    done = run_python(program(tmp_path, CLI), *paths)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), lines[1::2]) == (0, 6, ["2", "2", "2"]), done.stderr
    for name, line in zip(named, lines[::2], strict=True):
        assert line.startswith(
            f"error: lightning_memprof.{name.removesuffix('.fts.MemProfiler')} is for lightning.pytorch, but"
        )
        assert "import LightningCLI from lightning.pytorch.cli, or use" in line


@pytest.mark.slow
def test_without_the_package_lightning_one_line_says_what_is_missing(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("pytorch_lightning")
    done = run_python(program(tmp_path, HIDDEN, ASKED))
    assert done.returncode == 0, done.stderr[-3000:]
    rest = "is not installed; pytorch_lightning alone is not enough: pip install lightning"
    assert [line for line in done.stdout.splitlines() if "Error" in line] == [
        f"ModuleNotFoundError lightning_memprof.MemProfilerCallback needs the package lightning, which {rest}",
        f"ConfigError profiler='memprof' needs the package lightning, which {rest}",
    ]


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
FILES = {
    "aliases of aliases": (LAUGHS, "it has an alias"),
    "a value that contains itself": ("schedule: &a {wait: *a}", "it has an alias"),
    "deep": ("{a: " * 3_000, "recursion"),
    "a date of a 13th month": ("a: 2001-13-01", "month must be in 1..12"),
    "an object": ("!!python/object/apply:os.mkdir [made]", "could not determine a constructor"),
    "a number without end": ("a: " + "9" * 5_000, "digits"),
    "zeros": ("\0", "unacceptable character"),
    "two mebibytes": ("#" * (2 << 20), "it is larger than 1.00 MiB"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_options_that_is_hostile_is_one_line_and_makes_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, words = FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(content)
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError) as refusal:
        load_options(Path("a.yaml"))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert main(["run", "--config", "a.yaml", "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "train.py"]


def test_the_names_of_options_are_the_callbacks_parameters():
    assert list(inspect.signature(MemProfilerCallback).parameters) == list(OPTIONS)
