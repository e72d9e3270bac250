"""What installing the package changes for a training that does not use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.wheel, pytest.mark.slow]

PROGRAM = """
import json, sys, warnings
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, limit_val_batches=1)
trainer.fit(BoringModel())
found = {
    "progress bar": [str(type(each)) for each in trainer.callbacks if isinstance(each, ProgressBar)],
    "model summary": [str(type(each)) for each in trainer.callbacks if isinstance(each, ModelSummary)],
    "callbacks": [str(type(each)) for each in trainer.callbacks],
    "loggers": [str(type(each)) for each in trainer.loggers],
    "profiler": str(type(trainer.profiler)),
    "filters": [str(each) for each in warnings.filters],
}
with open("found.json", "w") as file:
    json.dump(found, file)
sys.exit(3)
"""


def closure(*names: str) -> dict[str, metadata.Distribution]:
    """Return the distributions that pip installs for these names, by name."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    pending = [Requirement(name) for name in names]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for each, extra in seen if each == name}:
            seen.add((name, extra))
            found[name] = metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            pending += [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def links(distribution: metadata.Distribution) -> Iterator[Path]:
    """Return the files and folders of a distribution in its site-packages, the topmost of each."""
    site = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}
    yield from (site / top for top in sorted(tops))


class Environment:
    """A virtual environment whose packages are links to installed ones: nothing is downloaded."""

    def __init__(self, directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True, capture_output=True)
        (self._site,) = directory.glob("lib/python*/site-packages")
        self._python = directory / "bin/python"

    def install(self, *names: str) -> None:
        """Link packages and all that they require."""
        for distribution in closure(*names).values():
            for path in links(distribution):
                if not (link := self._site / path.name).exists():
                    link.symlink_to(path)

    def train(self, directory: Path) -> dict[str, Any]:
        """Run the program in an empty directory; return what it and its streams say."""
        directory.mkdir()
        variables = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        done = subprocess.run(
            [self._python, "-W", "always", "-c", PROGRAM],
            cwd=directory,
            env={**variables, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        found = directory / "found.json"
        return {
            **(json.loads(found.read_text()) if found.exists() else {}),
            "exit code": done.returncode,
            "output": words(done.stdout),
            "errors": words(done.stderr),
            "files": sorted(re.sub(r"\d{6,}.*", "", str(path.relative_to(directory))) for path in directory.rglob("*")),
        }


def words(text: str) -> list[str]:
    """Return the different lines of an output, without what a progress bar measures."""
    return list(dict.fromkeys(re.sub(r"\|.*?\||\[.*?\]", "", line).strip() for line in re.split(r"[\r\n]+", text)))


def test_installing_the_wheel_changes_no_trainer_that_does_not_use_it(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env")
    environment.install("torch", "lightning", "tensorboard")
    bare = environment.train(tmp_path / "bare")
    environment.install("lightning-memprof")
    assert environment.train(tmp_path / "installed") == bare
    assert bare["exit code"] == 3, bare["errors"]
    assert [name.rpartition(".")[2] for name in bare["progress bar"]] == ["TQDMProgressBar'>"]
    assert [name.rpartition(".")[2] for name in bare["loggers"]] == ["TensorBoardLogger'>"]
