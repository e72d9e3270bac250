from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kineto import write_trace
from lightning_memprof.timeline.events import Source
from lightning_memprof.timeline.merge import merge_traces

BASE = 1_750_000_000_000_000_000
PROFILE = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])

PIDS = st.sampled_from([7, 0, -3, "7", "Spans", ""])
TIDS = st.sampled_from([8, "stream 7", 0])
TIMES = st.integers(0, 60).map(lambda tick: tick * 0.125)
CATS = st.sampled_from(["python_function", "cpu_op"])


@st.composite
def traces(draw: st.DrawFn) -> list[dict[str, object]]:
    slices = st.builds(
        lambda number, cat, where, ts, dur: {
            "ph": "X", "cat": cat, "name": f"s{number}", "pid": where[0], "tid": where[1], "ts": ts, "dur": dur
        },
        st.integers(0, 99), CATS, st.tuples(PIDS, TIDS), TIMES, TIMES,
    )  # fmt: skip
    arrows = st.builds(
        lambda ph, number, where, ts: {
            "ph": ph, "cat": "ac2g", "name": "a", "id": number, "pid": where[0], "tid": where[1], "ts": ts, "bp": "e"
        },
        st.sampled_from("sf"), st.sampled_from([1, 2, -1, "x", 2**63]), st.tuples(PIDS, TIDS), TIMES,
    )  # fmt: skip
    return draw(st.lists(st.one_of(slices, slices, arrows), max_size=25))


def named(events: list[dict[str, object]], source: int) -> list[dict[str, object]]:
    """The events with their source in the names of arrows."""
    return [{**event, "name": f"a{source}"} if event["ph"] in ("s", "f") else event for event in events]


@pytest.mark.slow
@PROFILE
@given(given=st.lists(traces(), min_size=1, max_size=3))
def test_merged_slices_nest_none_is_lost_and_sources_share_no_arrow(given):
    with TemporaryDirectory() as directory:
        here = Path(directory)
        sources = [
            Source(
                label=f"r{at}", sort=at,
                trace=write_trace(here / f"{at}.json", named(events, at), baseTimeNanoseconds=BASE),
            )
            for at, events in enumerate(given)
        ]  # fmt: skip
        merge_traces(sources, here / "out.json")
        found = json.loads((here / "out.json").read_text())["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    assert Counter(event["name"] for event in slices) == Counter(
        event["name"] for events in given for event in events if event["ph"] == "X"
    )
    tracks = defaultdict(list)
    for event in slices:
        start = round(event["ts"] * 1000)
        tracks[event["pid"], event["tid"]].append((start, -start - round(event["dur"] * 1000)))
    for track in tracks.values():
        open_ends: list[int] = []
        for start, negative_end in sorted(track):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or -negative_end <= open_ends[-1]
            open_ends.append(-negative_end)
    begun = {(event["name"], event["id"]) for event in found if event["ph"] == "s"}
    assert len({number for _, number in begun}) == len(begun)
    for event in found:
        assert event["pid"] > 0
        assert event.get("ts", 0) >= 0
        if event["ph"] in "sf":
            at = round(event["ts"] * 1000)
            assert any(start <= at <= -end for start, end in tracks[event["pid"], event["tid"]])
    cut_short = [event for event in slices if event["cat"] != "python_function"]
    told = Counter((event["name"], event["dur"]) for event in cut_short)
    assert told == Counter(
        (event["name"], event["dur"])
        for events in given
        for event in events
        if event["ph"] == "X" and event["cat"] == "cpu_op"
    )
