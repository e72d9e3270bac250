"""A real fit on a real device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from lightning_memprof.artifacts.series import PHASES
from recorded_rows import read_pulse
from training import Perceptron, loader, only_run, rows_of, trainer

pytestmark = pytest.mark.gpu


def recorder() -> MemProfilerCallback:
    return MemProfilerCallback(output=OutputOptions(summary=False, on_error="raise"))


def test_by_default_every_collector_is_available_and_nothing_fails(tmp_path: Path) -> None:
    fit = trainer(tmp_path, recorder(), profiler=ExtendedPyTorchProfiler(), accelerator="gpu")
    fit.fit(Perceptron(), loader())
    run = only_run(tmp_path)
    assert rows_of(run, "error") == []
    assert rows_of(run, "unavailable") == []
    listed = {row["collector"] for row in rows_of(run, "artifact")}
    assert {"pulse", "host", "allocator", "hooks", "operator_trace"} <= listed
    if torch.cuda.is_available():
        assert (run / "cuda_alloc_rank_0.training_step.4.end.pickle").is_file()


class Checkpointed(Perceptron):
    """Backward runs the forward of its layers again, until an exception of torch ends that."""

    def loss(self, batch: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().loss, batch, use_reentrant=False)
        return found


def test_a_history_of_the_allocator_does_not_end_a_training_with_checkpointing(tmp_path: Path) -> None:
    fit = trainer(tmp_path, recorder(), accelerator="gpu", precision="bf16-mixed")
    fit.fit(Checkpointed(), loader())
    assert fit.state.status == "finished"
    assert rows_of(only_run(tmp_path), "error") == []


def test_both_clocks_are_in_the_pulse(tmp_path: Path) -> None:
    trainer(tmp_path, recorder(), accelerator="gpu").fit(Perceptron(), loader())
    rows = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")
    read = [row for row in rows if row["device_duration_ns"] is not None]
    assert read
    # The timestamps of two steps are 4 ms apart or more; the last steps may end before the device.
    timed_ns = 0
    for row in rows[:-2]:
        start_ns = row["start_ns"] or 0
        assert row["device_duration_ns"] is not None or start_ns - timed_ns < 5_000_000
        timed_ns = start_ns if row["device_duration_ns"] is not None else timed_ns
    for row in read:
        assert sum(row[f"device_{phase}_ns"] or 0 for phase in PHASES) == row["device_duration_ns"]
    # Memory is read at most every 10 ms: rows in between have no peak.
    peaks = [row["device_peak_bytes"] for row in rows if row["device_peak_bytes"] is not None]
    assert peaks
    assert min(peaks) > 0
