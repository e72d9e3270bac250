"""ModuleMemory under DDP and FSDP1: two real processes on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranks import launch
from recorded_rows import read_series
from training import only_run, rows_of

pytestmark = pytest.mark.slow


def train(directory: Path, *options: str) -> list[dict[str, Any]]:
    """Train two ranks; give the facts that each writes."""
    codes = launch("replicated_ranks.py", directory, *options, world=2)
    assert codes == [0, 0], "".join((directory / f"out{rank}").read_text()[-3000:] for rank in (0, 1))
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's facts of a fit without a recording; they do not depend on the variant of DDP."""
    return train(tmp_path_factory.mktemp("bare") / "run", "bare")


@pytest.mark.parametrize("variant", ["plain", "static", "unused"])
def test_each_rank_has_its_memory_by_module_and_the_training_is_the_same(
    tmp_path: Path, bare: list[dict[str, Any]], variant: str
) -> None:
    ranks = train(tmp_path / "ours", variant)
    run = only_run(tmp_path / "ours")
    for rank in (0, 1):
        assert (ranks[rank]["losses"], ranks[rank]["weights"]) == (bare[rank]["losses"], bare[rank]["weights"])
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        rows = read_series(run / f"window000/rank{rank:05d}.module_memory.jsonl")
        assert all(sum(row["categories"].values()) == row["total_bytes"] for row in rows)
        (end,) = [row["categories"] for row in rows if row["kind"] == "end"]
        assert end["parameter"] == ranks[rank]["parameter_bytes"]
        # With a static graph DDP makes its bucket again in the third step, the tracked one.
        assert end["gradient"] == ranks[rank]["parameter_bytes"] * (2 if variant == "static" else 1)
        calls = {(row["module"], row["state"]): row["call"] for row in rows if row["kind"] == "module"}
        # The wrapper calls the LightningModule, whose training_step runs inside.
        assert calls["", "pre_forward"] == 1
        assert {module for module, _ in calls} > {"", "net"}
        found = {(row["module"], row["state"]): row["categories"] for row in rows if row["kind"] == "module"}
        # Saved by ReLU its result, by dropout its mask (four bytes each), by the last layer its input; and the result.
        before, after = (found["net", f"{moment}_forward"]["activation"] for moment in ("pre", "post"))
        assert (before, after) == (0, 3 * 4 * 16 * 4 + 4 * 4)


def test_gathered_parameters_are_parameters_and_modules_have_the_names_of_the_program(tmp_path: Path) -> None:
    bare, ranks = train(tmp_path / "bare", "fsdp1", "bare"), train(tmp_path / "ours", "fsdp1")
    run = only_run(tmp_path / "ours")
    shards = []
    for rank in (0, 1):
        assert (ranks[rank]["losses"], ranks[rank]["weights"]) == (bare[rank]["losses"], bare[rank]["weights"])
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        rows = read_series(run / f"window000/rank{rank:05d}.module_memory.jsonl")
        (shard,) = [row["categories"]["parameter"] for row in rows if row["kind"] == "end"]
        shards.append(shard)
        modules = {(row["module"], row["state"]): row["categories"] for row in rows if row["kind"] == "module"}
        assert {module for module, _ in modules} == {"", "net", "net.0", "net.1", "net.2", "net.3"}
        # All parameters are in `net`: each of its layers runs with the shard and the whole.
        whole = ranks[rank]["parameter_bytes"]
        assert modules["net", "pre_forward"]["parameter"] == shard
        assert 0 <= modules["net.0", "pre_forward"]["parameter"] - shard - whole < 64
    assert 0 <= sum(shards) - ranks[0]["parameter_bytes"] < 64  # padding
