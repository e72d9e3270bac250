from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memprof.artifacts import trace_rewriting
from lightning_memprof.artifacts.trace_rewriting import write_trace

EVENT = '{"ph": "X", "cat": "cuda_runtime", "name": "launch", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"a": 1}}'


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    file = tmp_path / "raw.json"
    file.write_text('{"traceEvents": [\n' + ",\n".join([EVENT] * 500) + "\n]}")
    return file


@pytest.fixture(params=["here", "by a process", "here, because no process can be started", "here, because it died"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way: str = request.param
    if way != "here":
        monkeypatch.setattr(trace_rewriting, "_SMALL_BYTES", 0)
    if way.endswith("process"):
        monkeypatch.setattr(trace_rewriting, "_write", lambda raw, target: pytest.fail("was done here"))
    if way.endswith("started"):
        monkeypatch.setattr(trace_rewriting, "own_program", lambda *_: ["/nowhere/python"])
    if way.endswith("died"):
        monkeypatch.setattr(
            trace_rewriting, "own_program", lambda *_: [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
        )
    return way


def test_the_file_that_stays_is_compressed_and_has_the_tabs_categories(raw: Path, tmp_path: Path, way: str) -> None:
    target = tmp_path / "a b" / "out.gz"
    target.parent.mkdir()
    write_trace(raw, target)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert len(events) == 500
    assert {(event["cat"], event["args"]["Original category"]) for event in events} == {("runtime", "cuda_runtime")}


def test_a_target_that_cannot_be_written_is_an_error(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        write_trace(raw, tmp_path / "nowhere" / "out.gz")


def test_the_process_knows_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_memprof.artifacts.trace_rewriting\n"
        "print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
