"""Torch's list of events, made from saved traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kineto import ACCELERATED, Made, event_fields, torch_table, write_trace
from lightning_memprof.errors import ArtifactError
from lightning_memprof.integration.function_events import function_events

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("by_shapes", [False, True])
@pytest.mark.parametrize("sort_by", [None, "self_cuda_time_total", "self_device_memory_usage"])
def test_times_and_memory_of_host_and_device_are_torchs(tmp_path: Path, by_shapes: bool, sort_by: str | None) -> None:
    path = write_trace(tmp_path / "t.json.gz", [event_fields(made) for made in ACCELERATED])
    averages = function_events([path]).key_averages(group_by_input_shapes=by_shapes)
    assert averages.table(sort_by=sort_by, row_limit=-1) == torch_table(
        ACCELERATED, by_shapes=by_shapes, sort_by=sort_by, row_limit=-1
    )


def test_the_windows_of_a_run_follow_each_other(tmp_path: Path) -> None:
    paths = [
        write_trace(tmp_path / f"{i}.json", [event_fields(Made("a", 5, 10))], baseTimeNanoseconds=1_000_000 * i)
        for i in (1, 3)
    ]
    times = [(event.time_range.start, event.time_range.end) for event in function_events(paths)]
    assert times == [(0, 5), (2000, 2005)]


def test_events_have_parents_shapes_and_the_names_of_their_category(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [event_fields(made) for made in ACCELERATED])
    events = {event.name: event for event in function_events([path])}
    assert events["aten::addmm"].cpu_parent is events["aten::linear"]
    assert events["aten::addmm"].input_shapes == [[8, 4], [4]]
    assert [kernel.duration for kernel in events["aten::addmm"].kernels] == [1000]
    assert events["ProfilerStep*"].is_user_annotation
    assert not events["aten::linear"].is_user_annotation


def test_a_trace_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"t\.json"):
        function_events([tmp_path / "t.json"])
