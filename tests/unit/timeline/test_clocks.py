from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from kineto import write_trace
from lightning_memprof import load_run
from lightning_memprof.account.ranks.summary import RankSummary, encode_summary, summarise
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.timeline.clocks import Clocks, align_clocks, align_traces

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def test_the_summaries_of_a_run_on_two_hosts_tell_the_difference(tmp_path: Path):
    run = load_run(make_run(tmp_path, FakeRun(world_size=2)))
    other = replace(run.ranks[1], facts=msgspec.structs.replace(run.ranks[1].facts, host="other"))
    run = replace(run, ranks=(run.ranks[0], other))
    for artifact in run.artifacts:
        if artifact.type == "trace":
            skew_us = 2_000_000.5 * artifact.rank
            events: list[dict[str, Any]] = [
                {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 1, "args": {},
                 "ts": 1000.0 * number + skew_us, "dur": 10.0 + 100 * artifact.rank}
                for number in range(5)
            ]  # fmt: skip
            for event in events:
                event["ts"] -= 100 * artifact.rank
            write_trace(artifact.file, events, baseTimeNanoseconds=START)
            window = artifact.window or 0
            origin = RankSummary(rank=artifact.rank, world_size=2, host="", window=window, steps=[])
            summary = encode_summary(summarise(origin, [], {}, artifact.file))
            (run.directory / summary_path(window, artifact.rank)).write_bytes(summary)
    clocks = align_clocks(run)
    assert clocks.offsets_ns == {run.ranks[0].facts.host: 0, "other": -2_000_000_500}
    assert (clocks.residual_ns, clocks.matched) == (0, 5)
    assert [clocks.offset_ns(rank) for rank in run.ranks] == [0, -2_000_000_500]


def test_of_one_host_nothing_is_read(tmp_path: Path):
    run = load_run(make_run(tmp_path, FakeRun(world_size=2)))
    for artifact in run.artifacts:
        artifact.file.unlink(missing_ok=True)
    assert align_clocks(run).residual_ns is None


def rank_trace(path: Path, rank: int | None, ahead_us: int, step: int = 3, every_us: int = 1000) -> Path:
    """A trace of one step with 5 all-reduces, by a clock that is ahead."""
    range_ = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
    reduce = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "dur": 10}
    start_us = step * 1_000_000 + ahead_us
    events = [{**range_, "ts": start_us, "dur": 10_000}]
    events += [{**reduce, "ts": start_us + every_us * (number + 1)} for number in range(5)]
    info: dict[str, Any] = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 3}}
    return write_trace(path, events, baseTimeNanoseconds=START, **info)


def test_traces_of_ranks_are_aligned_and_a_rank_has_one_clock_in_all_its_windows(tmp_path: Path):
    files = [
        rank_trace(tmp_path / "r0.json", 0, 0),
        rank_trace(tmp_path / "r1.json", 1, 3_000_000),
        rank_trace(tmp_path / "r1_later.json", 1, 3_000_000, step=20),
        rank_trace(tmp_path / "r2_later.json", 2, -40_000, step=20),
        rank_trace(tmp_path / "r2_last.json", 2, -40_000, step=30),
    ]
    clocks = align_traces(files)
    assert clocks.of_files(files) == [0, -3 * SECOND, -3 * SECOND, 40_000_000, 40_000_000]
    assert (clocks.residual_ns, clocks.matched, clocks.unaligned) == (0, 10, ())
    assert list(clocks.notes("traces")) == [
        "The clocks of 5 traces were aligned by 10 collectives; the residual error is 0 ns."
    ]


def test_traces_whose_collectives_do_not_end_together_or_without_a_rank_keep_their_clocks_and_are_named(tmp_path: Path):
    first = rank_trace(tmp_path / "first.json", 0, 0)
    slower = rank_trace(tmp_path / "slower.json", 1, 5_000, every_us=9_000)
    unknown = rank_trace(tmp_path / "unknown.json", None, 5_000)
    for other in (slower, unknown):
        clocks = align_traces([first, other])
        assert clocks.of_files([first, other]) == [0, 0]
        assert list(clocks.notes("traces")) == [f"No collective aligns the clock of {other}: it is used unchanged."]


def test_traces_of_one_rank_or_without_collectives_need_no_alignment(tmp_path: Path):
    windows = [rank_trace(tmp_path / f"{step}.json", 0, 0, step=step) for step in (3, 20)]
    others = [write_trace(tmp_path / f"{name}.json", [{"ph": "X", "ts": 1, "dur": 2, "name": "a"}]) for name in "ab"]
    for files in (windows, others, [*others, tmp_path / "missing.json"]):
        assert align_traces(files) == Clocks()
