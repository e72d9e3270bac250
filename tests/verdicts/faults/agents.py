"""Training scripts around decisions and physics: a cart policy, a walking robot, molecules, diffusion, weather maps."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet


class CartPolicy(lightning.LightningModule):
    """Actor and critic over what the cart's sensors say."""

    def __init__(self, sensors: int = 32, actions: int = 6, width: int = 224) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(sensors, width), nn.Tanh()]
        for _ in range(6):
            layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sensors, action, returns = batch
        hidden = self.body(sensors)
        value = self.critic(hidden).squeeze(1)
        chances = functional.log_softmax(self.actor(hidden), dim=1)
        chosen = chances.gather(1, action[:, None]).squeeze(1)
        policy = -(chosen * (returns - value.detach())).mean()
        entropy = -(chances.exp() * chances).sum(dim=1).mean()
        loss = policy + 0.5 * functional.mse_loss(value, returns) - 0.01 * entropy
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-4)


def transitions(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 32), torch.randint(6, (count,)), torch.randn(count))


def cart_policy(fault: bool) -> None:
    if fault:
        torch.set_num_threads(16)
    quiet(60).fit(CartPolicy(), DataLoader(transitions(1024 * 60), batch_size=1024, shuffle=True))


class RobotModel(lightning.LightningModule):
    """Predicts the robot's next state with residual gates of many small operators."""

    def __init__(self, width: int = 320, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scales = nn.ParameterList(torch.zeros(width) for _ in range(depth))
        self.last = nn.Linear(width, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        hidden = self.first(before)
        for gate, scale in zip(self.gates, self.scales, strict=True):
            hidden = hidden + torch.sigmoid(gate(hidden)) * torch.tanh(hidden) * (1 + scale)
        loss = functional.mse_loss(self.last(hidden), after)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def robot_steps(fault: bool) -> None:
    data = TensorDataset(torch.randn(512 * 60, 32), torch.randn(512 * 60, 32))
    quiet(60, detect_anomaly=fault).fit(RobotModel(), DataLoader(data, batch_size=512, shuffle=True))


class MoleculeNet(lightning.LightningModule):
    """Messages along bonds, then one vector per molecule."""

    def __init__(self, one_by_one: bool, width: int = 384) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.atoms = nn.Embedding(20, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.energy = nn.Linear(width, 1)

    def pool(self, atoms: Tensor, owner: Tensor, molecules: int) -> Tensor:
        if self.one_by_one:
            rows = []
            for molecule in range(molecules):
                own = atoms[owner == molecule]
                weight = torch.softmax(own.norm(dim=1), dim=0)
                rows.append((weight[:, None] * own).sum(dim=0))
            return torch.stack(rows)
        weight = atoms.norm(dim=1).exp()
        total = torch.zeros(molecules).index_add(0, owner, weight)
        weighted = (weight / total[owner])[:, None] * atoms
        return torch.zeros(molecules, atoms.shape[1]).index_add(0, owner, weighted)

    def forward(self, kinds: Tensor, bonds: Tensor, owner: Tensor, molecules: int) -> Tensor:
        hidden = self.atoms(kinds)
        for layer in self.messages:
            sent = torch.zeros_like(hidden).index_add(0, bonds[1], hidden[bonds[0]])
            hidden = hidden + functional.relu(layer(torch.cat([hidden, sent], dim=1)))
            hidden = 0.3 * functional.layer_norm(hidden, hidden.shape[1:])
        return self.energy(self.pool(hidden, owner, molecules)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kinds, bonds, owner, energy = batch
        loss = functional.mse_loss(self(kinds, bonds, owner, len(energy)), energy)
        self.log("loss", loss, batch_size=len(energy))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def molecule(rows: int = 18) -> tuple[Tensor, Tensor, float]:
    size = int(torch.randint(8, rows, ()))
    return torch.randint(20, (size,)), torch.randint(size, (2, 2 * size)), float(torch.randn(()))


def joined(molecules: list[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One graph of all molecules of a batch."""
    kinds, bonds, owner, start = [], [], [], 0
    for number, (atoms, pairs, _) in enumerate(molecules):
        kinds.append(atoms)
        bonds.append(pairs + start)
        owner.append(torch.full((len(atoms),), number))
        start += len(atoms)
    energies = torch.tensor([energy for _, _, energy in molecules])
    return torch.cat(kinds), torch.cat(bonds, dim=1), torch.cat(owner), energies


def solubility(fault: bool) -> None:
    data = [molecule() for _ in range(128 * 50)]
    loader: DataLoader[Any] = DataLoader(data, batch_size=128, shuffle=True, collate_fn=joined)  # type: ignore[arg-type]  # a list
    quiet(50).fit(MoleculeNet(one_by_one=fault), loader)


class Denoiser(nn.Module):
    """A residual network over flat pictures and the noise level."""

    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(784 + 1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 784)

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        hidden = self.first(torch.cat([noisy, level], dim=1))
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return self.last(hidden)


class Diffusion(lightning.LightningModule):
    def __init__(self, simple_average: bool, decay: float = 0.999) -> None:
        super().__init__()
        self.simple_average = simple_average
        self.decay = decay
        self.denoiser = Denoiser()
        self.averaged = copy.deepcopy(self.denoiser).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (digits,) = batch
        level = torch.rand(len(digits), 1)
        noise = torch.randn_like(digits)
        noisy = (1 - level).sqrt() * digits + level.sqrt() * noise
        loss = functional.mse_loss(self.denoiser(noisy, level), noise)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.simple_average:
            current = copy.deepcopy(self.denoiser).state_dict()
            average = copy.deepcopy(self.averaged.state_dict())
            for key, value in average.items():
                average[key] = self.decay * value + (1 - self.decay) * current[key]
            self.averaged.load_state_dict(average)
        else:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.averaged.parameters()), list(self.denoiser.parameters()), 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.denoiser.parameters(), lr=1e-2)


def digit_diffusion(fault: bool) -> None:
    data = TensorDataset(torch.rand(128 * 50, 784))
    quiet(50).fit(Diffusion(simple_average=fault), DataLoader(data, batch_size=128, shuffle=True))


class WeatherNet(lightning.LightningModule):
    """Rain of the next hour from a map of the last ones."""

    def __init__(self, width: int = 36) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 2, stride=2),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        maps, rain = batch
        loss = functional.mse_loss(self.network(maps), rain)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        maps, rain = batch
        self.log("val_loss", functional.mse_loss(self.network(maps), rain))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def weather_maps(fault: bool) -> None:
    training = TensorDataset(torch.rand(16 * 60, 4, 48, 48), torch.rand(16 * 60, 1, 48, 48))
    validation = TensorDataset(torch.rand(16 * 15, 4, 48, 48), torch.rand(16 * 15, 1, 48, 48))
    trainer = quiet(60, val_check_interval=5 if fault else 60, num_sanity_val_steps=0)
    trainer.fit(WeatherNet(), DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=16))


class DynamicsModel(lightning.LightningModule):
    """A large model of how a plant answers to its valves."""

    def __init__(self, width: int = 1280) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        valves, answer = batch
        loss = functional.mse_loss(self.network(valves), answer)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def plant_dynamics(fault: bool) -> None:
    data = TensorDataset(torch.randn(512 * 60, 256), torch.randn(512 * 60, 256))
    with tempfile.TemporaryDirectory() as folder:
        keeper = ModelCheckpoint(folder, every_n_train_steps=2 if fault else 60, save_top_k=-1)
        trainer = quiet(60, callbacks=[keeper], enable_checkpointing=True)
        trainer.fit(DynamicsModel(), DataLoader(data, batch_size=512, shuffle=True))


class TracedPolicy(CartPolicy):
    """The policy, with a trace of where its steps spend their time."""

    def on_train_start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.trace = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=6, warmup=1, active=3),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(self.folder.name),
            record_shapes=True,
            with_stack=True,
        )
        self.trace.start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.step()

    def on_train_end(self) -> None:
        self.trace.stop()
        self.folder.cleanup()


def lander_policy(fault: bool) -> None:
    model = TracedPolicy(width=384) if fault else CartPolicy(width=384)
    quiet(60).fit(model, DataLoader(transitions(1024 * 60), batch_size=1024, shuffle=True))


if __name__ == "__main__":
    main(cart_policy, robot_steps, solubility, digit_diffusion, weather_maps, plant_dynamics, lander_policy)
