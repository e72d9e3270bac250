"""Memory under tensor parallelism, alone and with fully_shard: real processes on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranks import launch
from recorded_rows import read_series
from training import only_run, rows_of

pytestmark = pytest.mark.slow

# One rank has half of the wide layer: 8 of 16 columns. A batch has 4 rows of 8 numbers.
HALF = 4 * 8 * 4
PARAMETERS = {"head": 4 * 9, "wide": 4 * (8 * 8 + 8), "narrow": 4 * (8 * 8 + 8)}


def train(directory: Path, world: int, *options: str) -> list[dict[str, Any]]:
    """Train; give the facts that each rank writes."""
    codes = launch("parallel_ranks.py", directory, *options, world=world)
    assert codes == [0] * world, "".join((directory / f"out{rank}").read_text()[-3000:] for rank in range(world))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_has_the_memory_of_its_share_and_the_training_is_the_same(tmp_path: Path, world: int) -> None:
    options = ("sharded",) if world == 4 else ()
    bare, ranks = train(tmp_path / "bare", world, "bare", *options), train(tmp_path / "ours", world, *options)
    assert ranks == bare
    run = only_run(tmp_path / "ours")
    collector = "fsdp_memory" if world == 4 else "module_memory"
    for rank in range(world):
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        rows = read_series(run / f"window000/rank{rank:05d}.{collector}.jsonl")
        assert all(sum(row["categories"].values()) == row["total_bytes"] for row in rows)
        (end,) = [row["categories"] for row in rows if row["kind"] == "end"]
        # A shard of each pair has half of the network, the head is everywhere.
        share = (PARAMETERS["wide"] + PARAMETERS["narrow"]) * 2 // world + PARAMETERS["head"]
        assert ranks[rank]["parameter_bytes"] == end["parameter"] == end["gradient"] == end["optimizer_state"] == share
        saved = [
            {path: values[0] for path, values in row["modules"].items() if path != "net.0"}
            for row in read_series(run / f"window000/rank{rank:05d}.saved_tensors.jsonl")
            if row["point"] == "before_backward" and row["recorded"]
        ]
        # GELU and the last layer save half of the columns, the head its input, and the loss what it squares.
        assert saved == [{"net": 0, "net.1": HALF, "net.2": HALF, "head": 4 * 8 * 4, "": 4 * 4}] * 2
