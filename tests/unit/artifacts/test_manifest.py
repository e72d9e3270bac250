from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprof.artifacts.manifest import SCHEMA_VERSION, ManifestWriter, read_manifest, read_rows
from lightning_memprof.errors import ArtifactError

RUN = {"kind": "run", "schema_version": SCHEMA_VERSION}


def write(path: Path, *rows: object, tail: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_what_was_appended_is_read_back_in_order_with_its_time(tmp_path: Path) -> None:
    writer = ManifestWriter(tmp_path / "m")
    writer.append("run", schema_version=1, host="h")
    writer.append("note", collector="schedule", message='two\nlines, a "quote" and \N{SNOWMAN}')
    writer.close()
    manifest = read_manifest(tmp_path / "m")
    assert not manifest.torn
    assert [row["kind"] for row in manifest.rows] == ["run", "note"]
    assert manifest.rows[1]["message"] == 'two\nlines, a "quote" and \N{SNOWMAN}'
    assert 0 < manifest.rows[0]["time_ns"] <= manifest.rows[1]["time_ns"]


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
    assert [row["host"] for row in read_manifest(tmp_path / "m").rows] == ["a", "b"]


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
    manifest = read_manifest(tmp_path / "m")
    assert [row.get("message") for row in manifest.rows] == [None, "refused", "kept"]
    assert not manifest.torn


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path / "m", RUN, tail='{"kind":"no'))
    assert manifest.torn
    assert manifest.rows == [RUN]


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
    with pytest.raises(ArtifactError, match=r"m:2: .*remove the line"):
        read_manifest(path)


def test_a_manifest_of_a_newer_version_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"kind": "run", "schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(ArtifactError, match="version 2 is newer than 1; upgrade lightning-memprof"):
        read_manifest(path)


@pytest.mark.parametrize("version", [None, "1", 1.5])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    with pytest.raises(ArtifactError, match="schema version"):
        read_manifest(write(tmp_path / "m", {"kind": "run", "schema_version": version}))


@pytest.mark.parametrize("rows", [[], [{"kind": "note"}], [{}]])
def test_a_manifest_without_a_run_is_refused(tmp_path: Path, rows: list[object]) -> None:
    with pytest.raises(ArtifactError, match="holds no run"):
        read_manifest(write(tmp_path / "m", *rows))


def test_rows_without_a_kind_are_not_kept_and_lines_behind_the_most_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m", RUN, *[{}] * 3, {"kind": 3}, {"kind": "note"}, {"kind": "end"})
    assert [row["kind"] for row in read_manifest(path).rows] == ["run", "note", "end"]
    assert not read_manifest(path).cut
    monkeypatch.setattr("lightning_memprof.artifacts.manifest.MOST_LINES", 6)
    cut = read_manifest(path)
    assert [row["kind"] for row in cut.rows] == ["run", "note"]
    assert cut.cut


def test_values_that_python_writes_and_json_does_not_know_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"a":NaN}\n{"a":-Infinity}\n{"a":"\\ud800"}\n{"a":36893488147419103232}\n')
    rows, torn = read_rows(path)
    assert [repr(row["a"]) for row in rows] == ["nan", "-inf", "'\\ud800'", "36893488147419103232"]
    assert not torn


def test_a_missing_manifest_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file or directory"):
        read_manifest(tmp_path / "m")
