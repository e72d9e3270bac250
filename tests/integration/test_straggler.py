"""The demo's model on two real ranks, one of them late with its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memprof.account.ranks.summary import read_summary
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.cli.main import main
from ranks import launch
from training import only_run, rows_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("straggler") / "run"
    printed = [directory / f"out{rank}" for rank in range(2)]
    ended = launch("straggling_ranks.py", directory, "slow=1", "steps=30", world=2)
    assert ended == [0, 0], "".join(map(Path.read_text, printed))
    return only_run(directory)


def test_show_names_the_slow_rank_as_the_straggler_and_its_data_fetch_as_the_cause(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    # On a busy machine the processes that take the cores come first.
    ranked = [finding["rule"] for finding in document["findings"] if finding["rule"] != "core_wait"]
    assert ranked[0] == "straggler"
    straggler = document["across_ranks"]["straggler"]
    assert (straggler["rank"], straggler["cause"]) == (1, "data_wait")
    assert straggler["own_ns"] >= 50_000_000
    assert straggler["own_ns"] > straggler["others_ns"]
    # The other rank waits for the data of this one, once a step.
    assert straggler["caused_ns"] > 30_000_000
    waiting = document["across_ranks"]["waiting"]
    assert waiting["collectives"] >= 3
    assert max(waiting["last"], key=waiting["last"].get) == "1"


def test_each_rank_leaves_a_summary_of_some_kilobytes_for_each_window(run: Path) -> None:
    for rank in (0, 1):
        path = run / summary_path(0, rank)
        assert path.stat().st_size < 10_000
        summary = read_summary(path)
        assert (summary.rank, summary.world_size, summary.window, summary.steps) == (rank, 2, 0, [*range(3, 11)])
        assert summary.recorded is not None
        assert summary.usual is not None
        assert len(summary.steps) == 8
        assert sum(summary.recorded.phases_ns.values()) == pytest.approx(summary.recorded.mean_ns, rel=0.01)
        assert summary.memory["peak_rss_bytes"] > 0
        assert summary.arrivals.count >= 3
        assert {kind[0] for kind in summary.arrivals.kinds} >= {"all_reduce"}
        listed = [row["path"] for row in rows_of(run, "artifact", rank)]
        assert f"{run.name}/{summary_path(0, rank)}" in listed
        assert not rows_of(run, "error", rank)


def test_the_gradients_all_reduce_is_in_both_traces_under_the_same_name(run: Path) -> None:
    first, second = (read_summary(run / summary_path(0, rank)).arrivals for rank in (0, 1))
    assert (first.kinds, first.kind, first.sequence) == (second.kinds, second.kind, second.sequence)
    spans = [
        [(each.base_ns + at, each.base_ns + at + ns) for at, ns in zip(each.start_ns, each.duration_ns, strict=True)]
        for each in (first, second)
    ]
    # One clock: an all-reduce ends on no rank before it has begun on the other.
    assert all(begun <= other_end and other <= end for (begun, end), (other, other_end) in zip(*spans, strict=True))


@pytest.mark.parametrize("slow", [pytest.param("1", id="straggler"), pytest.param("-1", id="healthy")])
@pytest.mark.extended
def test_who_waits_for_a_slow_forward_in_self_log_waits_for_that_rank_and_not_for_logging(
    slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    assert launch("straggling_ranks.py", directory, f"slow={slow}", "log=1", "steps=40", world=2) == [0, 0]
    assert main(["show", str(only_run(directory)), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {finding["rule"]: finding for finding in document["findings"]}
    # Its own work, on a busy machine too.
    assert found["logging_bound"]["recovers"]["max"] < 25_000_000 if "logging_bound" in found else True
    if slow == "-1":
        assert "straggler" not in found or found["straggler"]["severity"] == "info"
        return
    # Its rank of severity is that of its waits for a core, which a busy machine makes longer.
    assert document["verdict"]["rule"] != "logging_bound"
    straggler = document["across_ranks"]["straggler"]
    assert (straggler["rank"], straggler["cause"]) == (1, "compute")
    # The other rank waits for much of the sleep, and regains that.
    assert straggler["caused_ns"] > 15_000_000
    assert found["straggler"]["recovers"]["max"] > 15_000_000
