"""Traces that stay usable: which ranks record, what is left out over budget, and a writer that is slow or fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memprof import Budget, MemProfilerCallback, OutputOptions, Schedule, load_run
from lightning_memprof.capture.collectors import operator_trace
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from ranks import trained
from training import Perceptron, loader, only_run, rows_of, trainer

CYCLES = Schedule(wait=0, warmup=1, active=1, repeat=0)


def test_the_rank_that_is_chosen_records_everything_and_the_other_one_what_is_light(tmp_path: Path) -> None:
    trained(tmp_path / "run", "ddp", "ranks=[1]")
    run = only_run(tmp_path / "run")
    heavy = {"operator_trace", "functions", "saved_tensors"}
    recorded = [set(rows_of(run, "run", rank)[0]["collectors"]) for rank in range(2)]
    assert recorded[1] >= heavy
    assert recorded[0].isdisjoint(heavy)
    assert recorded[0] >= {"pulse", "host", "hooks"}
    assert [rows_of(run, "run", rank)[0]["every_collector"] for rank in range(2)] == [False, True]
    assert len(list(run.parent.glob("*-1[[]Strategy]*.pt.trace.json.gz"))) == 1
    assert list(run.parent.glob("*-0[[]Strategy]*")) == []
    assert [len(rank.windows) for rank in load_run(run).ranks] == [1, 1]


def test_rank_0_records_alone_where_the_others_have_no_callback(tmp_path: Path) -> None:
    trained(tmp_path / "run", "ddp", "", "lone=0")
    (rank,) = load_run(only_run(tmp_path / "run")).ranks
    assert (rank.rank, rank.status, rank.steps) == (0, "finished", 8)


def test_a_rank_records_nothing_where_rank_0_has_no_callback(tmp_path: Path) -> None:
    trained(tmp_path / "run", "ddp", "", "lone=1")
    assert list((tmp_path / "run").rglob("memprofiler*")) == []
    printed = (tmp_path / "run/out1").read_text()
    assert (
        "rank 1 records nothing: rank 0 has claimed no run directory in 2 s; every rank needs the callback" in printed
    )


def test_only_the_newest_windows_are_kept_and_the_page_says_so_without_a_word_of_missing_files(
    tmp_path: Path,
) -> None:
    callback = MemProfilerCallback(CYCLES, budget=Budget(keep_windows=2), output=OutputOptions(on_error="raise"))
    trainer(tmp_path, callback).fit(Perceptron(), loader(8))
    directory = only_run(tmp_path)
    assert sorted(path.name for path in directory.glob("window*")) == ["window002", "window003"]
    assert len(list(directory.parent.glob("*.pt.trace.json.gz"))) == 2
    run = load_run(directory)
    assert run.problems == ()
    assert {artifact.window for artifact in run.artifacts} >= {2, 3}
    assert {artifact.window for artifact in run.artifacts}.isdisjoint({0, 1})
    removed = [row["window"] for row in rows_of(directory, "removed")]
    assert removed == [0, 1]
    assert [note.message for note in run.notes if note.collector == "budget"] == [
        "the files of 2 windows (the last one 1) were removed: keep_windows is 2"
    ]


def test_a_slow_writer_costs_the_training_nothing_and_windows_it_cannot_keep_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    real = operator_trace.write_trace

    def slow(raw: Path, target: Path) -> None:
        assert go.wait(60)
        real(raw, target)

    monkeypatch.setattr(operator_trace, "write_trace", slow)

    class Releasing(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            # As good as proof that no step has waited for the writer.
            go.set()

    callback = MemProfilerCallback(CYCLES, [HostMemory(), OperatorTrace()])
    trainer(tmp_path, Releasing(), callback).fit(Perceptron(), loader(8))
    run = only_run(tmp_path)
    refused = [(row["collector"], row["window"], row["reason"]) for row in rows_of(run, "unavailable")]
    reason = "the writer is behind: windows 0, 1 are still being written"
    assert refused == [("operator_trace", 2, reason), ("operator_trace", 3, reason)]
    assert len(list(run.parent.glob("*.pt.trace.json.gz"))) == 2
    assert len(list(run.glob("window*/rank00000.host.jsonl"))) == 4
    assert {path.name for path in run.glob("window*/*")} == {"rank00000.host.jsonl", "rank00000.action_memory.jsonl"}
    assert list(run.parent.rglob("*.partial")) == []
    assert load_run(run).problems == ()
