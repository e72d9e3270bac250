from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.cli.main import main
from lightning_memprof.read.snapshot.reader import read_snapshot
from lightning_memprof.units import MIB
from snapshots import MODEL, block, event, segment, snapshot, write_snapshot
from speedscope import validate


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run in a directory, which is also the working one."""
    make_run(tmp_path / "log")
    monkeypatch.chdir(tmp_path)
    return "log"


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    ring = [event("alloc", 4096, MIB, MODEL)]
    write_snapshot(tmp_path / "dump.pickle", snapshot([segment(block(4096, MIB, MODEL))], ring))
    return "dump.pickle"


def rows(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as read:
        return list(csv.DictReader(read))


def test_a_run_becomes_tables_in_base_units(run: str, capsys) -> None:
    assert main(["export", run, "--to", "csv"]) == 0
    names = {path.stem for path in Path("log-csv").iterdir()}
    assert {"pulse", "steps", "ranks", "modules", "categories", "holders", "memory", "operators", "findings"} <= names
    assert "log-csv/pulse.csv: 30 rows" in capsys.readouterr().out
    pulse = rows("log-csv/pulse.csv")
    assert [int(one["step"]) for one in pulse] == list(range(30))
    assert int(pulse[1]["duration_ns"]) > 10_000_000
    assert sum(int(one["own_activation_bytes"]) for one in rows("log-csv/modules.csv")) > 8 * MIB
    assert {one["operator"] for one in rows("log-csv/holders.csv")} == {"aten::addmm"}
    assert {one["rank"] for one in rows("log-csv/series_host.csv")} == {"0"}


def test_the_ranks_of_a_run_are_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "log", FakeRun(world_size=2, steps=4, windows=((2, 3),)))
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "log"), "--to", "csv", "-o", str(out)]) == 0
    assert [one["rank"] for one in rows(str(out / "ranks.csv"))] == ["0", "1"]
    assert {one["rank"] for one in rows(str(out / "pulse.csv"))} == {"0", "1"}


def test_a_run_s_time_is_a_flame_graph_of_its_trace(run: str) -> None:
    assert main(["export", run, "--to", "speedscope"]) == 0
    document = json.loads(Path("log.time.speedscope.json").read_text())
    validate(document)
    assert "aten::addmm" in {one["name"] for one in document["shared"]["frames"]}


def test_a_run_s_memory_is_a_flame_graph_of_its_peak(run: str) -> None:
    assert main(["export", run, "--to", "speedscope", "--of", "memory"]) == 0
    (trace,) = Path("log").glob("*.pt.trace.json.gz")
    document = json.loads(Path("log.memory.speedscope.json").read_text())
    validate(document)
    (profile,) = document["profiles"]
    assert sum(profile["weights"]) == window_allocations(trace)[0].peak_bytes


def test_a_run_s_allocations_become_a_snapshot_with_their_peak(run: str) -> None:
    assert main(["export", run, "--to", "memory_viz", "-o", "out.pickle"]) == 0
    (trace,) = Path("log").glob("*.pt.trace.json.gz")
    assert replay(read_snapshot(Path("out.pickle"))).peak_requested_bytes == window_allocations(trace)[0].peak_bytes


def test_a_snapshot_is_exported_in_every_form_that_it_has(dump: str, capsys) -> None:
    assert main(["export", dump, "--to", "csv"]) == 0
    assert rows("dump-csv/events.csv")[0]["stack"] == "/home/a/model.py(7): forward"
    assert rows("dump-csv/devices.csv")[0]["peak_requested_bytes"] == str(MIB)
    assert main(["export", dump, "--to", "speedscope"]) == 0
    document = json.loads(Path("dump.memory.speedscope.json").read_text())
    validate(document)
    assert document["profiles"][0]["weights"] == [MIB]
    assert main(["export", dump, "--to", "memory_viz"]) == 0
    assert Path("dump.memory_viz.pickle").read_bytes()[:2] == b"\x80\x04"
    capsys.readouterr()
    assert main(["export", dump, "--to", "speedscope", "--of", "time"]) == 1
    assert "times come from traces only" in capsys.readouterr().err


def test_a_trace_becomes_tables(run: str) -> None:
    (trace,) = Path("log").glob("*.pt.trace.json.gz")
    assert main(["export", str(trace), "--to", "csv", "-o", "out"]) == 0
    assert [one["number"] for one in rows("out/steps.csv")] == ["2", "3"]
    assert {"aten::linear", "aten::addmm"} <= {one["name"] for one in rows("out/operators.csv")}
    assert rows("out/traces.csv")[0]["events"]


def test_a_trace_that_is_torn_costs_its_own_tables_and_is_a_row_of_problems(run: str) -> None:
    (trace,) = Path("log").glob("*.pt.trace.json.gz")
    trace.write_bytes(trace.read_bytes()[:-40])
    assert main(["export", run, "--to", "csv", "-o", "out"]) == 0
    names = {one.stem for one in Path("out").iterdir()}
    assert {"pulse", "modules", "series_host"} <= names
    assert "operators" not in names
    assert any(trace.name in one["piece"] for one in rows("out/problems.csv"))


@pytest.mark.parametrize(
    "fake",
    [FakeRun(steps=0, windows=()), FakeRun(steps=1, trace=False, windows=(), memory=None), FakeRun(endings={0: None})],
    ids=["no step", "one step", "killed"],
)
def test_runs_of_which_little_is_left_are_exported_and_compared(tmp_path: Path, fake: FakeRun) -> None:
    make_run(tmp_path / "log", fake)
    assert main(["export", str(tmp_path / "log"), "--to", "csv", "-o", str(tmp_path / "out")]) == 0
    assert rows(str(tmp_path / "out" / "ranks.csv"))
    assert main(["compare", str(tmp_path / "log"), str(tmp_path / "log")]) == 0


def test_what_is_read_is_never_written_over(dump: str, capsys) -> None:
    before = Path(dump).read_bytes()
    assert main(["export", dump, "--to", "memory_viz", "-o", dump]) == 1
    assert "another name" in capsys.readouterr().err
    assert Path(dump).read_bytes() == before


def test_a_run_without_traces_says_what_to_record(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "log", FakeRun(trace=False))
    for form in ("speedscope", "memory_viz"):
        assert main(["export", "log", "--to", form]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_the_form_must_be_named(run: str, capsys) -> None:
    assert main(["export", run]) == 2
    assert "--to" in capsys.readouterr().err


def test_a_pipe_or_device_is_never_replaced_by_the_result(run: str, dump: str, tmp_path: Path, capsys) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, form in ((run, "speedscope"), (dump, "memory_viz")):
        assert main(["export", target, "--to", form, "-o", str(pipe)]) == 1
        assert "a pipe or a device" in capsys.readouterr().err
        assert pipe.is_fifo()
        assert main(["export", target, "--to", form, "-o", ""]) == 1
        assert "cannot be written" in capsys.readouterr().err
