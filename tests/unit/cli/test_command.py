from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fake_runs import make_run
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.cli.command import check_output, parse_numbers
from lightning_memprof.cli.main import main
from lightning_memprof.cli.progress import ProgressLine, counting
from lightning_memprof.errors import ConfigError
from pages import Terminal


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["zero\x00byte", "loop", "a" * 300, "memprofiler/window000/" + "a" * 300],
    ids=["zero", "loop", "long", "file"],
)
@pytest.mark.parametrize("command", ["merge", "report", "export"])
def test_a_listed_path_that_cannot_be_a_file_does_not_stop_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, path: str
) -> None:
    run = make_run(tmp_path / "log")
    (run.parent / "loop").symlink_to("loop")
    manifest = ManifestWriter(run / "manifest.rank00000.jsonl")
    manifest.append("artifact", collector="x", type="blob", path=path, size_bytes=1)
    manifest.close()
    out = tmp_path / {"merge": "m.json", "report": "r.html", "export": "e"}[command]
    options = ["--to", "csv"] if command == "export" else []
    assert main([command, str(run), "-o", str(out), *options]) == 0, capsys.readouterr().err
    assert out.exists()


def test_an_input_is_not_overwritten_through_a_link_either(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({}))
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ConfigError, match="this is an input file"):
        check_output(tmp_path / "link", [tmp_path / "zero\x00", file])
    check_output(tmp_path / "b.json", [tmp_path / "zero\x00", file])


@pytest.mark.parametrize("name", ["manifest.rank00000.jsonl", "pulse.rank00003.csv"])
def test_manifests_and_pulses_of_a_run_are_not_overwritten(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="this is an input file"):
        check_output(tmp_path / name, [], tmp_path)
    check_output(tmp_path / "elsewhere" / name, [], tmp_path)


def test_numbers_and_ranges_are_read() -> None:
    assert parse_numbers("--ranks", "0, 3-5,4") == [0, 3, 4, 5]
    for wrong in ("", "1-", "-1", "1;2", "0-99999999999"):
        with pytest.raises(ConfigError, match="--ranks"):
            parse_numbers("--ranks", wrong)


def test_a_log_has_a_line_about_what_runs_and_the_next_one_after_some_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.0, 3.0, 30.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with counting("the first") as progress:
        for number in range(3):
            progress(f"round {number}, about 20 seconds left", number, 3)
    assert capsys.readouterr().err.splitlines() == [
        "memprof: round 0, about 20 seconds left",
        "memprof: round 2, about 20 seconds left",
    ]


def test_output_of_a_program_appears_above_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr", Terminal())
    terminal = sys.stderr
    with counting("the program") as progress, redirect_stdout(sys.stderr):
        print("its own words")
        progress("a\x1b[2J round", 1, 2)
    assert sys.stderr is terminal
    assert isinstance(terminal, Terminal)
    clear = "\x1b[1F\x1b[J"
    bar = "█" * 12 + "─" * 12
    assert terminal.getvalue() == f"the program\n{clear}its own words\n{bar} a\\x1b[2J round\n{clear}"


def test_a_line_of_progress_is_drawn_ten_times_per_second_and_never_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("time.monotonic", lambda: now)
    terminal = Terminal()
    line = ProgressLine(terminal)
    for step in range(100):
        now = step / 50
        line.update("x" * 30, step << 20, 100 << 20, in_bytes=True)
    drawn = re.sub(r"\x1b\[[0-9;]*[mFJ]", "", terminal.getvalue()).splitlines()
    assert 15 < len(drawn) <= 21
    assert max(map(len, drawn)) < 60
