from __future__ import annotations

import math
from typing import Any

import pytest

from drawn import columns
from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.account.ranks.report import RankReport, RankTimes
from lightning_memprof.report.charts.embed import Chart
from lightning_memprof.report.charts.ranks import ranks_chart

MS = 1_000_000
PHASES = {part: phase for phase, part in PHASE_PARTS.items()}


def rank(number: int, step_ms: int, parts_ms: dict[Part, int] | None = None, **measured: Any) -> RankTimes:
    phases = {PHASES[part]: ms * MS for part, ms in (parts_ms or {}).items()}
    return RankTimes(number, "a", 9, step_ms * MS, phases, "pulse", **measured)


def drawn(*ranks: RankTimes) -> Chart:
    chart = ranks_chart(RankReport(ranks, len(ranks), {}, None, None))
    assert chart is not None
    return chart


def test_the_bars_of_a_rank_add_up_to_its_mean_step():
    chart = drawn(rank(0, 10, {Part.FORWARD: 4, Part.BACKWARD: 6}), rank(3, 20, {Part.FORWARD: 4, Part.BACKWARD: 6}))
    (bars,) = columns(chart, "step")
    assert bars["x"] == [0, 3]
    assert bars["step"] == [10, 20]
    assert bars[Part.UNTRACKED] == [0, 10]
    assert bars[Part.FORWARD] == [4, 4]
    assert "10.0 ms on rank 0 to 20.0 ms on rank 3" in chart.summary


def test_a_rank_without_phases_has_a_bar_of_its_whole_step():
    (bars,) = columns(drawn(rank(0, 10), rank(1, 10)), "step")
    assert bars[Part.UNTRACKED] == [10, 10]


def test_the_wait_of_a_rank_that_recorded_none_is_not_drawn():
    (bars,) = columns(drawn(rank(0, 10, wait_ns=3 * MS), rank(1, 10)), "step")
    assert bars["wait"][0] == pytest.approx(3)
    assert math.isnan(bars["wait"][1])


def test_the_peaks_of_memory_stand_below_where_they_were_measured():
    chart = drawn(rank(0, 10, rss_peak_bytes=7), rank(1, 10, rss_peak_bytes=9, device_peak_bytes=5))
    assert [(peaks["x"], peaks["y"]) for peaks in columns(chart, "y")] == [([0, 1], [7, 9]), ([1], [5])]
    assert columns(drawn(rank(0, 10), rank(1, 10)), "y") == []


def test_one_rank_is_compared_with_none():
    assert ranks_chart(RankReport((rank(0, 10),), 1, {}, None, None)) is None
    assert ranks_chart(None) is None
