"""A rank is killed at random moments; nothing that was closed is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof import load_run
from lightning_memprof.account.ranks.summary import read_summary
from lightning_memprof.read.trace.communication import collectives
from lightning_memprof.report.view import run_view
from recorded_rows import read_events, read_series
from training import only_run

SUPPORT = Path(__file__).parents[1] / "support"
MOMENTS = 20


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    seed = int(os.environ.get("MEMPROF_SEED", random.SystemRandom().randrange(1 << 32)))
    # Pytest shows it where a test fails: MEMPROF_SEED=... repeats the moments.
    print(f"seed {seed}")
    directory = tmp_path_factory.mktemp("killed") / "runs"
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "mortal_ranks.py"), str(directory), str(seed), str(MOMENTS)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"directory"')]


def test_killing_either_rank_at_any_moment_leaves_every_closed_window_readable(killed: list[dict[str, Any]]) -> None:
    assert len(killed) == MOMENTS
    assert {result["victim"] for result in killed} == {0, 1}
    windows = 0
    for result in killed:
        assert result["killed"] == -9, result
        assert result["other"] is not None, f"the other rank hung: {result}"
        run = load_run(only_run(Path(result["directory"])))
        expected = ("truncated", "died at once", "is partial", "uncompressed trace")
        assert not [problem for problem in run.problems if not any(word in problem.message for word in expected)], (
            result
        )
        ended = {rank.rank: sum(window.closed for window in rank.windows) for rank in run.ranks}
        assert ended.get(result["victim"], 0) >= result["closed"], result
        for rank in run.ranks:
            for window in rank.windows:
                if window.closed:
                    windows += 1
                    assert "hooks" in window.series, (result, window)
                for path in window.series.values():
                    assert read_series(path), (result, path)
        for artifact in run.artifacts:
            assert artifact.state == "present", (result, artifact)
            if artifact.type == "trace":
                assert sum(1 for _ in read_events(artifact.file)) > 10
                collectives(artifact.file)
            if artifact.collector == "rank_summary":
                assert read_summary(artifact.file).rank == artifact.rank
        run_view(run)
    # The moments are spread: a quarter of the kills may come before the first window, the others come after it.
    assert windows > MOMENTS
