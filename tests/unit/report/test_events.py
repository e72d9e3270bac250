from __future__ import annotations

import json
from pathlib import Path

from fake_runs import FakeRun, make_run
from lightning_memprof import load_run
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.events import events_document, events_lines
from lightning_memprof.report.machine import to_json
from lightning_memprof.report.memory_tables import table
from lightning_memprof.report.view import run_view


def page(directory: Path, width: int = 80) -> list[str]:
    lines = events_lines(run_view(load_run(directory)), width)
    return ["".join(text for text, _ in line) for line in lines]


def test_the_table_has_the_parts_that_took_time_callbacks_by_name_and_the_longest_events(tmp_path: Path) -> None:
    lines = page(make_run(tmp_path, FakeRun(windows=((2, 3),))))
    assert lines[0] == "events    mean of 2 recorded steps"
    names = [line.split("  ")[1].strip() for line in lines[1:9] if line.startswith("  ")]
    assert names[0] == "part"
    assert [name for name in names if name in {"data wait", "forward", "backward", "optimizer", "callbacks"}] == [
        "data wait", "forward", "backward", "optimizer", "callbacks",
    ]  # fmt: skip
    assert any(line.startswith("    TQDMProgressBar ") for line in lines)
    longest = next(index for index, line in enumerate(lines) if "longest events" in line)
    assert lines[longest + 1].split()[0] == "SingleDeviceStrategy.backward"
    assert not any("validation" in line or "checkpoint" in line for line in lines)


def test_no_line_is_wider_than_the_page(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    for width in (40, 57, 80):
        assert max(map(len, page(directory, width))) <= width


def test_a_run_without_hook_timings_has_no_section_and_null_in_the_document(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=()))
    assert page(directory) == []
    document = events_document(run_view(load_run(directory)))
    assert (document["mean_ns"], document["steps"], document["actions"]) == (None, [], [])
    assert set(document["parts_ns"].values()) == {None}


def test_the_document_has_every_step_and_the_order_of_its_events(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=(tuple(range(2, 25)),)))
    run = load_run(directory)
    document = json.loads(json.dumps(to_json(run_view(run))))["events"]
    assert [step["step"] for step in document["steps"]] == list(range(2, 25))
    first = document["steps"][0]
    assert sum(first["parts_ns"].values()) == first["duration_ns"] == run.lead.pulse[2]["duration_ns"]
    assert [event["action"].rpartition(".")[2] for event in first["events"]] == [
        "train_dataloader_next", "run_training_batch", "optimizer_step", "training_step", "backward",
        "on_train_batch_end",
    ]  # fmt: skip
    assert document["steps"][20]["events"] is None
    pulse = run.lead.pulse
    for phase in PHASES:
        assert document["parts_ns"][phase] == round(sum(pulse[step][f"{phase}_ns"] or 0 for step in range(2, 25)) / 23)
    assert list(document["callbacks_ns"]) == ["TQDMProgressBar"]


def test_a_table_without_rows_is_its_head() -> None:
    assert table(("longest events", "a step"), [], 80) == [(("  longest events  a step", "bold"),)]
