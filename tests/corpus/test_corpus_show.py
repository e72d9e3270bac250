"""`show` on the files of the corpus says what the references say."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from corpus_files import recorded_file, reference_figures
from lightning_memprof.cli.main import main

pytestmark = pytest.mark.corpus

NAMES = {
    "window_ns": "window_us",
    "busy_ns": "busy_us",
    "idle_ns": "idle_us",
    "compute_ns": "compute_us",
    "communication_ns": "comm_us",
    "memory_copy_ns": "mem_us",
    "communication_overlapped_ns": "comm_overlapped_us",
    "communication_exposed_ns": "comm_exposed_us",
}
IN_STEPS = {**NAMES, "data_loading_ns": "dataloader_us", "mean_step_ns": "mean_step_us"}
# Its times since 1970 have digits that the references, made of doubles, lack.
DOUBLES_LOSE = "hta_ns_resolution"
# The references count a last step in which nothing is computed, and 13 s of a step behind the recording.
CUT_STEPS = {"hta_amd_mi250", "hta_triton"}
SIZES = {
    "reserved_bytes": "reserved",
    "allocated_bytes": "allocated",
    "requested_bytes": "requested_live",
    "inactive_bytes": "inactive",
    "peak_requested_bytes": "peak_requested_in_ring",
    "peak_reserved_bytes": "peak_reserved_in_ring",
    "events": "n_events",
}


@pytest.fixture(scope="module")
def corpus() -> Path:
    """Where the corpus is."""
    return recorded_file("references").parent


@pytest.fixture(scope="module")
def shown(corpus: Path) -> dict[str, dict[str, Any]]:
    """What `show --format json` says of the traces and of the snapshots, by the files' names."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert main(["show", str(corpus / "traces"), str(corpus / "snapshots"), "--format", "json"]) == 0
    document = json.loads(written.getvalue())
    assert document["problems"] == []
    return {
        "traces": {trace["file"].removeprefix(f"{corpus / 'traces'}/"): trace for trace in document["traces"]},
        "snapshots": {
            snapshot["file"].removeprefix(f"{corpus / 'snapshots'}/"): snapshot for snapshot in document["snapshots"]
        },
    }


def test_every_trace_agrees_with_its_reference(shown: dict[str, dict[str, Any]]) -> None:
    seen = 0
    for folder, traces in reference_figures("traces").items():
        for reference in traces:
            found = shown["traces"][f"{folder}/{reference['file']}"]
            for name, fields in (("gpu_window", NAMES), ("step_window", IN_STEPS)):
                expected = reference[name]
                if expected is None:
                    assert found[name] is None
                    assert found["missing"]
                    continue
                if name == "step_window" and folder in CUT_STEPS:
                    continue
                figures = {key: found[name][key] for key in fields}
                wanted = {key: expected[field] * 1000 for key, field in fields.items()}
                assert figures == pytest.approx(wanted, rel=5e-3 if folder == DOUBLES_LOSE else 1e-3, abs=1)
                seen += 1
    assert seen > 15


def test_every_snapshot_agrees_with_its_reference_to_the_byte(shown: dict[str, dict[str, Any]]) -> None:
    for file, reference in reference_figures("snapshots").items():
        devices = {str(device["device"]): device for device in shown["snapshots"][file]["devices"]}
        for device, expected in reference["devices"].items():
            found = devices[device]
            known = {key: expected[name] for key, name in SIZES.items() if name in expected}
            assert {key: found[key] for key in known} == known
            held = sum(holder["bytes"] for holder in found["holders_at_peak"]) + found["other_holders_bytes"]
            assert held == found["peak_requested_bytes"]


@pytest.mark.parametrize(("folder", "is_bound"), [("kineto_resnet50_nw0", True), ("hta_ns_resolution", False)])
def test_the_verdict_is_input_bound_where_it_is(
    folder: str, is_bound: bool, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(corpus / "traces" / folder)]) == 0
    page = capsys.readouterr().out
    verdict = " ".join(page.split("why")[0].split())
    assert ("waits for data 33% of each step" in verdict) == is_bound
    assert ("(input_bound)" in page) == is_bound
