from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.load import load_run


def append(directory: Path, kind: str, rank: int = 0, **facts: object) -> None:
    writer = ManifestWriter(directory / f"manifest.rank{rank:05d}.jsonl")
    writer.append(kind, **facts)
    writer.close()


@pytest.mark.parametrize("given", ["log_dir", "run directory", "parent", "grandparent", "manifest"])
def test_every_path_that_means_the_run_finds_it(tmp_path: Path, given: str) -> None:
    log_dir = tmp_path / "lightning_logs" / "version_0"
    directory = make_run(log_dir)
    path = {
        "log_dir": log_dir,
        "run directory": directory,
        "parent": log_dir.parent,
        "grandparent": tmp_path,
        "manifest": directory / "manifest.rank00000.jsonl",
    }[given]
    assert load_run(path).directory == directory


def test_a_relative_path_finds_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_run(tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    assert load_run("logs").directory == directory


def test_of_several_runs_in_one_log_directory_the_newest_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path) for _ in range(11)]
    run = load_run(tmp_path)
    assert run.directory == runs[-1] == tmp_path / "memprofiler-11"
    assert set(run.others) == set(runs[:-1])
    assert load_run(runs[0]).directory == runs[0]


def test_of_several_log_directories_the_one_whose_run_started_last_is_read(tmp_path: Path) -> None:
    first, last = (make_run(tmp_path / version) for version in ("version_1", "version_0"))
    os.utime(first, (2**33, 2**33))
    assert load_run(tmp_path).directory == last
    (last / "manifest.rank00000.jsonl").write_text("not a manifest\n")
    assert load_run(tmp_path).directory == first


def test_the_validation_beside_a_fit_does_not_make_its_log_directory_ambiguous(tmp_path: Path) -> None:
    fit = make_run(tmp_path / "version_0")
    validation = make_run(tmp_path / "version_0" / "validate", FakeRun(stage="validate"))
    run = load_run(tmp_path)
    assert run.directory == fit
    assert run.others == (validation,)
    assert load_run(tmp_path / "version_0" / "validate").directory == validation


def test_no_run_and_no_directory_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no run is in it .*train with MemProfilerCallback"):
        load_run(tmp_path)
    with pytest.raises(ArtifactError, match="no such directory"):
        load_run(tmp_path / "nowhere")


def test_a_whole_run_has_no_problems_and_everything_the_manifest_says(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    assert run.problems == ()
    assert run.status == "finished"
    assert [row.reason for row in run.unavailable] == ["no accelerator"]
    assert {artifact.type for artifact in run.artifacts} == {"pulse", "series", "trace"}
    assert all(artifact.state == "present" and artifact.file.exists() for artifact in run.artifacts)
    (window,) = run.lead.windows
    assert (window.steps, window.warmup_steps, window.truncated) == ((2, 3), (1,), False)
    assert set(window.series) == {"host", "hooks", "functions", "saved_tensors"}
    assert len(run.lead.pulse) == run.lead.steps == 30
    assert run.lead.training is not None
    assert run.lead.training.model == "LitGPT"


def test_a_rank_without_an_end_is_running_or_killed_and_the_others_data_is_there(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(world_size=2, endings={1: None})))
    assert [rank.status for rank in run.ranks] == ["finished", "running or killed"]
    assert run.status == "running or killed"
    assert all(len(rank.pulse) == 30 for rank in run.ranks)


def test_an_exception_is_the_status_of_the_run(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(world_size=2, endings={0: None, 1: "RuntimeError: boom"})))
    assert run.status == "exception"
    assert run.ranks[1].exception == "RuntimeError: boom"


def test_a_damaged_line_of_the_manifest_hides_only_itself(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    manifest = directory / "manifest.rank00000.jsonl"
    lines = manifest.read_bytes().split(b"\n")
    lines.insert(1, b"\xff\x00 not json")
    manifest.write_bytes(b"\n".join(lines))
    run = load_run(directory)
    assert len(run.problems) == 1
    assert "manifest.rank00000.jsonl:2" in run.problems[0].message
    assert run.status == "finished"
    assert len(run.artifacts) == 6


def test_a_pulse_that_is_torn_or_damaged_keeps_its_other_steps(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    pulse = directory / "pulse.rank00000.csv"
    lines = pulse.read_text().split("\n")
    lines[5] = "not,a,row"
    pulse.write_text("\n".join(lines)[:-7])
    run = load_run(directory)
    assert [row["step"] for row in run.lead.pulse] == [step for step in range(29) if step != 4]
    assert "28 steps could be read" in run.problems[0].message


def test_a_pulse_with_foreign_columns_is_a_problem_and_no_data(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "pulse.rank00000.csv").write_text("a,b\n1,2\n")
    run = load_run(directory)
    assert run.lead.pulse == ()
    assert any("columns" in problem.message for problem in run.problems)


@pytest.mark.parametrize("path", ["/" + "a" * 300, "a" * 300, "memprofiler/window000/" + "a" * 300])
def test_a_listed_name_that_is_too_long_for_a_file_is_a_problem_and_hides_nothing(tmp_path: Path, path: str) -> None:
    directory = make_run(tmp_path)
    manifest = ManifestWriter(directory / "manifest.rank00000.jsonl")
    manifest.append("artifact", collector="hooks", type="series", path=path, size_bytes=1, window=0)
    manifest.close()
    run = load_run(directory)
    named = {problem.piece: problem.message for problem in run.problems}
    assert named == {path: "is outside the run's directory or not accessible, and is not read"}
    assert run.artifacts


def test_missing_and_torn_artifacts_are_named(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "window000" / "rank00000.host.jsonl").unlink()
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    with trace.open("r+b") as file:
        file.truncate(10)
    run = load_run(directory)
    states = {artifact.collector: artifact.state for artifact in run.artifacts}
    assert [name for name, state in states.items() if state != "present"] == ["host", "operator_trace"]
    assert states["host"] == "missing"
    assert states["operator_trace"] == "torn"
    messages = {problem.piece: problem.message for problem in run.problems}
    assert messages["memprofiler/window000/rank00000.host.jsonl"] == "is listed but missing"
    assert "has 10 bytes where" in messages[trace.name]


@pytest.mark.parametrize(("there", "state"), [("old", "present"), ("newer", "present"), ("newe", "torn")])
def test_a_file_that_was_being_written_again_is_whole_before_and_afterwards(
    tmp_path: Path, there: str, state: str
) -> None:
    directory = make_run(tmp_path)
    (directory / "stats.yaml").write_text(there)
    for size in (3, 5):
        path = f"{directory.name}/stats.yaml"
        append(directory, "artifact", collector="x", type="blob", path=path, size_bytes=size, window=None)
    run = load_run(directory)
    assert [artifact.state for artifact in run.artifacts if artifact.collector == "x"] == [state]
    assert len(run.problems) == (state == "torn")


def test_a_path_that_leaves_the_run_is_not_followed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "log")
    (tmp_path / "secret").write_text("x")
    append(directory, "artifact", collector="x", type="blob", path="../secret", size_bytes=1, window=None)
    run = load_run(directory)
    assert all("secret" not in artifact.path for artifact in run.artifacts)
    assert run.problems[0].piece == "../secret"


def test_an_artifact_outside_of_the_root_is_read_where_the_user_sent_it(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "log")
    elsewhere = tmp_path / "elsewhere.bin"
    elsewhere.write_bytes(b"abc")
    append(directory, "artifact", collector="x", type="blob", path=str(elsewhere), size_bytes=3, window=None)
    assert load_run(directory).artifacts[-1].file == elsewhere


def test_a_run_directory_that_was_copied_alone_still_has_its_series(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "log")
    copy = tmp_path / "from-the-cluster"
    shutil.copytree(directory, copy)
    run = load_run(copy)
    assert set(run.lead.windows[0].series) == {"host", "hooks", "functions", "saved_tensors"}
    assert [artifact.type for artifact in run.artifacts if artifact.state == "missing"] == ["trace"]


def test_an_artifact_that_is_listed_twice_counts_once_as_listed_last(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    trace.write_bytes(b"compressed again")
    append(
        directory,
        "artifact",
        collector="operator_trace",
        type="trace",
        path=trace.name,
        size_bytes=16,
        window=0,
    )
    traces = [artifact for artifact in load_run(directory).artifacts if artifact.type == "trace"]
    assert [(trace.size_bytes, trace.state) for trace in traces] == [(16, "present")]


def test_errors_and_notes_are_read(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    append(
        directory, "error", collector="host", where="mark", window=0, message="ValueError: x", traceback="Traceback..."
    )
    append(directory, "note", collector="schedule", message="never records")
    run = load_run(directory)
    assert [(error.collector, error.where, error.window, error.message) for error in run.errors] == [
        ("host", "mark", 0, "ValueError: x")
    ]
    assert [note.message for note in run.notes] == ["never records"]


def test_a_budget_that_left_something_out_is_a_note(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    writer = ManifestWriter(directory / "manifest.rank00000.jsonl")
    writer.append("note", collector="schedule", message="late")
    writer.append("budget", window=1, level="no_stack", active_steps=None, reason="r1")
    writer.append("budget", window=2, level="active_steps", active_steps=1, reason="r2")
    writer.append("removed", window=0, paths=[], reason="keep_windows is 1")
    writer.close()
    assert [(note.collector, note.message) for note in load_run(tmp_path).notes][-4:] == [
        ("schedule", "late"),
        ("budget", "from window 1 on traces have no Python stacks: r1"),
        ("budget", "from window 2 on traces have at most 1 active step: r2"),
        ("budget", "the files of window 0 were removed: keep_windows is 1"),
    ]


def test_rows_with_fields_of_the_wrong_type_do_not_stop_the_reader(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    for kind in ("run", "training", "window", "artifact", "error", "unavailable", "note", "later kind"):
        append(directory, kind, window="x", event="open", steps=7, path=3, reason=None, message=[1], size_bytes="big")
    append(directory, "window", window=7, event="close", steps="2,3", truncated=None)
    assert load_run(directory).status == "finished"


def test_a_window_that_was_never_closed_is_truncated(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(endings={0: None}))
    append(directory, "window", window=1, event="open", warmup_steps=[10], active_steps=[11, 12])
    window = load_run(directory).lead.windows[1]
    assert (window.closed, window.truncated, window.planned_steps) == (False, True, (11, 12))


def test_a_newer_run_is_refused_and_the_message_says_upgrade(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    manifest = directory / "manifest.rank00000.jsonl"
    manifest.write_text(manifest.read_text().replace('"schema_version":1', '"schema_version":99'))
    with pytest.raises(ArtifactError, match="upgrade lightning-memprof"):
        load_run(directory)


def test_a_rank_whose_manifest_is_unreadable_does_not_hide_the_others(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=3))
    (directory / "manifest.rank00001.jsonl").write_text("")
    (directory / "manifest.rank00002.jsonl").unlink()
    run = load_run(directory)
    assert [rank.rank for rank in run.ranks] == [0]
    assert {(problem.piece, problem.rank) for problem in run.problems} == {
        ("manifest.rank00001.jsonl", 1),
        ("pulse.rank00002.csv", 2),
    }
    assert [note.message for note in run.notes] == ["1 of 3 ranks are here: 0"]


def test_a_budget_leaves_out_ranks_but_never_the_first(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=3))
    run = load_run(directory, max_pulse_bytes=1)
    assert [rank.rank for rank in run.ranks] == [0]
    assert "2 more ranks" in run.notes[-1].message
