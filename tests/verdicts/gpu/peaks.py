"""GPU trainings with one fault of memory each: diffusion, GAN, time series, graph."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import Attention, Layer, Residual, Trained, fit, main
from ready import GPU, OPTIONS, ready_loader, sized


class Block(nn.Module):
    """Two normalized convolutions with the time's embedding and a skip connection."""

    def __init__(self, inputs: int, outputs: int, moments: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Linear(moments, outputs)
        self.second = nn.Sequential(nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:
        hidden = self.first(x) + self.time(moment)[:, :, None, None]
        return self.skip(x) + self.second(hidden)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Predicts the noise in noisy images."""

    def __init__(self, width: int, levels: int, channels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        moments = 4 * width
        self.time = nn.Sequential(nn.Linear(1, moments), nn.SiLU(), nn.Linear(moments, moments))
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(Block(widths[max(level - 1, 0)], widths[level], moments) for level in range(levels))
        self.middle = Block(widths[-1], widths[-1], moments)
        self.up = nn.ModuleList(
            Block(2 * widths[level], widths[max(level - 1, 0)], moments) for level in reversed(range(levels))
        )
        self.leave = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, images: Tensor, moment: Tensor) -> Tensor:
        time = self.time(moment[:, None])
        x = self.enter(images)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        noise: Tensor = self.leave(x)
        return noise


class Diffusion(Trained, optimizer=torch.optim.AdamW, lr=2e-4, fused=GPU):
    """Denoising diffusion that makes some preview images now and then."""

    def __init__(self, width: int, levels: int, *, side: int, previews: int, recorded: bool) -> None:
        super().__init__()
        self.network = UNet(width, levels).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.shape = (previews, 3, side, side)
        self.recorded = recorded
        self.preview: Tensor | None = None

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        noise = torch.randn_like(images)
        moment = torch.rand(len(images), device=self.device)
        clean = torch.cos(moment * torch.pi / 2)[:, None, None, None]
        noisy = clean * images + (1 - clean.square()).sqrt() * noise
        loss = functional.mse_loss(self.network(noisy, moment).float(), noise)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 20 == 19:
            with contextlib.nullcontext() if self.recorded else torch.no_grad():
                self.preview = self.sample(16).clamp(-1, 1).detach().cpu()

    def sample(self, points: int) -> Tensor:
        """Go from noise to images in ``points`` deterministic steps."""
        x = torch.randn(self.shape, device=self.device)
        moments = torch.linspace(0.98, 0.0, points + 1, device=self.device)
        signal, spread = torch.cos(moments * torch.pi / 2), torch.sin(moments * torch.pi / 2)
        for point in range(points):
            with torch.autocast(self.device.type, torch.bfloat16):
                noise = self.network(x, moments[point].expand(len(x))).float()
            clean = (x - spread[point] * noise) / signal[point]
            x = signal[point + 1] * clean + spread[point + 1] * noise
        return x


def preview_images(fault: bool) -> None:
    """Fault: preview images are sampled with gradients on, which keeps 16 passes; healthy: under no_grad."""
    batch, side, previews = sized(48, 4), sized(128, 16), sized(8, 2)
    images = torch.rand(4, batch, 3, side, side) * 2 - 1
    steps = sized(120, 40)
    model = Diffusion(sized(64, 8), sized(4, 2), side=side, previews=previews, recorded=fault)
    fit(model, ready_loader(steps, images), steps=steps, **OPTIONS)


def generator(noise: int, width: int, doublings: int) -> nn.Sequential:
    """Make a network from noise to images of ``4 << doublings`` pixels a side."""
    layers: list[nn.Module] = [nn.Linear(noise, width * 16), nn.Unflatten(1, (width, 4, 4))]
    for doubling in range(doublings):
        inputs, outputs = max(width >> doubling, 8), max(width >> (doubling + 1), 8)
        layers += [
            nn.Upsample(scale_factor=2.0),
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(max(width >> doublings, 8), 3, 3, padding=1), nn.Tanh())


def critic(width: int, halvings: int) -> nn.Sequential:
    """Make a network from images to one score each."""
    layers: list[nn.Module] = []
    inputs = 3
    for halving in range(halvings):
        outputs = max(width >> (halvings - halving - 1), 8)
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(outputs, outputs, 4, 2, padding=1),
            nn.LeakyReLU(0.2),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 16, 1))


class Adversarial(lightning.LightningModule):
    """A GAN with manual optimization that splits each batch into micro-batches, to save memory."""

    automatic_optimization = False

    def __init__(self, noise: int, width: int, doublings: int, *, micro: int, together: bool) -> None:
        super().__init__()
        self.generator = generator(noise, width, doublings).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.critic = critic(width, doublings).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.noise = noise
        self.micro = micro
        self.together = together

    def critic_loss(self, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), self.noise, device=self.device))
        return functional.softplus(-self.critic(real)).mean() + functional.softplus(self.critic(fake)).mean()

    def generator_loss(self, real: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(real), self.noise, device=self.device))
        return functional.softplus(-self.critic(fake)).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()  # type: ignore[attr-defined]
        parts = batch.contiguous(memory_format=torch.channels_last).chunk(self.micro)
        for name, optimizer, loss_of in (
            ("critic", critic_optimizer, self.critic_loss),
            ("generator", generator_optimizer, self.generator_loss),
        ):
            optimizer.zero_grad()
            total = torch.zeros((), device=self.device)
            for part in parts:
                loss = loss_of(part) / self.micro
                if not self.together:
                    self.manual_backward(loss)
                    loss = loss.detach()
                total = total + loss
            if self.together:
                self.manual_backward(total)
            optimizer.step()
            self.log(name, total.detach())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.99), fused=GPU)
            for part in (self.generator, self.critic)
        ]


def summed_microbatches(fault: bool) -> None:
    """Fault: the losses of 4 micro-batches are summed and go backward together; healthy: each goes backward at once."""
    batch, doublings, noise = sized(192, 8), sized(5, 2), sized(128, 8)
    side = 4 << doublings
    images = torch.rand(4, batch, 3, side, side) * 2 - 1
    batches = sized(80, 40)
    model = Adversarial(noise, sized(1024, 16), doublings, micro=4, together=fault)
    # Lightning counts the steps of both optimizers.
    fit(model, ready_loader(batches, images), steps=2 * batches, **OPTIONS)


class WholeAttention(Attention):
    """Self-attention without the causal mask."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)


class Forecaster(Trained, optimizer=torch.optim.AdamW, lr=3e-4, fused=GPU):
    """A transformer that forecasts the next hours from a window of measurements."""

    def __init__(self, channels: int, length: int, *, layers: int, width: int, heads: int, horizon: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(Layer(WholeAttention(width, heads), width) for _ in range(layers)))
        self.head = nn.Linear(width, horizon)

    def forward(self, windows: Tensor) -> Tensor:
        hidden = self.layers(self.embed(windows) + self.positions)
        forecast: Tensor = self.head(hidden[:, -1])
        return forecast

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        windows, following = batch
        loss = functional.mse_loss(self(windows).float(), following)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        windows, following = batch
        self.log("val_error", (self(windows).float() - following).abs().mean(), batch_size=len(windows))


def holdout_windows(fault: bool) -> None:
    """Fault: validation takes all 4096 windows as one batch; healthy: it takes batches of the training's size."""
    batch, held, length, channels, horizon = sized(256, 8), sized(4096, 64), sized(256, 16), 16, 24
    windows, following = torch.randn(8, batch, length, channels), torch.randn(8, batch, horizon)
    count = 1 if fault else held // batch
    held_windows = torch.randn(held, length, channels).view(count, held // count, length, channels)
    held_following = torch.randn(held, horizon).view(count, held // count, horizon)
    steps = sized(240, 40)
    fit(
        Forecaster(channels, length, layers=sized(4, 1), width=sized(384, 32), heads=sized(6, 2), horizon=horizon),
        ready_loader(steps, windows, following),
        ready_loader(count, held_windows, held_following),
        steps=steps,
        val_check_interval=steps // 4,
        **OPTIONS,
    )


class Citations(Trained, optimizer=torch.optim.AdamW, lr=1e-3, fused=GPU):
    """Classifies the nodes of one graph: each layer averages over the neighbors, then mixes the features."""

    adjacency: Tensor
    features: Tensor
    labels: Tensor
    edges: Tensor
    weights: Tensor

    def __init__(self, edges: Tensor, nodes: int, features: int, width: int, classes: int, *, square: bool) -> None:
        super().__init__()
        self.nodes = nodes
        self.square = square
        self.register_buffer("features", torch.randn(nodes, features), persistent=False)
        self.register_buffer("labels", torch.randint(classes, (nodes,)), persistent=False)
        self.register_buffer("edges", edges, persistent=False)
        degrees = torch.bincount(edges[1], minlength=nodes).clamp(min=1)
        self.register_buffer("weights", 1.0 / degrees[edges[1]], persistent=False)
        self.enter = nn.Linear(features, width)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.mixers = nn.ModuleList(Residual(width) for _ in range(3))
        self.head = nn.Linear(width, classes)

    def on_fit_start(self) -> None:
        if self.square:
            source, target = self.edges
            self.adjacency = torch.zeros(self.nodes, self.nodes, device=self.device)
            self.adjacency.index_put_((target, source), self.weights, accumulate=True)

    def averaged(self, hidden: Tensor) -> Tensor:
        """Average the neighbors' features for each node."""
        if self.square:
            return self.adjacency @ hidden
        source, target = self.edges
        messages = hidden.float().index_select(0, source) * self.weights[:, None]
        return torch.zeros_like(hidden, dtype=torch.float32).index_add(0, target, messages)

    def training_step(self, chosen: Tensor, batch_idx: int) -> Tensor:
        hidden = self.enter(self.features)
        for message, mixer in zip(self.messages, self.mixers, strict=True):
            hidden = mixer(hidden + self.averaged(message(hidden)))
        loss = functional.cross_entropy(self.head(hidden[chosen]), self.labels[chosen])
        self.log("loss", loss, batch_size=len(chosen))
        return loss


def citation_graph(fault: bool) -> None:
    """Fault: the graph of 8 neighbors per node is a dense nodes x nodes matrix; healthy: it is a list of edges."""
    nodes, features, width, classes = sized(24_576, 256), sized(256, 16), sized(512, 16), 40
    edges = torch.randint(nodes, (2, 8 * nodes))
    chosen = torch.randint(nodes, (16, nodes // 8))
    steps = sized(400, 40)
    model = Citations(edges, nodes, features, width, classes, square=fault)
    fit(model, ready_loader(steps, chosen), steps=steps, **OPTIONS)


if __name__ == "__main__":
    main(preview_images, summed_microbatches, holdout_windows, citation_graph)
