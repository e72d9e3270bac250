from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from device_traces import Recording
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule, load_run
from lightning_memprof.capture.base import Collector
from lightning_memprof.collectors import ModuleMemory, OperatorTrace, SavedTensors
from lightning_memprof.read.trace.columns import read_columns
from lightning_memprof.testing.collectors import Lines
from lightning_memprof.testing.figures import Figures, _counts, figures_of
from training import Perceptron, loader, trainer


def recorded(
    directory: Path, model: pl.LightningModule, step: int = 1, collectors: Sequence[Collector] = (), **options: Any
) -> Figures:
    callback = MemProfilerCallback(
        Schedule(steps=(step,), active=1, warmup=0),
        [SavedTensors(), ModuleMemory(), OperatorTrace(), *collectors],
        output=OutputOptions(dirpath=directory, summary=False, report=False, curves=False, on_error="raise"),
    )
    trainer(directory, callback, **options).fit(model, loader())
    return figures_of(load_run(directory))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The mode itself makes autograd detach what it saves, and torch does not record all of that.
        if func.namespace == "aten" and func is not torch.ops.aten.detach.default:
            self.found[func.name().partition(".")[0]] += 1
        return func(*args, **kwargs or {})


class Counting(pl.Callback):
    """Counts the operators of the second batch without this package."""

    def __init__(self) -> None:
        self.mode = Operators()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.mode.__exit__(None, None, None)


@pytest.mark.parametrize(("accumulate", "collectors"), [(1, ()), (2, ()), (1, (Lines(),))])
def test_operators_are_those_that_a_dispatch_mode_counts(tmp_path, accumulate, collectors):
    counting = Counting()
    trainer(tmp_path / "bare", counting, max_epochs=1, accumulate_grad_batches=accumulate).fit(Perceptron(), loader(3))
    figures = recorded(tmp_path / "run", Perceptron(), collectors=collectors, accumulate_grad_batches=accumulate)
    by_operator: Counter[str] = Counter()
    for place, count in figures.parts["operators"].items():
        by_operator[place.partition(" in ")[0]] += count
    del by_operator["aten::detach"]
    assert by_operator == counting.mode.found


class Reading(Perceptron):
    """Reads values on the host, in a submodule and in the step."""

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.sum().item() == x.sum()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.net.append(self.Probe())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) + batch[batch > 0].sum()


def test_reads_of_values_on_a_cpu_count_as_synchronizations_but_not_those_of_the_optimizer(tmp_path):
    assert recorded(tmp_path / "plain", Perceptron(), max_steps=2).values["syncs"] == 0
    reading = recorded(tmp_path / "reading", Reading(), max_steps=2)
    # The comparison of two tensors as a condition is a read, too.
    assert reading.parts["syncs"] == {"aten::_local_scalar_dense in net.4": 2, "aten::nonzero": 1}


def test_kernels_and_synchronizations_of_a_device_are_those_of_its_trace(tmp_path):
    trace = Recording()
    with trace.inside("ProfilerStep#3"):
        trace.launch(40)
        trace.launch(40)
        trace.launch(10, "void add_kernel(float*)")
        trace.synchronize("aten::item")
        trace.synchronize()
    trace.synchronize()  # the profiler's own
    counts = dict(_counts(read_columns(trace.write(tmp_path / "a.pt.trace.json"))))
    assert counts["kernels"] == {"ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn": 2, "add_kernel(float*)": 1}
    assert counts["syncs"] == {"aten::item": 1, "cudaDeviceSynchronize": 1}
    assert counts["collectives"] == {}
    assert "operators" not in counts


def test_bytes_are_those_of_the_last_recorded_step_and_add_up(tmp_path):
    first = recorded(tmp_path / "first", Perceptron(), step=0, max_steps=2)
    later = recorded(tmp_path / "later", Perceptron(), max_steps=2)
    sizes = sum(parameter.nbytes for parameter in Perceptron().parameters())
    # AdamW: two moments, and a step count of 4 bytes for each of 4 parameters; its first step has temporaries in it.
    assert later.values["optimizer_state"] == 2 * sizes + 16 < first.values["optimizer_state"]
    assert later.values["parameters"] == later.values["gradients"] == sizes
    assert later.parts["parameters"] == {"net.0": 576, "net.3": 68}
    for figures in (first, later):
        assert sum(figures.parts["peak"].values()) == figures.values["peak"]
        assert sum(figures.parts["saved_activations"].values()) == figures.values["saved_activations"]
        assert figures.missing["kernels"] == "the training ran without an accelerator"


def test_what_was_not_recorded_has_a_reason(tmp_path):
    callback = MemProfilerCallback(
        Schedule(steps=(0,), active=1, warmup=0),
        [OperatorTrace()],
        output=OutputOptions(dirpath=tmp_path, summary=False, report=False, curves=False),
    )
    trainer(tmp_path, callback, max_steps=1).fit(Perceptron(), loader())
    figures = figures_of(load_run(tmp_path))
    assert set(figures.values) == {"collectives", "syncs"}
    assert figures.missing["operators"] == "the memory tracker did not record the step"
    assert figures.missing["peak"] == figures.missing["saved_activations"] == "not recorded"
