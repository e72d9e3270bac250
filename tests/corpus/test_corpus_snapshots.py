from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corpus_files import SNAPSHOTS, TRACES, reference_figures
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import Replay, free_ranges, replay
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.judge import Severity, examine_files
from lightning_memprof.read.snapshot.reader import DeviceSnapshot, read_snapshot

pytestmark = pytest.mark.corpus


@pytest.fixture(params=SNAPSHOTS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(params=TRACES, ids=lambda path: path.parent.name)
def trace(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def figures(device: DeviceSnapshot, ring: Replay) -> dict[str, Any]:
    """Everything that the references may say of a device."""
    return {
        "segments": len(device.segments),
        "reserved": device.reserved_bytes,
        "allocated": device.allocated_bytes,
        "pending_free": device.pending_bytes,
        "inactive": device.inactive_bytes,
        "requested_live": device.requested_bytes,
        "fully_free_bytes": device.free_segment_bytes,
        "n_events": len(device.events),
        "actions": Counter(event.action for event in device.events),
        "requested_at_ring_start": ring.live_at(-1).requested_bytes,
        "peak_requested_in_ring": ring.peak_requested_bytes,
        "peak_reserved_in_ring": ring.peak_reserved_bytes,
        "allocated_in_ring_still_live": sum(life.born >= 0 and life.died == ring.events for life in ring.lives),
    }


def test_every_recorded_snapshot_has_the_figures_of_the_references_to_the_byte(path):
    expected = reference_figures("snapshots")[f"{path.parent.name}/{path.name}"]
    snapshot = read_snapshot(path)
    assert snapshot.form == expected["form"]
    assert [str(device) for device in snapshot.devices] == list(expected["devices"])
    for number, wanted in expected["devices"].items():
        device = snapshot.devices[int(number)]
        found = figures(device, replay(snapshot, int(number)))
        assert {name: found[name] for name in wanted} == wanted


def test_the_holders_of_every_recorded_snapshot_add_up_at_every_moment(path):
    snapshot = read_snapshot(path)
    for device in snapshot.devices:
        found = replay(snapshot, device)
        assert sum(holder.bytes for holder in found.holders_at_peak) == found.peak_requested_bytes > 0
        assert sum(1 for holder in found.holders_at_peak if not holder.site) <= 1
        for event in range(-1, found.events, max(1, found.events // 7)):
            live = found.live_at(event)
            assert sum(holder.bytes for holder in found.holders_at(event)) == live.requested_bytes
            assert live.requested_bytes <= live.reserved_bytes
        parts = found.snapshot
        assert parts.reserved_bytes == (
            parts.allocated_bytes + parts.pending_bytes + parts.inactive_split_bytes + parts.free_segment_bytes
        )


def test_every_recorded_trace_says_what_it_knows_of_memory(trace):
    for device in window_allocations(trace):
        held = sum(site.bytes for site in device.sites) + device.unattributed_bytes
        assert held == device.peak_bytes + device.freed_outside_bytes > 0
        assert 0 < len(device.curve) <= 400
        assert max(live for _, live in device.curve) == device.peak_bytes


def test_the_report_of_every_recorded_snapshot_has_the_references_figures_and_says_what_is_missing(path):
    expected = reference_figures("snapshots")[f"{path.parent.name}/{path.name}"]
    report = snapshot_report(path)
    assert (report.form, report.oom is None) == (expected["form"], expected["at_oom"] is None)
    for device, wanted in zip(report.devices, expected["devices"].values(), strict=True):
        found = {
            "segments": len(device.snapshot.segments),
            "n_events": device.events,
            "reserved": device.snapshot.reserved_bytes,
            "allocated": device.snapshot.allocated_bytes,
            "requested_live": device.snapshot.requested_bytes,
            "pending_free": device.snapshot.pending_bytes,
            "inactive": device.snapshot.inactive_bytes,
            "requested_at_ring_start": device.live_at(-1).requested_bytes,
            "peak_requested_in_ring": device.peak_requested_bytes,
            "peak_reserved_in_ring": device.peak_reserved_bytes,
        }
        assert {**found, **wanted} == {**wanted, **found}
        assert sum(line.bytes for line in device.lines_at_peak) == device.peak_requested_bytes
        assert sum(aged.holder.bytes for aged in device.oldest) == device.live_at(device.events - 1).requested_bytes
        assert sum(pool.reserved_bytes for pool in device.pools) == device.snapshot.reserved_bytes
        assert not device.has_times or device.events
        at_end = sum(piece.size for piece in free_ranges(device, device.events - 1))
        assert at_end == device.snapshot.inactive_bytes
        assert any("no events" in said for said in report.missing) == (not device.events)
        assert any("already live" in said for said in report.missing) == bool(
            device.events and device.live_at(-1).requested_bytes
        )


def test_no_recorded_snapshot_has_a_fault(path):
    assert all(finding.severity <= Severity.INFO for finding in examine_files((), [snapshot_report(path)]))
