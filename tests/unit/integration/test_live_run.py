"""The life of a run, whatever drives its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memprof import ConfigError, load_run, record
from lightning_memprof.collectors import AllocatorHistory, Pulse
from plain_loops import QUIET, plain_epoch, seeded


def test_a_collector_that_is_not_available_here_is_refused_and_the_run_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="AllocatorHistory"),
        record(seeded(), dirpath=tmp_path, collectors=[AllocatorHistory()], output=QUIET),
    ):
        pass
    rows = [json.loads(line) for line in (tmp_path / "memprofiler/manifest.rank00000.jsonl").read_text().splitlines()]
    assert (rows[-1]["kind"], rows[-1]["status"]) == ("end", "exception")


def test_a_run_ends_once(tmp_path: Path) -> None:
    with record(seeded(), dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
        plain_epoch(recording, recording._model)
        live = recording._live
        assert live is not None
        assert live.is_here
        assert live.end(reason="enough") == "enough"
        assert not live.is_here
        assert live.end() is None
    found = load_run(tmp_path)
    assert (found.status, found.lead.exception, found.lead.steps) == ("exception", "enough", 6)


def test_a_run_that_nothing_ends_is_ended_when_the_process_exits(tmp_path: Path, run_python) -> None:
    program = (
        "import torch\n"
        "from lightning_memprof import record\n"
        "model = torch.nn.Linear(2, 1)\n"
        f"recording = record(model, dirpath={str(tmp_path / 'run')!r})\n"
        "recording.__enter__()\n"
        "for batch in recording.steps([torch.ones(3, 2)] * 4):\n"
        "    model(batch).sum().backward()\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    found = load_run(tmp_path / "run").lead
    assert (found.exception, found.steps) == ("the process exited during the run", 4)
