from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprof.analysis import operators
from lightning_memprof.cli.show import show
from lightning_memprof.errors import ArtifactError
from lightning_memprof.testing import FakeRun, make_run

TABLE = "fit-fts_extended_pytorch_profiler-0.txt"


def shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, list[dict[str, object]]]:
    assert show(str(path), "json") == 0
    document: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return document


def test_show_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert show(str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith("verdict ")


def test_show_makes_the_operator_table_where_it_is_missing_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    document = shown(capsys, tmp_path)
    assert [one["path"] for one in document["artifacts"] if one["type"] == "table"] == [TABLE]
    assert "aten::addmm" in (tmp_path / TABLE).read_text()
    (tmp_path / TABLE).write_text("kept")
    assert shown(capsys, tmp_path)["problems"] == []
    assert (tmp_path / TABLE).read_text() == "kept"
    assert not list(tmp_path.glob("*.partial"))


def test_a_table_that_cannot_be_made_is_a_problem_and_not_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ArtifactError("the trace is torn")

    monkeypatch.setattr(operators, "operator_table", fail)
    make_run(tmp_path)
    (problem,) = shown(capsys, tmp_path)["problems"]
    assert problem["piece"] == TABLE
    assert "the trace is torn" in str(problem["message"])
    assert not (tmp_path / TABLE).exists()


def test_a_run_without_traces_gets_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, FakeRun(trace=False))
    assert not [one for one in shown(capsys, tmp_path)["artifacts"] if one["type"] == "table"]


def test_show_needs_neither_torch_nor_lightning(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = (
        "import sys\n"
        "for name in ('torch', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        "from lightning_memprof.cli.show import show\n"
        "sys.exit(show(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verdict ")


def test_show_has_what_the_program_named_on_the_page_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path)
    row = {"name": "load", "step": None, "global_step": None, "time_ns": 1, "peak_rss_bytes": None}
    moments = [{**row, "point": "start", "rss_bytes": 2**20}, {**row, "point": "end", "rss_bytes": 3 * 2**20}]
    (directory / "snapshots.rank00000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in moments))
    assert shown(capsys, tmp_path)["named"] == [{"rank": 0, **one} for one in moments]
    assert show(str(tmp_path)) == 0
    assert "named     load  once · rss +2.00 MiB" in capsys.readouterr().out


def test_show_reads_the_traces_for_what_was_live_at_the_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    assert show(str(tmp_path), "json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [one["operator"] for one in memory["sites"]] == ["aten::addmm"] * 2
    assert memory["allocations"][0]["curve"]
    assert show(str(tmp_path)) == 0
    page = capsys.readouterr().out
    assert "sites     10.6 MiB on cpu above the start of window 0 at its peak, step 3" in page
    assert "live      " in page


def test_a_trace_that_is_torn_costs_the_sites_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    trace.write_bytes(trace.read_bytes()[:80])
    assert show(str(tmp_path), "json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["sites"] == []
    assert trace.name in memory["reasons"]["sites"]
    assert memory["modules"]
