"""Models of many kinds, and the peak of a step of each: tracked in a real fit on the CPU, and estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule, estimate
from lightning_memprof.capture.tracker.collectors import ModuleMemory
from lightning_memprof.demo.train import Block, GPTConfig
from recorded_rows import read_series
from training import only_run, trainer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


OPTIMIZERS: Final = MappingProxyType({"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW})
PRECISIONS: Final = ("32-true", "bf16-mixed")
MODES: Final = ("plain", "checkpointed", "accumulated")
_SAMPLES: Final = 4
_SERIES: Final = "window000/rank00000.module_memory.jsonl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: a model of :data:`MODELS`, and what is the same for all of them."""

    model: str
    optimizer: str = "AdamW"
    precision: str = "32-true"
    mode: str = "plain"

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.precision}-{self.mode}"

    def build(self) -> Example:
        """Return the model, on the CPU."""
        torch.manual_seed(0)
        found = MODELS[self.model]()
        found.is_checkpointed = self.mode == "checkpointed"
        found.kind = OPTIMIZERS[self.optimizer]
        return found

    def options(self) -> dict[str, Any]:
        """Return the arguments of a Trainer."""
        return {"precision": self.precision, "accumulate_grad_batches": 2 if self.mode == "accumulated" else 1}


class Example(pl.LightningModule):
    """Trains ``self.net`` on noise; modules may be checkpointed."""

    net: Any

    is_checkpointed = False
    kind: Any = torch.optim.AdamW

    def sample(self) -> Any:
        """Return one sample of the data set."""
        return torch.randn(16)

    def data(self) -> Any:
        """Return a loader."""
        samples: Any = [self.sample() for _ in range(_SAMPLES * 8)]
        return DataLoader(samples, batch_size=_SAMPLES)

    def run(self, module: Any, *values: Tensor) -> Any:
        """Call a module, checkpointed if asked for."""
        if self.is_checkpointed:
            return checkpoint(module, *values, use_reentrant=False)
        return module(*values)

    def blocks(self, modules: Iterable[nn.Module], values: Tensor) -> Tensor:
        for module in modules:
            values = self.run(module, values)
        return values

    def forward(self, batch: Any) -> Any:
        return self.blocks(self.net, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.kind([parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-3)


class Mlp(Example):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))


class Cnn(Example):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(3)
        )

    def sample(self) -> Tensor:
        return torch.randn(3, 8, 8)


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return functional.relu(self.main(values) + self.short(values))


class ResNet(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([_Residual(3, 8, 1), nn.MaxPool2d(2), _Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1)])
        self.head = nn.Linear(16, 5)

    def forward(self, batch: Tensor) -> Any:
        return self.head(super().forward(batch).flatten(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch), torch.zeros(len(batch), dtype=torch.long))


class Gpt(Example):
    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(vocabulary=64, context=16, width=32, heads=2, layers=2)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.net = nn.ModuleList(Block(config) for _ in range(config.layers))

    def sample(self) -> Tensor:
        return torch.randint(0, 64, (16,))

    def forward(self, batch: Tensor) -> Any:
        return super().forward(self.tokens(batch)) @ self.tokens.weight.T

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())


class Gru(Example):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(16, 24, batch_first=True, bidirectional=True)

    def sample(self) -> Tensor:
        return torch.randn(6, 16)

    def forward(self, batch: Tensor) -> Any:
        return self.net(batch)[0]


class SharedWeights(Example):
    def __init__(self) -> None:
        super().__init__()
        first, other = nn.Linear(16, 32), nn.Linear(32, 16)
        third = nn.Linear(16, 32)
        third.weight = first.weight
        self.net = nn.ModuleList([first, other, third, other])


class Gan(Example):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, other = optimizers
        made = self.run(self.generator, torch.randn(len(batch), 8))
        loss = functional.softplus(-self.critic(made)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        scores = self.critic(made.detach()) - self.critic(batch)
        other.zero_grad()
        self.manual_backward(functional.softplus(scores).mean())
        other.step()

    def configure_optimizers(self) -> Any:
        return [self.kind(self.generator.parameters(), lr=1e-3), self.kind(self.critic.parameters(), lr=1e-3)]


class Masked(Example):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=index == 0)
            for index in range(2)
        )

    def sample(self) -> Tensor:
        return torch.randn(6, 16)

    def forward(self, batch: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1])
        for layer in self.net:
            batch = self.run(layer, batch, mask)
        return batch


class UNet(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 8, 1))
        self.net = nn.Conv2d(16, 3, 1)

    def forward(self, batch: Tensor) -> Any:
        shallow = self.run(self.down, batch)
        return self.net(torch.cat([shallow, self.run(self.up, self.run(self.deep, shallow))], 1))


class SeveralLoaders(Mlp):
    def data(self) -> Any:
        return CombinedLoader({"one": super().data(), "other": super().data()}, "max_size_cycle")

    def forward(self, batch: Any) -> Any:
        return super().forward(batch["one"]) - super().forward(batch["other"])


class ComplexNumbers(Example):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.net = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, batch: Tensor) -> Any:
        return super().forward(torch.fft.irfft(torch.fft.rfft(batch.float()) * self.filter))


class Buffers(Mlp):
    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("scale", torch.ones(16), persistent=False)

    def forward(self, batch: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(batch.mean(0), 0.1)
        return super().forward((batch - self.mean) * self.scale)


class Frozen(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False).eval()


class Configured(Example):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def sample(self) -> Tensor:
        return torch.randn(128)


class GradientPenalty(Mlp):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        values = batch.requires_grad_()
        score = self(values).mean()
        (gradient,) = torch.autograd.grad(score, values, create_graph=True)
        found: Tensor = score + gradient.square().sum()
        return found


MODELS: Final[MappingProxyType[str, Callable[[], Example]]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            Mlp, Cnn, ResNet, Gpt, Gru, SharedWeights, Gan, Masked, UNet,
            SeveralLoaders, ComplexNumbers, Buffers, Frozen, Configured, GradientPenalty,
        )
    }
)  # fmt: skip


def tracked(case: Case, directory: Path) -> dict[str, int]:
    """Return the peak of the third step of a real fit by category, in bytes."""
    batches = 6 if case.mode == "accumulated" else 3
    model = case.build()
    ours = MemProfilerCallback(
        schedule=Schedule(wait=batches - 2, warmup=1, active=1),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    real = trainer(directory, ours, limit_train_batches=batches, **case.options())
    real.fit(model, model.data())
    (peak,) = [row for row in read_series(only_run(directory) / _SERIES) if row["kind"] == "peak"]
    return {name: count for name, count in peak["categories"].items() if count}


def estimated(case: Case, directory: Path) -> dict[str, int]:
    """Return the estimated peak of the third step by category, in bytes."""
    model = case.build()
    planned = trainer(directory, **case.options())
    found = estimate(model, model.data(), trainer=planned, device="cpu", what_if=("none",))
    moments = [dict(zip(found.live, values, strict=True)) for values in zip(*found.live.values(), strict=True)]
    # max() returns the first of equal moments, as the tracker does.
    return {name: count for name, count in max(moments, key=lambda moment: sum(moment.values())).items() if count}
