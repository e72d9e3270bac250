from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fake_memory import FakeMemory
from fake_runs import HEALTHY, FakeRun, make_run
from lightning_memprof.analysis.run.load import load_run
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.report.terminal import render
from lightning_memprof.report.view import run_view
from lightning_memprof.units import MIB


@pytest.fixture(autouse=True)
def _in_a_short_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def page(directory: Path, width: int = 80, *, colours: bool = False, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
    render(run_view(load_run(directory)), Console(file=file, width=width, force_terminal=colours, legacy_windows=False))
    file.seek(0)
    return file.read()


def append(directory: Path, kind: str, rank: int = 0, **facts: object) -> None:
    writer = ManifestWriter(directory / f"manifest.rank{rank:05d}.jsonl")
    writer.append(kind, **facts)
    writer.close()


def section(text: str, label: str) -> list[str]:
    """The lines from the one that opens with a label to the next empty one."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(label))
    return lines[start : lines.index("", start)]


def lines_of(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(name)]


def test_the_page_opens_with_verdict_why_and_next() -> None:
    text = page(make_run(Path("logs").absolute()))
    labels = [line.split()[0] for line in text.splitlines() if line[:1].strip()]
    assert labels[:3] == ["verdict", "why", "next"]


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


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_80_columns_or_the_terminal(name: str, width: int) -> None:
    text = page(make_run(Path("logs").absolute(), RUNS[name]), width)
    files = set(section(text, "files"))
    assert max(cell_len(line) for line in text.splitlines() if line not in files) <= min(width, 80)
    assert max(map(cell_len, files)) <= min(width, 120)


@pytest.mark.parametrize("width", [1, 10, 11, 25])
def test_a_terminal_of_hardly_any_width_gets_its_page(width: int) -> None:
    assert page(make_run(Path("logs").absolute(), RUNS["tracked"]), width)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("colours", [False, True])
def test_no_line_ends_in_blanks(name: str, colours: bool) -> None:
    text = page(make_run(Path("logs").absolute(), RUNS[name]), colours=colours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [line for line in plain.split("\n") if line != line.rstrip()] == []


def test_a_wide_terminal_shows_long_names_on_one_line() -> None:
    directory = make_run(Path("logs").absolute())
    name = f"{'n' * 80}.bin"
    append(directory, "artifact", collector="x", type="blob", path=f"memprofiler/{name}", size_bytes=1, window=None)
    assert name in page(directory, 200)
    assert name not in page(directory, 80)


def test_there_are_no_colours_where_there_is_no_terminal() -> None:
    directory = make_run(Path("logs").absolute())
    assert "\x1b" not in page(directory)
    assert "\x1b" in page(directory, colours=True)


def test_the_phases_of_each_column_sum_to_its_step() -> None:
    text = page(make_run(Path("logs").absolute()))
    names = ("data wait", "forward", "backward", "optimizer", "callbacks", "other")
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}

    def times(name: str) -> list[float]:
        (line,) = lines_of(text, name)
        return [float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+) (us|ms|s)\b", line)]

    sums = [sum(column) for column in zip(*map(times, names), strict=True)]
    assert sums == pytest.approx(times("a step"), rel=0.01)
    assert len(sums) == 3


def test_a_run_without_an_accelerator_says_so_and_never_zero() -> None:
    (line,) = lines_of(page(make_run(Path("logs").absolute())), "device")
    assert line.split(maxsplit=1)[1] == "no accelerator"


def test_an_accelerator_has_allocated_reserved_and_peak() -> None:
    text = page(make_run(Path("logs").absolute(), FakeRun(device_bytes=lambda _: 300 * MIB)))
    assert lines_of(text, "device allocated")[0].split()[2:4] == ["300", "MiB"]
    assert lines_of(text, "device reserved")[0].split()[2:4] == ["428", "MiB"]
    assert lines_of(text, "device peak")[0].split()[2:4] == ["364", "MiB"]
    assert lines_of(text, "callbacks")[0].split()[1:] == ["-", "-", "-"]


def test_an_accelerator_without_figures_says_why() -> None:
    directory = make_run(Path("logs").absolute())
    manifest = directory / "manifest.rank00000.jsonl"
    manifest.write_text(
        manifest.read_text().replace('"device":"cpu"', '"device":"mps:0"').replace("no accelerator", "no statistics")
    )
    assert "no statistics" in lines_of(page(directory), "device")[0]


def test_ranks_stand_side_by_side() -> None:
    text = page(make_run(Path("logs").absolute(), FakeRun(world_size=2, endings={1: None})))
    assert re.search(r"^ +0  node0  finished +30 +18.6 ms +408 us +2% +513 MiB", text, re.MULTILINE)
    assert re.search(r"^ +1  node0  no end +30 ", text, re.MULTILINE)
    assert "still running, or killed" in text


def test_of_many_ranks_the_slowest_are_shown() -> None:
    text = page(make_run(Path("logs").absolute(), RUNS["ranks"]))
    assert "the 16 slowest of 20 ranks" in text


def test_few_recorded_steps_are_columns_and_many_are_means_of_windows() -> None:
    few = page(make_run(Path("few").absolute(), FakeRun(windows=((2, 3),))))
    assert "step 2" in few
    assert "step 3" in few
    many = page(make_run(Path("many").absolute(), FakeRun(windows=((2, 3, 4, 5), (10, 11, 12)))))
    assert "steps 2-5" in many
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
    assert "show logs --format" in text
    assert "this is memprofiler-2; beside it: logs/memprofiler" in text


def test_a_run_that_is_named_itself_says_which_others_lie_beside_it() -> None:
    older = make_run(Path("logs").absolute())
    assert "beside it" not in page(older)
    make_run(Path("logs").absolute())
    make_run(Path("logs/validate").absolute(), FakeRun(stage="validate"))
    others = " ".join(" ".join(section(page(older), "note")).split())
    assert others.endswith("this is memprofiler; beside it: logs/memprofiler-2, logs/validate/memprofiler")


def test_tensorboard_reads_the_log_directory_whatever_the_stage() -> None:
    text = page(make_run(Path("logs/validate").absolute(), FakeRun(stage="validate")))
    assert text.count("tensorboard --logdir logs\n") == 1
    assert "show logs/validate --format" in text


def test_steps_in_windows_are_marked_as_dearer() -> None:
    note = "steps in windows include the cost of recording them"
    assert note in page(make_run(Path("with").absolute()))
    assert note not in page(make_run(Path("without").absolute(), FakeRun(windows=())))


def test_memory_of_several_steps_says_when_it_was_read() -> None:
    text = page(make_run(Path("logs").absolute()))
    (line, _) = lines_of(text, "host rss")
    assert line.split("MiB")[1].strip().startswith("at the end")
    assert line.count("at the end") == 1
    text = page(make_run(Path("many").absolute(), FakeRun(windows=((2, 3, 4, 5), (10, 11, 12)))))
    assert lines_of(text, "host rss")[0].count("at the end") == 3
    assert "at the end" not in lines_of(text, "host rss peak")[0]


def test_memory_that_recording_added_is_part_of_our_cost() -> None:
    fake = FakeRun(windows=((12, 13),), rss_bytes=lambda step: (500 + 112 * (step > 12)) * MIB)
    cost = " ".join(" ".join(section(page(make_run(Path("more").absolute(), fake)), "our cost")).split())
    assert "about 112 MiB of resident memory after its windows" in cost
    fake = FakeRun(windows=((12, 13),))
    assert "resident memory" not in page(make_run(Path("same").absolute(), fake))


def without_training(directory: Path) -> None:
    """Take away what a rank writes when its loop begins."""
    for path in directory.glob("manifest.rank*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["kind"] != "training"))


def test_a_run_that_left_only_its_setup_did_not_start() -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(steps=0, windows=(), endings={0: None}))
    assert "0 steps · still running, or killed" in " ".join(page(directory).split())
    without_training(directory)
    assert "0 steps · did not start" in " ".join(page(directory).split())
    running = make_run(Path("run").absolute(), FakeRun(steps=1, windows=(), endings={0: None}))
    assert "still running, or killed" in page(running)
    ended = make_run(Path("end").absolute(), FakeRun(steps=0, windows=()))
    assert "did not start" not in page(ended)


def test_named_moments_have_a_line_each() -> None:
    directory = make_run(Path("logs").absolute())
    sizes = [("load", "start", 400), ("load", "end", 500), ("[red]x", "snapshot", 500), ("load", "start", 500),
             ("load", "end", 480), ("odd", "start", 480)]  # fmt: skip
    rows = [
        {"name": name, "point": point, "step": None, "global_step": None, "time_ns": 1, "rss_bytes": size * MIB}
        for name, point, size in sizes
    ]
    (directory / "snapshots.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [line[10:] for line in section(page(directory), "named")] == [
        "load    2 times · rss +40.0 MiB a time, at most +100 MiB",
        "[red]x  once · rss 500 MiB",
        "odd     once · did not end",
    ]


def test_failures_damage_and_gaps_are_shown_with_their_reasons() -> None:
    directory = make_run(Path("logs").absolute())
    append(directory, "error", collector="allocator", where="mark", window=0, message="ValueError: odd", traceback="")
    append(directory, "note", collector="schedule", message="window 1 cannot be reached")
    (directory / "window000" / "rank00000.host.jsonl").unlink()
    text = page(directory)
    assert "failed    allocator on mark in window 0: ValueError: odd" in text
    assert "rank00000.host.jsonl: is listed but" in text
    assert "no data   allocator: no accelerator" in text
    assert "note      schedule: window 1 cannot be reached" in text


def test_our_own_cost_is_shown() -> None:
    (line,) = lines_of(page(make_run(Path("logs").absolute())), "our cost")
    assert "pulse 9.00 us a step (<1%); windows 40.0 ms (operator_trace 35.0 ms" in line


@pytest.mark.parametrize("hostile", ["[Strategy]DDP", "[bold red]x[/]", "[/unbalanced]", ":smile:", "[link=http://x]y"])
def test_text_from_outside_is_never_markup(hostile: str) -> None:
    directory = make_run(Path("logs").absolute(), FakeRun(training={"model": hostile}))
    append(directory, "error", collector=hostile, where="mark", window=None, message=hostile, traceback="")
    text = page(directory)
    assert f"fit of {hostile}" in text
    assert f"failed    {hostile} on mark: {hostile}" in text


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
    assert "#####" in text


def test_the_page_says_where_the_memory_was() -> None:
    text = page(make_run(Path("logs").absolute()))
    assert section(text, "memory")[0] == "memory    18.6 MiB on cpu in step 2, by category"
    assert [line.split()[0] for line in section(text, "modules")[2:4]] == ["net", "net.blocks"]
    assert section(text, "what if")[2].split()[:3] == ["net.blocks.0-3,", "all", "4"]
    assert "\x1b[33m█" in page(make_run(Path("colours").absolute()), colours=True)


def test_a_run_without_memory_collectors_has_no_memory_on_its_page() -> None:
    text = page(make_run(Path("logs").absolute(), FakeRun(memory=None)))
    assert not [line for line in text.splitlines() if line.startswith(("memory", "modules", "functions ", "what if"))]


def test_memory_is_drawn_in_ascii_where_the_terminal_knows_no_more() -> None:
    text = page(make_run(Path("logs").absolute()), encoding="ascii")
    assert "#" * 40 in section(text, "memory")[4]
    assert section(text, "kept")[0] == "kept      ##"


def test_damage_of_memory_files_is_named() -> None:
    directory = make_run(Path("logs").absolute())
    path = directory / "window000" / "rank00000.saved_tensors.jsonl"
    path.write_text("{broken\n" + path.read_text())
    assert "damaged   rank00000.saved_tensors.jsonl" in page(directory)
