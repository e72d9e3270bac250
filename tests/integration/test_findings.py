"""From a training to its findings: healthy trainings, and few faults.

What each rule concludes is tested from rows in tests/unit/judge and from recordings in tests/golden/runs.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from free_cores import with_free_cores
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.collectors import Holders, HookTimings, Pulse
from lightning_memprof.judge import Finding, Severity, examine_files, facts
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.view import run_view
from lightning_memprof.schedule import Window
from lightning_memprof.units import MIB
from training import Perceptron, only_run, trainer

Found = dict[str, Finding]


@pytest.fixture(autouse=True, scope="module")
def free_cores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "run_ledger", with_free_cores)
        yield


class Samples(Dataset[torch.Tensor]):
    """Batches of ones; each takes ``seconds`` to load."""

    def __init__(self, count: int, *, width: int = 8, seconds: float = 0.0) -> None:
        self._batches = torch.ones(4, width)
        self._count = count
        self._seconds = seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        # A sleep of no time gives the core away, and the wait for it would be one for data.
        if self._seconds:
            time.sleep(self._seconds)
        return self._batches


class Steady(pl.LightningModule):
    """A step of 15 ms, however busy the machine is: most of its forward is a sleep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.015)
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        time.sleep(0.015)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def found_in(
    directory: Path,
    model: pl.LightningModule | None = None,
    data: int | Dataset[torch.Tensor] = 24,
    *callbacks: pl.Callback,
    schedule: Schedule | None = None,
    collectors: list[Any] | None = None,
    is_validated: bool = False,
    **options: Any,
) -> Found:
    """Train, and return what the run directory shows, by rule, the verdict's first."""
    ours = MemProfilerCallback(
        schedule=schedule or Schedule(wait=7, warmup=1, active=2), collectors=collectors,
        output=OutputOptions(summary=False),
    )  # fmt: skip
    loader = DataLoader(Samples(data) if isinstance(data, int) else data, batch_size=None)
    validation = DataLoader(Samples(1), batch_size=None) if is_validated else None
    trainer(directory, ours, *callbacks, **options).fit(model or Steady(), loader, validation)
    run = load_run(only_run(directory))
    view = run_view(run, run_allocations(run))
    assert not view.run.errors
    return {finding.rule: finding for finding in view.findings}


def faults(found: Found) -> set[str]:
    """Rules of the findings above info, but for the sleep that is a step's work."""
    work = ("hot_line", "Steady.training_step")
    return {rule for rule, each in found.items() if each.severity > Severity.INFO and (rule, each.owner) != work}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_in(tmp_path_factory.mktemp("healthy"), is_validated=True)


def test_a_healthy_training_has_nothing_above_info(healthy: Found) -> None:
    assert not faults(healthy)
    assert (next(iter(healthy)) == "nothing_found") == all(each.severity is Severity.INFO for each in healthy.values())


class Wide(Steady):
    """Real work: no sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch.repeat(256, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


class Tiny(Perceptron):
    """Its optimizer takes little of a step of a millisecond."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, fused=True)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(lambda place: found_in(place, Wide(), Samples(24, width=256)), id="real work"),
        pytest.param(lambda place: found_in(place, Tiny(), 40), id="tiny steps"),
        pytest.param(lambda place: found_in(place, data=6), id="few steps"),
        pytest.param(lambda place: found_in(place, accumulate_grad_batches=4), id="accumulation"),
        pytest.param(
            lambda place: found_in(place, None, 60, ModelCheckpoint(), max_epochs=2, enable_checkpointing=True),
            id="epochs",
        ),
    ],
)
def test_other_healthy_trainings_have_nothing_above_info(train: Callable[[Path], Found], tmp_path: Path) -> None:
    assert not faults(train(tmp_path))


def test_a_slow_dataset_is_input_bound_in_the_run_and_in_its_trace_alone(tmp_path: Path) -> None:
    finding = found_in(tmp_path, data=Samples(24, seconds=0.03), profiler=ExtendedPyTorchProfiler())["input_bound"]
    assert finding.severity is Severity.CRITICAL
    assert finding.numbers["data_wait_share"] > 0.4
    pulse, hooks = finding.evidence[:2]
    assert (pulse.artifact, pulse.steps) == ("memprofiler/pulse.rank00000.csv", (0, 23))
    assert (hooks.window, hooks.steps) == (0, (8, 9))
    assert pulse.start_ns is not None
    assert hooks.start_ns is not None
    assert hooks.end_ns is not None
    assert pulse.start_ns < hooks.start_ns < hooks.end_ns
    (trace,) = tmp_path.rglob("*.pt.trace.json.gz")
    found = {each.rule: each for each in examine_files([trace_report(trace)], [])}
    assert found["input_bound"].severity >= Severity.WARNING
    assert found["input_bound"].numbers["steps"] == 2


class Keeping(Steady):
    """Keeps 4 MiB of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.kept.append(torch.ones(1024, 1024) + batch.sum())
        return super().training_step(batch, batch_idx) + 0 * self.kept[-1][0, 0]


def test_a_list_that_keeps_tensors_is_found_and_who_made_them(tmp_path: Path, healthy: Found) -> None:
    # What earlier tests of this process used new tensors would take; and its peak is forgotten.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if (marks := Path("/proc/self/clear_refs")).exists():
        marks.write_text("5", encoding="ascii")
    collectors = ["default", Holders(seconds=60)]
    schedule = Schedule(wait=20, active=3)
    finding = found_in(tmp_path, Keeping(), 60, schedule=schedule, collectors=collectors)["memory_growth"]
    # What the C allocator gives back late comes on top.
    assert 3 * MIB < finding.numbers["bytes_per_step"] < 9 * MIB
    (survivor, *_) = finding.numbers["survivors"]
    assert survivor["operator"] in ("add", "ones", "fill_", "aten::add")
    assert survivor["bytes"] >= 4 * MIB
    # Lightning's steps vary in length: growth is seen when it is large enough, at the latest at the end.
    assert finding.numbers["holder"]["place"] == "Keeping.kept[...]"
    assert finding.numbers["holder"]["line"].startswith("integration/test_findings.py:")
    assert "memory_growth" not in healthy


class Dear(Collector):
    """Takes two milliseconds at every mark."""

    name = "dear"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        yield lambda _mark: time.sleep(0.002)


def test_the_cost_of_recording_every_step_is_profiler_overhead(tmp_path: Path, healthy: Found) -> None:
    schedule = Schedule(wait=0, warmup=0, active=16)
    found = found_in(tmp_path, None, 16, schedule=schedule, collectors=[Pulse(), HookTimings(), Dear()])
    finding = found["profiler_overhead"]
    assert finding.severity > Severity.INFO
    assert finding.numbers["share"] > 0.2
    assert "dear takes the most" in finding.why
    # The marks lie between the phases, and nobody is told to log less for them.
    assert "between_steps" not in found
    assert healthy.get("profiler_overhead") is None or healthy["profiler_overhead"].severity is Severity.INFO
