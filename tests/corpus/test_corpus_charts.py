from __future__ import annotations

from pathlib import Path

import pytest

from corpus_files import SNAPSHOTS, recorded_file, reference_figures
from lightning_memprof.account.memory.blocks import live_by_kind, replayed_blocks
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.account.trace.table import device_timeline
from lightning_memprof.read.snapshot.reader import read_snapshot

pytestmark = pytest.mark.corpus


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name)
def test_the_blocks_of_a_recorded_snapshot_add_up_to_its_peak(path: Path):
    snapshot = read_snapshot(path)
    for device in snapshot.devices:
        ring = replay(snapshot, device)
        _, live = live_by_kind(replayed_blocks(ring))
        assert max(map(sum, zip(*live.values(), strict=True))) == ring.peak_requested_bytes


def test_the_stretches_of_a_recorded_trace_add_up_to_its_reference():
    path = recorded_file("traces/kineto_resnet50_nw0/*.json.gz")
    found = device_timeline(path)
    assert found is not None
    steps = reference_figures("traces")["kineto_resnet50_nw0"]
    known = next(step for step in steps if step["file"] == path.name)
    busy = sum(sum(found.shares[name]) for name in ("compute", "collective", "copy")) * found.stretch_ns
    assert busy == pytest.approx(1000 * known["gpu_window"]["busy_us"], rel=0.001)
