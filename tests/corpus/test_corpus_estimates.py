"""Estimated peaks beside recorded ones of trainings whose program is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from corpus_files import reference_figures
from lightning_memprof import estimate

pytestmark = pytest.mark.corpus

VOCABULARY, CONTEXT, SAMPLES = 10_000, 128, 4


class Norm(nn.Module):
    """RMS norm in single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Block(nn.Module):
    """Attention in single operators and SwiGLU, each after a norm."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([Norm(width), Norm(width)])
        self.projections = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(4)])
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in list(self.projections)[:3]
        )
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.projections[3]((weights @ value).transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        gate = self.gate(normed)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(normed))


class PlainAdamW(torch.optim.Optimizer):
    """AdamW that replaces its moments in each step, one parameter after the other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            state, grad = self.state[parameter], parameter.grad
            first = 0.9 * state.get("first", torch.zeros_like(grad)) + 0.1 * grad
            second = 0.99 * state.get("second", torch.zeros_like(grad)) + 0.01 * torch.square(grad)
            parameter.sub_(1e-3 * first / (torch.sqrt(second) + 1e-8))
            state["first"], state["second"] = first, second
        return loss


class Transformer(LightningModule):
    """A language model whose output lives until the end of the step, and whose gradients do not live longer."""

    def __init__(self, width: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, hidden, heads) for _ in range(layers)))
        self.norm, self.head = Norm(width), nn.Linear(width, VOCABULARY, bias=False)

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        logits = self.head(self.norm(self.blocks(self.embedding(batch[0]))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return PlainAdamW(self.parameters())


def test_the_allocated_peak_of_a_recorded_training_is_within_half_a_percent() -> None:
    known = reference_figures("snapshots")["snap_cs336_wedson/medium_128_training.pickle.gz"]["devices"]["0"]
    tokens = torch.zeros(SAMPLES, CONTEXT, dtype=torch.long)
    with torch.device("meta"):
        model = Transformer(width=1024, hidden=4096, layers=24, heads=16)
    found = estimate(model, DataLoader(TensorDataset(tokens, tokens), SAMPLES), what_if=("none",))
    assert found.part == "optimizer"
    assert found.allocated_bytes == pytest.approx(known["peak_requested_in_ring"], rel=0.005)
