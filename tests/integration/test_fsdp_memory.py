"""FSDPMemory under ModelParallelStrategy: one process, and two real ones on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks import launch, trained
from recorded_rows import read_series
from training import only_run, rows_of


def recording(options: str = "", root: str = "net") -> str:
    """Return arguments of a callback that records step 2 with FSDPMemory."""
    collector = f"FSDPMemory(depth=3, units='B', root_module={root!r}{options})"
    return f"schedule=Schedule(wait=1, warmup=1, active=2), collectors=[{collector}]"


MODULES = "schedule=Schedule(wait=1, warmup=1, active=2), collectors=[ModuleMemory()]"
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the ranks say of a fit without us."""
    return trained(tmp_path_factory.mktemp("bare") / "run", "fsdp2")


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("fsdp2-group", marks=pytest.mark.extended)])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ranks]:
    """A run directory and what its ranks say; two modules are sharded each for itself, or as one group."""
    directory = tmp_path_factory.mktemp("ours") / "run"
    ranks = trained(directory, request.param, recording())
    return only_run(directory), ranks


def figures(run: Path, rank: int, kind: str, collector: str = "fsdp_memory") -> dict[str, int]:
    rows = read_series(run / f"window000/rank{rank:05d}.{collector}.jsonl")
    (row,) = [row for row in rows if row["kind"] == kind]
    assert sum(row["categories"].values()) == row["total_bytes"]
    return row["categories"]


def test_the_ranks_sharded_parameters_add_up_to_the_model(ours: tuple[Path, Ranks]) -> None:
    run, said = ours
    whole, count = said[0]["parameter_bytes"], said[0]["parameters"]
    for kind in ("peak", "end"):
        ranks = [figures(run, rank, kind) for rank in (0, 1)]
        assert sum(found["parameter"] for found in ranks) == whole
        assert [found["optimizer_state"] for found in ranks] == [2 * found["parameter"] + 4 * count for found in ranks]


def test_training_is_the_same_to_the_last_bit_and_fsdps_hooks_are_back(ours: tuple[Path, Ranks], bare: Ranks) -> None:
    run, said = ours
    for rank in (0, 1):
        assert said[rank]["losses"] == bare[rank]["losses"]
        assert said[rank]["weights"] == bare[rank]["weights"]
        assert said[rank]["hooks_are_back"]
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []


def test_each_rank_has_its_log_with_the_figures_of_the_series(ours: tuple[Path, Ranks]) -> None:
    run, _ = ours
    for rank in (0, 1):
        text = (run / f"fsdp_mem_rank_{rank}_training_step_3.log").read_text()
        assert "Module:  FSDPSequential" in text
        assert "After Post-Backward" in text
        peak = figures(run, rank, "peak")
        assert f"Sharded Param: {peak['parameter']} B" in text
        assert f"Total: {sum(peak.values())} B" in text


def test_forward_and_backward_are_in_it_and_all_that_is_sharded_is_told_apart(ours: tuple[Path, Ranks]) -> None:
    run, _ = ours
    rows = [row for row in read_series(run / "window000/rank00000.fsdp_memory.jsonl") if row["kind"] == "module"]
    states = {(row["module"], row["state"]): row["categories"] for row in rows}
    assert {"net", "net.0"} <= {module for module, _ in states} <= {"net", "net.0", "net.2"}
    # Weight and bias of the first layer at least, whole, on top of what the root holds in its forward.
    first = 4 * (8 * 16 + 16)
    before, after = states["net.0", "before_pre_forward"], states["net.0", "after_pre_forward"]
    assert after["unsharded_parameter"] - before["unsharded_parameter"] >= first
    assert states["net.0", "before_post_backward"]["unsharded_gradient"] >= first
    # torch 2.15 frees the buffer of the previous all-gather: there is none at the peak.
    assert max(categories["all_gather"] for categories in states.values()) > 0
    assert figures(run, 0, "end")["gradient"] >= figures(run, 0, "end")["parameter"]
    assert figures(run, 0, "end")["unsharded_parameter"] == 0


def test_module_memory_counts_this_ranks_shards(tmp_path: Path) -> None:
    (facts, _) = trained(tmp_path / "ours", "fsdp2", MODULES)
    run = only_run(tmp_path / "ours")
    assert sum(figures(run, rank, "end", "module_memory")["parameter"] for rank in (0, 1)) == facts["parameter_bytes"]


@pytest.mark.parametrize(
    ("collector", "how"),
    [("fsdp_memory", recording()), pytest.param("module_memory", MODULES, marks=pytest.mark.extended)],
)
def test_a_checkpointed_model_is_recorded_and_trains_the_same(
    tmp_path: Path, bare: Ranks, collector: str, how: str
) -> None:
    said = trained(tmp_path / "ours", "fsdp2-checkpointed", how)
    run = only_run(tmp_path / "ours")
    for rank in (0, 1):
        # What is computed again has the same bits.
        assert (said[rank]["losses"], said[rank]["weights"]) == (bare[rank]["losses"], bare[rank]["weights"])
        assert said[rank]["hooks_are_back"]
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
    ranks = [figures(run, rank, "peak", collector) for rank in (0, 1)]
    assert sum(found["parameter"] for found in ranks) == said[0]["parameter_bytes"]
    assert all(found["activation"] > 0 for found in ranks)


def test_one_process_holds_the_whole_and_writes_tables_if_asked(tmp_path: Path) -> None:
    (facts,) = trained(tmp_path / "ours", "fsdp2", recording(", tabulate=True"), world=1)
    run = only_run(tmp_path / "ours")
    found = figures(run, 0, "end")
    assert found["parameter"] == found["gradient"] == facts["parameter_bytes"]
    text = (run / "fsdp_mem_rank_0_training_step_3.log").read_text()
    assert text.splitlines()[1].split()[:3] == ["Device", "Sharded", "Param"]
    assert "After Pre-Backward # 1" in text


def test_a_root_that_is_not_there_is_the_users_error_before_the_first_step(tmp_path: Path) -> None:
    assert launch("fitted_ranks.py", tmp_path / "ours", "fsdp2", recording(root="nope"), world=1) == [1]
    said = (tmp_path / "ours/out0").read_text()
    assert "ConfigError: FSDPMemory(root_module='nope'): the model has no such module" in said
    assert "sharded modules: 'net', 'net.0'" in said
    (end,) = rows_of(only_run(tmp_path / "ours"), "end")
    assert (end["status"], end["steps"]) == ("exception", 0)
