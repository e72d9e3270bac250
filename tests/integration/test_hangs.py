"""Trainings that hang, or lose a DataLoader worker: the page says where and why, although they were killed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprof import load_run
from lightning_memprof.report.document import Document
from lightning_memprof.report.printers.values import words_text
from ranks import launch
from training import only_run

SUPPORT = Path(__file__).parents[1] / "support"


def page(directory: Path, program: str, argument: int) -> Document:
    subprocess.run(
        [sys.executable, str(SUPPORT / program), str(directory), str(argument)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return load_run(only_run(directory)).document()


def test_a_step_that_does_not_end_is_the_verdict_with_its_line(tmp_path: Path, forked: None) -> None:
    document = page(tmp_path, "hanging.py", 1)
    assert document.rule == "hang"
    assert document.verdict.startswith("Step 3 does not end: stuck in forward at hanging.py:")
    assert document.verdict.endswith("in wait.")
    stacks = (only_run(tmp_path) / "stacks.rank00000.txt").read_text()
    assert "time.sleep(0.05)" in stacks or "path.read_bytes()" in stacks or "path.exists()" in stacks
    assert "the training" in stacks


@pytest.mark.timeout(300)
def test_all_ranks_end_with_one_exit_code_where_that_is_asked_for(tmp_path: Path) -> None:
    assert launch("hanging.py", tmp_path / "run", "2", "abort", world=2) == [75, 75]
    for rank in range(2):
        message = (tmp_path / f"run/out{rank}").read_text()
        assert f"memprof: a step does not end: rank {rank} ends with exit code 75" in message
    document = load_run(only_run(tmp_path)).document()
    assert document.verdict.startswith("Step 3 does not end on rank 1: stuck in forward at hanging.py:")
    (section,) = [section for section in document.sections if section.id == "hangs"]
    assert len(section.parts[0].rows) == 2


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "faults"),
    [("ddp", "missed,shaped,exception,stopped,uneven"), ("fsdp2", "sleep,reordered,loader")],
)
def test_the_page_names_the_fault_of_one_of_two_ranks_and_nothing_in_a_healthy_training(
    strategy: str, faults: str, forked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = runpy.run_path(str(SUPPORT.parent / "programs" / "hangs.py"))
    monkeypatch.setattr(
        sys, "argv", ["hangs.py", "--strategies", strategy, "--faults", faults, "--healthy", "1", "--parallel", "2"]
    )
    assert program["main"]() == 0, capsys.readouterr().out


@pytest.mark.parametrize(("code", "end"), [(-9, "signal 9 (SIGKILL)"), (3, "exit code 3")])
def test_a_worker_that_died_is_the_verdict_with_its_signal_or_exit_code(
    tmp_path: Path, forked: None, code: int, end: str
) -> None:
    document = page(tmp_path, "dying_worker.py", code)
    assert document.rule == "worker_died"
    assert document.verdict.endswith(f"died: {end}.")
    assert "worker" in words_text(document.why) or "Connection" in words_text(document.why)


@pytest.mark.parametrize(
    ("workers", "steps", "who"),
    [(0, 20, "data wait at"), (2, 20, "data wait, worker 0 at"), (-2, 7, "validation, worker 0 at")],
)
def test_a_data_set_that_hangs_is_the_verdict_with_its_line_in_any_process(
    tmp_path: Path, forked: None, workers: int, steps: int, who: str
) -> None:
    text = (SUPPORT / "stuck_worker.py").read_text().splitlines()
    last = next(number for number, line in enumerate(text, 1) if line.endswith("# waits"))
    lines = "|".join(str(number) for number in range(last - 3, last + 1))
    document = page(tmp_path, "stuck_worker.py", workers)
    place = rf"stuck_worker\.py:({lines}) in __getitem__"
    assert re.fullmatch(rf"Step {steps} does not end: stuck in {who} {place}\.", words_text(document.verdict))
    assert re.match(rf"Look at {place}: it does not return", document.next or "")
    # The pulse has half of them or more, the report all.
    assert f"{steps} steps" in words_text(document.about)
