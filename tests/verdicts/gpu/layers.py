"""GPU trainings with one fault of time each: a fine-tuned CNN, a language model, a recommender, a policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import Attention, LanguageModel, Trained, fit, main
from ready import GPU, OPTIONS, ready_loader, sized


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        is_same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if is_same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.skip(x), inplace=True)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Make a convolution without a bias and its normalization."""
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def resnet(blocks: tuple[int, ...], width: int) -> nn.Sequential:
    """Make the trunk of a residual network; (3, 4, 6, 3) blocks and a width of 64 are a ResNet-50."""
    layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class FineTuned(lightning.LightningModule):
    """A new head on a pretrained ResNet; only the head and the last stage go to the optimizer."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, *, freeze: bool, classes: int = 100) -> None:
        super().__init__()
        width, blocks = sized(64, 4), sized((3, 4, 6, 3), (1, 1, 1, 1))
        trunk = resnet(blocks, width).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self.backbone, self.last_stage = trunk[: -blocks[-1] - 2], trunk[-blocks[-1] - 2 :]
        if freeze:
            self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(32 * width, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, classes))
        self.register_buffer("mean", torch.tensor([124.0, 116.0, 104.0]).view(1, 3, 1, 1))
        self.register_buffer("deviation", torch.tensor([58.0, 57.0, 57.0]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        scaled = (images.float() - self.mean) / self.deviation
        features = self.backbone(scaled.contiguous(memory_format=torch.channels_last))
        logits: Tensor = self.head(self.last_stage(features))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.last_stage.parameters(), *self.head.parameters()], lr=1e-4, fused=GPU)


def late_stage_finetune(fault: bool) -> None:
    """Fault: the early stages are not optimized, but still require gradients; healthy: they are frozen."""
    batch, side, classes = sized(128, 4), sized(224, 64), 100
    images = torch.randint(256, (4, batch, 3, side, side), dtype=torch.uint8)
    labels = torch.randint(classes, (4, batch))
    steps = sized(90, 40)
    fit(FineTuned(freeze=not fault, classes=classes), ready_loader(steps, images, labels), steps=steps, **OPTIONS)


class CarefulAttention(Attention):
    """Causal self-attention that leaves autocast "for stability"."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return functional.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)


class PretrainedOnText(LanguageModel, optimizer=torch.optim.AdamW, lr=3e-4, fused=GPU):
    """The shared language model with a choice of the attention."""

    def __init__(self, *, careful: bool, **sizes: int) -> None:
        self.careful = careful
        super().__init__(**sizes)

    def attention(self, width: int, heads: int) -> nn.Module:
        return CarefulAttention(width, heads) if self.careful else Attention(width, heads)


def stable_attention(fault: bool) -> None:
    """Fault: attention casts to float32 with autocast off in a bf16-mixed training; healthy: it stays in bfloat16."""
    batch, length, vocabulary = sized(8, 2), sized(2048, 64), sized(32_000, 500)
    sizes = {"layers": sized(8, 2), "width": sized(1024, 64), "heads": sized(16, 4), "vocabulary": vocabulary}
    tokens = torch.randint(1, vocabulary, (8, batch, length + 1))
    steps = sized(60, 40)
    fit(PretrainedOnText(careful=fault, **sizes), ready_loader(steps, tokens), steps=steps, **OPTIONS)


class FieldTables(nn.Module):
    """An embedding table per categorical field. Input: batch x fields; output: batch x fields * width."""

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))

    def forward(self, codes: Tensor) -> Tensor:
        return torch.cat([table(codes[:, field]) for field, table in enumerate(self.tables)], dim=1)


class JointTable(nn.Module):
    """One embedding table for all fields, each with its own range of rows."""

    offsets: Tensor

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(fields * rows, width)
        self.register_buffer("offsets", torch.arange(0, fields * rows, rows, dtype=torch.int32))

    def forward(self, codes: Tensor) -> Tensor:
        rows: Tensor = self.table(codes + self.offsets)
        return rows.flatten(1)


class ClickModel(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Predicts clicks from many categorical fields."""

    def __init__(self, embeddings: nn.Module, features: int, width: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.tower = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width // 4)
        )
        self.click = nn.Linear(width // 4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        codes, clicked = batch
        scores = self.click(functional.relu(self.tower(self.embeddings(codes)))).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(scores, clicked)
        self.log("loss", loss)
        return loss


def many_fields(fault: bool) -> None:
    """Fault: a Python loop looks up 200 small embedding tables, one per field; healthy: one table with offsets."""
    fields, rows, width, batch = sized(200, 12), sized(20_000, 100), sized(32, 8), sized(16_384, 64)
    codes = torch.randint(rows, (8, batch, fields), dtype=torch.int32)
    clicked = torch.randint(2, (8, batch)).float()
    embeddings = (FieldTables if fault else JointTable)(fields, rows, width)
    steps = sized(160, 40)
    model = ClickModel(embeddings, fields * width, sized(4096, 64))
    fit(model, ready_loader(steps, codes, clicked), steps=steps, **OPTIONS)


def network(inputs: int, width: int, depth: int, outputs: int) -> nn.Sequential:
    """Make a perceptron of ``depth`` hidden layers."""
    layers: list[nn.Module] = []
    for layer in range(depth):
        layers += [nn.Linear(width if layer else inputs, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class ActorCritic(Trained, optimizer=torch.optim.Adam, lr=3e-4, fused=GPU):
    """Policy gradient with generalized advantages on recorded rollouts of the shape time x environments."""

    def __init__(self, observations: int, actions: int, width: int, *, looping: bool) -> None:
        super().__init__()
        self.actor = network(observations, width, 4, actions)
        self.critic = network(observations, width, 4, 1)
        self.advantages = self.looped if looping else self.doubled
        self.discount, self.trace = 0.99, 0.95

    def looped(self, errors: Tensor, goes_on: Tensor) -> Tensor:
        """Go back in time, step by step."""
        advantage = torch.zeros_like(errors[0])
        advantages = torch.empty_like(errors)
        for time in reversed(range(len(errors))):
            advantage = errors[time] + self.discount * self.trace * goes_on[time] * advantage
            advantages[time] = advantage
        return advantages

    def doubled(self, errors: Tensor, goes_on: Tensor) -> Tensor:
        """Sum over 1, 2, 4, 8 ... steps of time at once."""
        factors = self.discount * self.trace * goes_on
        reach = 1
        while reach < len(errors):
            later = functional.pad(errors[reach:], (0, 0, 0, reach))
            errors = errors + factors * later
            factors = factors * functional.pad(factors[reach:], (0, 0, 0, reach))
            reach *= 2
        return errors

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        observations, actions, rewards, goes_on, old_logs = batch
        values = self.critic(observations).squeeze(-1).float()
        with torch.no_grad():
            following = functional.pad(values[1:], (0, 0, 0, 1))
            errors = rewards + self.discount * goes_on * following - values
            advantages = self.advantages(errors, goes_on)
            returns = advantages + values
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        policy = self.actor(observations).float().log_softmax(-1)
        ratio = (policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - old_logs).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        entropy = -(policy.exp() * policy).sum(-1).mean()
        loss = functional.mse_loss(values, returns) - surrogate - 0.01 * entropy
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]


def rollout_advantages(fault: bool) -> None:
    """Fault: a Python loop over 640 points of time makes the advantages; healthy: ten doubling sums make them."""
    time, environments, observations, actions = sized(640, 32), sized(160, 4), 64, 12
    shape = (4, time, environments)
    rollouts = (
        torch.randn(*shape, observations),
        torch.randint(actions, shape),
        torch.randn(shape),
        (torch.rand(shape) > 0.01).float(),
        torch.full(shape, -2.5),
    )
    steps = sized(140, 40)
    model = ActorCritic(observations, actions, sized(1024, 32), looping=fault)
    fit(model, ready_loader(steps, *rollouts), steps=steps, **OPTIONS)


if __name__ == "__main__":
    main(late_stage_finetune, stable_attention, many_fields, rollout_advantages)
