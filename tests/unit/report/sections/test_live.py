"""The section of a run that has not ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.live import GONE_NS, SILENT_NS, live_run
from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers.text import plain, sections_page
from lightning_memprof.report.sections import document_of
from pages import table_of, words

ENDLESS = dict.fromkeys(range(3))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the present, which a test changes."""
    time = [0]
    monkeypatch.setattr("lightning_memprof.report.live.time.time_ns", lambda: time[0])
    return time


def last_start_ns(directory: Path) -> int:
    """Return when the last step began, which takes less than a second."""
    return int((directory / "pulse.rank00000.csv").read_text().splitlines()[-1].split(",")[4])


def section(directory: Path) -> str:
    """Return the section on one line, empty where there is none."""
    with opened([str(directory)]) as view:
        return words(plain(sections_page(document_of(view).only(["now"]), 80)))


def test_a_run_is_live_from_its_beginning_until_it_is_long_silent(tmp_path: Path, now: list[int]) -> None:
    training = {"num_batches": 60, "max_epochs": 1, "max_steps": -1}
    directory = make_run(tmp_path, FakeRun(endings=ENDLESS, training=training))
    now[0] = last_start_ns(directory) + 3 * 10**9
    page = section(directory)
    assert page.startswith("Now ")
    assert "steps 30 of 60 (50%) · epoch 0 · about " in page
    assert " now last step 3 s ago " in page
    now[0] += GONE_NS
    assert section(directory) == ""
    assert live_run(load_run(make_run(tmp_path / "ended", FakeRun()))) is None


def test_a_run_before_its_first_step_is_live_too(tmp_path: Path, now: list[int]) -> None:
    directory = make_run(tmp_path, FakeRun(steps=0, windows=(), endings=ENDLESS))
    now[0] = json.loads((directory / "manifest.rank00000.jsonl").read_text().splitlines()[0])["time_ns"]
    assert "now before its first step" in section(directory)


def test_several_ranks_are_a_table(tmp_path: Path, now: list[int]) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=3, endings={**ENDLESS, 1: "ValueError"}))
    now[0] = last_start_ns(directory)
    with opened([str(directory)]) as view:
        rows = table_of(view, "live-ranks")
    assert [(row["rank"], row["status"], row["steps"]) for row in rows] == [
        ("0", "running", "30"), ("1", "ended", "30"), ("2", "running", "30"),
    ]  # fmt: skip


def test_a_run_that_stands_still_has_its_place_and_its_hang(tmp_path: Path, now: list[int]) -> None:
    directory = make_run(tmp_path, FakeRun(endings=ENDLESS))
    now[0] = last_start_ns(directory) + 2 * SILENT_NS
    assert "it waits, or was killed" in section(directory)
    beat = {"kind": "heartbeat", "step": 30, "phase": "data_wait", "waited_ns": 55 * 10**9}
    (directory / "heartbeat.rank00000.jsonl").write_text(json.dumps({**beat, "time_ns": now[0] - 5 * 10**9}) + "\n")
    assert "in data wait of step 30 for 60 s" in section(directory)
    (directory / "heartbeat.rank00000.jsonl").write_text(json.dumps({**beat, "time_ns": 10**9}) + "\n")
    assert "it is stopped, or was killed" in section(directory)
