"""Traces that stay usable: which ranks record, what is left out over budget, and a writer that is slow or fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_memprof import Budget, MemProfilerCallback, OutputOptions, Schedule, load_run
from lightning_memprof.capture.collectors import operator_trace
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
from ranks import launch
from training import Perceptron, loader, only_run, rows_of, trainer

CYCLES = Schedule(wait=0, warmup=1, active=1, repeat=0)


def test_the_rank_that_is_chosen_records_everything_and_the_other_one_what_is_light(tmp_path: Path) -> None:
    codes = launch("chosen_rank.py", tmp_path / "run", world=2)
    assert codes == [0, 0], "".join((tmp_path / f"run/out{rank}").read_text() for rank in range(2))
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
    # The script takes a millionth of the group's timeout for half of it.
    (warning,) = [row["message"] for row in rows_of(run, "note", 1) if row["collector"] == "operator_trace"]
    assert "more than half of the process group's timeout of 100 s" in warning
    assert warning in (tmp_path / "run/out1").read_text()


def test_rank_0_records_alone_where_the_others_have_no_callback(tmp_path: Path) -> None:
    assert launch("lone_rank.py", tmp_path / "run", "0", world=2) == [0, 0]
    (rank,) = load_run(only_run(tmp_path / "run")).ranks
    assert (rank.rank, rank.status, rank.steps) == (0, "finished", 8)


def test_a_rank_records_nothing_where_rank_0_has_no_callback(tmp_path: Path) -> None:
    assert launch("lone_rank.py", tmp_path / "run", "1", world=2) == [0, 0]
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


def test_what_a_budget_left_out_is_told_on_the_page(tmp_path: Path) -> None:
    budget = Budget(max_trace_bytes=1)
    collectors = [HostMemory(), OperatorTrace(record_shapes=True)]
    trainer(tmp_path, MemProfilerCallback(CYCLES, collectors, budget=budget)).fit(Perceptron(), loader(4))
    (note,) = [note.message for note in load_run(only_run(tmp_path)).notes if note.collector == "budget"]
    assert note.startswith("from window 1 on traces have no input shapes: the trace of window 0 was ")


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


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def test_a_write_that_fails_is_an_error_row_and_the_training_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Path, target: Path) -> None:
        target.write_bytes(b"half")
        os.close(os.open("/dev/full", os.O_WRONLY))
        with Path("/dev/full").open("w") as disk:
            disk.write("x")

    monkeypatch.setattr(operator_trace, "write_trace", full)
    found = []
    for callbacks in ([], [MemProfilerCallback(CYCLES, [HostMemory(), OperatorTrace()])]):
        torch.manual_seed(0)
        losses = Losses()
        trainer(tmp_path / str(len(callbacks)), losses, *callbacks).fit(Perceptron(), loader(8))
        found.append(losses.losses)
    assert found[0] == found[1]
    run = only_run(tmp_path)
    errors = rows_of(run, "error")
    assert {(row["collector"], row["where"]) for row in errors} == {("operator_trace", "write")}
    assert "No space left on device" in errors[0]["message"]
    assert sum("collector operator_trace failed on write" in record.getMessage() for record in caplog.records) == 1
    assert list(run.parent.rglob("*.partial")) == []
    assert list(run.parent.glob("*.pt.trace.json.gz")) == []
    assert load_run(run).problems == ()
