"""Memory under tensor parallelism, alone and with fully_shard: real processes on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks import trained
from recorded_rows import read_series
from training import only_run, rows_of

pytestmark = pytest.mark.slow

# One rank has half of the wide layer: 8 of 16 columns. A batch has 4 rows of 8 numbers.
HALF = 4 * 8 * 4
PARAMETERS = {"head": 4 * 9, "wide": 4 * (8 * 8 + 8), "narrow": 4 * (8 * 8 + 8)}


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_has_the_memory_of_its_share_and_the_training_is_the_same(tmp_path: Path, world: int) -> None:
    tracker = "FSDPMemory(root_module='net')" if world == 4 else "ModuleMemory()"
    recording = f"schedule=Schedule(wait=1, warmup=1, active=2), collectors=[SavedTensors(), {tracker}]"
    bare = trained(tmp_path / "bare", "tensor", world=world)
    ranks = trained(tmp_path / "ours", "tensor", recording, world=world)
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
        assert ranks[rank]["local_bytes"] == end["parameter"] == end["gradient"] == end["optimizer_state"] == share
        saved = [
            {path: values[0] for path, values in row["modules"].items() if path != "net.0"}
            for row in read_series(run / f"window000/rank{rank:05d}.saved_tensors.jsonl")
            if row["point"] == "before_backward" and row["recorded"]
        ]
        # GELU and the last layer save half of the columns, the head its input, and the loss what it squares.
        assert saved == [{"net": 0, "net.1": HALF, "net.2": HALF, "head": 4 * 8 * 4, "": 4 * 4}] * 2
