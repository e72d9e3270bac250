from __future__ import annotations

import json
import tracemalloc

import pytest

from fake_runs import FakeRun, add_series, make_run
from lightning_memprof import load_run
from lightning_memprof.errors import ReportError
from lightning_memprof.timeline.clocks import Clocks
from lightning_memprof.timeline.events import Source, TimelineEvent
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.sources import run_sources
from lightning_memprof.units import GIB


def events(sources: list[Source], **wanted: str) -> list[TimelineEvent]:
    """The events of the sources that are in their spans."""
    found = [
        event
        for source in sources
        if source.events
        for event in source.events()
        if source.span_ns is None
        or (source.span_ns[0] <= event.start_ns and event.start_ns + event.duration_ns <= source.span_ns[1])
    ]
    return [event for event in found if all(getattr(event, key) == value for key, value in wanted.items())]


def test_every_rank_is_a_group_in_order_and_findings_stand_above(tmp_path):
    sources = run_sources(load_run(make_run(tmp_path, FakeRun(world_size=3))))
    assert sources[0].label == "findings"
    assert [source.sort for source in sources] == sorted(source.sort for source in sources)
    labels = list(dict.fromkeys(source.label for source in sources[1:]))
    assert [label.split(" · ")[0] for label in labels] == ["rank 0", "rank 1", "rank 2"]
    assert sum(source.trace is not None for source in sources) == 3
    (finding,) = events(sources[:1])
    assert finding.name.startswith("Compute-bound")
    assert (finding.ph, finding.duration_ns > 0) == ("X", True)
    assert finding.args
    assert "lightning-memprof view" in finding.args["next"]


def test_steps_hooks_fetches_marks_and_memory_stand_on_tracks_of_their_own(tmp_path):
    fake = FakeRun(device_bytes=lambda step: GIB)
    sources = run_sources(load_run(make_run(tmp_path, fake)))
    assert [event.name for event in events(sources, thread="steps")] == ["step 1", "step 2", "step 3"]
    assert {event.name for event in events(sources, thread="data fetches")} == {
        "[_TrainingEpochLoop].train_dataloader_next"
    }
    hooks = events(sources, thread="hooks")
    assert hooks
    assert all(hook.ph == "X" and hook.cat == "hook" for hook in hooks)
    assert {"batch_start", "batch_end"} <= {event.name for event in events(sources, thread="marks")}
    counters = {event.name: event for event in events(sources, ph="C")}
    assert {"rss_bytes", "cuda:0 allocated_bytes", "cuda:0 allocated_bytes_peak"} <= counters.keys()
    assert counters["cuda:0 allocated_bytes"].args == {"value": GIB}


def test_pauses_and_samples_of_the_machine_are_events_and_damage_hides_only_itself(tmp_path):
    run = make_run(tmp_path)
    keys = {"step": 2, "global_step": 2, "recorded": True, "time_ns": 10**18}
    add_series(run, "garbage", [{**keys, "duration_ns": 7_000, "generation": 2, "collected": 5, "uncollectable": 0}])
    system = {**keys, "load_1m": 0.5, "gpu0_power_w": None, "swap_used_bytes": True}
    add_series(run, "system", [system, {"time_ns": "soon"}], torn='{"time_ns": 10000')
    sources = run_sources(load_run(run))
    (pause,) = events(sources, thread="garbage collection")
    assert (pause.name, pause.duration_ns) == ("garbage collection, generation 2", 7_000)
    assert pause.args == {"generation": 2, "collected": 5, "uncollectable": 0}
    (sample,) = events(sources, process="system")
    assert (sample.name, sample.args) == ("load_1m", {"value": 0.5})


def test_each_worker_of_a_dataloader_has_a_track_with_its_batches(tmp_path):
    run = make_run(tmp_path)
    batch = {"recorded": True, "dataset": "Images", "start_ns": 10**18, "duration_ns": 7_000}
    rows = [{**batch, "pid": 90 + worker, "worker": worker} for worker in (0, 1)]
    add_series(run, "worker_batches", [*rows, {"pid": 92, "start_ns": "soon"}])
    found = events(run_sources(load_run(run)), name="Images batch")
    assert [event.thread for event in found] == ["worker 0 of Images, pid 90", "worker 1 of Images, pid 91"]
    assert {event.duration_ns for event in found} == {7_000}


def test_samples_of_the_whole_run_and_named_moments_are_kept_to_the_windows(tmp_path):
    directory = make_run(tmp_path)
    starts = {row["step"]: row["start_ns"] or 0 for row in load_run(directory).lead.pulse}
    inside, outside = starts[2], starts[20]
    rows = [{"step": None, "recorded": False, "time_ns": time, "load_1m": 1.0} for time in (inside, outside)]
    (directory / "system.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [("a", "start", 0), ("a", "end", 5), ("b", "snapshot", 1), ("c", "start", 2)]
    moments = [
        {"name": name, "point": point, "step": 2, "time_ns": start + more, "rss_bytes": more}
        for start in (inside, outside)
        for name, point, more in named
    ]
    (directory / "snapshots.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moments))
    sources = run_sources(load_run(directory))
    assert [event.start_ns for event in events(sources, process="system")] == [inside]
    (region,) = events(sources, thread="regions")
    assert (region.name, region.start_ns, region.duration_ns) == ("a", inside, 5)
    assert region.args == {"step": 2, "rss_change_bytes": 5}
    assert [event.name for event in events(sources, thread="snapshots")] == ["b", "c"]


def test_one_window_some_ranks_and_some_steps_can_be_chosen(tmp_path):
    run = load_run(make_run(tmp_path, FakeRun(world_size=2, windows=((2, 3), (10, 11)))))
    sources = run_sources(run, window=1, ranks=[1])
    assert {source.sort for source in sources[1:]} == {1}
    assert [event.name for event in events(sources, thread="steps")] == ["step 9", "step 10", "step 11"]
    sliced = run_sources(run, ranks=[0], steps=[3])
    (step,) = events(sliced, thread="steps")
    assert step.name == "step 3"
    merge_traces(sliced, tmp_path / "step.json")
    merged = json.loads((tmp_path / "step.json").read_text())
    drawn = [event for event in merged["traceEvents"] if event["ph"] != "M"]
    assert [event["name"] for event in drawn if event.get("cat") == "step"] == ["step 3"]
    for event in drawn:
        start_ns = merged["baseTimeNanoseconds"] + round(event["ts"] * 1000)
        assert step.start_ns <= start_ns
        assert start_ns + round(event.get("dur", 0) * 1000) <= step.start_ns + step.duration_ns
    (trace,) = [source for source in sliced if source.trace]
    assert trace.span_ns
    assert trace.span_ns[1] - trace.span_ns[0] == step.duration_ns


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"window": 7}, "no such window; the run's windows are 0"),
        ({"ranks": [5]}, "rank 5 is not in this run; its ranks are 0"),
        ({"steps": [20, 21]}, "no window has step 20-21; the recorded steps are 2-3"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(tmp_path, choice, said):
    run = load_run(make_run(tmp_path))
    with pytest.raises(ReportError, match=said):
        run_sources(run, **choice)


def test_a_hosts_clock_moves_all_its_events(tmp_path):
    run = load_run(make_run(tmp_path))
    assert run.lead.facts.host is not None
    clocks = Clocks(offsets_ns={run.lead.facts.host: 1_000})
    assert {source.offset_ns for source in run_sources(run, clocks=clocks)[1:]} == {1_000}


@pytest.mark.slow
def test_a_long_series_is_never_held_in_memory(tmp_path):
    run = make_run(tmp_path)
    row = {"step": 2, "global_step": 2, "recorded": True, "time_ns": 10**18, "load_1m": 0.5}
    add_series(run, "system", [row] * 50_000)
    sources = run_sources(load_run(run))
    tracemalloc.start()
    try:
        count = sum(1 for source in sources if source.events for event in source.events() if event.process == "system")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < 2_000_000
