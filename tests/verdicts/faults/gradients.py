"""The backward pass: gradients that nobody uses, several passes, penalties, clipping one by one."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    BATCH,
    CLASSES,
    WIDTH,
    Classifier,
    Residual,
    Trained,
    Vectors,
    fit,
    labeled,
    main,
    one_epoch,
    quiet,
    trainer,
)
from small_models import convolution


class Adversarial(lightning.LightningModule):
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.detach = detach
        self.generator = nn.Sequential(Residual(WIDTH), Residual(WIDTH), Residual(WIDTH))
        self.discriminator = nn.Sequential(Residual(WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        made = self.generator(torch.randn_like(real))
        for _ in range(2):
            optimizer_d.zero_grad()
            judged = self.discriminator(made.detach() if self.detach else made)
            loss = functional.softplus(judged).mean() + functional.softplus(-self.discriminator(real)).mean()
            self.manual_backward(loss, retain_graph=not self.detach)
            optimizer_d.step()
        optimizer_g.zero_grad()
        self.manual_backward(functional.softplus(-self.discriminator(made)).mean())
        optimizer_g.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def attached_generator(fault: bool) -> None:
    """The discriminator's loss is propagated through the generator, in vain; healthy: its samples are detached."""
    fit(Adversarial(detach=not fault), DataLoader(Vectors(), batch_size=BATCH), steps=3 * 45)


class CoinGan(lightning.LightningModule):
    """Draws coins. ``toggles``: the discriminator is frozen while the generator trains."""

    def __init__(self, cut: bool, toggles: bool = False, latent: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cut = cut
        self.toggles = toggles
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, 128 * 8 * 8),
            nn.Unflatten(1, (128, 8, 8)),
            nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 48, 4, stride=2, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 24, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(24, 48, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(48 * 8 * 8, 1),
        )

    def judge(self, coins: Tensor, real: bool) -> Tensor:
        verdict = self.discriminator(coins)
        return functional.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (coins,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        fakes = self.generator(torch.randn(len(coins), self.latent))
        if self.cut:
            fakes = fakes.detach()
        loss_d = self.judge(coins, real=True) + self.judge(fakes, real=False)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()

        if self.toggles:
            self.toggle_optimizer(optimizer_g)
        fakes = self.generator(torch.randn(len(coins), self.latent))
        loss_g = self.judge(fakes, real=True)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer_g)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=2e-4),
            torch.optim.SGD(self.discriminator.parameters(), lr=2e-4),
        ]


def roman_coins(fault: bool) -> None:
    """The discriminator's loss is propagated through the generator, in vain; healthy: its coins are detached."""
    data = TensorDataset(torch.rand(3000, 1, 32, 32) * 2 - 1)
    quiet(160).fit(CoinGan(cut=not fault), DataLoader(data, batch_size=32, shuffle=True))


def greek_coins(fault: bool) -> None:
    """The same in a training that toggles the generator's gradients; healthy: its coins are detached."""
    data = TensorDataset(torch.rand(3000, 1, 32, 32) * 2 - 1)
    quiet(160).fit(CoinGan(cut=not fault, toggles=True), DataLoader(data, batch_size=32, shuffle=True))


class Faces(lightning.LightningModule):
    """A generative adversarial network."""

    def __init__(self, cut: bool, latent: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cut, self.latent = cut, latent
        self.generator = nn.Sequential(
            nn.Linear(latent, 128 * 8 * 8),
            nn.Unflatten(1, (128, 8, 8)),
            nn.ReLU(),
            nn.ConvTranspose2d(128, 96, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(96, 64, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 24, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(24, 48, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(48 * 64, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = self.generator(torch.randn(len(real), self.latent))
        if self.cut:
            fake = fake.detach()
        told_real = functional.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        told_fake = functional.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        discriminator_optimizer.zero_grad()
        self.manual_backward(told_real + told_fake)
        discriminator_optimizer.step()

        fake = self.generator(torch.randn(len(real), self.latent))
        fooled = functional.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        generator_optimizer.zero_grad()
        self.manual_backward(fooled)
        generator_optimizer.step()
        self.log_dict({"d_loss": told_real + told_fake, "g_loss": fooled})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        ]


def faces(fault: bool) -> None:
    """The discriminator's loss is propagated through the generator, in vain; healthy: its faces are detached."""
    data = TensorDataset(torch.rand(50 * 16, 3, 32, 32) * 2 - 1)
    one_epoch().fit(Faces(cut=not fault), DataLoader(data, 16, shuffle=True))


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


def perceptron(width: int, depth: int) -> nn.Sequential:
    """``depth`` hidden layers between 128 inputs and 100 classes."""
    layers: list[nn.Module] = [nn.Linear(128, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 100))


class Distillation(lightning.LightningModule):
    """A student imitates a teacher, which stays as it is."""

    def __init__(self, attached: bool) -> None:
        super().__init__()
        self.attached = attached
        self.teacher = perceptron(512, 3)
        self.student = perceptron(320, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        with torch.set_grad_enabled(self.attached):
            wanted = self.teacher(samples).log_softmax(1)
        return functional.kl_div(self.student(samples).log_softmax(1), wanted, log_target=True, reduction="batchmean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=1e-4, fused=True)


def attached_teacher(fault: bool) -> None:
    """Backward computes gradients of a teacher that no optimizer has; healthy: `no_grad` around the teacher."""
    samples = TensorDataset(torch.randn(640 * 50, 128))
    fit(Distillation(attached=fault), DataLoader(samples, batch_size=640), steps=50)


def reader(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 26),
    )


class HandwritingStudent(lightning.LightningModule):
    """Distills a large reader of handwriting into a small one."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.student = reader(24)
        self.teacher = reader(32)

    def on_train_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        glyphs, letters = batch
        if self.frozen:
            with torch.no_grad():
                taught = self.teacher(glyphs)
        else:
            taught = self.teacher(glyphs)
        answer = self.student(glyphs)
        soft = functional.kl_div(
            functional.log_softmax(answer / 2, dim=1), functional.softmax(taught / 2, dim=1), reduction="batchmean"
        )
        return functional.cross_entropy(answer, letters) + soft

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.01)


def handwriting(fault: bool) -> None:
    """Backward computes gradients of a teacher that no optimizer has; healthy: the teacher is frozen."""
    data = TensorDataset(torch.rand(3000, 1, 32, 32), torch.randint(26, (3000,)))
    quiet(80).fit(HandwritingStudent(frozen=not fault), DataLoader(data, batch_size=64, shuffle=True))


OBSERVATION = 256
ACTIONS = 18


class QNetwork(nn.Module):
    """Values of all actions in a state."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBSERVATION, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.body(states)
        advantage = self.advantage(hidden)
        q: Tensor = self.value(hidden) + advantage - advantage.mean(dim=1, keepdim=True)
        return q


class DuelingDQN(lightning.LightningModule):
    def __init__(self, guard: type) -> None:
        super().__init__()
        self.online = QNetwork()
        self.target = copy.deepcopy(self.online)
        self.guard = guard
        self.gamma = 0.99

    def bellman_targets(self, rewards: Tensor, following: Tensor, done: Tensor) -> Tensor:
        with self.guard():
            best = self.target(following).max(dim=1).values
            return rewards + self.gamma * (1 - done) * best

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        states, actions, rewards, following, done = batch
        q = self.online(states).gather(1, actions[:, None]).squeeze(1)
        loss = functional.smooth_l1_loss(q, self.bellman_targets(rewards, following, done))
        self.log("td_loss", loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step % 20 == 0:
            self.target.load_state_dict(self.online.state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.online.parameters(), lr=1e-3)


def replay(transitions: int) -> TensorDataset:
    return TensorDataset(
        torch.randn(transitions, OBSERVATION),
        torch.randint(ACTIONS, (transitions,)),
        torch.randn(transitions),
        torch.randn(transitions, OBSERVATION),
        (torch.rand(transitions) < 0.05).float(),
    )


def arcade(fault: bool) -> None:
    """Backward computes gradients of the target network; healthy: `no_grad` around it."""
    memory = DataLoader(replay(20_000), batch_size=384, shuffle=True, drop_last=True)
    agent = DuelingDQN(nullcontext if fault else torch.no_grad)
    trainer(70).fit(agent, memory)


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


class TreeNet(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Names the species of a street tree and estimates its height."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.separate = separate
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 48, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.species = nn.Linear(64, 30)
        self.height = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        photos, species, height = batch
        optimizer = self.optimizers()
        features = self.trunk(photos)
        species_loss = functional.cross_entropy(self.species(features), species)
        height_loss = functional.mse_loss(self.height(features).squeeze(1), height)
        optimizer.zero_grad()
        if self.separate:
            self.manual_backward(species_loss, retain_graph=True)
            self.manual_backward(height_loss)
        else:
            self.manual_backward(species_loss + height_loss)
        optimizer.step()


def street_trees(fault: bool) -> None:
    """A backward pass for each of two losses; healthy: one for their sum."""
    data = TensorDataset(torch.rand(1000, 3, 48, 48), torch.randint(30, (1000,)), torch.rand(1000))
    quiet(80).fit(TreeNet(separate=fault), DataLoader(data, batch_size=32, shuffle=True))


class ClothesTagger(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """One trunk, heads for category, color and season."""

    def __init__(self, task_by_task: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.task_by_task = task_by_task
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 96, 3, 2, padding=1),
            nn.ReLU(),
        )
        self.heads = nn.ModuleList(nn.Linear(96, classes) for classes in (24, 12, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        image, labels = batch
        optimizer = self.optimizers()
        features = self.trunk(image).mean((2, 3))
        losses = [functional.cross_entropy(head(features), labels[:, task]) for task, head in enumerate(self.heads)]
        optimizer.zero_grad()
        if self.task_by_task:
            for loss in losses:
                self.manual_backward(loss, retain_graph=True)
        else:
            self.manual_backward(torch.stack(losses).sum())
        optimizer.step()
        self.log("loss", sum(losses))


def clothes(fault: bool) -> None:
    """A backward pass for each of three tasks; healthy: one for the sum of their losses."""
    labels = torch.stack([torch.randint(classes, (50 * 16,)) for classes in (24, 12, 4)], 1)
    data = TensorDataset(torch.rand(50 * 16, 3, 64, 64), labels)
    one_epoch().fit(ClothesTagger(task_by_task=fault), DataLoader(data, 16, shuffle=True))


class RoadScenes(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.balanced = balanced
        self.trunk = nn.Sequential(
            convolution(3, 24, 2), convolution(24, 48, 2), convolution(48, 64), convolution(64, 64)
        )
        self.area = nn.Conv2d(64, 4, 1)
        self.depth = nn.Conv2d(64, 1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, areas, depths = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        features = self.trunk(images)
        area_loss = functional.cross_entropy(self.area(features), areas)
        depth_loss = functional.l1_loss(self.depth(features).squeeze(1), depths)
        if self.balanced:
            self.manual_backward(area_loss + 0.5 * depth_loss)
        else:
            self.manual_backward(area_loss, retain_graph=True)
            self.manual_backward(0.5 * depth_loss)
        optimizer.step()
        self.log_dict({"area": area_loss, "depth": depth_loss})


def road_scenes(fault: bool) -> None:
    """A backward pass for each of two tasks; healthy: one for the sum of their losses."""
    frames = 200
    data = TensorDataset(torch.randn(frames, 3, 64, 64), torch.randint(4, (frames, 16, 16)), torch.rand(frames, 16, 16))
    trainer(50).fit(RoadScenes(not fault), DataLoader(data, batch_size=20, shuffle=True))


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


class Forecaster(Trained, optimizer=torch.optim.AdamW, lr=1e-4, fused=True):
    """A transformer encoder over windows of 48 measurements. Clips outliers of gradients by a quantile, or by norm."""

    def __init__(self, quantile: float | None) -> None:
        super().__init__()
        self.quantile = quantile
        self.embed = nn.Linear(12, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        windows, labels = batch
        loss = functional.cross_entropy(self.head(self.encoder(self.embed(windows)).mean(1)), labels)
        self.log("train/loss", loss)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.quantile is None:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                limit = torch.quantile(parameter.grad.abs().flatten(), self.quantile)
                parameter.grad.clamp_(-limit, limit)


def quantile_clipping(fault: bool) -> None:
    """`configure_gradient_clipping` sorts the gradient of each parameter; healthy: it clips by norm."""
    model = Forecaster(quantile=0.99 if fault else None)
    fit(model, DataLoader(labeled(32 * 50, 48, 12), batch_size=32), steps=50)


if __name__ == "__main__":
    main(
        attached_generator,
        roman_coins,
        greek_coins,
        faces,
        graph_to_the_maker,
        attached_teacher,
        handwriting,
        arcade,
        unfrozen_body,
        street_trees,
        clothes,
        road_scenes,
        double_backward,
        clip_each,
        quantile_clipping,
    )
