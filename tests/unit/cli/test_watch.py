from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.cli import watch as watching
from lightning_memprof.cli.main import main
from lightning_memprof.cli.watch import _Watcher
from lightning_memprof.errors import ArtifactError, ConfigError
from pages import Terminal

SLOW_DATA = FakeRun(
    phases=lambda *_: {**HEALTHY, "data_wait": 30_000_000},
    training={"num_batches": 60, "max_epochs": 1, "max_steps": -1},
)


def unended(directory: Path) -> Callable[[float], None]:
    """Take the end off the manifest of rank 0; return what puts the end back."""
    path = directory / "manifest.rank00000.jsonl"
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    kept = [row for row in rows if row["kind"] != "end"]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    ends = [line for line in text.splitlines(keepends=True) if json.loads(line)["kind"] == "end"]

    def end(_seconds: float) -> None:
        path.write_text("".join([*(json.dumps(row) + "\n" for row in kept), *ends]))

    return end


def test_a_run_that_has_ended_is_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, SLOW_DATA)
    assert main(["show", str(tmp_path), "--watch"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("verdict   Input-bound: ")
    assert "finished" in page
    assert main(["show", str(tmp_path), "--watch", "--all"]) == 0
    assert "\nProfiler overhead ─" in capsys.readouterr().out


def test_where_there_is_no_terminal_each_look_is_a_line_and_the_page_is_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = unended(make_run(tmp_path, SLOW_DATA))
    monkeypatch.setattr(watching.time, "sleep", end)
    assert main(["show", str(tmp_path), "--watch"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("steps 30 of 60 (50%) · ")
    assert all(label in first for label in ("data wait ", " · RSS ", " · now last step "))
    assert sum(line.startswith("verdict ") for line in rest) == 1


def test_a_terminal_of_few_rows_keeps_the_whole_page_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("lightning_memprof.report.printers.terminal._size", lambda _: os.terminal_size((80, 6)))
    directory = make_run(tmp_path, SLOW_DATA)
    assert main(["show", str(tmp_path), "--watch"]) == 0
    page = capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(watching.time, "sleep", unended(directory))
    assert main(["show", str(tmp_path), "--watch"]) == 0
    first, last = terminal.getvalue().split("\x1b[5F\x1b[J")
    assert first.startswith("verdict   Input-bound: ")
    assert len(first.splitlines()) == 5
    assert last == page


def test_a_run_whose_process_is_gone_is_not_watched_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memprof.report.live.GONE_NS", 0)
    unended(make_run(tmp_path, FakeRun()))
    assert main(["show", str(tmp_path), "--watch"]) == 0
    assert "running or killed" in capsys.readouterr().out


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    for more in (["other"], ["--section", "steps"], ["--rank", "0"], ["--window", "0"], ["--format", "json"]):
        with pytest.raises(ConfigError, match="--watch: shows one whole run"):
            main(["--debug", "show", str(tmp_path), *more, "--watch"])
    with pytest.raises(ArtifactError, match="a run at a URL has its files only when it has ended"):
        main(["--debug", "show", "s3://bucket/run", "--watch"])
    with pytest.raises(ArtifactError, match="no run is in it"):
        main(["--debug", "show", str(tmp_path), "--watch"])


def test_findings_are_computed_again_when_a_rank_reports(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    unended(directory)
    watcher = _Watcher(directory)
    assert "hang" not in {finding.rule for finding in watcher.update().findings}
    hang = {"kind": "hang", "step": 30, "phase": "forward", "waited_ns": 61 * 10**9, "place": "train.py:7 in read"}
    (directory / "hangs.rank00000.jsonl").write_text(json.dumps(hang) + "\n")
    assert "hang" in {finding.rule for finding in watcher.update().findings}
