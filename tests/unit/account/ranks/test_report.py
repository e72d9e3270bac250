"""Ranks beside each other: waiting, imbalance, the straggler, and thousands of ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from device_traces import paired_ranks
from fake_runs import FakeRun, make_run
from known import known
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import RankTrack, WindowWaits, track, window_waits
from lightning_memprof.account.ranks.report import Straggler, rank_report
from lightning_memprof.account.ranks.summary import (
    Arrivals,
    RankSummary,
    StepTime,
    encode_summary,
    read_summary,
    summarise,
)
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Facts, Severity
from lightning_memprof.judge.rules.communication import straggler
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view
from many_ranks import make_many_ranks
from pages import full

MS = 1_000_000
KINDS: list[tuple[str, str, int | None]] = [("all_reduce", "", 4)]


def summary(rank: int, starts_ms: list[float], ends_ms: list[float], *, host: str = "h", first: int = 0) -> RankSummary:
    return RankSummary(
        rank=rank, world_size=2, host=host, window=0, steps=[2, 3],
        arrivals=Arrivals(
            count=len(starts_ms), base_ns=0, kinds=KINDS, kind=[0] * len(starts_ms),
            sequence=list(range(first, first + len(starts_ms))), start_ns=[round(ms * MS) for ms in starts_ms],
            duration_ns=[round((end - start) * MS) for start, end in zip(starts_ms, ends_ms, strict=True)],
        ),
    )  # fmt: skip


def tracks(*summaries: RankSummary) -> list[RankTrack]:
    shared: dict[Any, Any] = {}
    return [track(summary.rank, summary.host, summary.arrivals, shared) for summary in summaries]


def caused_ns(waits: WindowWaits) -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for row in waits.late:
        found[row.rank] += row.ns
    return found


def test_the_last_to_come_causes_the_wait_and_overlapping_collectives_are_one_wait() -> None:
    waits = window_waits(tracks(summary(0, [0, 2, 100], [51, 52, 111]), summary(1, [50, 51, 110], [51, 52, 111])))
    assert waits.own_wait_ns[0] == (51 + 10) * MS
    assert waits.own_wait_ns[1] == 0
    assert caused_ns(waits) == {1: 61 * MS}
    (kind,) = waits.by_kind()
    assert (kind.name, kind.count, kind.last_rank, kind.last_count) == ("all_reduce", 3, 1, 3)


@pytest.mark.parametrize("first_ms", [0, 40, 95])
def test_the_waits_of_a_step_are_its_rows_wherever_its_collectives_are(first_ms: int) -> None:
    starts = [first_ms + 100.0 * step + 2 * at for step in range(4) for at in range(3)]
    ends = [start + 1.5 for start in starts]
    waits = window_waits(tracks(summary(0, starts, ends), summary(1, [start + 1 for start in starts], ends)), steps=4)
    assert [row.step for row in waits.late] == [step for step in range(4) for _ in range(3)]


def test_clocks_of_hosts_are_aligned_by_the_ends() -> None:
    late = summary(1, [950, 1010, 1130], [951, 1021, 1131], host="other")
    waits = window_waits(tracks(summary(0, [0, 20, 100], [51, 121, 231]), late))
    assert waits.clock_offsets_ns == {"other": 900 * MS}
    assert waits.clock_error_ns == 0
    assert waits.own_wait_ns == {0: (50 + 59 + 109) * MS, 1: 0} or set(caused_ns(waits)) == {1}


def test_a_trace_that_begins_one_collective_later_is_shifted_to_where_the_ends_agree() -> None:
    ends = [10.0, 35.0, 81.0, 170.0, 400.0]
    whole = summary(0, [end - 5 for end in ends], ends)
    shorter = summary(1, [end - 1 for end in ends[1:]], ends[1:])
    waits = window_waits(tracks(whole, shorter))
    assert len(waits.meetings) == 4
    assert caused_ns(waits) == {1: 4 * 4 * MS}


def late_by(cause: Part | None, host: str = "a") -> Straggler:
    return Straggler(
        rank=1, host=host, step_ns=100 * MS, caused_ns=50 * MS, caused_share=1.0, cause=cause, own_ns=60 * MS,
        others_ns=10 * MS, callback=None,
    )  # fmt: skip


def tensor_parallel(compute_ms: Callable[[int, int], float]) -> list[RankTrack]:
    return [
        track(
            rank,
            "h",
            Arrivals(
                kinds=[("all_reduce", call.group, 4) for call in calls],
                kind=[*range(len(calls))],
                sequence=[call.step for call in calls],
                start_ns=[call.start_us * 1000 for call in calls],
                duration_ns=[(call.end_us - call.start_us) * 1000 for call in calls],
            ),
            {},
        )
        for rank, calls in paired_ranks(compute_ms).items()
    ]


def test_a_rank_that_makes_its_partner_late_causes_what_others_wait_for_the_partner() -> None:
    waits = window_waits(tensor_parallel(lambda rank, step: 20.0 if rank == 5 else 10.0), steps=6)
    assert set(caused_ns(waits)) == {5}
    assert {meeting.last_rank for meeting in waits.meetings if meeting.kind[1] == "dp0" and meeting.cause == 5} == {4}


@pytest.mark.parametrize(
    "compute_ms",
    [
        pytest.param(lambda rank, step: 13.0 if rank in {2, 3} else 10.0, id="both of a pair are late"),
        pytest.param(
            lambda rank, step: 20.0 if (rank, step % 2) in {(5, 0), (0, 1)} else 10.0, id="all waited alike before"
        ),
    ],
)
def test_a_rank_is_late_by_itself_where_it_has_waited_no_longer_than_the_others(
    compute_ms: Callable[[int, int], float],
) -> None:
    waits = window_waits(tensor_parallel(compute_ms), steps=6)
    pairs = [meeting for meeting in waits.meetings if meeting.kind[1].startswith("tp")]
    assert {meeting.cause for meeting in pairs} == {meeting.last_rank for meeting in pairs}
    assert set(caused_ns(waits)) <= {rank for rank in range(8) if max(compute_ms(rank, step) for step in (0, 1)) > 10}


def test_a_summary_comes_back_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    written = summary(3, [1, 2], [3, 4])
    path = tmp_path / "rank00003.summary.json"
    path.write_bytes(encode_summary(written))
    assert read_summary(path) == written
    assert path.stat().st_size < 1000
    for damaged in (
        b"{",
        encode_summary(msgspec.structs.replace(written, schema_version=99)),
        encode_summary(msgspec.structs.replace(written, arrivals=Arrivals(count=1, kind=[7]))),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match="rank00003"):
            read_summary(path)
    for field in ("base_ns", "start_ns", "duration_ns"):
        document = json.loads(encode_summary(written))
        # Sums of such times would not fit into 64 bits.
        document["arrivals"][field] = 1 << 63 if field == "base_ns" else [1 << 62] * 2
        path.write_text(json.dumps(document))
        with pytest.raises(ArtifactError, match="cannot be read"):
            read_summary(path)


def test_a_summary_is_made_of_the_windows_files_and_the_steps_before(tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.jsonl"
    rows = [{"step": step, "recorded": step > 2, "action": "[Callback]Slow.on_train_batch_end", "start_ns": 0,
             "duration_ns": 3 * MS, "depth": 0} for step in (2, 3, 4)]  # fmt: skip
    hooks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    host = tmp_path / "host.jsonl"
    host.write_text('{"rss_bytes": 5, "peak_rss_bytes": 9}\n')
    times = [StepTime(step, 0 if step > 1 else None, (step + 1) * MS, [MS, 0, 0, 0, 0, step * MS]) for step in range(5)]
    origin = RankSummary(rank=1, world_size=2, host="h", window=0, steps=[])
    made = summarise(origin, times, {"hooks": hooks, "host": host}, tmp_path / "missing.json")
    assert made.steps == [3, 4]
    assert made.recorded is not None
    assert (made.recorded.mean_ns, made.recorded.phases_ns["data_wait"]) == (4_500_000, MS)
    assert made.usual is not None
    assert made.usual.mean_ns == 1.5 * MS
    assert made.callbacks_ns == {"Slow": 3 * MS}
    assert made.memory["peak_rss_bytes"] == 9
    assert made.arrivals.count == 0


@pytest.mark.slow
def test_of_hundreds_of_ranks_on_hosts_with_other_clocks_the_late_one_is_named(tmp_path: Path) -> None:
    directory = make_many_ranks(tmp_path, 96, windows=2, straggler=42)
    run = load_run(directory)
    assert [rank.rank for rank in run.ranks if rank.pulse] == list(range(8))
    report = known(rank_report(run, {}))
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.host, report.straggler.cause) == (42, "node005", Part.DATA_WAIT)
    assert report.straggler.caused_ns == pytest.approx(40 * MS, rel=0.02)
    assert report.waiting is not None
    assert report.waiting.clock_error_ns < MS
    assert (report.spreads["data_wait"].highest_rank, report.spreads["data_wait"].median) == (42, 2 * MS)
    text = " ".join(full(run_view(load_run(directory))).split())
    assert "Rank 42 is the straggler: its data wait takes 42.0 ms per step, 2.00 ms on " in text
    assert "for rank 42" in text
    document = to_json(run_view(run))
    assert document["across_ranks"]["straggler"]["rank"] == 42
    assert len(document["across_ranks"]["ranks"]) == 96
    json.dumps(document, allow_nan=False)


def test_ranks_that_take_turns_to_be_last_are_no_stragglers(tmp_path: Path) -> None:
    directory = make_many_ranks(tmp_path, 80, windows=1, straggler=-1)
    report = known(rank_report(load_run(directory), {}))
    assert report.straggler is None


def test_a_damaged_summary_hides_only_its_rank(tmp_path: Path) -> None:
    directory = make_many_ranks(tmp_path, 70, windows=1, straggler=42)
    (directory / summary_path(0, 7)).write_bytes(b"torn")
    report = known(rank_report(load_run(directory), {}))
    assert [problem.rank for problem in report.problems] == [7]
    assert report.straggler is not None


def test_a_late_rank_that_recorded_no_collectives_is_named_and_its_waiting_is_not_zero(tmp_path: Path) -> None:
    directory = make_many_ranks(tmp_path, 16, windows=1, straggler=5)
    for rank in range(1, 16):
        if rank != 8:
            path = directory / summary_path(0, rank)
            path.write_bytes(encode_summary(msgspec.structs.replace(read_summary(path), arrivals=Arrivals())))
    # Their pulses say nothing of the data: the summaries are all there is.
    for pulse in directory.glob("pulse.*"):
        pulse.unlink()
    report = known(Facts.of(load_run(directory)).ranks)
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.cause) == (5, Part.DATA_WAIT)
    waits = {rank.rank: rank.wait_ns for rank in report.ranks}
    assert waits[5] is None
    assert waits[8] is not None


def test_one_hiccup_and_taking_turns_are_no_straggler(tmp_path: Path) -> None:
    def straggler(late_ms: dict[int, list[int]]) -> int | None:
        directory = make_many_ranks(tmp_path / str(len(list(tmp_path.iterdir()))), 2, windows=1, straggler=-1)
        for rank in (0, 1):
            path = directory / summary_path(0, rank)
            starts = [100 * step + late_ms[rank][step] for step in range(4)]
            ends = [100 * step + max(late_ms[0][step], late_ms[1][step]) + 1 for step in range(4)]
            found = msgspec.structs.replace(
                read_summary(path), steps=[2, 3, 4, 5], arrivals=summary(rank, [*starts], [*ends]).arrivals
            )
            path.write_bytes(encode_summary(found))
        report = known(Facts.of(load_run(directory)).ranks)
        return None if report.straggler is None else report.straggler.rank

    assert straggler({0: [0, 0, 0, 0], 1: [20, 20, 20, 20]}) == 1
    assert straggler({0: [0, 0, 0, 0], 1: [0, 0, 80, 0]}) is None
    assert straggler({0: [0, 30, 0, 30], 1: [40, 0, 40, 0]}) is None


@pytest.mark.parametrize(
    ("cause", "hosts", "device", "severity"),
    [
        (Part.COMPUTE, ("a", "a"), "cpu", Severity.INFO),
        (Part.OPTIMIZER, ("a", "a"), "cpu", Severity.INFO),
        (None, ("a", "a"), "cpu", Severity.INFO),
        (Part.DATA_WAIT, ("a", "a"), "cpu", Severity.CRITICAL),
        (Part.CALLBACK, ("a", "a"), "cpu", Severity.CRITICAL),
        (Part.COMPUTE, ("a", "b"), "cpu", Severity.CRITICAL),
        (Part.COMPUTE, ("a", "a"), "cuda", Severity.CRITICAL),
    ],
)
def test_a_rank_that_computes_longer_than_others_on_the_same_cores_is_an_info(
    tmp_path: Path, cause: Part | None, hosts: tuple[str, str], device: str, severity: Severity
) -> None:
    run = load_run(
        make_run(tmp_path / "run", FakeRun(world_size=2, device_bytes=None if device == "cpu" else lambda _: 1))
    )
    # What the ranks took by the host's clock, whatever the run says of its device.
    facts = replace(Facts.of(load_run(make_run(tmp_path / "cpu", FakeRun(world_size=2)))), run=run)
    assert facts.ranks is not None
    late = late_by(cause, hosts[1])
    ranks = tuple(replace(rank, host=host) for rank, host in zip(facts.ranks.ranks, hosts, strict=True))
    found = known(straggler(replace(facts, ranks=replace(facts.ranks, ranks=ranks, straggler=late))))
    assert found.severity is severity
    assert ("cores of one machine" in found.why) == (severity is Severity.INFO)


@pytest.mark.parametrize(
    ("device", "has_lines"),
    [("cuda", False), ("cpu", False), ("cpu", True)],
)
def test_a_rank_that_computes_longer_on_a_cpu_has_a_line_and_no_temperature(
    tmp_path: Path, device: str, has_lines: bool
) -> None:
    fake = FakeRun(world_size=2, device_bytes=None if device == "cpu" else lambda _: 1)
    directory = make_run(tmp_path, fake)
    if has_lines:
        functions, path = ["Net.training_step", "Net.relax"], "window000/rank00001.lines.jsonl"
        row = {"step": 2, "recorded": True, "functions": functions, "place": "net.py:7", "source": "x.sort()", "ns": MS}
        (directory / path).write_text(json.dumps({**row, "looks": 100}) + "\n")
        listed = {"kind": "artifact", "time_ns": 1, "collector": "lines", "type": "series", "window": 0}
        with (directory / "manifest.rank00001.jsonl").open("a") as manifest:
            manifest.write(json.dumps({**listed, "path": f"{directory.name}/{path}", "size_bytes": 1}) + "\n")
    facts = Facts.of(load_run(directory))
    assert facts.ranks is not None
    found = known(straggler(replace(facts, ranks=replace(facts.ranks, straggler=late_by(Part.COMPUTE)))))
    assert found.remedies[0].id == "compare_rank"
    assert ("temperature" in " ".join(found.next_steps)) == (device == "cuda")
    assert ("Net.relax (net.py:7)" in found.next_steps[0]) == has_lines


@pytest.mark.parametrize(
    ("elements", "cause", "words"),
    [
        ((2000, 4000), Part.COMPUTE, "rank 1 gets 4,000 elements per batch, the others 2,000."),
        ((2000, 4000), Part.DATA_WAIT, "Check the data of rank 1"),
        ((2000, 2200), Part.COMPUTE, "Compare the batch lengths"),
    ],
)
def test_a_rank_that_computes_longer_for_its_larger_batches_gets_a_sampler_as_its_remedy(
    tmp_path: Path, elements: tuple[int, int], cause: Part, words: str
) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2, elements=lambda rank, _: elements[rank]))
    assert words in next_step_of_rank_1(directory, cause)


def test_a_few_large_batches_of_a_late_rank_are_not_its_size(tmp_path: Path) -> None:
    sizes = iter([1000, 1000, 1000, 9000] * 9)
    directory = make_run(tmp_path, FakeRun(world_size=2, elements=lambda rank, _: 1500 if rank == 0 else next(sizes)))
    assert "Compare the batch lengths" in next_step_of_rank_1(directory, Part.COMPUTE)


def next_step_of_rank_1(directory: Path, cause: Part) -> str:
    facts = Facts.of(load_run(directory))
    assert facts.ranks is not None
    found = known(straggler(replace(facts, ranks=replace(facts.ranks, straggler=late_by(cause)))))
    return found.next_steps[0]


@pytest.mark.parametrize(("steps", "late"), [([2, 3], None), ([2, 3, 4], 1)])
def test_who_is_last_in_two_steps_on_shared_cores_is_chance(tmp_path: Path, steps: list[int], late: int | None) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2))
    ends = [20.0 * at + 15 for at in range(2 * len(steps))]
    for rank in (0, 1):
        found = summary(rank, [end - (1 if rank == 1 else 14) for end in ends], ends)
        path = directory / summary_path(0, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_summary(msgspec.structs.replace(found, steps=steps)))
    report = known(Facts.of(load_run(directory)).ranks)
    assert report.waiting is not None
    assert report.waiting.caused_ns[1] > report.waiting.caused_ns.get(0, 0)
    assert (report.straggler.rank if report.straggler else None) == late


def test_the_waits_of_the_leading_rank_are_known_by_the_start_of_each_collective(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2))
    for rank, starts in enumerate(([0.0, 20.0, 41.0], [8.0, 20.0, 40.0])):
        path = directory / summary_path(0, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_summary(summary(rank, starts, [10, 30, 50])))
    report = known(Facts.of(load_run(directory)).ranks)
    assert report.lead_waits_ns == {0: 8 * MS, 20 * MS: 0, 41 * MS: 0}


def test_one_rank_and_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    alone = load_run(make_run(tmp_path / "one", FakeRun()))
    assert Facts.of(alone).ranks is None
    several = Facts.of(load_run(make_run(tmp_path / "two", FakeRun(world_size=3))))
    assert several.ranks is not None
    assert several.ranks.straggler is None
    assert "Spread over ranks" in full(run_view(load_run(tmp_path / "two")))


def test_a_rank_that_was_read_lightly_keeps_its_end_and_its_errors(tmp_path: Path) -> None:
    directory = make_many_ranks(tmp_path, 66, windows=1, straggler=-1)
    manifest = directory / "manifest.rank00050.jsonl"
    kept = [line for line in manifest.read_text().splitlines() if '"kind":"end"' not in line]
    error = {
        "kind": "error",
        "time_ns": 1,
        "collector": "host",
        "where": "mark",
        "window": 0,
        "message": "X: y",
        "traceback": "",
    }
    manifest.write_text("\n".join([*kept, json.dumps(error)]) + "\n")
    run = load_run(directory)
    (light,) = [rank for rank in run.ranks if rank.rank == 50]
    assert (light.status, light.in_full, len(light.windows)) == ("running or killed", False, 1)
    assert [error.rank for error in run.errors] == [50]
