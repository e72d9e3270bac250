from __future__ import annotations

import gzip
import json
import os
import stat

import pytest

from kineto import write_trace
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.timeline.events import Source, TimelineEvent
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.sources import file_sources
from recorded_rows import Trace

BASE = 1_750_000_000_000_000_000


def op(name, ts, dur, **more):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur, **more}


def merged(tmp_path, *traces, base=BASE):
    sources = []
    for at, events in enumerate(traces):
        path = write_trace(tmp_path / f"t{at}.json", events, baseTimeNanoseconds=base)
        sources.append(Source(label=f"rank {at} · host", sort=at, trace=path))
    return document(sources, tmp_path / "out.json.gz")


def document(sources, out):
    merge_traces(sources, out)
    opener = gzip.open if out.suffix == ".gz" else open
    with opener(out, "rt", encoding="utf-8") as stream:
        return json.load(stream)


def events(found, ph="X"):
    return [event for event in found["traceEvents"] if event["ph"] in ph]


def names(found, what="process_name"):
    told = [event for event in events(found, "M") if event["name"] == what]
    return {event["tid" if what.startswith("thread") else "pid"]: event["args"]["name"] for event in told}


def test_ranks_stand_on_one_time_base_in_nanoseconds(tmp_path):
    early = write_trace(tmp_path / "a.json", [op("a", 1.001, 2.003)], baseTimeNanoseconds=BASE + 5_000_000_000)
    late = write_trace(tmp_path / "b.json", [op("b", 5_000_004.5, 1)], baseTimeNanoseconds=BASE)
    sources = [Source(label="rank 0", trace=early), Source(label="rank 1", sort=1, trace=late, offset_ns=-500)]
    found = document(sources, tmp_path / "out.json")
    assert [(event["name"], event["ts"], event["dur"]) for event in events(found)] == [("a", 0, 2.003), ("b", 2.999, 1)]
    assert found["baseTimeNanoseconds"] == BASE + 5_000_001_001


def test_times_since_1970_keep_their_nanoseconds(tmp_path):
    text = '{"traceEvents": [{"ph": "X", "name": "%s", "pid": 1, "tid": 1, "ts": %s, "dur": 1.25}]}'
    (tmp_path / "old.json").write_text(text % ("old", "1712195495406752.797"))
    (tmp_path / "older.json").write_text(text % ("older", "1712195495406752"))
    sources = [Source(label=name, trace=tmp_path / f"{name}.json") for name in ("old", "older")]
    found = document(sources, tmp_path / "out.json")
    assert {event["name"]: event["ts"] for event in events(found)} == {"old": 0.797, "older": 0}
    assert found["baseTimeNanoseconds"] == 1_712_195_495_406_752_000


def test_a_trace_that_does_not_say_when_it_was_recorded_begins_with_the_others(tmp_path):
    dated = write_trace(tmp_path / "dated.json", [op("a", 10, 1)], baseTimeNanoseconds=BASE)
    other = write_trace(tmp_path / "other.json", [op("b", 123_456, 1)])
    out = tmp_path / "out.json"
    result = merge_traces([Source(label="a", trace=dated), Source(label="b", trace=other)], out)
    assert [event["ts"] for event in events(json.loads(out.read_text()))] == [0, 0]
    assert result.notes == ("b: has no time of recording; it is placed at the start",)


def test_a_frame_that_outlasts_the_range_it_opened_yields_to_it(tmp_path):
    enter = {**op("enter", 10, 20), "cat": "python_function"}
    inner = {**op("_record_function_enter_new", 12, 10), "cat": "python_function"}
    found = merged(tmp_path, [op("step", 0, 100), enter, inner, op("range", 15, 50)])
    assert {event["name"]: (event["ts"], event["dur"]) for event in events(found)} == {
        "step": (0, 100), "enter": (10, 5), "_record_function_enter_new": (12, 3), "range": (15, 50),
    }  # fmt: skip
    assert len({event["tid"] for event in events(found)}) == 1


def test_kernels_that_overlap_on_a_stream_get_room_beside_and_their_arrows_follow(tmp_path):
    arrow = {"cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 8, "id": 5, "bp": "e"}
    found = merged(
        tmp_path, [op("one", 0, 10), op("two", 5, 10), {**arrow, "ph": "s", "ts": 1}, {**arrow, "ph": "f", "ts": 5}]
    )
    tracks = {event["name"]: event["tid"] for event in events(found)}
    assert tracks["one"] != tracks["two"]
    assert [event["tid"] for event in events(found, "sf")] == [tracks["one"], tracks["two"]]
    assert names(found, "thread_name")[tracks["two"]] == "thread 8 (beside 1)"
    assert [(event["ts"], event["dur"]) for event in events(found)] == [(0, 10), (5, 10)]


def test_numbers_are_small_and_positive_and_ids_belong_to_one_rank(tmp_path):
    arrow = {"cat": "ac2g", "name": "ac2g", "pid": -1, "tid": "stream 7", "bp": "e"}
    first = [
        op("k", 0, 9, pid=-1, tid="stream 7"),
        {**arrow, "ph": "s", "ts": 1, "id": 3},
        {**arrow, "ph": "f", "ts": 2, "id": 3},
    ]
    again = [*first, {**arrow, "ph": "s", "ts": 3, "id": 2**64}, {**arrow, "ph": "s", "ts": 3, "id": "x"}]
    found = merged(tmp_path, first, again)
    starts = [event["id"] for event in events(found, "s")]
    assert len(set(starts)) == len(starts) == 4
    assert all(0 <= number < 2**53 for number in starts)
    assert [event["id"] for event in events(found, "f")] == starts[:2]
    assert {event["pid"] for event in found["traceEvents"]} == {1, 2}
    assert names(found) == {1: "rank 0 · host · -1", 2: "rank 1 · host · -1"}


def test_an_instant_of_a_rank_stands_on_its_own_track_and_not_across_all(tmp_path):
    mark = {"ph": "i", "name": "Record Window End", "pid": "", "tid": 8, "ts": 3, "s": "g"}
    found = merged(tmp_path, [op("a", 1, 1), mark, {**mark, "s": "p"}])
    assert [event["s"] for event in events(found, "i")] == ["t", "p"]


def test_what_cannot_be_drawn_is_left_out_and_told(tmp_path):
    bare = {"pid": 7, "tid": 8, "name": "x", "ts": 3}
    path = write_trace(
        tmp_path / "t.json",
        [op("a", 1, 1), {**bare, "ph": "b"}, {**bare, "ts": 1}, {**bare, "ph": "s", "id": 1, "ts": 90},
         {**bare, "ph": "i", "ts": 1e300}, op("long", 1, 9.9e307), {**bare, "ph": "C", "args": {"b": 2}}],
    )  # fmt: skip
    out = tmp_path / "out.json"
    result = merge_traces([Source(label="", trace=path)], out)
    found = json.loads(out.read_text())
    assert [(event["ph"], event.get("args")) for event in found["traceEvents"] if event["ph"] != "M"] == [
        ("X", None), ("X", None), ("C", {"b": 2}),
    ]  # fmt: skip
    assert sorted(result.notes) == [
        "skipped, because a viewer cannot draw them: arrow ends outside of every slice (1)",
        "skipped, because a viewer cannot draw them: arrows and asynchronous slices without an id (1)",
        "skipped, because a viewer cannot draw them: events without a kind (1)",
        "skipped, because a viewer cannot draw them: events without a time (1)",
    ]


def test_ready_events_share_the_processes_of_their_label(tmp_path):
    def ready():
        yield TimelineEvent(name="fetch", start_ns=BASE + 2_000_003, duration_ns=7, thread="data", args={"step": 1})
        yield TimelineEvent(ph="i", name="mark", start_ns=BASE + 1_000_000, thread="marks")
        yield TimelineEvent(ph="C", name="rss", start_ns=BASE + 5, args={"value": 12})

    trace = write_trace(tmp_path / "t.json", [op("a", 1, 1)], baseTimeNanoseconds=BASE)
    sources = [Source(label="rank 0", events=ready), Source(label="rank 0", trace=trace)]
    found = document(sources, tmp_path / "out.json.gz")
    assert names(found) == {1: "rank 0", 2: "rank 0 · 7"}
    told = {event["name"]: (event["pid"], event["ts"]) for event in found["traceEvents"] if event["ph"] != "M"}
    assert told == {"rss": (1, 0), "a": (2, 0.995), "mark": (1, 999.995), "fetch": (1, 1999.998)}


def test_windows_of_a_rank_share_its_tracks(tmp_path):
    first = write_trace(tmp_path / "1.json", [op("a", 0, 10)], baseTimeNanoseconds=BASE)
    second = write_trace(tmp_path / "2.json", [op("b", 20, 10)], baseTimeNanoseconds=BASE)
    found = document([Source(label="r", trace=source) for source in (first, second)], tmp_path / "out.json")
    assert len({event["tid"] for event in events(found)}) == len(names(found)) == 1


@pytest.mark.slow
def test_workers_write_what_one_process_writes(tmp_path, monkeypatch):
    traces = [[op(f"{rank}-{n}", n * 3, 5, args={"n": n}) for n in range(200)] for rank in range(3)]
    alone = merged(tmp_path, *traces)
    monkeypatch.setattr("lightning_memprof.timeline.merge._workers", lambda _: 2)
    assert merged(tmp_path, *traces) == alone
    assert len(events(alone)) == 600
    assert {path.name for path in tmp_path.iterdir()} == {"t0.json", "t1.json", "t2.json", "out.json.gz"}
    assert sum(1 for _ in Trace(tmp_path / "out.json.gz").events()) == len(alone["traceEvents"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_trace_leaves_nothing_behind(tmp_path, monkeypatch, workers):
    monkeypatch.setattr("lightning_memprof.timeline.merge._workers", lambda _: workers)
    good = write_trace(tmp_path / "good.json", [op("a", 0, 10)])
    (tmp_path / "cut.json").write_bytes(good.read_bytes()[:-30])
    sources = [Source(label=name, trace=tmp_path / name) for name in ("good.json", "cut.json")]
    with pytest.raises(ArtifactError, match=r"cut\.json: is truncated"):
        merge_traces(sources, tmp_path / "out.json.gz")
    assert {path.name for path in tmp_path.iterdir()} == {"good.json", "cut.json"}


def test_a_result_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    trace = write_trace(tmp_path / "t.json", [op("a", 0, 10)])
    with pytest.raises(ArtifactError, match=r"nowhere.*cannot be written"):
        merge_traces([Source(label="a", trace=trace)], tmp_path / "nowhere" / "out.json")
    with pytest.raises(ConfigError, match="another name"):
        merge_traces([Source(label="a", trace=trace)], trace)
    with pytest.raises(ConfigError, match="no trace to merge"):
        merge_traces([], tmp_path / "out.json")


def test_progress_counts_every_file_twice(tmp_path):
    told = []
    trace = write_trace(tmp_path / "t.json", [op("a", 0, 10)])
    merge_traces([Source(label="a", trace=trace)], tmp_path / "o.json", lambda done, total: told.append((done, total)))
    assert told[-1] == (2 * trace.stat().st_size,) * 2
    assert told == sorted(told)


def test_a_merged_trace_can_be_cut_and_merged_again(tmp_path):
    traces = [[{**op("ProfilerStep#1", 0, 10), "cat": "user_annotation"}, op("a", 2, 3)] for _ in range(2)]
    first = merged(tmp_path, *traces)
    out = tmp_path / "again.json"
    merge_traces(file_sources([tmp_path / "out.json.gz"], [0], [1]), out)
    again = json.loads(out.read_text())
    assert (first["mergedTraces"], again["mergedTraces"]) == (2, 2)
    assert names(again) == names(first)
    assert [(event["name"], event["ts"]) for event in events(again)] == [
        (event["name"], event["ts"]) for event in events(first)
    ]


def test_an_event_nested_too_deeply_is_a_damaged_trace(tmp_path):
    trace = tmp_path / "a.json"
    trace.write_text('{"traceEvents":[{"ph":"X","ts":1,"args":' + '{"a":' * 5000 + "1" + "}" * 5000 + "}]}")
    with pytest.raises(ArtifactError, match="over 500 levels"):
        merge_traces([Source(label="a", trace=trace)], tmp_path / "out.json")


def test_a_damaged_row_takes_no_other_event_with_it(tmp_path):
    rows = [TimelineEvent(name="odd", start_ns=start) for start in ((1 << 63) - 1, -5, 0)]
    rows.append(TimelineEvent(name="odd", start_ns=BASE, duration_ns=1 << 62))
    rows.append(TimelineEvent(name="good", start_ns=BASE))
    found = document([Source(label="a", events=lambda: rows)], tmp_path / "out.json")
    assert [event["name"] for event in events(found, "X")] == ["good"]
    assert found["baseTimeNanoseconds"] == BASE


def test_a_directory_or_a_device_is_no_place_for_the_result(tmp_path):
    trace = write_trace(tmp_path / "a.json", [op("a", 1, 2)])
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is a directory or a device"):
            merge_traces([Source(label="a", trace=trace)], out)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
