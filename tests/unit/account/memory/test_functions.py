from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.functions import FunctionReport
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

START: dict[str, Any] = {
    "step": 2, "global_step": 2, "point": "start", "recorded": True, "time_ns": 1, "function": "training_step",
    "number": 3, "depth": 0, "thread": None, "rss": 10,
}  # fmt: skip
END = {**START, "point": "end", "raised": None, "rss": 15}


def functions(root: Path, rows: list[dict[str, Any]]) -> tuple[FunctionReport, ...]:
    """Read back rows that stand in the place of a run's own."""
    directory = make_run(root, FakeRun(windows=((2,),)))
    path = directory / "window000" / "rank00000.functions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return memory_report(load_run(directory)).lead.functions


def test_a_function_has_what_its_calls_changed(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(windows=((2, 3), (8,)))))
    (function,) = memory_report(run).lead.functions
    assert (function.name, [call.step for call in function.calls]) == ("training_step", [2, 3, 8])
    assert function.changes("rss_bytes") == [FakeMemory().rss_bytes] * 3
    assert function.changes("forward_rss_bytes") == [FakeMemory().rss_bytes] * 3
    assert function.changes("saved_bytes") == [FakeMemory().activation_bytes] * 3
    assert function.changes("allocated_bytes") == []


def test_an_allocators_figures_have_plain_names(tmp_path: Path) -> None:
    start = {**START, "allocated_bytes.all.current": MIB, "reserved_bytes.all.current": 2 * MIB}
    end = {**END, "allocated_bytes.all.current": 3 * MIB, "reserved_bytes.all.current": 4 * MIB,
           "allocated_bytes.all.peak": 5 * MIB}  # fmt: skip
    (function,) = functions(tmp_path, [start, end])
    assert (function.changes("allocated_bytes"), function.changes("reserved_bytes")) == ([2 * MIB], [2 * MIB])
    (call,) = function.calls
    assert call.end is not None
    assert call.end["peak_allocated_bytes"] == 5 * MIB


def test_calls_inside_of_calls_keep_their_own_ends(tmp_path: Path) -> None:
    inner = {"depth": 1, "function": "encode", "number": 1}
    rows = [START, {**START, **inner, "rss": 20}, {**END, **inner, "rss": 21}, END]
    outer, inside = functions(tmp_path, rows)
    assert (outer.name, outer.changes("rss_bytes")) == ("training_step", [5])
    assert (inside.name, inside.changes("rss_bytes"), inside.calls[0].depth) == ("encode", [1], 1)


def test_a_function_that_calls_itself_ends_from_the_inside(tmp_path: Path) -> None:
    rows = [START, {**START, "depth": 1, "rss": 11}, {**END, "depth": 1, "rss": 12}, END]
    (function,) = functions(tmp_path, rows)
    assert [(call.depth, call.end and call.end["rss_bytes"]) for call in function.calls] == [(0, 15), (1, 12)]


def test_calls_of_threads_are_told_apart(tmp_path: Path) -> None:
    rows = [START, {**START, "thread": "loader", "rss": 50}, END, {**END, "thread": "loader", "rss": 51}]
    (function,) = functions(tmp_path, rows)
    assert function.changes("rss_bytes") == [5, 1]


def test_a_call_that_raised_has_its_end_and_the_exception(tmp_path: Path) -> None:
    (function,) = functions(tmp_path, [START, {**END, "raised": "ValueError"}])
    assert [call.raised for call in function.calls] == ["ValueError"]
    assert function.changes("rss_bytes") == [5]


def test_a_call_that_did_not_end_changed_nothing_that_is_known(tmp_path: Path) -> None:
    (function,) = functions(tmp_path, [END, {**START, "number": 4}])
    assert [call.end for call in function.calls] == [None]
    assert function.changes("rss_bytes") == []


def test_calls_that_were_counted_over_the_whole_run_are_there_too(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=None))
    row = {**START, "step": None, "global_step": None, "function": "backward"}
    rows = [row, {**END, **row, "point": "end", "rss": 17}]
    (directory / "functions.rank00000.jsonl").write_text("{torn\n" + "".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(directory)
    found = memory_report(run)
    assert [(function.name, function.changes("rss_bytes")) for function in found.lead.functions] == [("backward", [7])]
    assert [problem.piece for problem in run.series_problems] == ["functions.rank00000.jsonl"]
