"""A program that estimates trainings, runs them on the GPU, and prints the reserved bytes of both."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprof import estimate

SAMPLES, TOKENS, WIDTH, WORDS = 8, 256, 512, 8000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: the model's name, and the options of its Trainer."""

    model: str
    optimizer: str
    precision: str
    accumulated: int

    def build(self) -> LightningModule:
        return MODELS[self.model](self.optimizer)

    def trainer(self, accelerator: str) -> Trainer:
        return Trainer(
            accelerator=accelerator,
            devices=1,
            precision=self.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=self.accumulated,
            gradient_clip_val=1.0 if self.accumulated > 1 else None,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


class Example(LightningModule):
    """A model with an optimizer of a name."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), 1e-3)
        return made


class Residual(Example):
    """Layers beside which the input goes on."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def training_step(self, batch: Any) -> Tensor:
        values = batch[0]
        for layer in self.net:
            values = values + layer(values)
        total: Tensor = values.square().sum()
        return total


class Decoder(Example):
    """A regression with an output that is larger than the model."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8 * WIDTH))

    def training_step(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[0].repeat(1, 1, 8))


class Block(nn.Module):
    """Causal attention and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = self.inward(self.norms[0](values)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        values = values + self.outward(found)
        found = self.down(functional.gelu(self.up(self.norms[1](values))))
        return values + functional.dropout(found, 0.1, self.training)


class Gpt(Example):
    """A language model whose first and last weights are one."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def training_step(self, batch: Any) -> Tensor:
        logits = self.head(self.blocks(self.words(batch[1])))
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


MODELS = {"Residual": Residual, "Gpt": Gpt, "Decoder": Decoder}
CASES = [
    Case(model="Residual", optimizer="AdamW", precision="32-true", accumulated=1),
    Case(model="Residual", optimizer="SGD", precision="bf16-mixed", accumulated=2),
    Case(model="Gpt", optimizer="AdamW", precision="bf16-mixed", accumulated=1),
    Case(model="Gpt", optimizer="AdamW", precision="bf16-true", accumulated=2),
    Case(model="Gpt", optimizer="SGD", precision="32-true", accumulated=1),
    Case(model="Gpt", optimizer="Adam", precision="16-mixed", accumulated=1),
    Case(model="Decoder", optimizer="AdamW", precision="32-true", accumulated=1),
    Case(model="Decoder", optimizer="SGD", precision="bf16-mixed", accumulated=1),
]


def loader() -> DataLoader[Any]:
    values, words = torch.zeros(SAMPLES, TOKENS, WIDTH), torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    return DataLoader(TensorDataset(values.repeat(2, 1, 1), words.repeat(2, 1)), SAMPLES)


def estimated(case: Case) -> int:
    memory = f"{torch.cuda.get_device_properties(0).total_memory / 2**20}MiB"
    name = torch.cuda.get_device_name(0)
    trainer = case.trainer("cpu")
    found = estimate(case.build(), loader(), trainer=trainer, device=name, device_memory=memory, what_if=("none",))
    return found.reserved.likely_bytes


def measured(case: Case) -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    case.trainer("gpu").fit(case.build(), loader())
    return torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    # A process that has trained on a GPU cannot estimate.
    expected = [estimated(case) for case in CASES]
    for case, found in zip(CASES, expected, strict=True):
        print(json.dumps([str(case), found, measured(case)]))
