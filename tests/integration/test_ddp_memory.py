"""ModuleMemory under DDP and FSDP1: two real processes on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import trained
from recorded_rows import read_series
from training import only_run, rows_of

pytestmark = pytest.mark.slow


RECORDING = "schedule=Schedule(wait=1, warmup=1, active=2), collectors=[ModuleMemory()]"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's facts of a fit without a recording; they do not depend on the variant of DDP."""
    return trained(tmp_path_factory.mktemp("bare") / "run", "ddp")


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(f"ddp-{name}", marks=pytest.mark.extended) for name in ("static", "unused"))]
)
def test_each_rank_has_its_memory_and_the_training_is_the_same(
    tmp_path: Path, bare: list[dict[str, Any]], kind: str
) -> None:
    ranks = trained(tmp_path / "ours", kind, RECORDING)
    run = only_run(tmp_path / "ours")
    for rank in (0, 1):
        assert (ranks[rank]["losses"], ranks[rank]["weights"]) == (bare[rank]["losses"], bare[rank]["weights"])
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        rows = read_series(run / f"window000/rank{rank:05d}.module_memory.jsonl")
        assert all(sum(row["categories"].values()) == row["total_bytes"] for row in rows)
        (end,) = [row["categories"] for row in rows if row["kind"] == "end"]
        assert end["parameter"] == ranks[rank]["parameter_bytes"]
        # With a static graph DDP makes its bucket again in the third step, the tracked one.
        assert end["gradient"] == ranks[rank]["parameter_bytes"] * (2 if kind == "ddp-static" else 1)


def test_gathered_parameters_are_parameters(tmp_path: Path) -> None:
    bare, ranks = trained(tmp_path / "bare", "fsdp1"), trained(tmp_path / "ours", "fsdp1", RECORDING)
    run = only_run(tmp_path / "ours")
    shards = []
    for rank in (0, 1):
        assert (ranks[rank]["losses"], ranks[rank]["weights"]) == (bare[rank]["losses"], bare[rank]["weights"])
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        rows = read_series(run / f"window000/rank{rank:05d}.module_memory.jsonl")
        (shard,) = [row["categories"]["parameter"] for row in rows if row["kind"] == "end"]
        shards.append(shard)
        (peak,) = [row["categories"]["parameter"] for row in rows if row["kind"] == "peak"]
        assert shard < peak <= shard + ranks[rank]["parameter_bytes"] + 64
    assert 0 <= sum(shards) - ranks[0]["parameter_bytes"] < 64  # padding
