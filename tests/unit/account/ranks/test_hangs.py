"""Collectives of ranks compared with each other and with earlier steps, and the exception that came first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ranks.hangs import call, difference, first_exception, usual_call
from lightning_memprof.artifacts.series import CollectiveRow
from lightning_memprof.read.run.load import load_run


def made(*names: str) -> list[CollectiveRow]:
    return [CollectiveRow(group="0", number=n, operation=name, tensors="Float[3]") for n, name in enumerate(names, 1)]


@pytest.mark.parametrize(
    ("names", "usual"),
    [
        (("all_reduce", "broadcast", "all_reduce", "barrier"), "broadcast"),
        (("all_reduce", "broadcast", "all_reduce", "broadcast"), None),
        (("all_reduce",), None),
        (("barrier", "all_reduce"), None),
    ],
)
def test_a_call_is_compared_with_what_followed_the_same_call_before(names: tuple[str, ...], usual: str | None) -> None:
    found = usual_call(made(*names))
    assert (found and found.operation) == usual


def test_the_tensors_count_only_where_all_ranks_must_pass_the_same() -> None:
    rows = made("_all_gather_base", "all_gather")
    assert list(map(call, rows)) == [("all_gather", "Float[3]"), ("all_gather", "")]


def test_ranks_whose_last_calls_do_not_overlap_are_not_compared(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2))
    for rank, number in ((0, 5), (1, 900)):
        row = {"group": "0", "number": number, "operation": f"call_{rank}", "tensors": ""}
        (directory / f"collectives.rank{rank:05d}.jsonl").write_text(json.dumps(row) + "\n")
    assert difference(load_run(directory).ranks) is None


@pytest.mark.parametrize(
    ("function", "time_ns"),
    [
        ("train.step", 9),
        # Clocks of machines differ: a lost connection in a collective is a consequence.
        ("torch.distributed.distributed_c10d.all_reduce", 5),
    ],
)
def test_the_exception_of_a_run_is_the_first_one_outside_a_collective(
    tmp_path: Path, function: str, time_ns: int
) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2, endings={0: "RuntimeError: closed", 1: "ValueError: empty"}))
    for rank, error, at, name in ((0, "RuntimeError: closed", time_ns, function), (1, "ValueError: empty", 7, "step")):
        row = {"kind": "exception", "error": error, "time_ns": at, "function": name, "place": "train.py:3"}
        (directory / f"hangs.rank{rank:05d}.jsonl").write_text(json.dumps(row) + "\n")
    assert first_exception(load_run(directory).ranks) == "ValueError: empty (rank 1)"
