"""Faults in other places and styles: hooks that callbacks register, samplers, padded vectors, adversarial training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, CLASSES, STEPS, WIDTH, Classifier, Vectors, fit, main


class Tabular(Classifier):
    """The same network, trained by a fused Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3, fused=True)


class ConditionProbe(lightning.Callback):
    """Looks at the singular values of what goes into each linear layer."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self.check)

    def check(self, module: nn.Module, inputs: Any) -> None:
        module.condition = float(torch.linalg.svdvals(inputs[0][:192, :192].detach())[0])  # type: ignore[assignment]


def pre_hook(fault: bool) -> None:
    """A callback registers a forward pre-hook that decomposes each input; healthy: it does not."""
    fit(Tabular(), DataLoader(Vectors(), batch_size=BATCH), callbacks=[ConditionProbe()] if fault else [])


def gradient_hook(fault: bool) -> None:
    """A hook of each parameter makes a histogram of its gradient; healthy: no hook."""
    model = Tabular()
    for parameter in model.parameters() if fault else ():
        parameter.register_hook(lambda gradient: (np.histogram(gradient.numpy(), bins=64), None)[1])
    fit(model, DataLoader(Vectors(), batch_size=BATCH))


class Weighted(Sampler[int]):
    """Samples by weight: one draw from all weights per sample, or all draws at once."""

    def __init__(self, samples: int, slow: bool) -> None:
        self.weights = torch.rand(20_000)
        self.samples = samples
        self.slow = slow

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        if not self.slow:
            yield from (torch.multinomial(self.weights, self.samples, replacement=True) % self.samples).tolist()
            return
        for _ in range(self.samples):
            yield int(torch.multinomial(self.weights, 1)) % self.samples


def slow_sampler(fault: bool) -> None:
    """The sampler draws each index from all weights; healthy: all indices of an epoch at once."""
    sampler = Weighted(STEPS * BATCH, slow=fault)
    fit(Tabular(), DataLoader(Vectors(), batch_size=BATCH, sampler=sampler))


class Recurrent(lightning.LightningModule):
    """A regression on series of 24 values per position."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(24, 160, num_layers=2, batch_first=True)
        self.out = nn.Linear(160, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, target = batch
        loss = functional.mse_loss(self.out(self.rnn(series)[0][:, -1])[:, 0], target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3, fused=True)


def padded_series(fault: bool) -> None:
    """Batches of random series of 4 to 120 positions, padded with zeros; healthy: of series of similar lengths."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.gamma(2, 12, 32 * STEPS).astype(int), 4, 120)
    lengths = lengths if fault else np.sort(lengths)
    series = [torch.randn(int(length), 24) for length in lengths]
    batches = [list(range(32 * at, 32 * at + 32)) for at in numbers.permutation(STEPS).tolist()]

    def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad_sequence(samples, batch_first=True), torch.ones(len(samples))

    fit(Recurrent(), DataLoader(series, batch_sampler=batches, collate_fn=collate))  # type: ignore[arg-type]  # a list


class Critic(lightning.LightningModule):
    """A generator and a critic with optimizers of different kinds; the critic trains twice."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.detach = detach
        self.maker = nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, WIDTH)
        )
        self.critic = nn.Sequential(nn.Linear(WIDTH, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        for_maker, for_critic = self.optimizers()
        for _ in range(2):
            made = self.maker(torch.randn(len(real), 64))
            distance = self.critic(made.detach() if self.detach else made).mean() - self.critic(real).mean()
            for_critic.zero_grad()
            self.manual_backward(distance)
            for_critic.step()
        for_maker.zero_grad()
        self.manual_backward(-self.critic(self.maker(torch.randn(len(real), 64))).mean())
        for_maker.step()

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (
            torch.optim.Adam(self.maker.parameters(), 1e-4, fused=True),
            torch.optim.SGD(self.critic.parameters(), 1e-4, fused=True),
        )


def graph_to_the_maker(fault: bool) -> None:
    """New samples for each pass of the critic, with their graph; healthy: detached."""
    fit(Critic(detach=not fault), DataLoader(Vectors(), batch_size=BATCH), steps=3 * 45)


class LinearProbe(lightning.LightningModule):
    """Trains a head on features of a body that no optimizer has."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.body = Classifier(depth=3).blocks.requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        return functional.cross_entropy(self.head(self.body(features)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.01, fused=True)


def unfrozen_body(fault: bool) -> None:
    """The gradients of the body are computed and never used; healthy: it is frozen."""
    fit(LinearProbe(frozen=not fault), DataLoader(Vectors(), batch_size=BATCH))


class Chatty(Tabular):
    """Logs statistics of each parameter, many times."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for name, parameter in self.named_parameters():
            for at in range(20):
                self.log(f"{name}/{at}", float(at) + len(parameter), on_step=True, on_epoch=True)
        return loss


def chatty_log(fault: bool) -> None:
    """The training step calls self.log 280 times; healthy: once."""
    fit((Chatty if fault else Tabular)(depth=2), DataLoader(Vectors(), batch_size=BATCH))


def single_rows(fault: bool) -> None:
    """One row per batch of a table; healthy: 128."""
    batch = 1 if fault else 128
    model = Tabular(width=64, depth=12)
    rows = TensorDataset(torch.randn(200 * batch, 64), torch.randint(CLASSES, (200 * batch,)))
    fit(model, DataLoader(rows, batch_size=batch), steps=200)


class Clipped(Classifier):
    """Clips its gradients in a hook: each parameter on its own, or all at once."""

    def __init__(self, each: bool) -> None:
        super().__init__(depth=4)
        self.each = each
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(600))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.stack(list(self.scales)).mean(0))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.each:
            for parameter in self.parameters():
                nn.utils.clip_grad_norm_([parameter], 1.0)
        else:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0, foreach=True)


def clip_each(fault: bool) -> None:
    """Gradients are clipped parameter by parameter; healthy: all in one call."""
    fit(Clipped(each=fault), DataLoader(Vectors(), batch_size=BATCH))


class Smooth(Classifier):
    """Penalizes the gradient of its output by its input, in each step or in every 16th."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        is_penalized = batch_idx % self.every == 0
        logits = self(features.requires_grad_(is_penalized))
        loss = functional.cross_entropy(logits, labels)
        if is_penalized:
            (slope,) = torch.autograd.grad(logits.sum(), features, create_graph=True)
            loss = loss + slope.square().sum(1).mean()
        return loss


def double_backward(fault: bool) -> None:
    """A gradient penalty in each step differentiates the backward pass; healthy: in every 16th step."""
    fit(Smooth(every=1 if fault else 16), DataLoader(Vectors(), batch_size=BATCH))


if __name__ == "__main__":
    main(
        pre_hook,
        gradient_hook,
        slow_sampler,
        padded_series,
        graph_to_the_maker,
        unfrozen_body,
        chatty_log,
        single_rows,
        clip_each,
        double_backward,
    )
