from __future__ import annotations

import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.cli.main import main
from lightning_memprof.cli.watch import _Watcher
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.report.sections import live

SLOW_DATA = FakeRun(
    phases=lambda *_: {**HEALTHY, "data_wait": 30_000_000},
    training={"num_batches": 60, "max_epochs": 1, "max_steps": -1},
)


def unended(directory: Path, rank: int = 0, **facts: Any) -> None:
    """Take the end off a rank's manifest, and change its facts."""
    path = directory / f"manifest.rank{rank:05d}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{**row, **(facts if row["kind"] == "run" else {})} for row in rows if row["kind"] != "end"]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def test_one_look_is_a_page_of_at_most_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, SLOW_DATA)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    page = capsys.readouterr().out
    labels = [line.split()[0] for line in page.splitlines() if line[:1].strip()]
    assert labels == ["Run", "run", "now", "steps", "Steps", "Step", "Step", "Mean", "Memory", "RSS", "RSS", "Windows",
                      "windows", "critical"]  # fmt: skip
    assert "finished" in page
    assert "1 recorded · 0: steps 2–3" in page
    assert "training loop waits for data" in page
    assert max(map(len, page.splitlines())) <= 80
    assert "\x1b" not in page


def test_where_there_is_no_terminal_each_look_is_a_line_until_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, SLOW_DATA)
    assert main(["watch", str(tmp_path), "--interval", "0.01"]) == 0
    first, *findings = capsys.readouterr().out.splitlines()
    assert first.startswith("steps 30 of 60 (50%) · ")
    assert "data wait" in first
    assert "RSS " in first
    assert findings
    assert findings[0].startswith("  critical: Input-bound: the training loop waits for data")


def test_a_terminal_of_few_rows_keeps_the_whole_page_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("lightning_memprof.report.printers.terminal._size", lambda _: os.terminal_size((80, 6)))
    make_run(tmp_path, SLOW_DATA)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    page = capsys.readouterr().out
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["watch", str(tmp_path), "--interval", "0.01"]) == 0
    first, last = terminal.getvalue().split("\x1b[5F\x1b[J")
    assert first.splitlines() == page.splitlines()[:5]
    assert last == page


def test_several_ranks_stand_in_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, FakeRun(world_size=3))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    page = capsys.readouterr().out
    rows = page.partition("  rank ")[2].splitlines()[1:4]
    assert [line.split()[:2] for line in rows] == [["0", "ended"], ["1", "ended"], ["2", "ended"]]


def test_a_run_whose_process_is_gone_is_not_watched_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memprof.report.sections.live.SILENT_NS", 0)
    directory = make_run(tmp_path, FakeRun())
    unended(directory, host=socket.gethostname(), pid=2**22 + 1)
    assert main(["watch", str(tmp_path), "--interval", "0.01"]) == 0
    assert "last step" in capsys.readouterr().out


def test_a_run_that_is_silent_says_that_it_may_have_been_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_run(tmp_path, FakeRun())
    unended(directory)
    start = int((directory / "pulse.rank00000.csv").read_text().splitlines()[-1].split(",")[4])
    monkeypatch.setattr(time, "time_ns", lambda: start + 2 * live.SILENT_NS)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "it waits, or was killed" in capsys.readouterr().out


def test_a_run_before_its_first_step_is_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unended(make_run(tmp_path, FakeRun(steps=0, windows=())))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "before its first step" in capsys.readouterr().out


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--interval 0: must be above 0"):
        main(["--debug", "watch", str(tmp_path), "--interval", "0"])
    with pytest.raises(ArtifactError, match="a run at a URL has its files only when it has ended"):
        main(["--debug", "watch", "s3://bucket/run"])
    with pytest.raises(ArtifactError, match="no run is in it"):
        main(["--debug", "watch", str(tmp_path)])


def test_a_run_that_stands_still_has_its_place_and_its_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_run(tmp_path, FakeRun())
    unended(directory)
    last = int((directory / "pulse.rank00000.csv").read_text().splitlines()[-1].split(",")[4])
    now = last + 2 * live.SILENT_NS
    monkeypatch.setattr(time, "time_ns", lambda: now)
    beat = {"kind": "heartbeat", "step": 30, "phase": "data_wait", "waited_ns": 55 * 10**9, "time_ns": now - 5 * 10**9}
    (directory / "heartbeat.rank00000.jsonl").write_text(json.dumps(beat).ljust(511) + "\n")
    hang = {"kind": "hang", "step": 30, "phase": "data_wait", "waited_ns": 61 * 10**9, "place": "train.py:7 in read"}
    (directory / "hangs.rank00000.jsonl").write_text(json.dumps(hang) + "\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    page = capsys.readouterr().out
    assert "in data wait of step 30 for 60 s" in page
    assert "Step 30 does not end: stuck in data wait at train.py:7 in read." in " ".join(page.split())


def test_findings_are_computed_again_when_a_rank_reports(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    unended(directory)
    watcher = _Watcher(directory)
    assert "hang" not in {finding.rule for finding in watcher.update().findings}
    hang = {"kind": "hang", "step": 30, "phase": "forward", "waited_ns": 61 * 10**9, "place": "train.py:7 in read"}
    (directory / "hangs.rank00000.jsonl").write_text(json.dumps(hang) + "\n")
    assert "hang" in {finding.rule for finding in watcher.update().findings}


def test_a_heartbeat_that_ended_says_that_the_process_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path, FakeRun())
    unended(directory)
    beat = {"kind": "heartbeat", "step": 30, "phase": "forward", "waited_ns": 5, "time_ns": 10**9}
    (directory / "heartbeat.rank00000.jsonl").write_text(json.dumps(beat) + "\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "it is stopped, or was killed" in capsys.readouterr().out
