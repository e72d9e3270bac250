"""A measured figure says where it comes from."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import measured


def test_a_fragment_begins_with_its_command_the_machine_and_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    path = measured.write_fragment("fits", "make bench", "body", packages=["numpy", "composer 0.30", "no-such-package"])
    made, machine, versions, empty, body = path.read_text().splitlines()
    assert path == tmp_path / "fits.md"
    assert made.startswith("Made by `make bench` on 20")
    assert measured.processor() in machine
    assert versions.startswith(f"Python {platform.python_version()}, torch {version('torch')}, lightning ")
    assert versions.endswith(f", numpy {version('numpy')}, composer 0.30, no-such-package not installed")
    assert (empty, body) == ("", "body")
    assert [entry.name for entry in tmp_path.iterdir()] == ["fits.md"]


def test_a_fragment_names_the_commit_and_whether_its_sources_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        named = ("-c", "user.name=A", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    monkeypatch.setattr(measured, "ROOT", tmp_path)
    git("init", "-q")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one.py").touch()
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short=10", "HEAD").strip()
    (tmp_path / "docs.md").touch()
    assert measured.origin("make bench").splitlines()[0].rstrip().endswith(f", at commit {commit}")
    (tmp_path / "tests" / "two.py").touch()
    assert measured.origin("make bench").splitlines()[0].rstrip().endswith(f", at commit {commit} and changes")


def test_every_fragment_says_which_command_made_it() -> None:
    fragments = sorted((Path(__file__).parents[2] / "docs" / "measured").glob("*.md"))
    assert fragments
    for path in fragments:
        lines = path.read_text(encoding="utf-8").splitlines()
        # What was not measured has the command that would, and no figure.
        is_empty = lines[0].startswith("Not measured yet: `") and len(lines) == 1
        assert is_empty or lines[0].startswith("Made by `"), path
