from __future__ import annotations

from pathlib import Path

from kineto import Made, event_fields, write_trace
from lightning_memprof.account.trace.lanes import Lanes, read_lanes


def lanes(directory: Path, *made: Made) -> Lanes:
    return read_lanes(write_trace(directory / "a.pt.trace.json", [event_fields(event) for event in made]))


def test_calls_nest_and_times_count_from_the_first_of_all(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        Made("outer", 100, 200),
        Made("first", 110, 130),
        Made("second", 130, 150),
        Made("kernel", 140, 240, "kernel", thread=3),
    )
    host, device = found.lanes
    assert (host.title, device.title) == ("thread 7", "device 7 stream 3")
    told = [("+" if call.is_begin else "-", found.names[call.name], call.at_ns) for call in host.calls()]
    assert told == [
        ("+", "outer", 0),
        ("+", "first", 10_000),
        ("-", "first", 30_000),
        ("+", "second", 30_000),
        ("-", "second", 50_000),
        ("-", "outer", 100_000),
    ]
    assert found.end_ns == 140_000


def test_a_call_that_outlives_what_it_began_in_ends_with_it(tmp_path: Path) -> None:
    found = lanes(tmp_path, Made("outer", 0, 100), Made("late", 90, 130))
    (host,) = found.lanes
    ends = {found.names[call.name]: call.at_ns for call in host.calls() if not call.is_begin}
    assert ends == {"late": 100_000, "outer": 100_000}


def test_events_that_are_no_calls_are_left_out(tmp_path: Path) -> None:
    found = lanes(tmp_path, Made("aten::mm", 0, 10), Made("[memory]", 5, 5, "cpu_instant_event", bytes=8))
    assert [found.names[name] for lane in found.lanes for name in lane.names] == ["aten::mm"]
