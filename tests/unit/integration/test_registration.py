from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from lightning_memprof import ConfigError
from lightning_memprof.cli.main import main
from lightning_memprof.integration.callback import load_options
from lightning_memprof.integration.registration import OPTIONS

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
    for ask in (lambda: lightning_memprof.MemProfilerCallback, lambda: pl.Trainer(profiler="fts_extended")):
        try:
            ask()
        except Exception as error:
            print(type(error).__name__, error)
"""


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
        f"ConfigError profiler='fts_extended' needs the package lightning, which {rest}",
    ]


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
FILES = {
    "aliases of aliases": (LAUGHS, "more than 10,000 values"),
    "a value that contains itself": ("schedule: &a {wait: *a}", "a value that contains itself"),
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
    from lightning_memprof import MemProfilerCallback

    assert list(inspect.signature(MemProfilerCallback).parameters) == list(OPTIONS)
