from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corpus_files import SNAPSHOTS, TRACES, reference_figures
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import free_ranges
from lightning_memprof.account.snapshot.report import DeviceReport, snapshot_report
from lightning_memprof.judge import Severity, examine_files

pytestmark = pytest.mark.corpus


@pytest.fixture(params=SNAPSHOTS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(params=TRACES, ids=lambda path: path.parent.name)
def trace(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def figures(device: DeviceReport) -> dict[str, Any]:
    """Everything that the references may say of a device."""
    found = device.snapshot
    return {
        "segments": len(found.segments),
        "reserved": found.reserved_bytes,
        "allocated": found.allocated_bytes,
        "pending_free": found.pending_bytes,
        "inactive": found.inactive_bytes,
        "requested_live": found.requested_bytes,
        "fully_free_bytes": found.free_segment_bytes,
        "n_events": device.events,
        "actions": Counter(event.action for event in found.events),
        "requested_at_ring_start": device.live_at(-1).requested_bytes,
        "peak_requested_in_ring": device.peak_requested_bytes,
        "peak_reserved_in_ring": device.peak_reserved_bytes,
        "allocated_in_ring_still_live": sum(life.born >= 0 and life.died == device.events for life in device.lives),
    }


def test_every_recorded_snapshot_has_the_figures_of_the_references_to_the_byte_and_says_what_is_missing(path):
    expected = reference_figures("snapshots")[f"{path.parent.name}/{path.name}"]
    report = snapshot_report(path)
    assert (report.form, report.oom is None) == (expected["form"], expected["at_oom"] is None)
    assert [str(device.device) for device in report.devices] == list(expected["devices"])
    for device, wanted in zip(report.devices, expected["devices"].values(), strict=True):
        found = figures(device)
        assert {name: found[name] for name in wanted} == wanted
        assert sum(line.bytes for line in device.lines_at_peak) == device.peak_requested_bytes
        assert not device.has_times or device.events
        at_end = sum(piece.size for piece in free_ranges(device, device.events - 1))
        assert at_end == device.snapshot.inactive_bytes
        assert any("no events" in said for said in report.missing) == (not device.events)
        assert any("already live" in said for said in report.missing) == bool(
            device.events and device.live_at(-1).requested_bytes
        )


def test_every_recorded_trace_says_what_it_knows_of_memory(trace):
    for device in window_allocations(trace):
        held = sum(site.bytes for site in device.sites) + device.unattributed_bytes
        assert held == device.peak_bytes + device.freed_outside_bytes > 0
        assert 0 < len(device.curve) <= 400
        assert max(live for _, live in device.curve) == device.peak_bytes


def test_no_recorded_snapshot_has_a_fault(path):
    assert all(finding.severity <= Severity.INFO for finding in examine_files((), [snapshot_report(path)]))
