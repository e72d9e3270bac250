"""A command opens each file of a run once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.__main__ import main

# Snapshots and traces are binary: a few bytes tell what they are, then they are read.
TEXT = {".jsonl", ".csv", ".json"}

_counts: list[Counter[str]] = []


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _counts and isinstance(arguments[0], (str, Path)):
        _counts[-1][os.path.realpath(arguments[0])] += 1


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_count)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    make_run(root, FakeRun(world_size=2, windows=((2, 3), (9, 10))))
    directory = root / "memprofiler"
    (directory / "system.rank00000.jsonl").write_text('{"time_ns": 5, "cpu_percent": 3.0}\n')
    (directory / "snapshots.rank00000.jsonl").write_text('{"name": "a", "point": "snapshot", "rss_bytes": 5}\n')
    return root


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "show --all", "show --format json", "report", "compare"])
def test_each_text_file_of_a_run_is_opened_once(
    run: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    more = {"report": ["-o", str(tmp_path / "page.html")], "compare": []}.get(name, [])
    other = tmp_path / "other"
    if name == "compare":
        make_run(other, FakeRun())
        more = [str(other)]
    monkeypatch.setattr(sys, "argv", ["lightning-memprof", name, str(run), *more, *options])
    _counts.append(Counter())
    try:
        assert main() == 0, capsys.readouterr().err
    finally:
        counts = _counts.pop()
    opened = {path: times for path, times in counts.items() if "/memprofiler/" in path and Path(path).suffix in TEXT}
    assert any("hooks" in path for path in opened)
    assert any("manifest" in path for path in opened)
    assert {path: times for path, times in opened.items() if times > 1} == {}
