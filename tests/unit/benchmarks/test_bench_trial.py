"""With `--quick` a benchmark is tried: it prints, judges nothing, and leaves the published figures alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# The benchmarks are scripts: their directory is on the path while one of them runs.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import merge
import networks
import part
import traces
import tracker

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder that takes the place of ``docs/measured``."""
    folder = tmp_path / "measured"
    folder.mkdir()
    monkeypatch.setattr("measured.MEASURED", folder)
    return folder


def is_trial(printed: str, published: Path) -> bool:
    said = "A trial: nothing was written." in printed and "not judged" in printed
    return said and not re.search(r"\b(met|missed)\b", printed) and not list(published.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        (merge, ["--traces", "2", "--megabytes", "1"]),
        (traces, ["--megabytes", "1", "--only", "decode", "ours"]),
        (tracker, ["--rounds", "1"]),
    ],
    ids=["merge", "traces", "tracker"],
)
def test_a_trial_prints_its_figures_and_writes_and_judges_nothing(
    program: Any,
    arguments: list[str],
    published: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(networks, "BLOCKS", 2)
    monkeypatch.setattr(sys, "argv", ["program.py", "--quick", *arguments])
    program.main()
    assert is_trial(capsys.readouterr().out, published)


def test_a_trial_of_growth_draws_no_picture_either(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    # What draws is not installed with the tests.
    plots = ModuleType("plots")
    vars(plots)["draw"] = lambda name, *_: (images / f"growth_{name}.png").touch()
    monkeypatch.setitem(sys.modules, "plots", plots)
    import growth

    def squares(sizes: Any, repeats: int, tick: Any) -> growth.Costs:
        costs = growth.Costs("steps")
        for size in sizes:
            costs.add(size, show_s=size**2)
        costs.targets.append(part.Target("within a second", "two", met=False))
        return costs

    monkeypatch.setitem(growth.FAMILIES, "steps", growth.Family("By steps", squares, (1, 10, 100), (1, 2, 3)))
    monkeypatch.setattr(sys, "argv", ["growth.py", "--only", "steps", "--quick"])
    growth.main()
    assert is_trial(capsys.readouterr().out, published)
    assert list(images.iterdir()) == []

    monkeypatch.setattr(sys, "argv", ["growth.py", "--only", "steps"])
    growth.main()
    assert [path.name for path in images.iterdir()] == ["growth_steps.png"]
    written = (published / "growth-steps.md").read_text(encoding="utf-8")
    assert written.count("**missed**") == 2
    # As a viewer that opens the fragment alone looks for it.
    shown = re.findall(r"!\[.*?\]\((.*?)\)", written)
    assert [(published / each).resolve() for each in shown] == [images / "growth_steps.png"]


def test_every_picture_of_a_published_fragment_is_where_it_says() -> None:
    folder = BENCHMARKS.parents[1] / "docs" / "measured"
    pictures = {
        path: re.findall(r"!\[.*?\]\((.*?)\)", path.read_text(encoding="utf-8")) for path in folder.glob("growth-*.md")
    }
    assert pictures
    for path, found in pictures.items():
        assert found, path
        assert all((folder / each).is_file() for each in found), path
