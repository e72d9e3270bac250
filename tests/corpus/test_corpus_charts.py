from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_memprof.analysis.memory.block_lives import live_by_kind, lives_of_replay
from lightning_memprof.analysis.snapshot.reader import read_snapshot
from lightning_memprof.analysis.snapshot.replay import replay
from lightning_memprof.analysis.trace.device import device_timeline

pytestmark = pytest.mark.corpus

ROOT = Path(os.environ.get("MEMPROF_CORPUS") or Path(__file__).parents[2].parent / "shared" / "corpus")
SNAPSHOTS: list[Path | None] = [*sorted((ROOT / "snapshots").glob("*/*.pickle.gz"))]


@pytest.mark.parametrize("path", SNAPSHOTS or [None], ids=lambda path: path.name if path else "none")
def test_the_blocks_of_a_recorded_snapshot_add_up_to_its_peak(path: Path | None):
    if path is None:
        pytest.skip(f"no recorded snapshots in {ROOT}; set MEMPROF_CORPUS to where they are")
    snapshot = read_snapshot(path)
    for device in snapshot.devices:
        ring = replay(snapshot, device)
        _, live = live_by_kind(lives_of_replay(ring))
        assert max(map(sum, zip(*live.values(), strict=True))) == ring.peak_requested_bytes


def test_the_stretches_of_a_recorded_trace_add_up_to_its_reference():
    paths = sorted((ROOT / "traces" / "kineto_resnet50_nw0").glob("*.json.gz"))
    if not paths:
        pytest.skip(f"no recorded traces in {ROOT}; set MEMPROF_CORPUS to where they are")
    found = device_timeline(paths[0])
    assert found is not None
    references = json.loads((ROOT / "references" / "traces.json").read_text())
    known = next(step for step in references["kineto_resnet50_nw0"] if step["file"] == paths[0].name)
    busy = sum(sum(found.shares[name]) for name in ("compute", "communication", "memory_copy")) * found.stretch_ns
    assert busy == pytest.approx(1000 * known["gpu_window"]["busy_us"], rel=0.001)
