from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.artifacts.manifest import (
    SCHEMA_VERSION,
    EndRow,
    ManifestWriter,
    NoteRow,
    OverheadFacts,
    RunFacts,
    read_manifest,
)
from lightning_memprof.errors import ArtifactError
from recorded_rows import read_rows

RUN = {"kind": "run", "schema_version": SCHEMA_VERSION}


def write(path: Path, *rows: object, tail: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_what_was_appended_is_read_back_in_order_with_its_time(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    writer.append("run", schema_version=1, host="h")
    writer.append("note", collector="schedule", message='two\nlines, a "quote" and \N{SNOWMAN}')
    writer.close()
    rows, is_truncated = read_rows(tmp_path / "m")
    assert not is_truncated
    assert [row["kind"] for row in rows] == ["run", "note"]
    assert rows[1]["message"] == 'two\nlines, a "quote" and \N{SNOWMAN}'
    assert 0 < rows[0]["time_ns"] <= rows[1]["time_ns"]


def test_a_row_is_on_disk_before_the_next_one_is_written(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    writer.append("run", schema_version=1)
    assert len(read_manifest(tmp_path / "m").rows) == 1
    writer.close()


def test_a_second_writer_appends_to_what_is_there(tmp_path: Path) -> None:
    for host in ("a", "b"):
        writer = ManifestWriter(tmp_path / "m")
        writer.append("run", schema_version=1, host=host)
        writer.close()
    assert [facts.host for facts in read_manifest(tmp_path / "m").of(RunFacts)] == ["a", "b"]


def test_values_that_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    writer.append("note", path=Path("a/b"))
    writer.close()
    assert read_rows(tmp_path / "m")[0][0]["path"] == "a/b"


def test_rows_of_several_threads_stay_whole(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")

    def append() -> None:
        for _ in range(50):
            writer.append("note", message="x" * 5000)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    rows, torn = read_rows(tmp_path / "m")
    assert (len(rows), torn) == (200, False)


def test_after_close_rows_are_dropped_and_closing_again_is_harmless(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    writer.close()
    writer.append("note")
    writer.close()
    assert (tmp_path / "m").read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_is_said_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    writer = ManifestWriter(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        writer.append("run")
        writer.append("note")
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written (No space left on device); facts of this run are lost where it stays so"
    ]


def test_a_disk_that_went_away_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = ManifestWriter(tmp_path / "m")
    read_only = os.open(tmp_path / "m", os.O_RDONLY)
    os.dup2(read_only, writer._fd)
    os.close(read_only)
    writer.append("run")
    writer.close()
    assert "cannot be written" in caplog.text


def test_a_row_that_a_full_disk_refused_is_written_whole_with_the_next_that_it_takes(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    writer = ManifestWriter(tmp_path / "m")
    writer.append("run", schema_version=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "m").stat().st_size + 10, limits[1]))
    try:
        writer.append("note", message="refused")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.append("note", message="kept")
    writer.close()
    rows, is_truncated = read_rows(tmp_path / "m")
    assert [row.get("message") for row in rows] == [None, "refused", "kept"]
    assert not is_truncated


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path / "m", RUN, tail='{"kind":"no'))
    assert "its last line is truncated" in str(manifest.damage)
    assert [type(row) for row in manifest.rows] == [RunFacts]


@given(cut=st.integers(min_value=0))
def test_a_manifest_cut_anywhere_gives_the_rows_that_are_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "m"
    whole = write(path, *({"kind": "note", "n": n, "text": "é\n"} for n in range(5))).read_bytes()
    cut %= len(whole) + 1
    path.write_bytes(whole[:cut])
    rows, torn = read_rows(path)
    assert [row["n"] for row in rows] == list(range(whole[:cut].count(b"\n")))
    assert torn == (cut > 0 and whole[cut - 1 : cut] != b"\n")


@pytest.mark.parametrize("damage", ["not json", "", "[1]", '"text"', "null", "\x00\x00", "\udcff"])
def test_damage_before_the_last_line_names_the_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m"
    lines = (json.dumps(RUN), damage, json.dumps(RUN), "")
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    manifest = read_manifest(path)
    assert re.search(r"m:2: .*remove the line", str(manifest.damage))
    assert len(manifest.of(RunFacts)) == 2
    if damage:
        with pytest.raises(ArtifactError, match=r"m:2: .*remove the line"):
            read_rows(path)


def test_a_manifest_of_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"kind": "run", "schema_version": SCHEMA_VERSION + 1})
    manifest = read_manifest(path)
    assert "version 2 is newer than 1; upgrade lightning-memprof" in str(manifest.damage)
    assert manifest.rows == []


@pytest.mark.parametrize("version", [None, "1", 1.5])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    manifest = read_manifest(write(tmp_path / "m", {"kind": "run", "schema_version": version}))
    assert "schema version" in str(manifest.damage)
    assert manifest.run is None


@pytest.mark.parametrize("rows", [[], [{"kind": "note"}], [{}]])
def test_a_manifest_without_a_run_is_refused(tmp_path: Path, rows: list[object]) -> None:
    assert "has no run" in str(read_manifest(write(tmp_path / "m", *rows)).damage)


def test_rows_without_a_kind_are_not_kept_and_lines_behind_the_most_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m", RUN, *[{}] * 3, {"kind": 3}, {"kind": "note"}, {"kind": "end"})
    assert [type(row) for row in read_manifest(path).rows] == [RunFacts, NoteRow, EndRow]
    assert read_manifest(path).damage is None
    monkeypatch.setattr("lightning_memprof.artifacts.manifest.MOST_LINES", 6)
    cut = read_manifest(path)
    assert [type(row) for row in cut.rows] == [RunFacts, NoteRow]
    assert cut.damage == "it has more than 6 lines; the rest is not read"


def test_values_that_python_writes_and_json_does_not_know_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"a":NaN}\n{"a":-Infinity}\n{"a":"\\ud800"}\n{"a":36893488147419103232}\n')
    rows, torn = read_rows(path)
    assert [repr(row["a"]) for row in rows] == ["nan", "-inf", "'\\ud800'", "36893488147419103232"]
    assert not torn


def test_a_missing_manifest_is_damage(tmp_path: Path) -> None:
    manifest = read_manifest(tmp_path / "m")
    assert "No such file or directory" in str(manifest.damage)
    assert manifest.run is None


def artifact(path: str, window: int) -> dict[str, Any]:
    return {"kind": "artifact", "path": path, "window": window}


def removed(window: int, *paths: Any) -> dict[str, Any]:
    return {"kind": "removed", "window": window, "paths": list(paths), "reason": "keep_windows is 1"}


def test_a_file_that_the_run_removed_is_no_file_of_it_unless_it_was_written_again(tmp_path: Path) -> None:
    rows = [artifact("a", 0), artifact("b", 0), removed(0, "a", "b"), artifact("b", 1), artifact("c", 1)]
    manifest = read_manifest(write(tmp_path / "m", RUN, *rows))
    assert [(row.path, row.window) for (row,) in manifest.artifacts.values()] == [("b", 1), ("c", 1)]


@pytest.mark.parametrize("damage", [{"kind": "removed"}, {"kind": "removed", "paths": "a"}, removed(0, "a", 3)])
def test_a_damaged_row_removes_nothing(tmp_path: Path, damage: dict[str, Any]) -> None:
    manifest = read_manifest(write(tmp_path / "m", RUN, artifact("a", 0), damage))
    assert list(manifest.artifacts) == ["a"]


def test_the_list_of_files_can_be_skipped(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    for row in (RUN, artifact("a", 0), {"kind": "note", "message": "kept"}):
        writer.append(**row)
    writer.close()
    manifest = read_manifest(tmp_path / "m", with_artifacts=False)
    assert [type(row) for row in manifest.rows] == [RunFacts, NoteRow]


def test_a_damaged_field_hides_only_itself_in_nested_facts_too(tmp_path: Path) -> None:
    optimizers = [{"name": "Adam", "fused": "yes", "lr": 1}, {"name": 5, "parameters": 2**70}]
    training = {"kind": "training", "max_steps": "many", "num_batches": 8, "optimizers": optimizers}
    end = {"kind": "end", "steps": True, "overhead": {"pulse_ns": 5, "collectors_ns": {"a": 1}}}
    manifest = read_manifest(write(tmp_path / "m", RUN, training, end))
    assert manifest.damage is None
    facts = manifest.training
    assert facts is not None
    assert (facts.max_steps, facts.num_batches) == (None, 8)
    assert [(row.name, row.fused, row.parameters) for row in facts.optimizers] == [("Adam", None, None), (None,) * 3]
    assert facts.optimizers[0].fields == optimizers[0]
    assert manifest.end is not None
    assert manifest.end.steps is None
    assert manifest.end.overhead == OverheadFacts(pulse_ns=5, collectors_ns={"a": 1})


@pytest.mark.slow
def test_a_manifest_of_a_million_empty_rows_is_read_soon_and_says_that_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(json.dumps(RUN).encode() + b"\n" + b"{}\n" * 1_000_000 + b"not read\n")
    before = time.process_time()
    manifest = read_manifest(path)
    assert time.process_time() - before < 10
    assert len(manifest.rows) == 1
    assert manifest.damage == "it has more than 1,000,000 lines; the rest is not read"
