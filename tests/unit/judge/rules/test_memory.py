from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB

FAKE = FakeRun(device_bytes=lambda _step: 70 * GIB, windows=((2, 3), (12, 13)), world_size=2)


def found(tmp_path: Path, retries: dict[int, list[int]]) -> Finding | None:
    """Return the finding of a run in whose windows, by index, rank 1 had these counts one after the other."""
    directory = make_run(tmp_path, FAKE)
    for window, counts in retries.items():
        path = directory / f"window{window:03d}" / "rank00001.allocator.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for place, row in enumerate(rows):
            row["num_alloc_retries"] = counts[min(place, len(counts) - 1)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    findings = examine(Facts.of(load_run(directory)))
    return next((finding for finding in findings if finding.rule == "allocator_retries"), None)


def test_a_device_with_memory_to_spare_is_silent(tmp_path: Path) -> None:
    assert found(tmp_path, {}) is None


def test_retries_in_recorded_steps_say_that_memory_is_nearly_full(tmp_path: Path) -> None:
    finding = found(tmp_path, {1: [1, 1, 2, 3]})
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.title == ("cuda:0 of rank 1 is nearly full: the allocator emptied its cache 2 times in 3 steps.")
    assert "70.1 GiB reserved" in finding.why
    assert finding.numbers["retries_in_all"] == 3
    assert (finding.evidence[0].artifact, finding.evidence[0].window) == (
        "memprofiler/window001/rank00001.allocator.jsonl",
        1,
    )
    assert "expandable_segments" in finding.next_steps[1]


def test_a_retry_in_each_step_is_critical(tmp_path: Path) -> None:
    finding = found(tmp_path, {0: [0, 2, 5, 9]})
    assert finding is not None
    assert finding.severity is Severity.CRITICAL


def test_retries_before_the_recorded_steps_are_info(tmp_path: Path) -> None:
    finding = found(tmp_path, {0: [4], 1: [4]})
    assert finding is not None
    assert finding.severity is Severity.INFO
    assert "was full 4 times before the recorded steps" in finding.title


def test_damaged_rows_are_no_retries(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FAKE)
    path = directory / "window000" / "rank00000.allocator.jsonl"
    path.write_text('{"num_alloc_retries": "many"}\nnot json\n{"num_alloc_retries": 3}\n')
    assert not [finding for finding in examine(Facts.of(load_run(directory))) if finding.rule == "allocator_retries"]


@pytest.mark.parametrize(
    ("size", "dtype", "device", "first"),
    [
        (512 * MIB, "float32", False, "smaller_dtype"),
        (512 * MIB, "float32", True, "smaller_dtype"),
        (512 * MIB, "uint8", False, "map_file"),
        (100 * MIB, "float32", False, None),
        (0, None, False, None),
    ],
)
def test_a_data_set_of_a_quarter_of_the_memory_is_a_note(
    tmp_path: Path, size: int, dtype: str | None, device: bool, first: str | None
) -> None:
    loader = {"num_workers": 0, "data_bytes": size, "data_largest": dtype and "Clips.clips", "data_dtype": dtype}
    fake = FakeRun(
        rss_bytes=lambda _: GIB,
        device_bytes=(lambda _: GIB) if device else None,
        memory=FakeMemory(kept_bytes=MIB),
        training={"dataloaders": [loader]},
    )
    facts = Facts.of(load_run(make_run(tmp_path, fake)))
    finding = next((finding for finding in examine(facts) if finding.rule == "data_memory"), None)
    assert (finding is not None) == (first is not None)
    if finding is not None and first is not None:
        assert finding.severity is Severity.INFO
        assert (finding.numbers["bytes"], finding.numbers["owner"]) == (512 * MIB, "Clips.clips")
        assert finding.remedies[0].id == first
        assert finding.recovers is not None
        assert (finding.recovers.min, finding.recovers.max) == (256 * MIB, 512 * MIB)
