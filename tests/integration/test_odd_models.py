"""Models that few people train, and programs that use torch's own hooks and modes: unchanged, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from lightning_memprof import Collector, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import FunctionMemory, ModuleMemory, SavedTensors
from models import Mlp, TracedModel, fit
from training import only_run, rows_of

WINDOWS = Schedule(wait=1, warmup=1, active=2, repeat=1)


class LateLazy(TracedModel):
    """Its lazy part is called in no step but the last ones."""

    def build(self) -> None:
        self.first = nn.Linear(8, 8)
        self.lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU())

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        value = self.first(batch)
        return (self.lazy(value) if self.global_step > 2 else value).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


class SparseGradients(TracedModel):
    def build(self) -> None:
        self.embedding = nn.Embedding(32, 8, sparse=True)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.embedding((batch.abs() * 10).long() % 32).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.extend(parameter.grad.to_dense() for parameter in self.parameters() if parameter.grad is not None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), 1e-2)


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 64).reshape(8, 8))

    def forward(self, edges: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(edges, self.weight)


class SparseInputs(Mlp):
    """A module's only argument is a sparse tensor, and a buffer is one, as in networks on graphs."""

    def build(self) -> None:
        super().build()
        self.convolution = GraphConvolution()
        self.edges: torch.Tensor
        self.register_buffer("edges", torch.eye(8).to_sparse(), persistent=False)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        edges = (self.edges, self.edges.coalesce(), self.edges.to_dense().to_sparse_csr())
        return super().loss(batch @ torch.stack([self.convolution(each) for each in edges]).sum(0))


class NestedInputs(Mlp):
    """A module's only argument is a batch of samples of different lengths."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        lengths = torch.nested.nested_tensor([batch[:1], batch[1:]], layout=torch.jagged, requires_grad=True)
        return self.net(lengths).values().square().mean()


class Counted(torch.Tensor):
    """Counts what is done with it."""

    calls: ClassVar[int] = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnTensors(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        Counted.calls = 0
        loss: torch.Tensor = self.net(batch.as_subclass(Counted)).square().mean()
        self.seen.append(torch.tensor(Counted.calls))
        return loss


class Scripted(Mlp):
    def build(self) -> None:
        super().build()
        self.net: Any = torch.jit.script(self.net)


class CompiledFunction(Mlp):
    """Compiles a function, and no module: nobody can see it before it is called."""

    def build(self) -> None:
        super().build()
        self.compiled: list[Any] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if not self.compiled:
            torch._dynamo.reset()
            self.compiled.append(torch.compile(self.square, backend="eager", fullgraph=True))
        loss: torch.Tensor = self.compiled[0](self.net(batch))
        return loss

    @staticmethod
    def square(value: torch.Tensor) -> torch.Tensor:
        return value.square().mean()


class CompiledInAWindow(TracedModel):
    """A part of it is compiled, in one graph, when a window is open already."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(value)
            return out

    def build(self) -> None:
        self.net = self.Part()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step == 2:
            torch._dynamo.reset()
            self.net.compile(backend="eager", fullgraph=True)
        return self.net(batch).square().mean()


class Exported(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if self.global_step == 2:
            self.seen.append(torch.tensor(len(torch.export.export(nn.Linear(8, 8), (batch,)).graph.nodes)))
        return super().loss(batch)


class HooksOverTheStep(Mlp):
    """Its saved-tensor hooks begin in one method and end in another."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.packed += 1
            return tensor.clone()

        self.packed = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = torch.ones(3, requires_grad=True)
        value * value
        self.hooks.__exit__()
        value * value
        self.seen.append(torch.tensor(self.packed))


class ModeOverTheStep(Mlp):
    """Its dispatch mode begins in front of a tracked step and ends in front of its end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mode = FlopCounterMode(display=False)
        self.mode.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mode.__exit__(None, None, None)
        self.seen.append(torch.tensor(self.mode.get_total_flops()))
        del self.mode


KINDS = (
    LateLazy, SparseGradients, SparseInputs, NestedInputs, OwnTensors, Scripted, CompiledFunction, CompiledInAWindow,
    Exported, HooksOverTheStep, ModeOverTheStep,
)  # fmt: skip
EACH: dict[str, Callable[[], Collector]] = {
    "functions": lambda: FunctionMemory(functions=["training_step", "backward"], saved_tensors_hooks=True),
    "saved_tensors": SavedTensors,
    "module_memory": ModuleMemory,
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_last_bit_and_nothing_fails(kind: type[TracedModel], tmp_path: Path) -> None:
    bare = fit(kind, tmp_path / "bare")
    for name, collector in EACH.items():
        ours = MemProfilerCallback(schedule=WINDOWS, collectors=[collector()], output=OutputOptions(summary=False))
        recorded = fit(kind, tmp_path / name, ours)
        assert [torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True)] == [True] * len(
            bare
        ), name
        run = only_run(tmp_path / name)
        assert rows_of(run, "error") == []
        assert rows_of(run, "unavailable") == []
        assert (run / "window000" / f"rank00000.{name}.jsonl").stat().st_size > 0


@pytest.mark.parametrize("kind", [SparseGradients, SparseInputs, NestedInputs])
def test_what_every_run_records_fails_for_no_layout_of_a_tensor(kind: type[TracedModel], tmp_path: Path) -> None:
    bare = fit(kind, tmp_path / "bare")
    recorded = fit(kind, tmp_path / "recorded", MemProfilerCallback(schedule=WINDOWS))
    assert [torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True)] == [True] * len(bare)
    assert rows_of(only_run(tmp_path / "recorded"), "error") == []


def test_a_dispatch_mode_that_ends_before_ours_leaves_torchs_flags_as_they_were(tmp_path: Path) -> None:
    ours = MemProfilerCallback(schedule=WINDOWS, collectors=[ModuleMemory()], output=OutputOptions(summary=False))
    fit(ModeOverTheStep, tmp_path, ours)
    assert _python_dispatch._get_current_dispatch_mode_stack() == []
    assert not _python_dispatch.is_in_torch_dispatch_mode()
