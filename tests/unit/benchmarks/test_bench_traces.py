"""The benchmark of analyses: a rate that is missed is profiled."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

# The benchmarks are scripts: their directory is on the path while one of them runs.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import part
import traces

SIZE = 50 * part.MB


@pytest.mark.parametrize(
    ("seconds", "missed"), [(0.2, []), (0.3, ["decode"]), (0.6, ["decode", "ours"])], ids=["met", "one", "both"]
)
def test_what_misses_its_rate_is_named(seconds: float, missed: list[str]) -> None:
    run = traces.Run(seconds, 0, 1)
    assert traces.slow({"decode": [run, traces.Run(9, 0, 1)], "ours": [run], "hta": [run]}, SIZE) == missed
    assert traces.slow({"decode": [run], "ours": [run]}, part.MB) == []


@pytest.mark.slow
def test_a_profile_names_the_functions_that_take_longest(tmp_path: Path) -> None:
    trace = tmp_path / "worker0.1.pt.trace.json"
    traces.make(trace, part.MB)
    lines = traces.profile("decode", trace).splitlines()
    assert lines[0] == "Missed: decoding to columns, once more with a profile."
    rows = [line.split(" | ") for line in lines[4:]]
    assert len(rows) == traces.PROFILED_FUNCTIONS
    assert any(re.search("lightning_memprof/(read|account)/|msgspec", row[0]) for row in rows)
    own = [int(row[2].replace(",", "")) for row in rows]
    assert own == sorted(own, reverse=True)
    assert str(tmp_path) not in "".join(lines)
