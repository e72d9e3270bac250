"""The report's text has torch's own layout; its rows have the same figures."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed._tools import mem_tracker

from lightning_memprof.capture.tracker.report import Figures, Layout, ModuleFigures, TrackerReport
from lightning_memprof.errors import ConfigError

PEAK = (Figures("cpu", {"Parameter": 3 << 20, "Activation": 1 << 20}, 4 << 20),)
END = (Figures("cpu", {"Parameter": 3 << 20, "Activation": 0}, 3 << 20),)
REPORT = TrackerReport(
    PEAK,
    END,
    (
        ModuleFigures("Net", "", "Pre-Forward", 1, END),
        ModuleFigures("Net.layers.10", "layers.10", "Pre-Forward", 1, PEAK),
        ModuleFigures("Net.layers", "layers", "Pre-Forward", 1, END),
        ModuleFigures("Net.layers", "layers", "Pre-Forward", 2, PEAK),
        ModuleFigures("Net.layers.9", "layers.9", "Pre-Forward", 1, PEAK),
    ),
)


@pytest.fixture(scope="module")
def torchs() -> Iterator[mem_tracker.MemTracker]:
    """torch's own tracker, after a step of a model whose middle module is called twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(value))

    model = nn.Sequential(nn.Linear(4, 4), Twice(), nn.BatchNorm1d(4))
    tracker = mem_tracker.MemTracker()
    tracker.track_external(model)
    with tracker:
        model(torch.ones(3, 4)).sum().backward()
    yield tracker
    del model  # the tracker holds it weakly


def printed(tracker: mem_tracker.MemTracker, depth: int, units: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        tracker.display_snapshot("peak", units=units)
        tracker.display_modulewise_snapshots(depth=depth, units=units)
    return out.getvalue()


def figures(snapshot: dict[torch.device, dict[str, int]]) -> tuple[Figures, ...]:
    found = []
    for device, counts in snapshot.items():
        kinds = {getattr(kind, "value", kind): count for kind, count in counts.items()}
        total = kinds.pop("Total")
        found.append(Figures(str(device), kinds, total))
    return tuple(found)


@pytest.mark.parametrize(("depth", "units"), [(1, "B"), (2, "KiB"), (3, "KiB")])
def test_the_text_is_laid_out_as_torch_prints_it(torchs: mem_tracker.MemTracker, depth: int, units: str) -> None:
    modules = tuple(
        ModuleFigures(stats.mod_fqn, "", state.value, call, figures(snapshot))
        for stats in torchs.memory_tracking.values()
        for state, snapshots in stats.snapshots.items()
        for call, snapshot in enumerate(snapshots, start=1)
    )
    report = TrackerReport(figures(torchs.get_tracker_snapshot("peak")), (), modules)
    text = report.text(Layout(depth=depth, units=units))
    assert text == printed(torchs, depth, units)
    assert ("# 2:" in text) == (depth == 3)


def test_a_table_is_laid_out_as_tabulate_writes_rst() -> None:
    assert REPORT.text(Layout(depth=2, tabulate=True)).splitlines() == [
        "========  ===========  ============  =======",
        "Device    Parameter    Activation    Total",
        "========  ===========  ============  =======",
        "cpu       3.0 MiB      1.0 MiB       4.0 MiB",
        "========  ===========  ============  =======",
        "Module:  Net",
        "===============  ========  ===========  ============  =======",
        "State & Call     Device    Parameter    Activation    Total",
        "===============  ========  ===========  ============  =======",
        "Pre-Forward # 1  cpu       3.0 MiB      0.0 MiB       3.0 MiB",
        "===============  ========  ===========  ============  =======",
        "Module:  Net.layers",
        "===============  ========  ===========  ============  =======",
        "State & Call     Device    Parameter    Activation    Total",
        "===============  ========  ===========  ============  =======",
        "Pre-Forward # 1  cpu       3.0 MiB      0.0 MiB       3.0 MiB",
        "Pre-Forward # 2  cpu       3.0 MiB      1.0 MiB       4.0 MiB",
        "===============  ========  ===========  ============  =======",
    ]


def test_modules_are_sorted_as_people_count_and_cut_at_the_depth() -> None:
    lines = REPORT.text(Layout(depth=3)).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("Module:")] == [
        "Net", "Net.layers", "Net.layers.9", "Net.layers.10",
    ]  # fmt: skip
    assert REPORT.text(Layout(depth=1)).count("Module:") == 1


def test_the_categories_of_a_row_sum_to_its_total() -> None:
    rows = list(REPORT.rows())
    assert [row.kind for row in rows] == ["peak", "end", *["module"] * 5]
    assert (rows[5].module, rows[5].state, rows[5].call, rows[5].device) == ("layers", "pre_forward", 2, "cpu")
    for row in rows:
        assert sum((row.categories or {}).values()) == row.total_bytes


def test_a_device_whose_bytes_round_to_nothing_is_there() -> None:
    small = TrackerReport((Figures("cpu", {"Parameter": 12}, 12),), (), ())
    assert small.text(Layout()) == "Device: cpu\n\tParameter: 0.0 MiB\n\tTotal: 0.0 MiB\n"
    assert "cpu" in small.text(Layout(tabulate=True))


def test_nothing_tracked_is_said() -> None:
    empty = TrackerReport((), (), ())
    assert empty.text(Layout()) == empty.text(Layout(tabulate=True)) == "No memory tracked.\n"
    assert list(empty.rows()) == []


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": True}, {"depth": "2"}, {"units": "MB"}])
def test_a_layout_that_cannot_be_written_is_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Layout(**options)
