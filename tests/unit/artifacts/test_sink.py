from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.artifacts.series import AllocatorRow, HostRow
from lightning_memprof.artifacts.sink import ArtifactSpec, RunPlace, Sink, claim_run_place
from lightning_memprof.schedule import Mark, Point, Window
from recorded_rows import read_rows, read_series

WINDOW = Window(0, (1,), (2, 3))
MARK = Mark(2, 1, Point.AFTER_FORWARD, recorded=True, time_ns=5)


def break_off(sink: Sink, path: Path, error: BaseException) -> None:
    with sink.file(ArtifactSpec(path, "blob", "fake")) as temporary:
        temporary.write_bytes(b"half")
        raise error


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[Sink]:
    made = Sink(claim_run_place(tmp_path / "log"), 3)
    yield made
    made.close()


def artifact_rows(sink: Sink) -> list[dict[str, Any]]:
    return [row for row in read_rows(sink.manifest.path)[0] if row["kind"] == "artifact"]


def files(sink: Sink) -> set[str]:
    root = sink.place.root
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_whole_file_gets_its_name_and_a_manifest_line(sink: Sink) -> None:
    path = sink.place.directory / "deep/er/x.bin"
    with sink.file(ArtifactSpec(path, "blob", "fake", 0)) as temporary:
        temporary.write_bytes(b"abc")
        assert not path.exists()
    assert path.read_bytes() == b"abc"
    (row,) = artifact_rows(sink)
    assert row["path"] == "memprofiler/deep/er/x.bin"
    assert (row["type"], row["collector"], row["window"]) == ("blob", "fake", 0)
    assert (row["size_bytes"], row["sha256"]) == (3, hashlib.sha256(b"abc").hexdigest())
    assert sink.artifacts == [ArtifactSpec(path, "blob", "fake", 0)]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_body_that_raises_leaves_no_file_and_no_row_and_an_earlier_file_as_it_was(
    sink: Sink, error: BaseException
) -> None:
    earlier = sink.place.directory / "earlier.bin"
    earlier.write_bytes(b"earlier")
    for path in (earlier, sink.place.directory / "x.bin"):
        with pytest.raises(type(error)) as caught:
            break_off(sink, path, error)
        assert caught.value is error
    assert earlier.read_bytes() == b"earlier"
    assert files(sink) == {"memprofiler/manifest.rank00003.jsonl", "memprofiler/earlier.bin"}
    assert artifact_rows(sink) == []
    assert sink.artifacts == []


def test_a_file_that_is_written_again_is_listed_before_it_takes_its_place(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    artifact = ArtifactSpec(sink.place.directory / "stats.yaml", "blob", "x")
    with sink.file(artifact) as temporary:
        temporary.write_text("old")
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), sink.file(artifact) as temporary:
        temporary.write_text("newer")
    assert [row["size_bytes"] for row in artifact_rows(sink)] == [3, 5]
    assert artifact.path.read_text() == "old"


def test_a_body_that_writes_nothing_is_an_error_and_no_row(sink: Sink) -> None:
    with pytest.raises(FileNotFoundError), sink.file(ArtifactSpec(sink.place.directory / "x", "blob", "fake")):
        pass
    assert artifact_rows(sink) == []


def test_a_name_that_is_taken_by_a_directory_leaves_nothing_unfinished(sink: Sink) -> None:
    path = sink.place.directory / "x"
    path.mkdir()
    with pytest.raises(OSError), sink.file(ArtifactSpec(path, "blob", "fake")) as temporary:
        temporary.write_bytes(b"abc")
    assert files(sink) == {"memprofiler/manifest.rank00003.jsonl"}


@pytest.mark.parametrize("path", ["elsewhere/x.bin", "log/../elsewhere/x.bin"])
def test_a_file_outside_of_the_root_is_listed_by_its_absolute_path(sink: Sink, tmp_path: Path, path: str) -> None:
    with sink.file(ArtifactSpec(tmp_path / path, "blob", "fake")) as temporary:
        temporary.write_bytes(b"")
    assert [row["path"] for row in artifact_rows(sink)] == [(tmp_path / "elsewhere/x.bin").as_posix()]


def test_paths_are_relative_to_a_root_that_is_itself_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = Sink(claim_run_place(Path("log")), 0)
    with sink.file(ArtifactSpec(sink.place.directory / "x", "blob", "fake")) as temporary:
        temporary.write_bytes(b"")
    sink.close()
    assert [row["path"] for row in artifact_rows(sink)] == ["memprofiler/x"]


def test_a_series_is_written_when_its_window_ends(sink: Sink) -> None:
    with sink.series(WINDOW, "host") as write:
        write(MARK, rss_bytes=1, uss_bytes=None)
        assert artifact_rows(sink) == []
    path = sink.place.directory / "window000/rank00003.host.jsonl"
    assert read_series(path) == [
        {
            "step": 2,
            "global_step": 1,
            "point": "after_forward",
            "recorded": True,
            "time_ns": 5,
            "rss_bytes": 1,
            "uss_bytes": None,
        }
    ]
    assert [row["path"] for row in artifact_rows(sink)] == ["memprofiler/window000/rank00003.host.jsonl"]


def test_a_typed_row_is_written_with_its_mark_and_read_as_the_same_row(sink: Sink) -> None:
    row = HostRow(rss_bytes=1, vms_bytes=2)
    with sink.series(WINDOW, "host") as write:
        write(MARK, row)
        # A column that is known later only.
        row.uss_bytes = 3
    content = (sink.place.directory / "window000/rank00003.host.jsonl").read_bytes()
    found = HostRow(step=2, global_step=1, point="after_forward", recorded=True, time_ns=5, rss_bytes=1, vms_bytes=2)
    found.uss_bytes = 3
    assert decode_rows(content, HostRow) == ([found], None)
    assert b'"peak_rss_bytes": null' in content


def test_a_typed_row_may_have_further_columns_and_leaves_out_those_that_are_not_set(sink: Sink) -> None:
    with sink.series(WINDOW, "allocator") as write:
        write(MARK, AllocatorRow(device="cuda:0"), **{"num_ooms": 0, "allocated_bytes.all.current": 7})
    (row,) = read_series(sink.place.directory / "window000/rank00003.allocator.jsonl")
    assert list(row.items())[5:] == [("device", "cuda:0"), ("num_ooms", 0), ("allocated_bytes.all.current", 7)]


def test_a_series_whose_collector_fails_keeps_the_rows_so_far(sink: Sink) -> None:
    with ExitStack() as window:
        window.enter_context(pytest.raises(ValueError))
        window.enter_context(sink.series(WINDOW, "host"))(MARK, rss_bytes=1)
        raise ValueError
    assert len(read_series(sink.place.directory / "window000/rank00003.host.jsonl")) == 1


def test_a_series_without_rows_is_no_file(sink: Sink) -> None:
    with sink.series(WINDOW, "host"):
        pass
    assert artifact_rows(sink) == []


def test_background_jobs_run_in_order_one_that_raises_stops_no_other_and_drain_waits_for_them(sink: Sink) -> None:
    done: list[int] = []
    go = threading.Event()

    def first() -> None:
        go.wait(10)
        done.append(0)

    sink.in_background(first)
    for number in range(1, 5):
        sink.in_background(lambda: 1 // 0, window=number)  # type: ignore[arg-type]
        sink.in_background(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    go.set()
    sink.drain()
    assert done == list(range(5))
    assert not sink._waiting


def test_draining_ends_the_thread_and_work_may_go_on_afterwards(sink: Sink) -> None:
    before = set(threading.enumerate())
    done: list[int] = []
    for number in range(2):
        sink.in_background(lambda number=number: done.append(number))  # type: ignore[misc]
        sink.drain()
        assert not set(threading.enumerate()) - before
    sink.drain()
    assert done == [0, 1]


def test_close_finishes_the_background_work_before_the_manifest_is_released(sink: Sink) -> None:
    sink.in_background(lambda: sink.manifest.append("note", message="late"))
    sink.close()
    sink.close()
    assert [row["message"] for row in read_rows(sink.manifest.path)[0]] == ["late"]


def test_runs_of_one_root_get_numbered_directories(tmp_path: Path) -> None:
    places = [claim_run_place(tmp_path / "new/log") for _ in range(3)]
    assert [place.number for place in places] == [1, 2, 3]
    assert [place.directory.name for place in places] == ["memprofiler", "memprofiler-2", "memprofiler-3"]
    assert all(place.directory.is_dir() for place in places)


def test_a_file_that_is_in_the_way_counts_as_a_run(tmp_path: Path) -> None:
    (tmp_path / "memprofiler").write_text("")
    assert claim_run_place(tmp_path).directory == tmp_path / "memprofiler-2"


def test_claims_at_the_same_time_get_different_directories(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def claim(_: int) -> RunPlace:
        barrier.wait(10)
        return claim_run_place(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        numbers = [place.number for place in pool.map(claim, range(8))]
    assert sorted(numbers) == list(range(1, 9))


def test_ranks_share_a_directory_and_have_their_own_manifests(tmp_path: Path) -> None:
    place = claim_run_place(tmp_path)
    for rank in range(2):
        sink = Sink(place, rank)
        sink.manifest.append("run", rank=rank)
        sink.close()
    assert {path.name: json.loads(path.read_text())["rank"] for path in place.directory.iterdir()} == {
        "manifest.rank00000.jsonl": 0,
        "manifest.rank00001.jsonl": 1,
    }


def test_the_writer_is_behind_when_two_windows_wait_for_it_whatever_the_number_of_their_jobs(sink: Sink) -> None:
    go = threading.Event()
    waited: list[bool] = []
    sink.in_background(lambda: waited.append(go.wait(10)))
    for _ in range(5):
        sink.in_background(lambda: None, window=0)
    assert sink.behind() is None
    sink.in_background(lambda: 1 // 0, window=1)  # type: ignore[arg-type]
    assert sink.behind() == "the writer is behind: windows 0, 1 are still being written"
    go.set()
    sink.drain()
    assert sink.behind() is None


def listed(sink: Sink, name: str, window: int | None) -> Path:
    path = sink.place.directory / name
    with sink.file(ArtifactSpec(path, "blob", "fake", window)) as temporary:
        temporary.write_bytes(b"x")
    return path


def test_a_window_that_is_removed_takes_its_files_and_its_directory_with_it_and_nothing_else(sink: Sink) -> None:
    listed(sink, "window000/rank00003.a.jsonl", 0)
    listed(sink, "b.bin", 0)
    kept = [listed(sink, "window001/rank00003.a.jsonl", 1), listed(sink, "c.bin", None)]
    sink.remove_window(0, "why")
    assert files(sink) - {"memprofiler/manifest.rank00003.jsonl"} == {
        "memprofiler/window001/rank00003.a.jsonl", "memprofiler/c.bin",
    }  # fmt: skip
    assert not (sink.place.directory / "window000").exists()
    assert [artifact.path for artifact in sink.artifacts] == kept
    row = read_rows(sink.manifest.path)[0][-1]
    assert (row["kind"], row["window"], row["reason"]) == ("removed", 0, "why")
    assert row["paths"] == ["memprofiler/window000/rank00003.a.jsonl", "memprofiler/b.bin"]


def test_a_window_whose_directory_another_rank_uses_keeps_the_directory(sink: Sink) -> None:
    listed(sink, "window000/rank00003.a.jsonl", 0)
    other = sink.place.directory / "window000/rank00004.a.jsonl"
    other.write_text("")
    sink.remove_window(0, "why")
    assert files(sink) - {"memprofiler/manifest.rank00003.jsonl"} == {"memprofiler/window000/rank00004.a.jsonl"}


def test_a_file_that_is_written_again_in_each_window_has_one_entry_and_stays_until_the_last_is_removed(
    sink: Sink,
) -> None:
    *_, path = (listed(sink, "all_windows", window) for window in range(50))
    assert sink.artifacts == [ArtifactSpec(path, "blob", "fake", 49)]
    sink.remove_window(48, "why")
    assert path.exists()
    assert read_rows(sink.manifest.path)[0][-1]["paths"] == []
    sink.remove_window(49, "why")
    assert not path.exists()
    assert sink.artifacts == []
