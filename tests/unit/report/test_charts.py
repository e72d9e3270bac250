from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from drawn import columns, document
from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from kineto import write_trace
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.memory.blocks import Blocks
from lightning_memprof.account.memory.columns import Origin
from lightning_memprof.account.parts import PHASE_PARTS
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.account.trace.table import device_timeline
from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Run
from lightning_memprof.read.run.targets import find_targets
from lightning_memprof.report.charts import charts, file_charts
from lightning_memprof.report.charts.embed import Chart, chart_resources, inert
from lightning_memprof.report.charts.holders import holders_chart
from lightning_memprof.report.charts.memory import memory_chart, offsets
from lightning_memprof.report.charts.system import system_chart
from lightning_memprof.report.document import Cell, Facts
from lightning_memprof.report.document import Chart as Place
from lightning_memprof.report.files_view import FilesView, files_view
from lightning_memprof.report.printers.values import cell_text
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.view import View, run_view
from lightning_memprof.units import format_bytes

STEERING = "a\x1b[31mb\u202ec\x07d\ud800é€😀\\u202e"
HOSTILE = "</script><img src=x onerror=window.hit=1>"


def of_run(tmp_path: Path, fake: FakeRun | None = None) -> dict[str, Chart]:
    make_run(tmp_path, fake)
    run = load_run(tmp_path)
    return charts(run_view(run, run_allocations(run)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 20)), max_size=40))
def test_no_two_blocks_are_drawn_over_each_other(blocks: list[tuple[int, int, int]]):
    born, died = [block for block, _, _ in blocks], [block + length for block, length, _ in blocks]
    size = [block for _, _, block in blocks]
    lower = offsets(born, died, size)
    for i in range(len(blocks)):
        for j in range(i):
            meet = max(born[i], born[j]) < min(died[i], died[j])
            assert not meet or max(lower[i], lower[j]) >= min(lower[i] + size[i], lower[j] + size[j])


def test_blocks_that_are_freed_leave_their_place_to_the_next():
    assert offsets([0, 0, 1, 2], [1, 9, 9, 9], [10, 5, 10, 5]) == [5, 0, 5, 15]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Chart]]:
    """A healthy run of two ranks with its charts."""
    place = tmp_path_factory.mktemp("run")
    found = of_run(place, FakeRun(world_size=2))
    return load_run(place), found


@pytest.mark.slow
def test_the_steps_of_a_run_stand_in_its_chart(usual: tuple[Run, dict[str, Chart]]):
    run, found = usual
    chart = found["steps"]
    (bars,) = columns(chart, "forward")
    assert bars["name"] == [str(row["step"]) for row in run.lead.pulse]
    assert bars["total"] == pytest.approx([(row["duration_ns"] or 0) / 1e6 for row in run.lead.pulse])
    assert [sum(bars[part][i] for part in PHASE_PARTS.values()) for i in range(30)] == pytest.approx(bars["total"])
    assert "30 steps" in chart.summary


@pytest.mark.slow
def test_neighbours_of_many_steps_share_a_bar_and_the_slowest_is_still_seen(tmp_path: Path):
    def phases(_: int, step: int) -> Any:
        known = {"data_wait": 0, "forward": 1_000_000, "backward": 0, "optimizer": 0, "callbacks": 0, "other": 0}
        return known | ({"forward": 90_000_000} if step == 777 else {})

    chart = of_run(tmp_path, FakeRun(steps=1200, phases=phases, windows=(), memory=None))["steps"]
    (bars,) = columns(chart, "forward")
    assert len(bars["x"]) == 400
    assert max(bars["slowest"]) == pytest.approx(90)
    assert "exceed the axis" in chart.summary


@pytest.mark.slow
def test_the_memory_of_a_window_adds_up_to_its_peak(usual: tuple[Run, dict[str, Chart]]):
    run, found = usual
    peak = max(device.peak_bytes for allocation in run_allocations(run) for device in allocation.devices)
    (areas,) = columns(found["memory"], "sum")
    held = FakeMemory().parameter_bytes
    assert max(areas["parameter"]) == held
    assert max(areas["optimizer_state"]) == 2 * held
    assert max(areas["sum"]) == peak + 3 * held
    # The table of peaks has the first of them.
    said = json.dumps(document(found["memory"]))
    assert f"= live bytes peak {format_bytes(peak)} + {format_bytes(3 * held)} from before" in said
    assert f"optimizer state {format_bytes(2 * held)}" in found["memory"].summary
    blocks = columns(found["memory"], "left")
    assert sum(sum(block["size"]) for block in blocks) >= peak
    (holders,) = columns(found["holders"], "share")
    assert sum(size for size, top in zip(holders["size"], holders["top"], strict=True) if top == 0) == peak


def test_a_run_that_measured_nothing_has_no_charts(tmp_path: Path):
    assert list(of_run(tmp_path, FakeRun(steps=0, windows=(), memory=None, trace=False))) == []


def blocks(count: int, text: str = "train.py(1): main") -> Blocks:
    origins = [Origin(text, None, None, ())]
    found = Blocks(device="cuda:0", times=range(1_000_001), before_bytes=0, origins=origins)
    for i in range(count):
        found.add((i, i + 50, 0x7F0000000000 + 512 * i, 512 + i), 0, "activation")
    return found


def test_a_caption_names_the_device_once():
    alone, inside = (memory_chart(blocks(3), "memory", where) for where in ("a.pickle, cuda:0", "window 0"))
    assert alone is not None
    assert alone.summary.startswith("Live bytes on a.pickle, cuda:0 peak at")
    assert inside is not None
    assert inside.summary.startswith("Live bytes on cuda:0 in window 0 peak at")


def test_of_too_many_blocks_the_largest_are_drawn_and_the_summary_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_memprof.report.charts.memory.MAX_BLOCKS", 10)
    chart = memory_chart(blocks(30), "memory", "window 0")
    assert chart is not None
    (drawn,) = columns(chart, "left")
    assert sorted(drawn["size"]) == [512.0 + i for i in range(20, 30)]
    assert "the 10 largest of 30 blocks" in chart.summary


def test_no_name_of_the_program_can_end_the_script_it_stands_in():
    made = blocks(3, HOSTILE)
    held = holders_chart([((HOSTILE, HOSTILE), 10, 1)], "holders", HOSTILE)
    drawn = memory_chart(replace(made, device=HOSTILE), "memory", HOSTILE)
    assert held is not None
    assert drawn is not None
    for chart in (held, drawn):
        assert chart.html.count("</script") == 1
        assert "<img" not in chart.html
        assert HOSTILE in json.dumps(document(chart))


def test_a_name_cannot_turn_the_direction_of_what_stands_below_a_chart():
    drawn = memory_chart(blocks(3, "a"), "memory", "\u202egnp.x")
    assert drawn is not None
    assert "\u202e" not in drawn.html
    assert drawn.html.count(r"\u202egnp.x") == 2


def test_the_library_is_there_and_asks_for_nothing():
    resources = chart_resources()
    assert "Bokeh" in resources
    assert resources.count("</script") == 2
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", resources)
    assert len(resources) < 1_400_000


def gpu(name: str, start: int, length: int, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": length, "args": {}}


def test_a_trace_is_shared_among_what_its_device_did(tmp_path: Path):
    events = [
        gpu("gemm", 0, 100),
        gpu("ncclDevKernel_AllReduce", 50, 100),
        gpu("Memcpy HtoD", 180, 20, "gpu_memcpy"),
        gpu("gemm", 300, 100),
    ]
    path = write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0)
    timeline = device_timeline(path, 4)
    assert timeline is not None
    assert timeline.shares == {
        "compute": pytest.approx([1, 0, 0, 1]),
        "collective": pytest.approx([0, 0.5, 0, 0]),
        "copy": pytest.approx([0, 0.2, 0, 0]),
        "idle_data": pytest.approx([0, 0, 0, 0]),
        "idle": pytest.approx([0, 0.3, 1, 0]),
    }
    found = file_charts([trace_report(path)])
    assert list(found) == ["timeline-0"]
    (shares,) = columns(found["timeline-0"], "width")
    assert shares["compute"][:10] == pytest.approx([100] * 10)


def placed(view: View | FilesView) -> list[str]:
    parts = (part for section in document_of(view).sections for part in section.parts)
    return [part.id for part in parts if isinstance(part, Place)]


@pytest.mark.slow
def test_every_chart_has_a_place_on_the_page(usual: tuple[Run, dict[str, Chart]]):
    assert {*usual[1]} <= {*placed(run_view(usual[0], run_allocations(usual[0])))}


@pytest.mark.slow
def test_the_chart_of_a_trace_stands_with_its_figures(tmp_path: Path):
    busy = write_trace(tmp_path / "busy.json", [gpu("gemm", 0, 400)], baseTimeNanoseconds=0)
    idle = write_trace(tmp_path / "idle.json", [gpu("gemm", 0, 10), gpu("gemm", 390, 10)], baseTimeNanoseconds=0)
    view = files_view(find_targets([busy, idle]))
    drawn = file_charts(view.traces)
    assert {*drawn} <= {*placed(view)}
    facts = [part for section in document_of(view).sections for part in section.parts if isinstance(part, Facts)]
    for number, name in enumerate(("idle.json", "busy.json")):
        assert cell_text(cast("Cell", facts[number].rows[0][1])).endswith(name)
        assert name in drawn[f"timeline-{number}"].summary


def test_the_memory_chart_says_that_bytes_from_before_the_window_are_unknown():
    drawn = memory_chart(replace(blocks(3), before_bytes=None), "memory", "window 0")
    assert drawn is not None
    assert "bytes allocated before the first event, mostly parameters, are unknown and not drawn" in drawn.summary
    assert "from before" not in json.dumps(document(drawn))


def sample(seconds: int, percent: float) -> str:
    return json.dumps({"time_ns": seconds * 10**9, "machine_cpu_percent": percent}) + "\n"


def machine(tmp_path: Path, of_run: str = "") -> tuple[list[float], list[float]]:
    """What the line of the processors goes through, of two windows that were sampled and three seconds between them."""
    directory = make_run(tmp_path, FakeRun(windows=((2, 3), (10, 11)), memory=None))
    run = load_run(directory)
    for window, first in zip(run.lead.windows, (1, 5), strict=True):
        path = directory / "window" / f"{window.index}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(sample(first, 40) + sample(first + 1, 60))
        run = replace(run, ranks=(replace(run.lead, windows=tuple(
            replace(candidate, series={**candidate.series, "system": path})
            if candidate.index == window.index else candidate
            for candidate in run.lead.windows)),))  # fmt: skip
    if of_run:
        (run.directory / system_name(0)).write_text(of_run)
    chart = system_chart(run)
    assert chart is not None
    (line,) = columns(chart, "y")
    return line["x"], line["y"]


def test_no_line_is_drawn_across_the_time_in_which_the_machine_was_not_sampled(tmp_path: Path):
    x, y = machine(tmp_path)
    assert y == pytest.approx([40, 60, math.nan, 40, 60], nan_ok=True)
    assert x == [0, 1, 4, 4, 5]


def test_a_run_that_was_sampled_all_the_time_has_one_line(tmp_path: Path):
    _, y = machine(tmp_path, "".join(sample(second, 50) for second in range(8)))
    assert not any(map(math.isnan, y))
    assert len(y) == 12


def test_a_trace_of_a_host_has_no_charts(tmp_path: Path):
    path = write_trace(tmp_path / "t.json", [gpu("aten::mm", 0, 5, "cpu_op")], baseTimeNanoseconds=0)
    assert device_timeline(path) is None
    assert file_charts([trace_report(path)]) == {}


def test_texts_of_the_program_in_a_chart_cannot_steer_what_shows_them() -> None:
    chart = holders_chart([((STEERING, "x" * 10_000), 10, 1)], "holders", "the test")
    assert chart is not None
    (data,) = columns(chart, "name")
    assert data["name"][0] == "a\\x1b[31mb\\u202ec\\x07d\\ud800é€😀\\u202e"
    assert len(data["name"][1]) < 1000
    assert "part is a\\x1b[31mb" in chart.summary
    written = json.dumps({STEERING: STEERING + "\n"})
    ((key, text),) = json.loads(inert(written)).items()
    assert key.isprintable()
    assert text == key + "\n"
    assert key.endswith("é€😀\\u202e")


@pytest.mark.slow
def test_charts_are_drawn_from_the_view_and_read_no_manifest_again(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(world_size=2)))
    view = run_view(run)
    for manifest in run.directory.glob("manifest.*"):
        manifest.unlink()
    assert {"steps", "ranks"} <= set(charts(view))
