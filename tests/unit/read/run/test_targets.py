from __future__ import annotations

import codecs
import gzip
import json
import os
import pickle
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import find_run
from lightning_memprof.read.run.targets import file_kind, find_targets

TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1}]}).encode()
SNAPSHOT: dict[str, list[object]] = {"segments": [], "device_traces": [[]]}
SEGMENT = {"device": 0, "address": 1, "total_size": 0, "blocks": []}


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_known_by_its_content_whatever_its_name_is(tmp_path: Path, packed: bool) -> None:
    pack = gzip.compress if packed else bytes
    kinds = {
        TRACE: "trace",
        b'\n[{"ph": "X", "ts": 1}]': "trace",
        **{pickle.dumps(SNAPSHOT, protocol): "snapshot" for protocol in range(6)},
        pickle.dumps([SEGMENT], 4): "snapshot",
        b'{"loss": 0.5}': None,
        b"step,loss\n1,0.5\n": None,
        b"": None,
        pickle.dumps({"state_dict": {}}, 4): None,
    }
    found = {data: file_kind(write(tmp_path / f"{at}.odd", pack(data))) for at, data in enumerate(kinds)}
    assert found == kinds


def test_metadata_before_the_events_may_be_long(tmp_path: Path) -> None:
    groups = [{"ranks": list(range(1000)), "name": str(number)} for number in range(100)]
    head = json.dumps({"distributedInfo": {"pg_config": groups}})[:-1]
    assert file_kind(write(tmp_path / "a.json", f'{head}, "traceEvents": []}}'.encode())) == "trace"


def test_files_and_directories_of_them_are_gathered_and_what_is_neither_is_left_out(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "b" / "one.pt.trace.json.gz", gzip.compress(TRACE))
    two = write(tmp_path / "a" / "two.pickle", pickle.dumps(SNAPSHOT, 4))
    write(tmp_path / "a" / "metrics.json", b'{"loss": 1}')
    write(tmp_path / "a" / "model.pkl", pickle.dumps([1, 2]))
    three = write(tmp_path / "three", TRACE)
    targets = find_targets([tmp_path / "a", three, three])
    assert targets.traces == (first, three)
    assert targets.snapshots == (two,)
    assert targets.run is None


def test_a_directory_with_a_run_means_the_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=2))
    for path in (directory, tmp_path, tmp_path.parent):
        assert find_targets([path]).run == path
        assert not find_targets([path]).traces


def test_what_is_neither_says_so_and_does_not_take_its_directory(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=2))
    pulse = directory / "pulse.rank00000.csv"
    with pytest.raises(ArtifactError, match=r"is neither a trace .* of a run name its log directory"):
        find_targets([pulse])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["none"], "no such file or directory"),
        (["empty"], "no run is in it .* no trace and no snapshot"),
        (["run", "other"], "two runs; .* compare"),
        (["run", "trace.json"], "a run and a file"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path: Path, names: list[str], words: str) -> None:
    make_run(tmp_path / "run", FakeRun(steps=2))
    make_run(tmp_path / "other", FakeRun(steps=2))
    (tmp_path / "empty").mkdir()
    write(tmp_path / "trace.json", TRACE)
    with pytest.raises(ArtifactError, match=words) as refused:
        find_targets([tmp_path / name for name in names])
    assert "\n" not in str(refused.value)


def test_a_broken_file_whose_name_says_what_it_should_be_is_left_to_its_reader(tmp_path: Path) -> None:
    torn = write(tmp_path / "a.pt.trace.json.gz", b"\x1f\x8b torn")
    odd = write(tmp_path / "b.pickle", b"odd")
    targets = find_targets([torn, odd])
    assert (targets.traces, targets.snapshots) == ((torn,), (odd,))


def test_a_pipe_is_refused_where_it_is_named_and_left_out_of_a_directory(tmp_path: Path) -> None:
    trace = write(tmp_path / "a.json", TRACE)
    pipe = tmp_path / "b.json"
    os.mkfifo(pipe)
    assert find_targets([tmp_path]).traces == (trace,)
    with pytest.raises(ArtifactError, match="is a pipe or a device"):
        find_targets([pipe])


def test_a_path_that_cannot_be_looked_at_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no such file"):
        find_targets([tmp_path / ("x" * 5000)])


def test_what_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = write(tmp_path / "a.json", TRACE)

    def refuse(self: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(self), mode)

    # Root, who runs the tests in a container, may read everything.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArtifactError, match="may not be read by you"):
        find_targets([trace])


def test_a_trace_behind_a_byte_order_mark_is_one(tmp_path: Path) -> None:
    assert file_kind(write(tmp_path / "a.odd", codecs.BOM_UTF8 + TRACE)) == "trace"


def test_of_a_directory_that_is_too_large_to_look_through_a_place_in_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memprof.read.run.locate.MAX_DIRECTORIES", 3)
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(ArtifactError, match=r"3 directories were looked at, .* there are more; name a run's log") as no:
        find_targets([tmp_path])
    assert "\n" not in str(no.value)
    with pytest.raises(ArtifactError, match="3 directories were looked at"):
        find_run(tmp_path)


def test_what_is_near_is_found_before_what_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memprof.read.run.locate.MAX_DIRECTORIES", 4)
    (tmp_path / "a" / "b" / "c" / "d").mkdir(parents=True)
    trace = write(tmp_path / "z" / "one.json", TRACE)
    assert find_targets([tmp_path]).traces == (trace,)


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "one.json", TRACE)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "loop").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "away").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="no run is in it"):
        find_targets([tmp_path / "here"])
