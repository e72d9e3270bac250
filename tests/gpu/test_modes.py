"""Ways of using a GPU: two streams, CUDA graphs, compiled models; and what recording costs there."""

from __future__ import annotations

import gzip
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule, load_run
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from training import Perceptron, loader, only_run, rows_of, trainer

pytestmark = pytest.mark.gpu

WINDOW = Schedule(wait=2, warmup=1, active=2, repeat=1)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    return torch.device("cuda", 0)


class TwoStreams(Perceptron):
    """Half of its work is on a stream of its own."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            scale = (batch @ batch.T).square().mean()
        loss = self.loss(batch)
        torch.cuda.current_stream().wait_stream(aside)
        return loss + 0 * scale


class Compiled(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile()


class Graphed(Perceptron):
    """Its network without dropout is replayed from a CUDA graph."""

    def configure_model(self) -> None:
        self.graphed: Any = None

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.graphed is None:
            plain = nn.Sequential(self.net[0], self.net[1], self.net[3])
            self.graphed = [torch.cuda.make_graphed_callables(plain, (batch.clone(),))]
        return self.graphed[0](batch).square().mean()


def train(model: pl.LightningModule, directory: Path, *, recorded: bool) -> list[torch.Tensor]:
    ours: dict[str, Any] = {"callbacks": []}
    if recorded:
        callback = MemProfilerCallback(WINDOW, output=OutputOptions(summary=False, on_error="raise"))
        ours = {"callbacks": [callback], "profiler": ExtendedPyTorchProfiler()}
    made = trainer(directory, *ours.pop("callbacks"), accelerator="gpu", **ours)
    made.fit(model, loader(8))
    return [value.detach().cpu() for value in model.state_dict().values()]


def events(trace: Path, category: str) -> list[dict[str, Any]]:
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in found if event.get("cat") == category]


@pytest.mark.parametrize("kind", [TwoStreams, Compiled, Graphed])
def test_the_training_is_the_same_and_its_kernels_are_recorded(
    cuda: torch.device, tmp_path: Path, kind: type[Perceptron]
) -> None:
    if kind is Compiled:
        pytest.importorskip("triton", reason="Inductor's kernels need triton")
    bare = train(kind(), tmp_path / "bare", recorded=False)
    ours = train(kind(), tmp_path / "ours", recorded=True)
    assert all(torch.equal(expected, other) for expected, other in zip(bare, ours, strict=True))
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "error") == []
    (trace,) = (tmp_path / "ours").rglob("*.pt.trace.json.gz")
    found = events(trace, "kernel")
    assert found
    if kind is TwoStreams:
        assert len({event["args"]["stream"] for event in found}) >= 2
    if kind is Graphed:
        # A kernel's "graph node id" is in the traces of some versions of torch only; the launch is in all.
        launches = [event for event in events(trace, "runtime") if "GraphLaunch" in event["name"]]
        launched = {event["args"]["correlation"] for event in launches}
        assert any(event["args"]["correlation"] in launched for event in found)
        assert trace_report(trace).program.has_graphs


def test_what_recording_costs_on_the_device_is_said_in_absolute_times(
    cuda: torch.device, tmp_path: Path, record_property: Any
) -> None:
    def step_ms(schedule: Schedule | None) -> float:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(50)))
        seconds: list[float] = []

        class Timed(Perceptron):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 512), model, nn.Linear(512, 1))

            def on_train_batch_start(self, *_: Any) -> None:
                torch.cuda.synchronize()
                seconds.append(time.perf_counter())

        callbacks = [] if schedule is None else [MemProfilerCallback(schedule, output=OutputOptions(summary=False))]
        fit = trainer(tmp_path / str(len(list(tmp_path.iterdir()))), *callbacks, accelerator="gpu")
        fit.fit(Timed(), loader(60))
        steps = sorted(after - before for before, after in pairwise(seconds[10:]))
        return 1000 * steps[len(steps) // 2]

    bare = step_ms(None)
    waiting = step_ms(Schedule(wait=1_000_000))
    active = step_ms(Schedule(wait=9, warmup=1, active=45, repeat=1))
    for name, value in (("bare", bare), ("waiting", waiting), ("active", active)):
        record_property(f"{name}_step_ms", f"{value:.2f}")
    # Durations depend on what else the machine does: they are printed, not judged.
    windows = [len(load_run(only_run(tmp_path / number)).lead.windows) for number in ("1", "2")]
    assert windows == [0, 1]


def test_the_allocators_history_is_off_after_a_fit(cuda: torch.device, tmp_path: Path) -> None:
    callback = MemProfilerCallback(WINDOW, [AllocatorHistory()], output=OutputOptions(summary=False, on_error="raise"))
    trainer(tmp_path, callback, accelerator="gpu").fit(Perceptron(), loader(8))
    torch.empty(1 << 20, device=cuda)
    assert not any(torch.cuda.memory._snapshot(cuda)["device_traces"])
