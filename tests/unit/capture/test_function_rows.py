"""The file of memory at functions is plain YAML, whole after each window, and the pickle says the same."""

from __future__ import annotations

import pickle
import pickletools
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memprof.artifacts.sink import Sink, claim_run_place
from lightning_memprof.capture.function_rows import stats_key, write_memory_stats
from lightning_memprof.units import MIB
from mutations import Runs
from recorded_rows import read_rows

FIRST = {"0.training_step.3.start": {"active_bytes.all.allocated": 1, "rss": 2}, "0.training_step.3.end": {"rss": 3}}
SECOND = {"0.training_step.7.start": {"rss": 4, "note": "yes", "none": None, "share": 0.5}}


@pytest.fixture
def sink(tmp_path: Path) -> Any:
    made = Sink(claim_run_place(tmp_path), 0)
    yield made
    made.close()


def listed(sink: Sink) -> list[tuple[str, str, str]]:
    rows = read_rows(sink.manifest.path)[0]
    return [(row["collector"], row["type"], row["path"]) for row in rows if row["kind"] == "artifact"]


def test_a_key_says_rank_function_number_and_edge() -> None:
    assert stats_key(1, "training_step", 2, "end") == "1.training_step.2.end"


def test_the_file_is_plain_mappings_and_holds_all_windows_so_far(sink: Sink) -> None:
    path = sink.place.directory / "rank_0_memory_stats.yaml"
    write_memory_stats(sink, "functions", FIRST, ["yaml"])
    assert yaml.safe_load(path.read_text()) == FIRST
    write_memory_stats(sink, "functions", SECOND, ["yaml"])
    assert yaml.safe_load(path.read_text()) == FIRST | SECOND
    assert list(yaml.safe_load(path.read_text())) == [*FIRST, *SECOND]
    assert "!" not in path.read_text()
    assert listed(sink) == [("functions", "blob", "memprofiler/rank_0_memory_stats.yaml")] * 2


def test_a_long_run_s_file_is_added_to_and_not_read(sink: Sink) -> None:
    path = sink.place.directory / "rank_0_memory_stats.yaml"
    path.write_bytes(b"".join(b"0.training_step.%d.end: {rss: 1}\n" % step for step in range(300_000)))
    size = path.stat().st_size
    assert size > 8 * MIB
    tracemalloc.start()
    try:
        write_memory_stats(sink, "functions", FIRST, ["yaml"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 2
    assert path.stat().st_size > size


def test_the_pickle_is_of_protocol_4_and_says_the_same(sink: Sink) -> None:
    path = sink.place.directory / "rank_0_memory_stats.pickle"
    write_memory_stats(sink, "functions", FIRST, ["pickle"])
    write_memory_stats(sink, "functions", SECOND, ["pickle"])
    assert pickle.loads(path.read_bytes()) == FIRST | SECOND  # noqa: S301 our own
    assert next(pickletools.genops(path.read_bytes()))[1] == 4
    assert not (sink.place.directory / "rank_0_memory_stats.yaml").exists()


def test_names_that_yaml_would_read_as_something_else_stay_names(sink: Sink) -> None:
    stats = {"0.<lambda>.3.end": {"true": 1, "1": 2, "a: b": 3, "größe": 4}}
    write_memory_stats(sink, "functions", stats, ["yaml"])
    text = (sink.place.directory / "rank_0_memory_stats.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == stats


def test_a_write_that_fails_leaves_the_file_that_was_there(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    write_memory_stats(sink, "functions", FIRST, ["yaml"])

    def refuse(*_: Any, **__: Any) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(yaml, "dump", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_memory_stats(sink, "functions", SECOND, ["yaml"])
    path = sink.place.directory / "rank_0_memory_stats.yaml"
    assert yaml.safe_load(path.read_text()) == FIRST
    assert [path.name for path in sink.place.directory.iterdir() if "partial" in path.name] == []


def test_a_pickle_that_somebody_else_has_put_there_runs_nothing_in_the_training(sink: Sink) -> None:
    path = sink.place.directory / "rank_0_memory_stats.pickle"
    path.write_bytes(pickle.dumps({"0.training_step.3.end": Runs()}))
    with pytest.raises(
        pickle.UnpicklingError, match=r"refers to collections\.OrderedDict, which is not allowed; remove the file"
    ):
        write_memory_stats(sink, "functions", FIRST, ["pickle"])
