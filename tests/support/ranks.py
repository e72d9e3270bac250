"""Real processes that are the ranks of one training."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from typing import Any

from ports import free_port
from warm_python import Popen, shared, without_ours


def launch(script: str, directory: Path, *options: str, world: int) -> list[int]:
    """Run ``script`` of this directory once for each rank; give the exit codes.

    Each rank is given ``directory``, which is made, and the options; it writes what it prints to ``out{R}`` in it. A
    rank that is not done after two minutes, its peer may have died, is ended.
    """
    directory.mkdir(parents=True)
    support = Path(__file__).parent
    port = str(free_port())
    common = without_ours() | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support),
    }  # fmt: skip
    with shared(common), ExitStack() as opened:
        ranks = []
        for rank in range(world):
            out = opened.enter_context((directory / f"out{rank}").open("ab"))
            ranks.append(
                Popen(
                    [sys.executable, str(support / script), str(directory), *options], cwd=directory,
                    env=common | {"LOCAL_RANK": str(rank)}, stdin=DEVNULL, stdout=out, stderr=out,
                )
            )  # fmt: skip
        deadline = time.monotonic() + 120
        return [_code(rank, deadline - time.monotonic()) for rank in ranks]


def trained(directory: Path, kind: str, recording: str = "bare", *options: str, world: int = 2) -> list[dict[str, Any]]:
    """Train ranks of ``fitted_ranks.py``, which has the arguments; return the facts that each writes."""
    codes = launch("fitted_ranks.py", directory, kind, recording, *options, world=world)
    assert codes == [0] * world, "".join((directory / f"out{rank}").read_text()[-3000:] for rank in range(world))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(world)]


def _code(rank: Popen, seconds: float) -> int:
    try:
        return int(rank.wait(max(0.1, seconds)))
    except TimeoutExpired:
        rank.kill()
        return int(rank.wait())
