"""The worked examples of docs/contributing run as they stand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fake_runs import FakeRun, make_run
from lightning_memprof import MemProfilerCallback, Schedule, load_run
from lightning_memprof.judge.facts import Facts
from lightning_memprof.report.document import Document
from lightning_memprof.report.printers.html import render_document
from lightning_memprof.report.printers.json import encode
from lightning_memprof.report.printers.markdown import to_markdown
from lightning_memprof.report.printers.text import full_page, plain
from lightning_memprof.report.view import run_view
from training import Perceptron, loader, only_run, trainer

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_collector_records_a_row_per_mark(tmp_path: Path) -> None:
    collector = example("open_files").OpenFiles()
    callback = MemProfilerCallback(schedule=Schedule(wait=1, warmup=1, active=2), collectors=[collector])
    trainer(tmp_path, callback).fit(Perceptron(), loader(6))
    series = only_run(tmp_path) / "window000/rank00000.open_files.jsonl"
    rows = [json.loads(line) for line in series.read_text().splitlines()]
    assert {row["step"] for row in rows if row["recorded"]} == {2, 3}
    assert all(row["open_files"] > 0 for row in rows)


def test_the_finding_is_for_large_recordings_only(tmp_path: Path) -> None:
    facts = Facts.of(load_run(make_run(tmp_path, FakeRun(windows=((2, 3), (8, 9))))))
    rule = example("large_recording").large_recording
    assert rule(facts) == []
    (finding,) = rule(facts, notable_bytes=1_000)
    assert finding.rule == "large_recording"
    assert finding.numbers["bytes"] >= finding.numbers["collector_bytes"] > 0
    assert {evidence.window for evidence in finding.evidence} >= {0, 1}


def test_the_table_is_in_every_format(tmp_path: Path) -> None:
    view = run_view(load_run(make_run(tmp_path)))
    section = example("disk_use").disk_use_section(view)
    document = Document(title="a run", kind="run", sections=[section])
    terminal = plain(full_page(document, 100))
    for page in (terminal, to_markdown(document, is_full=True), render_document(document)):
        assert "Disk space by collector" in page
        assert "operator_trace" in page
    rows = json.dumps(encode(document))
    assert "operator_trace" in rows
