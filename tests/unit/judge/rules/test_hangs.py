"""The rank that hangs, from what each rank reported, and DataLoader workers that died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from findings import write_rows
from lightning_memprof import load_run
from lightning_memprof.judge import Facts, Finding, Severity
from lightning_memprof.judge.rules.hangs import hang, worker_died

KILLED: dict[int, str | None] = {0: None, 1: None}
ALL_REDUCE: dict[str, Any] = {
    "function": "torch.distributed.distributed_c10d.all_reduce",
    "place": "train.py:9 in training_step",
}
GRADIENTS: dict[str, Any] = {"function": "torch.autograd.graph._engine_run_backward", "phase": "backward"}
SLEEP: dict[str, Any] = {
    "function": "__main__.Net.training_step",
    "place": "train.py:14 in training_step",
    "source": "sleep(9)",
}
FETCH: dict[str, Any] = {"function": "multiprocessing.connection.wait", "phase": "data_wait"}


def hanging(step: int = 29, **fields: Any) -> dict[str, Any]:
    return {"kind": "hang", "step": step, "phase": "forward", "waited_ns": 61 * 10**9, "limit_ns": 60 * 10**9, **fields}


def found(root: Path, reports: dict[int, list[dict[str, Any]]], endings: dict[int, str | None]) -> list[Finding]:
    run = make_run(root, FakeRun(world_size=2, endings=endings))
    for rank, rows in reports.items():
        write_rows(run / f"hangs.rank{rank:05d}.jsonl", *rows)
    return hang(Facts.of(load_run(run)))


@pytest.mark.parametrize(
    ("reports", "title", "next_step"),
    [
        (
            {0: hanging(**GRADIENTS), 1: hanging(**SLEEP)},
            "Step 29 does not end on rank 1: stuck in forward at train.py:14",
            "Look at",
        ),
        ({0: hanging(**ALL_REDUCE), 1: hanging(28, **ALL_REDUCE)}, "Step 28 does not end on rank 1", "Call the same"),
        (
            {0: hanging(**GRADIENTS), 1: hanging(**FETCH)},
            "Step 29 does not end on rank 1: stuck in data wait at",
            "Run with DataLoader(num_workers=0)",
        ),
        (
            {0: hanging(**GRADIENTS)},
            "Rank 1 does not respond: rank 0 waits for it in step 29.",
            "Dump its stacks: `py-spy dump --pid",
        ),
        ({0: hanging(**SLEEP)}, "Step 29 does not end on rank 0", "Look at"),
    ],
    ids=["sleep", "missed collective", "stuck loader", "silent rank", "sleep beside a silent rank"],
)
def test_the_rank_is_named_that_the_others_wait_for(
    tmp_path: Path, reports: dict[int, dict[str, Any]], title: str, next_step: str
) -> None:
    (finding,) = found(tmp_path, {rank: [report] for rank, report in reports.items()}, KILLED)
    assert finding.title.startswith(title)
    assert len(finding.title) < 100
    assert finding.next_steps[0].startswith(next_step)


def test_a_rank_that_ended_by_an_exception_is_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {0: [hanging(**ALL_REDUCE)]}, {0: None, 1: "OutOfMemoryError: 8 GiB"})
    assert finding.title == "Rank 1 ended: rank 0 waits for it in step 29."


@pytest.mark.parametrize(
    ("state", "title", "next_step"),
    [
        (
            "stopped",
            "Rank 1 is stopped by a signal: rank 0 waits for it in step 29.",
            "Continue it: `kill -CONT 77`",
        ),
        ("gone", "Rank 1 died in step 29: rank 0 waited for it in a collective.", "Read the end of the output of rank"),
        (
            "running",
            "Rank 1 does not respond: rank 0 waits for it in step 29.",
            "Dump its stacks: `py-spy dump",
        ),
    ],
)
def test_a_silent_rank_has_the_state_of_its_process(tmp_path: Path, state: str, title: str, next_step: str) -> None:
    beat = {"kind": "other", "peer": 1, "state": state, "pid": 77, "step": 28, "phase": "optimizer", "waited_ns": 10**9}
    (finding,) = found(tmp_path, {0: [hanging(**ALL_REDUCE), beat]}, KILLED)
    assert finding.title == title
    assert finding.why.startswith(
        "Its last heartbeat was 1.00 s earlier, in optimizer of step 28. Other ranks: rank 0 in"
    )
    assert finding.next_steps[0].startswith(next_step)


def test_a_rank_that_has_no_more_batches_is_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {0: [hanging(**ALL_REDUCE)]}, {0: None})
    assert finding.title == "Rank 1 has finished, but rank 0 waits for it in step 29."
    assert finding.next_steps[0].startswith("Give every rank the same number of batches")


def raised(error: str, time_ns: int, **fields: Any) -> dict[str, Any]:
    return {**hanging(**fields), "kind": "exception", "error": error, "time_ns": time_ns}


def test_the_exception_that_came_first_and_not_the_lost_connection_is_the_verdict(tmp_path: Path) -> None:
    lost = raised("RuntimeError: Connection closed by peer", 5, **ALL_REDUCE)
    error = raised("ValueError: empty", 9, place="train.py:14 in training_step", source="raise ValueError")
    (finding,) = found(
        tmp_path, {0: [lost], 1: [error]}, {0: "RuntimeError: Connection closed", 1: "ValueError: empty"}
    )
    assert finding.title == "Rank 1 raised ValueError in forward of step 29 at train.py:14 in training_step."
    assert "rank 0 raised RuntimeError in forward of step 29 at train.py:9 in training_step" in finding.why
    assert finding.next_steps == ("Look at train.py:14 in training_step: `raise ValueError`.",)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"step": None, "phase": None}, "Rank 1 raised ValueError outside a step at train.py:14 in setup."),
        ({"step": 30, "phase": "between_steps"}, "Rank 1 raised ValueError before step 30 at train.py:14 in setup."),
    ],
)
def test_an_exception_between_steps_has_no_phase(tmp_path: Path, place: dict[str, Any], words: str) -> None:
    error = {"kind": "exception", "error": "ValueError: empty", "place": "train.py:14 in setup", **place}
    # Its thread may report once more before the process ends.
    asked = {"kind": "asked", "step": 30, **ALL_REDUCE}
    (finding,) = found(tmp_path, {1: [error, asked]}, {0: None, 1: "ValueError: empty"})
    assert finding.title == words


def test_an_exception_of_all_ranks_is_no_hang(tmp_path: Path) -> None:
    rows = {rank: [raised("ValueError: empty", rank, **SLEEP)] for rank in (0, 1)}
    assert found(tmp_path, rows, {0: "ValueError: empty", 1: "ValueError: empty"}) == []


def collectives(*calls: str) -> list[dict[str, Any]]:
    """Give the rows of calls such as ``"all_reduce Float[3]"``; the last one waits."""
    rows: list[dict[str, Any]] = []
    for number, (operation, tensors) in enumerate(map(str.split, calls), 1):
        rows.append({"group": "0", "number": number, "state": "completed", "time_ns": number})
        rows[-1] |= {"operation": operation, "tensors": tensors}
    rows[-1]["state"] = "waiting"
    return rows


REDUCE, SEND, GRADS = "all_reduce Float[3]", "broadcast Float[2]", "all_reduce Float[161]"


@pytest.mark.parametrize(
    ("calls", "title"),
    [
        ({0: REDUCE, 1: SEND}, "Rank 1 calls broadcast Float[2] in step 29 where rank 0 calls all_reduce Float[3]."),
        ({0: SEND, 1: REDUCE}, "Rank 0 calls broadcast Float[2] in step 29 where rank 1 calls all_reduce Float[3]."),
        ({0: REDUCE, 1: "all_reduce Float[5]"}, "Rank 1 calls all_reduce Float[5] in step 29, rank 0 with Float[3]."),
        ({0: REDUCE, 1: "all_reduce Half[3]"}, "Rank 1 calls all_reduce Half[3] in step 29, rank 0 with Float[3]."),
        ({0: "all_gather Float[3]", 1: "all_gather Float[4]"}, "Step 29 does not end on rank 0"),
        ({0: REDUCE, 1: REDUCE}, "Step 29 does not end on rank 0"),
    ],
    ids=["missed", "missed by rank 0", "shape", "dtype", "sizes that may differ", "network"],
)
def test_collectives_that_differ_are_the_verdict(tmp_path: Path, calls: dict[int, str], title: str) -> None:
    run = make_run(tmp_path, FakeRun(world_size=2, endings=KILLED))
    for rank, last in calls.items():
        before = [REDUCE, SEND, GRADS, REDUCE, SEND, GRADS]
        rows = "".join(json.dumps(row) + "\n" for row in collectives(*before, last))
        (run / f"collectives.rank{rank:05d}.jsonl").write_text(rows)
        (run / f"hangs.rank{rank:05d}.jsonl").write_text(json.dumps(hanging(**ALL_REDUCE)) + "\n")
    (finding,) = hang(Facts.of(load_run(run)))
    assert finding.title.startswith(title)
    assert len(finding.title) < 100
    assert calls[1].split()[0] in finding.why


def test_a_call_that_differs_from_earlier_steps_is_compared_with_them(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, FakeRun(world_size=2, endings={0: "RuntimeError: Connection reset", 1: None}))
    calls = collectives(REDUCE, SEND, GRADS, REDUCE, SEND, GRADS, "all_reduce Float[5000]")
    write_rows(run / "collectives.rank00000.jsonl", *calls)
    beat = {"kind": "other", "peer": 1, "state": "gone", "pid": 77, "step": 29}
    rows = [raised("RuntimeError: Connection reset", 5, **ALL_REDUCE), beat]
    write_rows(run / "hangs.rank00000.jsonl", *rows)
    (finding,) = hang(Facts.of(load_run(run)))
    assert finding.title == "Rank 1 died in step 29: rank 0 waited for it in all_reduce Float[5000]."
    assert "n earlier steps rank 0 called all_reduce Float[3] there." in finding.why


def test_of_many_ranks_the_one_that_differs_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, FakeRun(world_size=4, endings=dict.fromkeys(range(4))))
    for rank in range(4):
        rows = "".join(json.dumps(row) + "\n" for row in collectives(SEND if rank == 2 else REDUCE))
        (run / f"collectives.rank{rank:05d}.jsonl").write_text(rows)
        (run / f"hangs.rank{rank:05d}.jsonl").write_text(json.dumps(hanging(**ALL_REDUCE)) + "\n")
    (finding,) = hang(Facts.of(load_run(run)))
    assert finding.title.startswith("Rank 2 calls broadcast Float[2] in step 29 where rank 0 calls all_reduce")


def test_a_run_that_finished_has_no_finding(tmp_path: Path) -> None:
    assert found(tmp_path, {0: [hanging(**SLEEP)]}, {}) == []


def test_a_step_that_ended_after_all_is_no_finding(tmp_path: Path) -> None:
    ended = [hanging(12, **SLEEP), {"kind": "end", "step": 12, "waited_ns": 70 * 10**9}]
    assert found(tmp_path, {1: ended}, KILLED) == []


def test_a_step_that_ended_with_an_exception_is_one(tmp_path: Path) -> None:
    ended = [hanging(29, **GRADIENTS), {"kind": "end", "step": 29, "waited_ns": 70 * 10**9}]
    (finding,) = found(tmp_path, {0: ended, 1: [hanging(29, **SLEEP)]}, {0: "RuntimeError: timeout", 1: None})
    assert "on rank 1" in finding.title
    assert "rank 0 in backward of step 29" in finding.why


@pytest.mark.parametrize(
    ("code", "end", "next_step"),
    [
        (-9, "signal 9 (SIGKILL)", "Use fewer workers"),
        (-7, "signal 7 (SIGBUS)", "Shared memory is full"),
        (3, "exit code 3", "Run with DataLoader(num_workers=0)"),
    ],
)
def test_a_worker_that_died_is_named_with_its_signal_or_exit_code(
    tmp_path: Path, code: int, end: str, next_step: str
) -> None:
    run = make_run(tmp_path, FakeRun(endings={0: "RuntimeError: DataLoader worker exited unexpectedly"}))
    alive = {"kind": "worker", "pid": 7, "step": 1, "private_bytes": 1 << 30, "dataset": "Images"}
    rows = [alive, {**alive, "pid": 8}, {**alive, "pid": 8, "step": 2, "exit_code": code}]
    write_rows(run / "processes.rank00000.jsonl", *rows)
    (finding,) = worker_died(Facts.of(load_run(run)))
    assert finding.title == f"A DataLoader worker of Images died: {end}."
    assert finding.severity is Severity.CRITICAL
    assert finding.why.startswith("It had 1.00 GiB of private memory.")
    assert finding.next_steps[0].startswith(next_step)
