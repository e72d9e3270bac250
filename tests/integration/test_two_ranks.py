"""Two real processes under DDP on gloo."""

from __future__ import annotations

from pathlib import Path

from lightning_memprof import load_run
from lightning_memprof.account.trace.operators import ensure_operator_tables
from ranks import launch, trained
from recorded_rows import read_pulse
from training import manifest, only_run, rows_of

RECORDING = "output=OutputOptions(on_error='raise')"


def test_both_ranks_write_into_one_directory_without_a_collective(tmp_path: Path) -> None:
    pairs = zip(
        trained(tmp_path / "bare", "ddp", "bare", "count=yes"),
        trained(tmp_path / "ours", "ddp", RECORDING, "profiler=yes", "count=yes"),
        strict=True,
    )
    for bare, ours in ((without["calls"], recorded["calls"]) for without, recorded in pairs):
        added = {name: ours.get(name, 0) - bare.get(name, 0) for name in bare | ours}
        assert {name: count for name, count in added.items() if count > 0} == {}
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
    assert ["verdict" in (tmp_path / f"ours/out{rank}").read_text() for rank in (0, 1)] == [True, False]
    recorded = ensure_operator_tables(load_run(run))
    assert sorted(table.file.name for table in recorded.files("table")) == [
        f"fit-fts_extended_pytorch_profiler-{rank}.txt" for rank in (0, 1)
    ]
    ranks = recorded.ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    for read in ranks:
        waits = [row for row in read.actions if row.action == "[Strategy]DDPStrategy.broadcast_sigterm"]
        # In front of each batch: of 8 steps the first is not counted, and no batch follows the last.
        assert sum(row.count or 0 for row in waits) == 6


def test_a_rank_that_is_killed_in_a_window_leaves_the_others_data_readable(tmp_path: Path) -> None:
    codes = launch("fitted_ranks.py", tmp_path / "run", "ddp", RECORDING, "profiler=yes", "die=3", world=2)
    assert codes[1] == -9
    run = only_run(tmp_path / "run")
    assert manifest(run, 0)[-1]["status"] == "exception"
    (closed,) = [row for row in rows_of(run, "window", 0) if row["event"] == "close"]
    assert closed["steps"][0] == 2
    assert (run / "window000/rank00000.host.jsonl").is_file()
    assert len(list(run.parent.glob("fit-fts_extended_pytorch_profiler-0[[]Strategy]*.pt.trace.json.gz"))) == 1
    assert [row["event"] for row in rows_of(run, "window", 1)] == ["open"]
    assert rows_of(run, "end", 1) == []
    ranks = load_run(run).ranks
    assert [rank.rank for rank in ranks] == [0, 1]
