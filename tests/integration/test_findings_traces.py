"""Findings of the operator trace of a real training."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader

from faults import Samples, Steady
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.collectors import Pulse
from lightning_memprof.judge import Finding, Severity, examine_files
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
    return {finding.rule: finding for finding in examine_files([report], [])}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_dataset_is_input_bound_in_the_trace_alone(tmp_path: Path, workers: int) -> None:
    finding = found(tmp_path, Samples(11, seconds=0.12), workers)["input_bound"]
    assert finding.severity >= Severity.WARNING
    assert finding.numbers["steps"] == STEPS
    assert finding.numbers["share"] > 0.3
    assert finding.evidence[0].steps is not None
    assert "num_workers" in finding.next_steps[0]


def test_a_fast_dataset_is_not(tmp_path: Path) -> None:
    assert "input_bound" not in found(tmp_path, Samples(12))


class Sums(Steady):
    """Adds a parameter 1,500 times."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def sums(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(1_500):
            batch = batch + self.weight
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.sums(batch), batch_idx)


class SumsAtOnce(Sums):
    def sums(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.weight.expand(1_500, 8).sum(0)


def recorded(directory: Path, model: pl.LightningModule) -> TraceReport:
    """Train, and return the report of the one trace."""
    ours = MemProfilerCallback(
        schedule=Schedule(wait=3, warmup=1, active=STEPS), collectors=[Pulse()], output=OutputOptions(summary=False)
    )
    trainer(directory, ours, profiler=ExtendedPyTorchProfiler()).fit(model, DataLoader(Samples(11), batch_size=None))
    (path,) = directory.rglob("*.pt.trace.json.gz")
    return trace_report(path)


def test_a_forward_of_many_tiny_operators_is_launch_bound_on_the_host(tmp_path: Path) -> None:
    report = recorded(tmp_path, Sums())
    operators = report.host_operators
    assert operators is not None
    assert operators.steps == STEPS
    # Each addition, and the calls in backward that accumulate the parameter's gradient.
    assert operators.operators > 4 * 1_500
    assert {name for name, _ in operators.names[:2]} == {"aten::add", "AddBackward0"}
    assert {place.rpartition(".")[2] for place, _ in operators.places[:2]} == {"training_step", "backward"}
    # The machine decides how long an operator and its recording take: the finding is tested at 10 µs per operator.
    count = operators.operators
    timed = replace(
        operators, median_ns=4_000, small_ns=count * 7_000, between_ns=count * 2_000, step_ns=count * 10_000,
        events=count * 2,
    )  # fmt: skip
    findings = {finding.rule: finding for finding in examine_files([replace(report, host_operators=timed)], [])}
    finding = findings["many_small_operators"]
    assert finding.severity >= Severity.WARNING
    assert finding.numbers["operators"] == count
    assert "torch.compile" in finding.next_steps[0]


@pytest.mark.parametrize("model", [SumsAtOnce, Steady])
def test_the_same_in_one_operator_is_not(model: type[Steady], tmp_path: Path) -> None:
    report = recorded(tmp_path, model())
    assert report.host_operators is not None
    assert "many_small_operators" not in {finding.rule for finding in examine_files([report], [])}
