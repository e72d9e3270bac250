from __future__ import annotations

import io
import json
from pathlib import Path
from typing import cast

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.trace import operators
from lightning_memprof.cli.main import main
from lightning_memprof.cli.progress import reading
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.judge import Evidence, Facts, Finding, Severity
from lightning_memprof.report.opened import OpenOptions, opened
from lightning_memprof.report.view import View
from lightning_memprof.units import quoted
from next_steps import step
from pages import Terminal

TABLE = "fit-fts_extended_pytorch_profiler-0.txt"


def show(target: Path, *options: str) -> int:
    """Run the command; an error is raised as it is."""
    return main(["--debug", "show", str(target), *options])


def shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, list[dict[str, object]]]:
    assert show(path, "--format", "json") == 0
    document: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return document


def test_show_prints_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert show(tmp_path) == 0
    assert capsys.readouterr().out.startswith("verdict ")


def test_show_without_a_target_shows_the_run_that_started_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("version_10", "version_0", "version_2"):
        make_run(tmp_path / "lightning_logs" / name)
    # A page in its directory does not make a run new.
    assert main(["report", "lightning_logs/version_0"]) == 0
    capsys.readouterr()
    for targets in ([], ["."], ["lightning_logs"]):
        assert main(["show", *targets]) == 0
        assert "report lightning_logs/version_2" in capsys.readouterr().out
    make_run(tmp_path / "other" / "version_0")
    assert main(["show"]) == 0
    assert "report other/version_0" in capsys.readouterr().out


def test_show_without_a_target_shows_the_newest_run_also_where_an_older_one_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path)
    make_run(tmp_path / "lightning_logs" / "version_0")
    assert main(["show"]) == 0
    assert "report lightning_logs/version_0" in capsys.readouterr().out
    assert main(["show", "."]) == 0
    assert "report ." in capsys.readouterr().out


def test_show_without_a_target_and_a_run_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show"]) == 1
    assert "train with MemProfilerCallback, or give the log directory of a run" in capsys.readouterr().err


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


@pytest.mark.parametrize(("torch", "python_functions"), [("2.13.0+cpu", True), ("2.14.1", False), ("2.9", True)])
def test_a_table_that_show_makes_has_the_rows_that_the_recording_torch_has_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, python_functions: bool
) -> None:
    def table(_traces: object, options: operators.TableOptions) -> str:
        return f"Python functions: {options.include_python_functions}"

    monkeypatch.setattr(operators, "operator_table", table)
    make_run(tmp_path)
    (manifest,) = tmp_path.rglob("manifest.*.jsonl")
    manifest.write_text(manifest.read_text().replace('"torch":"2.13.0"', f'"torch":"{torch}"'))
    assert show(tmp_path, "--format", "json") == 0
    assert (tmp_path / TABLE).read_text() == f"Python functions: {python_functions}"


def test_a_run_that_names_a_trace_elsewhere_gets_no_table_written_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "sent")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (manifest,) = (tmp_path / "sent").rglob("manifest.*.jsonl")
    for trace in (tmp_path / "sent").glob("*.pt.trace.json.gz"):
        trace.rename(elsewhere / trace.name)
        manifest.write_text(manifest.read_text().replace(f'"{trace.name}"', f'"{elsewhere / trace.name}"'))
    before = sorted(elsewhere.iterdir())
    problems = shown(capsys, tmp_path / "sent")["problems"]
    assert [one["message"] for one in problems if one["piece"] == TABLE] == [
        f"is not made outside of the run; `lightning-memprof show {quoted(before[0])}` shows the operators"
    ]
    assert sorted(elsewhere.iterdir()) == before


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


def test_show_has_what_the_program_named_on_the_page_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path)
    row = {"name": "load", "step": None, "global_step": None, "time_ns": 1, "peak_rss_bytes": None}
    moments = [{**row, "point": "start", "rss_bytes": 2**20}, {**row, "point": "end", "rss_bytes": 3 * 2**20}]
    (directory / "snapshots.rank00000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in moments))
    assert shown(capsys, tmp_path)["named"] == [{"rank": 0, **one} for one in moments]
    assert show(tmp_path, "--section", "memory") == 0
    page = capsys.readouterr().out
    assert "load     0      1    +2.00 MiB" in page
    assert "verdict" not in page


def test_show_reads_the_traces_for_what_was_live_at_the_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    assert show(tmp_path, "--format", "json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [one["operator"] for one in memory["sites"]] == ["aten::addmm"] * 2
    assert memory["allocations"][0]["curve"]
    assert show(tmp_path, "--all") == 0
    page = capsys.readouterr().out
    assert "Live bytes on cpu peak at 10.6 MiB in step 3, window 0." in page
    assert "Live bytes, window 0 on cpu" in page


def test_sections_and_the_full_document_are_json_too_and_an_unknown_section_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    assert show(tmp_path, "--format", "json", "--section", "memory") == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    assert section["id"] == "memory"
    assert show(tmp_path, "--format", "json", "--all") == 0
    assert len(json.loads(capsys.readouterr().out)["sections"]) > 5
    with pytest.raises(ConfigError, match="--section nope: unknown, or nothing to show; this page has overview, steps"):
        show(tmp_path, "--section", "nope")


def test_a_trace_that_is_torn_costs_the_sites_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    trace.write_bytes(trace.read_bytes()[:80])
    assert show(tmp_path, "--format", "json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["sites"] == []
    assert trace.name in memory["reasons"]["sites"]
    assert memory["modules"]


def test_show_of_a_file_is_of_that_file_and_not_of_the_run_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path)
    with pytest.raises(ArtifactError, match="is neither a trace"):
        show(directory / "pulse.rank00000.csv")
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    document = shown(capsys, trace)
    assert [one["file"] for one in document["traces"]] == [str(trace)]
    assert "run" not in document


def test_a_run_has_its_leading_ranks_traces_in_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, FakeRun(world_size=2))
    document = shown(capsys, tmp_path)
    traces = sorted(tmp_path.glob("*-0[[]*.pt.trace.json.gz"))
    assert [one["file"] for one in document["traces"]] == [str(one) for one in traces]
    assert document["snapshots"] == []


def test_a_rank_leads_the_page_and_a_window_leaves_out_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, FakeRun(world_size=2, windows=((2, 3), (6, 7))))
    assert show(tmp_path, "--format", "json", "--rank", "1", "--window", "1") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["lead_rank"] == 1
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert [(one["rank"], one["index"]) for one in document["windows"]] == [(1, 1)]
    assert {one["window"] for one in document["artifacts"]} <= {None, 1}
    for options, words in (
        (("--rank", "7"), "--rank 7: the run has no such rank; there are 0, 1"),
        (("--window", "9"), "--window 9: the run has no such window; there are 0, 1"),
    ):
        with pytest.raises(ArtifactError, match=words):
            show(tmp_path, *options)


def test_a_rank_of_thousands_is_read_in_full_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memprof.read.run.load.FULL_RANKS", 2)
    monkeypatch.setattr("lightning_memprof.read.run.load.FIRST_RANKS", 1)
    make_run(tmp_path, FakeRun(world_size=4, trace=False))
    assert show(tmp_path, "--format", "json", "--rank", "3") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pulse"]["steps"] == 30
    assert [bool(one["pulse"]["steps"]) for one in document["ranks"]] == [True, False, False, True]


def test_large_traces_of_a_run_are_left_out_with_a_note(tmp_path: Path) -> None:
    make_run(tmp_path, FakeRun(windows=((2, 3), (6, 7))))
    with opened([str(tmp_path)], OpenOptions(max_file_bytes=1)) as view:
        assert isinstance(view, View)
        assert view.traces == ()
        assert "2 of 2 traces and snapshots are large" in " ".join(note.message for note in view.run.notes)


def test_evidence_names_a_runs_files_as_its_manifest_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(facts: Facts) -> list[Finding]:
        evidence = (Evidence(artifact=str(facts.traces[0].file)),)
        return [
            Finding(
                rule="odd",
                severity=Severity.CRITICAL,
                title="It is odd.",
                why="Why.",
                remedies=(step("Do this."),),
                evidence=evidence,
            )
        ]

    monkeypatch.setattr("lightning_memprof.judge.verdict.RULES", (rule,))
    make_run(tmp_path)
    document = shown(capsys, tmp_path)
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    (finding,) = [one for one in document["findings"] if one["rule"] == "odd"]
    (evidence,) = cast("list[dict[str, object]]", finding["evidence"])
    assert evidence["artifact"] == trace.name


def test_markdown_has_the_verdict_and_tables_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, FakeRun(world_size=2, training={"model": "<b>Net</b>"}))
    assert show(tmp_path, "--format", "markdown") == 0
    assert capsys.readouterr().out.startswith("**Compute-bound: the model takes 88%")
    assert show(tmp_path, "--format", "markdown", "--all") == 0
    text = capsys.readouterr().out
    for heading in ("## Steps", "## Memory", "## Ranks", "## Files"):
        assert heading in text
    assert "| backward | 10.2 ms (55%) |" in text
    assert "\\<b\\>Net\\</b\\>" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_a_bar_is_drawn_on_a_terminal_where_reading_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow, file = Terminal(), Terminal(), io.StringIO()
    with reading(quick) as bar:
        bar.read(Path("a.json"), 1, 10)
    monkeypatch.setattr("lightning_memprof.cli.progress.PATIENCE_SECONDS", 0.0)
    for stream in (slow, file):
        with reading(stream) as bar:
            bar.read(Path("[red]a.json"), 1, 10)
            bar.read(Path("b.json"), 10, 10)
    assert quick.getvalue() == ""
    assert file.getvalue() == ""
    assert "[red]a.json" in slow.getvalue()
