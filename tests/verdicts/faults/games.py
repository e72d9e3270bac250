"""Q-learning from a replay memory of game states."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, trainer

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
    memory = DataLoader(replay(20_000), batch_size=384, shuffle=True, drop_last=True)
    agent = DuelingDQN(nullcontext if fault else torch.no_grad)
    trainer(70).fit(agent, memory)


if __name__ == "__main__":
    main(arcade)
