"""Small models of every kind that training must not be changed for, and what a fit of one came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from training import loader, trainer

STEPS = 6

Outcome = list[torch.Tensor]


class TracedModel(pl.LightningModule):
    """Keeps its losses and its gradients; the batch is 4 rows of 8 numbers."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.seen: Outcome = []
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.detach().clone())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.extend(
            parameter.grad.detach().clone() for parameter in self.parameters() if parameter.grad is not None
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Mlp(TracedModel):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()


class InPlaceCnn(TracedModel):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten()
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch.view(1, 1, 4, 8)).square().mean()


class SharedEmbeddings(TracedModel):
    def build(self) -> None:
        self.embedding = nn.Embedding(32, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = (batch.abs() * 10).long() % 32
        logits = self.head(self.encoder(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Lstm(TracedModel):
    def build(self) -> None:
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.1)
        self.head = nn.Linear(8, 1)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(batch.view(4, 1, 8))[0]).square().mean()


class GradientPenalty(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        given = batch.clone().requires_grad_()
        out = functional.softplus(self.net(given)).sum()
        (slope,) = torch.autograd.grad(out, given, create_graph=True)
        return out + slope.square().sum()


class Checkpointed(TracedModel):
    reentrant: ClassVar[bool] = False

    def build(self) -> None:
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8)) for _ in range(3)
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        value = batch.clone().requires_grad_()
        for block in self.blocks:
            value = checkpoint(block, value, use_reentrant=self.reentrant)
        return value.square().mean()


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class Compiled(Mlp):
    def build(self) -> None:
        super().build()
        self.net[3].compile(backend="aot_eager")


class TwoOptimizers(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        super().build()
        self.other = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, part in zip(self.optimizers(), (self.net, self.other), strict=True):
            loss = part(batch).square().mean()
            self.seen.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net.parameters(), 1e-2), torch.optim.SGD(self.other.parameters(), 1e-2)]


class HalfPrecision(Mlp):
    options: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class Accumulated(Mlp):
    options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 3}


class TrulyHalf(Mlp):
    options: ClassVar[dict[str, Any]] = {"precision": "bf16-true"}


class Clipped(Mlp):
    options: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.1}


class SeveralLoaders(TracedModel):
    """Its batch is a mapping of what two loaders give."""

    def build(self) -> None:
        self.net = nn.Linear(8, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch["a"]).square() + self.net(batch["b"]).square()).mean()

    def train_dataloader(self) -> Any:
        return {"a": loader(STEPS), "b": loader(STEPS)}

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(self.net(batch).mean())

    def val_dataloader(self) -> Any:
        return [loader(2), loader(3)]


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


MODELS: dict[str, type[TracedModel]] = {
    "MLP": Mlp,
    "CNN with in-place ReLU and BatchNorm": InPlaceCnn,
    "transformer with shared embeddings": SharedEmbeddings,
    "LSTM": Lstm,
    "double backward": GradientPenalty,
    "checkpoint": Checkpointed,
    "reentrant checkpoint": ReentrantCheckpointed,
    "compiled": Compiled,
    "manual optimization with two optimizers": TwoOptimizers,
    "AMP bf16": HalfPrecision,
    "accumulation": Accumulated,
    "clipping": Clipped,
}
# Models that few people train, and programs that use torch's own hooks and modes.
ODD: dict[str, type[TracedModel]] = {
    kind.__name__: kind
    for kind in (
        TrulyHalf, SeveralLoaders, LateLazy, SparseGradients, SparseInputs, NestedInputs, OwnTensors, Scripted,
        CompiledFunction, CompiledInAWindow, Exported, HooksOverTheStep, ModeOverTheStep,
    )
}  # fmt: skip


def fit(kind: type[TracedModel], directory: Path, *callbacks: pl.Callback, **options: Any) -> Outcome:
    """Train a few steps; give losses, gradients, weights, buffers and the random generator's state."""
    torch.manual_seed(11)
    model = kind()
    data = None if isinstance(model, SeveralLoaders) else loader(STEPS)
    trainer(directory, *callbacks, **{**kind.options, **options}).fit(model, data)
    return [*model.seen, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()]
