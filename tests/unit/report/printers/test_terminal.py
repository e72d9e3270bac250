from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest
from rich.cells import cell_len

from fake_memory import FakeMemory
from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.terminal import Display, page_width, print_lines
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.view import run_view
from lightning_memprof.units import MIB
from pages import Terminal, printed, table_of, tables_of, words


@pytest.fixture(autouse=True)
def _in_a_short_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def page(
    directory: Path, width: int = 80, *, colours: bool = False, encoding: str = "utf-8", is_full: bool = True
) -> str:
    view = run_view(load_run(directory))
    return printed(view, width, colours=colours, encoding=encoding, is_full=is_full)


def append(directory: Path, kind: str, rank: int = 0, **facts: object) -> None:
    writer = ManifestWriter(directory / f"manifest.rank{rank:05d}.jsonl")
    writer.append(kind, **facts)
    writer.close()


def body(text: str) -> list[str]:
    """Return the lines without the paths and commands at the end, which are never broken."""
    return text.rpartition("\nfiles ")[0].splitlines()


RUNS = {
    "healthy": FakeRun(),
    "ranks": FakeRun(world_size=20, endings={3: None, 4: "RuntimeError: " + "long " * 100}),
    "device": FakeRun(device_bytes=lambda _: 300 * MIB, windows=((2, 3), (10, 11, 12), (20, 21))),
    "many windows": FakeRun(steps=100, windows=tuple((start, start + 1) for start in range(2, 90, 5))),
    "every rule": FakeRun(
        steps=60,
        phases=lambda *_: {**HEALTHY, "data_wait": 10**10, "optimizer": 10**10},
        rss_bytes=lambda step: (500 + 9 * step) * MIB,
        training={"dataloaders": [{"num_workers": 0}], "optimizers": [{"name": "AdamW", "device": "cpu"}]},
    ),
    "no windows": FakeRun(windows=()),
    "no steps": FakeRun(steps=0, windows=()),
    "truncated": FakeRun(steps=3),
    "long names": FakeRun(training={"model": "M" * 300}),
    "tracked": FakeRun(memory=FakeMemory(temporary_bytes=MIB), device_bytes=lambda _: 300 * MIB),
    "compiled": FakeRun(memory=FakeMemory(attribution="a part of the model is compiled " * 5)),
    "no memory": FakeRun(memory=None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("is_full", [True, False])
def test_no_line_is_wider_than_the_terminal_or_ends_in_blanks(name: str, width: int, is_full: bool) -> None:
    text = page(make_run(Path("logs").absolute(), RUNS[name]), width, is_full=is_full)
    assert max(cell_len(line) for line in body(text)) <= min(width, 100)
    assert [line for line in text.split("\n") if line != line.rstrip()] == []


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [80, 100])
def test_the_short_page_fits_one_screen(name: str, width: int) -> None:
    text = page(make_run(Path("logs").absolute(), RUNS[name]), width, is_full=False)
    assert len(text.splitlines()) <= 40
    assert "commands  lightning-memprof report" in text


def test_categories_that_were_not_measured_are_only_on_the_long_page() -> None:
    directory = make_run(Path("logs").absolute())
    assert "temporary" not in page(directory, is_full=False)
    assert "temporary " in page(directory, is_full=True)


@pytest.mark.parametrize("width", [1, 10, 11, 25])
@pytest.mark.parametrize("is_full", [True, False])
def test_a_terminal_of_hardly_any_width_gets_its_page(width: int, is_full: bool) -> None:
    assert page(make_run(Path("logs").absolute(), RUNS["tracked"]), width, is_full=is_full)


@pytest.mark.parametrize(
    ("file", "variables", "has_colors"),
    [
        (Terminal, {}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (io.StringIO, {}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colors_are_those_of_the_terminal_and_of_the_environment(
    file: type[io.StringIO], variables: dict[str, str], has_colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    stream = file()
    print_lines([(("found", "bold red"), ("  ", "")), ()], stream)
    assert stream.getvalue() == ("\x1b[1;31mfound\x1b[0m\n\n" if has_colors else "found\n\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], TextIO]]:
    """Return a function that opens a terminal of so many rows and columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    with ExitStack() as stack:

        def opened(rows: int, columns: int) -> TextIO:
            ours, theirs = os.openpty()
            stack.callback(os.close, ours)
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            return stack.enter_context(open(theirs, "w", encoding="utf-8"))  # noqa: PTH123 a descriptor

        yield opened


def test_a_page_is_as_wide_as_its_terminal(
    terminal: Callable[[int, int], TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [page_width(terminal(24, columns)) for columns in (40, 97, 300)] == [40, 97, 100]
    monkeypatch.setenv("COLUMNS", "60")
    assert [page_width(file) for file in (terminal(24, 97), io.StringIO())] == [60, 60]


def test_a_terminal_without_a_size_and_a_closed_stream_have_80_columns(
    terminal: Callable[[int, int], TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("__stdin__", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, None)
    closed = terminal(24, 97)
    closed.close()
    assert [page_width(file) for file in (terminal(0, 0), closed, io.StringIO())] == [80, 80, 80]


def test_a_display_is_redrawn_in_place_within_the_rows_of_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memprof.report.printers.terminal._size", lambda _: os.terminal_size((80, 3)))
    file = io.StringIO()
    display = Display(file)
    display.show([(("first", ""),)])
    display.show([((name, ""),) for name in ("second", "third", "beyond")])
    display.clear()
    display.clear()
    assert file.getvalue() == "first\n\x1b[1F\x1b[Jsecond\nthird\n\x1b[2F\x1b[J"


def test_the_phases_of_each_column_sum_to_its_step() -> None:
    view = run_view(load_run(make_run(Path("logs").absolute())))
    (table,) = [table for table in tables_of(run_document(view)) if table.id == "by-phase"]
    step = table.footer[0]
    for place in range(1, len(table.columns)):
        total = sum(float(row[place].value or 0) for row in table.rows)
        assert total == pytest.approx(step[place].value, rel=0.01)
    assert len(table.columns) == 4


def test_a_run_without_an_accelerator_says_so_and_never_zero() -> None:
    text = page(make_run(Path("logs").absolute()))
    assert "device: no accelerator" in text
    assert "device peak" not in text


def test_an_accelerator_has_allocated_reserved_and_peak() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(device_bytes=lambda _: 300 * MIB))
    rows = {row["phase"]: row["whole run"] for row in table_of(run_view(load_run(directory)), "by-phase")}
    assert rows["device allocated"] == "300 MiB"
    assert rows["device reserved"] == "428 MiB"
    assert rows["device peak"] == "364 MiB"
    assert rows["callbacks"] == "-"


def test_an_accelerator_without_figures_says_why() -> None:
    directory = make_run(Path("logs").absolute())
    manifest = directory / "manifest.rank00000.jsonl"
    manifest.write_text(
        manifest.read_text().replace('"device":"cpu"', '"device":"mps:0"').replace("no accelerator", "no statistics")
    )
    assert "device: no statistics" in page(directory)


def test_ranks_are_rows_of_a_table() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(world_size=2, endings={1: None}))
    first, second = table_of(run_view(load_run(directory)), "rank-table")
    assert list(first.values())[:6] == ["0", "node0", "finished", "30", "18.6 ms", "408 µs"]
    assert (second["rank"], second["status"], second["steps"]) == ("1", "running or killed", "30")
    assert "finished" in page(directory, is_full=False)


def test_of_many_ranks_the_slowest_are_shown() -> None:
    text = page(make_run(Path("logs").absolute(), RUNS["ranks"]))
    assert "the slowest ranks first" in text
    assert "4 more" in text


def test_few_recorded_steps_are_columns_and_many_are_means_of_windows() -> None:
    few = page(make_run(Path("few").absolute(), FakeRun(windows=((2, 3),))))
    assert "step 2" in few
    assert "step 3" in few
    many = page(make_run(Path("many").absolute(), FakeRun(windows=((2, 3, 4, 5), (10, 11, 12)))))
    assert "steps 2–5" in many
    assert "step 2 " not in many


def test_commands_can_be_copied_whole() -> None:
    text = page(make_run(Path("logs").absolute()))
    assert "lightning-memprof show logs --format json" in text
    assert "tensorboard --logdir logs" in text
    deep = Path("d" * 90) / "with space"
    text = page(make_run(deep.absolute()))
    assert f"'{deep}'" in text


def test_an_older_run_is_named_by_its_own_directory() -> None:
    older = make_run(Path("logs").absolute())
    make_run(Path("logs").absolute())
    assert "show logs/memprofiler --format" in page(older)
    text = page(older.parent)
    assert "show logs/memprofiler-2 --format" in text
    assert "this page shows memprofiler-2; other runs: logs/memprofiler" in text


def test_a_run_that_is_named_itself_lists_the_other_runs() -> None:
    older = make_run(Path("logs").absolute())
    assert "other runs" not in page(older)
    make_run(Path("logs").absolute())
    make_run(Path("logs/validate").absolute(), FakeRun(stage="validate"))
    expected = "this page shows memprofiler; other runs: logs/memprofiler-2, logs/validate/memprofiler"
    assert expected in words(page(older))


def test_tensorboard_reads_the_log_directory_whatever_the_stage() -> None:
    text = page(make_run(Path("logs/validate").absolute(), FakeRun(stage="validate")))
    assert text.count("tensorboard --logdir logs\n") == 1
    assert "show logs/validate --format" in text


def test_each_part_of_a_bar_has_a_mark_of_its_own() -> None:
    directory = make_run(Path("logs").absolute())
    for text in (page(directory, is_full=False), page(directory, is_full=False, encoding="ascii")):
        legend = text.partition("Mean step by part")[2].partition("\n\n")[0].splitlines()[2:]
        marks = [entry.strip()[0] for line in legend for entry in line.split("   ") if entry.strip()]
        assert len(marks) == len(set(marks)) > 4


def test_the_profilers_overhead_is_whole_on_a_page_of_80_columns() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(steps=30))
    line = page(directory, is_full=False).partition("profiler overhead")[2].partition("\n\n")[0]
    assert "of the run; pulse 9.00 µs per step, windows 40.0 ms" in words(line)
    assert "Profiler overhead of rank 0: pulse 9.00 µs per step, windows 40.0 ms." in words(page(directory))


def without_training(directory: Path) -> None:
    """Take away what a rank writes when its loop begins."""
    for path in directory.glob("manifest.rank*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["kind"] != "training"))


def test_a_run_that_left_only_its_setup_did_not_start() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(steps=0, windows=(), endings={0: None}))
    assert "0 steps · running or killed" in " ".join(page(directory).split())
    without_training(directory)
    assert "0 steps · did not start" in " ".join(page(directory).split())
    running = make_run(Path("run").absolute(), FakeRun(steps=1, windows=(), endings={0: None}))
    assert "running or killed" in page(running)
    ended = make_run(Path("end").absolute(), FakeRun(steps=0, windows=()))
    assert "did not start" not in page(ended)


def test_the_step_that_a_run_stands_in_is_on_its_page_before_its_limit() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(world_size=2, endings={0: None, 1: None}))
    for rank, (phase, waited_ns) in enumerate([("backward", 41_000_000_000), ("forward", 42_000_000_000)]):
        row = {"step": 30, "kind": "heartbeat", "phase": phase, "waited_ns": waited_ns}
        (directory / f"heartbeat.rank0000{rank}.jsonl").write_text(json.dumps(row) + "\n")
    assert "in forward of step 30 for 42.0 s on rank 1" in " ".join(page(directory).split())
    for path in directory.glob("heartbeat.*"):
        path.write_text(path.read_text().replace("000000000", "00000000"))
    assert "of step 30 for" not in page(directory)


def test_failures_damage_and_gaps_are_shown_with_their_reasons() -> None:
    directory = make_run(Path("logs").absolute())
    append(directory, "error", collector="allocator", where="mark", window=0, message="ValueError: odd", traceback="")
    append(directory, "note", collector="schedule", message="window 1 cannot be reached")
    (directory / "window000" / "rank00000.host.jsonl").unlink()
    text = words(page(directory))
    assert "failed allocator at mark in window 0: ValueError: odd" in text
    assert "rank00000.host.jsonl: is listed but" in text
    assert "not available allocator: no accelerator" in text
    assert "note schedule: window 1 cannot be reached" in text
    short = words(page(directory, is_full=False))
    assert "failed allocator: ValueError: odd" in short
    assert "damaged" in short


@pytest.mark.parametrize("hostile", ["\x1b[31mred", "\x1b]0;title\x07", "a\rb", "a\nb", "\x9b31m", "\ud800", "\u202e"])
def test_text_from_outside_cannot_steer_the_terminal(hostile: str) -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(training={"model": hostile}))
    append(directory, "note", collector=hostile, message=hostile)
    append(directory, "unavailable", collector=hostile, reason=hostile)
    text = page(directory)
    assert hostile not in text
    assert not set(text) & set("\x1b\x07\r\x9b\ud800\u202e")


def test_a_terminal_that_knows_only_ascii_gets_ascii() -> None:
    text = page(make_run(Path("logs").absolute()), encoding="ascii")
    assert "#" * 40 in text
    assert text.isascii()


def test_damage_of_memory_files_is_named() -> None:
    directory = make_run(Path("logs").absolute())
    path = directory / "window000" / "rank00000.saved_tensors.jsonl"
    path.write_text("{broken\n" + path.read_text())
    assert "damaged rank00000.saved_tensors.jsonl" in words(page(directory))
    assert "\ndamaged   " in page(directory, is_full=False)
