"""The rank that hangs, from what each rank reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof import load_run
from lightning_memprof.analysis.findings import Facts, Finding, Severity
from lightning_memprof.analysis.findings.profiler import hang, worker_died

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
        (run / f"hangs.rank{rank:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return hang(Facts.of(load_run(run)))


@pytest.mark.parametrize(
    ("reports", "sentence", "next_step"),
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
            "Let a stuck worker",
        ),
        (
            {0: hanging(**GRADIENTS)},
            "Rank 1 is stuck or gone: rank 0 waits in backward of step 29.",
            "Look at the log of rank 1",
        ),
        ({0: hanging(**SLEEP)}, "Step 29 does not end on rank 0", "Look at"),
    ],
    ids=["sleep", "missed collective", "stuck loader", "silent rank", "sleep beside a silent rank"],
)
def test_the_rank_is_named_that_the_others_wait_for(
    tmp_path: Path, reports: dict[int, dict[str, Any]], sentence: str, next_step: str
) -> None:
    (finding,) = found(tmp_path, {rank: [report] for rank, report in reports.items()}, KILLED)
    assert finding.sentence.startswith(sentence)
    assert len(finding.sentence) < 100
    assert finding.next_steps[0].startswith(next_step)


def test_a_rank_that_raised_is_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {0: [hanging(**ALL_REDUCE)]}, {0: None, 1: "OutOfMemoryError: 8 GiB"})
    assert finding.sentence == "Rank 1 raised OutOfMemoryError: rank 0 waits in forward of step 29."


def test_a_run_that_finished_has_no_finding(tmp_path: Path) -> None:
    assert found(tmp_path, {0: [hanging(**SLEEP)]}, {}) == []


def test_a_step_that_ended_after_all_is_no_finding(tmp_path: Path) -> None:
    ended = [hanging(12, **SLEEP), {"kind": "end", "step": 12, "waited_ns": 70 * 10**9}]
    assert found(tmp_path, {1: ended}, KILLED) == []


def test_a_step_that_ended_with_an_exception_is_one(tmp_path: Path) -> None:
    ended = [hanging(29, **GRADIENTS), {"kind": "end", "step": 29, "waited_ns": 70 * 10**9}]
    (finding,) = found(tmp_path, {0: ended, 1: [hanging(29, **SLEEP)]}, {0: "RuntimeError: timeout", 1: None})
    assert "on rank 1" in finding.sentence
    assert "rank 0 in backward of step 29" in finding.why


@pytest.mark.parametrize(
    ("code", "end", "next_step"),
    [
        (-9, "signal 9 (SIGKILL)", "The kernel kills"),
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
    (run / "processes.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = worker_died(Facts.of(load_run(run)))
    assert finding.sentence == f"A DataLoader worker of Images died: {end}."
    assert finding.severity is Severity.CRITICAL
    assert finding.why.startswith("It had 1.00 GiB of private memory.")
    assert finding.next_steps[0].startswith(next_step)
