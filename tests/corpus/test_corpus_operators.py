from __future__ import annotations

from pathlib import Path

import pytest

from corpus_files import TRACES
from lightning_memprof.account.trace.operators import TableOptions, operator_table
from lightning_memprof.read.trace.events import full_events
from lightning_memprof.read.trace.text import TraceText

pytestmark = pytest.mark.corpus


@pytest.fixture(params=TRACES, ids=lambda path: path.parent.name)
def trace(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.mark.parametrize("by_shapes", [False, True])
def test_every_recorded_trace_gives_a_table(trace, by_shapes):
    text = operator_table([trace], TableOptions(group_by_input_shapes=by_shapes, sort_by="self_cpu_time_total"))
    lines = text.splitlines()
    assert lines[1].split()[:4] == ["Name", "Self", "CPU", "%"]
    assert lines[0] == lines[2] == next(line for line in lines[3:] if line.startswith("---"))
    assert lines[-1] == "Windows: 1"
    assert "\nSelf CPU time total: " in text


def test_every_recorded_trace_is_read_in_small_pieces(trace):
    reader = TraceText(trace)
    sizes = [len(batch) for batch in reader.pieces(full_events)]
    assert sum(sizes) > 20
    assert max(sizes) < 30_000
    assert reader.metadata
