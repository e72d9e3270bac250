"""What the rules about traces say of a real training's operator trace, by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from faults import Samples, Steady
from lightning_memprof import ExtendedPyTorchProfiler, Schedule
from lightning_memprof.analysis.findings import Finding, Severity, examine_files
from lightning_memprof.analysis.trace_report import trace_report
from training import trainer

STEPS = 6


def found(directory: Path, data: Samples, workers: int = 0) -> dict[str, Finding]:
    """Train, and examine the one trace as a file of any program."""
    profiler = ExtendedPyTorchProfiler(schedule=Schedule(wait=3, warmup=1, active=STEPS))
    batches = DataLoader(data, batch_size=None, num_workers=workers)
    trainer(directory, profiler=profiler).fit(Steady(), batches)
    (path,) = directory.rglob("*.pt.trace.json.gz")
    report = trace_report(path)
    assert len(report.steps) == STEPS
    assert report.gpu_window is None
    return {one.rule: one for one in examine_files([report], [])}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_dataset_is_input_bound_in_the_trace_alone(tmp_path: Path, workers: int) -> None:
    one = found(tmp_path, Samples(11, seconds=0.12), workers)["input_bound_trace"]
    assert one.severity >= Severity.WARNING
    assert one.numbers["steps"] == STEPS
    assert one.numbers["data_loading_share"] > 0.3
    assert one.evidence[0].steps is not None
    assert "num_workers" in one.next_steps[0]


def test_a_fast_dataset_is_not(tmp_path: Path) -> None:
    assert "input_bound_trace" not in found(tmp_path, Samples(12))
