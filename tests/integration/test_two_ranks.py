"""Two real processes under DDP on gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightning_memprof import load_run
from lightning_memprof.artifacts.series import read_pulse
from training import manifest, only_run, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def two_ranks(tmp_path: Path, environment: dict[str, str]) -> Callable[..., list[int]]:
    """Run both ranks below a directory; return their exit codes. A rank whose peer died is ended."""

    def run(directory: Path, *options: str) -> list[int]:
        directory.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = environment | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT),
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SUPPORT / "two_ranks.py"), str(directory), *options],
                env=common | {"LOCAL_RANK": str(rank)},
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=(tmp_path / f"out{rank}").open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 120
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        return [rank.wait() for rank in ranks]

    return run


def test_both_ranks_write_into_one_directory_without_a_collective_after_setup(
    tmp_path: Path, two_ranks: Callable[..., list[int]]
) -> None:
    assert two_ranks(tmp_path / "bare", "bare") == [0, 0]
    assert two_ranks(tmp_path / "ours") == [0, 0], (tmp_path / "out0").read_text() + (tmp_path / "out1").read_text()
    for rank in (0, 1):
        bare = json.loads((tmp_path / f"bare/rank{rank}.json").read_text())
        ours = json.loads((tmp_path / f"ours/rank{rank}.json").read_text())
        added = {name: ours.get(name, 0) - bare.get(name, 0) for name in bare | ours}
        assert {name: count for name, count in added.items() if name.startswith("training.") and count} == {}
        assert added["setup.broadcast_object_list"] == 2
    run = only_run(tmp_path / "ours")
    for rank in (0, 1):
        facts = rows_of(run, "run", rank)[0]
        assert (facts["rank"], facts["world_size"], facts["strategy"]) == (rank, 2, "DDPStrategy")
        assert len(read_pulse(run / f"pulse.rank{rank:05d}.csv")) == 8
        assert (run / f"window000/rank{rank:05d}.host.jsonl").is_file()
        assert (
            len(
                list(
                    run.parent.glob(f"fit-fts_extended_pytorch_profiler-{rank}[[]Strategy]DDPStrategy.training_step.*")
                )
            )
            == 1
        )
        assert (run.parent / f"fit-fts_extended_pytorch_profiler-{rank}.txt").is_file()
    assert "verdict" in (tmp_path / "out0").read_text()
    assert "verdict" not in (tmp_path / "out1").read_text()
    assert [rank.rank for rank in load_run(run).ranks] == [0, 1]


def test_a_rank_that_is_killed_in_a_window_leaves_the_others_data_readable(
    tmp_path: Path, two_ranks: Callable[..., list[int]]
) -> None:
    codes = two_ranks(tmp_path / "run", "die=3")
    assert codes[1] == -9
    run = only_run(tmp_path / "run")
    assert manifest(run, 0)[-1]["status"] == "exception"
    (closed,) = [row for row in rows_of(run, "window", 0) if row["event"] == "close"]
    assert closed["steps"][0] == 2
    assert (run / "window000/rank00000.host.jsonl").is_file()
    assert len(list(run.parent.glob("fit-fts_extended_pytorch_profiler-0[[]Strategy]*.pt.trace.json.gz"))) == 1
    assert manifest(run, 1)[-1]["kind"] == "window"
    ranks = load_run(run).ranks
    assert [rank.rank for rank in ranks] == [0, 1]
