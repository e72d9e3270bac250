from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from lightning_memprof.analysis.compare.comparison import compare
from lightning_memprof.analysis.compare.sides import snapshots_side, traces_side
from lightning_memprof.analysis.snapshot.reader import load_snapshot, read_snapshot
from lightning_memprof.analysis.snapshot.replay import replay
from lightning_memprof.analysis.trace.threads import read_lanes
from lightning_memprof.report.export.memory_viz import viewable, write_snapshot
from lightning_memprof.report.export.stacks import Speedscope
from speedscope import validate

pytestmark = pytest.mark.corpus

ROOT = Path(os.environ.get("MEMPROF_CORPUS") or Path(__file__).parents[2].parent / "shared" / "corpus")
# To replay the larger ones twice takes seconds and shows nothing new.
SNAPSHOTS: list[Path | None] = [
    path for path in sorted((ROOT / "snapshots").glob("*/*.pickle.gz")) if path.stat().st_size < 50_000
]
# One of each kind of device, and one without: small ones, since every event is checked.
TRACES = ("kineto_resnet50_nw0", "hta_cpu_only_gloo", "hta_amd_mi250")
SMALL = [*(ROOT / "snapshots").glob("snap_verl/*.gz")]


@pytest.fixture(params=SNAPSHOTS or [None], ids=lambda path: path.name if path else "none")
def dumped(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip(f"no recorded snapshots in {ROOT}; set MEMPROF_CORPUS to where they are")
    found: Path = request.param
    return found


@pytest.fixture(params=TRACES)
def trace(request: pytest.FixtureRequest) -> Path:
    found = sorted((ROOT / "traces" / request.param).glob("*.json.gz"))
    if not found:
        pytest.skip(f"no {request.param} in {ROOT}; set MEMPROF_CORPUS to where it is")
    return found[0]


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
        len(lane.start) for lane in lanes.lanes
    )


@pytest.mark.parametrize("name", ["traces/hta_amd_mi250", "snapshots/snap_cs336_silmont"])
def test_a_file_does_not_differ_from_itself_and_does_from_another(name: str) -> None:
    found = sorted((ROOT / name).glob("*.gz"))
    others = sorted((ROOT / name).parent.glob("hta_cpu_only_gloo/*.gz") if "traces" in name else SMALL)
    if not found or not others:
        pytest.skip(f"no {name} in {ROOT}; set MEMPROF_CORPUS to where it is")
    read = traces_side if "traces" in name else snapshots_side
    side = read(found[:1], "x")
    assert compare(side, side).is_same
    assert not compare(side, read(others[:1], "y")).is_same
