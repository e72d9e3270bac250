from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from corpus_files import SNAPSHOTS, recorded_file
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.account.trace.lanes import read_lanes
from lightning_memprof.compare.comparison import compare
from lightning_memprof.compare.model import Side
from lightning_memprof.compare.sides import snapshots_side, traces_side
from lightning_memprof.read.snapshot.reader import load_snapshot, read_snapshot
from lightning_memprof.report.export.memory_viz import viewable, write_snapshot
from lightning_memprof.report.export.stacks import Speedscope
from speedscope import validate

pytestmark = pytest.mark.corpus

# To replay the larger ones twice takes seconds and shows nothing new.
SMALL = [path for path in SNAPSHOTS if path.stat().st_size < 50_000]
# One of each kind of device, and one without: small ones, since every event is checked.
DEVICES = ("kineto_resnet50_nw0", "hta_cpu_only_gloo", "hta_amd_mi250")


@pytest.fixture(params=DEVICES)
def trace(request: pytest.FixtureRequest) -> Path:
    return recorded_file(f"traces/{request.param}/*.json.gz")


@pytest.mark.parametrize("dumped", SMALL, ids=lambda path: path.name)
def test_a_snapshot_that_is_exported_says_the_same(dumped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pickle"
    with out.open("wb") as stream:
        write_snapshot(viewable(load_snapshot(dumped), "x"), stream)
    before, after = read_snapshot(dumped), read_snapshot(out)
    assert before.devices.keys() == after.devices.keys()
    for device in before.devices:
        ours, theirs = replay(before, device), replay(after, device)
        assert ours.peak_requested_bytes == theirs.peak_requested_bytes
        assert ours.live_at(ours.events - 1) == theirs.live_at(theirs.events - 1)


def test_a_trace_is_a_file_that_speedscope_s_format_allows(trace: Path) -> None:
    lanes = read_lanes(trace)
    scope = Speedscope("x", "lightning-memprof")
    scope.add_lanes("", lanes)
    out = io.StringIO()
    scope.write(out)
    document = json.loads(out.getvalue())
    validate(document)
    assert sum(len(profile["events"]) for profile in document["profiles"]) == 2 * sum(
        len(lane.starts) for lane in lanes.lanes
    )


@pytest.mark.parametrize(
    ("read", "one", "other"),
    [
        (traces_side, "traces/hta_amd_mi250/*.gz", "traces/hta_cpu_only_gloo/*.gz"),
        (snapshots_side, "snapshots/snap_cs336_silmont/*.gz", "snapshots/snap_verl/*.gz"),
    ],
)
def test_a_file_does_not_differ_from_itself_and_does_from_another(
    read: Callable[[Sequence[Path], str], Side], one: str, other: str
) -> None:
    side = read([recorded_file(one)], "x")
    assert compare(side, side).is_same
    assert not compare(side, read([recorded_file(other)], "y")).is_same
