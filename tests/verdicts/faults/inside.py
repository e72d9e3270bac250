"""Trainings whose model or optimizer matters: sound, text, tables, pictures, graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main


def trainer(**options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**settings | options)


# --- keyword spotting ---


class EnergyNormalization(nn.Module):
    """Per-channel energy normalization (PCEN) of a mel spectrogram: batch x mels x time."""

    def __init__(self, mels: int, by_frame: bool) -> None:
        super().__init__()
        self.by_frame = by_frame
        self.smoothing = nn.Parameter(torch.tensor(-2.0))
        self.gain = nn.Parameter(torch.full((mels, 1), 0.9))

    def smooth(self, energy: Tensor) -> Tensor:
        s = self.smoothing.sigmoid()
        if self.by_frame:
            frames = [energy[..., 0]]
            for index in range(1, energy.shape[-1]):
                frames.append((1 - s) * frames[-1] + s * energy[..., index])
            return torch.stack(frames, dim=-1)
        kernel = s * (1 - s) ** torch.arange(63, -1, -1)
        padded = F.pad(energy.flatten(0, 1)[:, None], (63, 0), mode="replicate")
        return F.conv1d(padded, kernel[None, None]).view_as(energy)

    def forward(self, energy: Tensor) -> Tensor:
        smoothed = self.smooth(energy)
        return (energy / (1e-3 + smoothed) ** self.gain + 2).sqrt() - 2**0.5


class KeywordSpotter(L.LightningModule):
    def __init__(self, by_frame: bool, mels: int = 40, words: int = 30) -> None:
        super().__init__()
        self.front = EnergyNormalization(mels, by_frame)
        self.body = nn.Sequential(
            nn.Conv1d(mels, 192, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv1d(192, 192, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(192, 192, 5, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(192, words)

    def forward(self, energy: Tensor) -> Tensor:
        return self.head(self.body(self.front(energy)).mean(-1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def keywords(fault: bool) -> None:
    data = TensorDataset(torch.rand(50 * 8, 40, 1000), torch.randint(30, (50 * 8,)))
    trainer().fit(KeywordSpotter(by_frame=fault), DataLoader(data, 8, shuffle=True))


# --- characters of a text ---


class MyLSTM(nn.Module):
    """A long short-term memory after the equations of the paper. Input: batch x time x features."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.w_i, self.u_i = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_f, self.u_f = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_g, self.u_g = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.w_o, self.u_o = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = x.new_zeros(len(x), self.hidden)
        c = x.new_zeros(len(x), self.hidden)
        outputs = []
        for t in range(x.shape[1]):
            x_t = x[:, t]
            i = torch.sigmoid(self.w_i(x_t) + self.u_i(h))
            f = torch.sigmoid(self.w_f(x_t) + self.u_f(h))
            g = torch.tanh(self.w_g(x_t) + self.u_g(h))
            o = torch.sigmoid(self.w_o(x_t) + self.u_o(h))
            c = f * c + i * g
            h = o * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1), None


class TextModel(L.LightningModule):
    def __init__(self, own: bool, vocabulary: int = 3000, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = MyLSTM(width, width) if own else nn.LSTM(width, width, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.GELU())
        self.head = nn.Linear(256, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.rnn(self.embed(tokens))[0]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def characters(fault: bool) -> None:
    data = TensorDataset(torch.randint(3000, (50 * 16, 81)))
    trainer().fit(TextModel(own=fault), DataLoader(data, 16, shuffle=True))


# --- molecules: attention over atoms ---


class AtomAttention(nn.Module):
    """Self-attention of the atoms of a molecule."""

    def __init__(self, width: int, heads: int, loop: bool) -> None:
        super().__init__()
        self.heads, self.loop = heads, loop
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, atoms, width = x.shape
        q, k, v = self.qkv(x).view(batch, atoms, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if not self.loop:
            mixed = F.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(batch, atoms, width))
        molecules = []
        for molecule in range(batch):
            heads = []
            for head in range(self.heads):
                scores = q[molecule, head] @ k[molecule, head].T / q.shape[-1] ** 0.5
                heads.append(scores.softmax(-1) @ v[molecule, head])
            molecules.append(torch.cat(heads, -1))
        return self.out(torch.stack(molecules))


class SolubilityModel(L.LightningModule):
    def __init__(self, loop: bool, width: int = 320, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.attention = nn.ModuleList(AtomAttention(width, 4, loop) for _ in range(layers))
        self.feedforward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        atoms, solubility = batch
        x = self.embed(atoms)
        for attention, feedforward in zip(self.attention, self.feedforward, strict=True):
            x = x + attention(x)
            x = x + feedforward(x)
        loss = F.mse_loss(self.head(x.mean(1)).squeeze(1), solubility)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def molecules(fault: bool) -> None:
    data = TensorDataset(torch.randn(50 * 16, 48, 32), torch.randn(50 * 16))
    trainer().fit(SolubilityModel(loop=fault), DataLoader(data, 16, shuffle=True))


# --- credit scoring ---


class Loans(Dataset):
    """Applications of one day per item, as the feature store gives them."""

    def __init__(self, days: int, per_day: int, dtype: type) -> None:
        generator = np.random.default_rng(0)
        self.columns: Any = generator.normal(size=(days, per_day, 200)).astype(dtype)
        self.default: Any = generator.integers(2, size=(days, per_day, 1)).astype(dtype)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.columns[index]), torch.from_numpy(self.default[index])


class CreditModel(L.LightningModule):
    def __init__(self, width: int = 896) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(200, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, default = batch
        loss = F.binary_cross_entropy_with_logits(self.net(features), default)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def credit(fault: bool) -> None:
    data = Loans(60, 768, np.float64 if fault else np.float32)
    model = CreditModel()
    if fault:
        model = model.double()
    trainer().fit(model, DataLoader(data, batch_size=None, shuffle=True))


# --- faces from noise ---


class Faces(L.LightningModule):
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
        told_real = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        told_fake = F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        discriminator_optimizer.zero_grad()
        self.manual_backward(told_real + told_fake)
        discriminator_optimizer.step()

        fake = self.generator(torch.randn(len(real), self.latent))
        fooled = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
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
    data = TensorDataset(torch.rand(50 * 16, 3, 32, 32) * 2 - 1)
    trainer().fit(Faces(cut=not fault), DataLoader(data, 16, shuffle=True))


# --- attributes of clothes ---


class ClothesTagger(L.LightningModule):
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
        losses = [F.cross_entropy(head(features), labels[:, task]) for task, head in enumerate(self.heads)]
        optimizer.zero_grad()
        if self.task_by_task:
            for loss in losses:
                self.manual_backward(loss, retain_graph=True)
        else:
            self.manual_backward(torch.stack(losses).sum())
        optimizer.step()
        self.log("loss", sum(losses))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def clothes(fault: bool) -> None:
    labels = torch.stack([torch.randint(classes, (50 * 16,)) for classes in (24, 12, 4)], 1)
    data = TensorDataset(torch.rand(50 * 16, 3, 64, 64), labels)
    trainer().fit(ClothesTagger(task_by_task=fault), DataLoader(data, 16, shuffle=True))


# --- articles for readers ---


class NextArticle(L.LightningModule):
    """Scores articles for the history of a reader."""

    def __init__(self, rows_only: bool, articles: int = 120_000, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rows_only = rows_only
        self.articles = nn.Embedding(articles, width, sparse=rows_only)
        self.reader = nn.Sequential(
            nn.Linear(10 * width, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, width)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        history, clicked = batch
        reader = self.reader(self.articles(history).flatten(1))
        loss = F.cross_entropy(reader @ self.articles(clicked).T, torch.arange(len(clicked)))
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        kind = torch.optim.SparseAdam if self.rows_only else torch.optim.Adam
        return [kind(self.articles.parameters(), lr=1e-3), torch.optim.SGD(self.reader.parameters(), lr=0.01)]


def articles(fault: bool) -> None:
    data = TensorDataset(torch.randint(120_000, (60 * 512, 10)), torch.randint(120_000, (60 * 512,)))
    trainer().fit(NextArticle(rows_only=not fault), DataLoader(data, 512, shuffle=True))


# --- sensors of a turbine ---


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.up(y) * torch.sigmoid(self.gate(y))


class TurbineModel(L.LightningModule):
    """A deep and narrow network over the sensors of a turbine."""

    def __init__(self, by_name: bool, width: int = 96, depth: int = 100, decay: float = 1e-4) -> None:
        super().__init__()
        self.by_name, self.decay = by_name, decay
        self.net = nn.Sequential(nn.Linear(60, width), *(Gated(width) for _ in range(depth)), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Limit each gradient to a share of its weight's norm, and decay the weights."""
        if self.by_name:
            for name, weight in self.named_parameters():
                allowed = weight.norm(2).clamp(min=1e-3) * 0.01
                assert weight.grad is not None
                norm = weight.grad.norm(2)
                limited = weight.grad * (allowed / norm.clamp(min=1e-6))
                weight.grad.copy_(torch.where(norm > allowed, limited, weight.grad))
                if "bias" not in name:
                    weight.mul_(1 - self.decay)
            return
        weights: list[Tensor] = list(self.parameters())
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        allowed = torch.stack(torch._foreach_norm(weights)).clamp(min=1e-3) * 0.01
        norms = torch.stack(torch._foreach_norm(gradients))
        torch._foreach_mul_(gradients, (allowed / norms.clamp(min=1e-6)).clamp(max=1).tolist())
        torch._foreach_mul_([weight for weight in weights if weight.ndim > 1], 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=True)


def turbines(fault: bool) -> None:
    data = TensorDataset(torch.randn(50 * 96, 60), torch.randn(50 * 96, 1))
    trainer().fit(TurbineModel(by_name=fault), DataLoader(data, 96, shuffle=True))


class Adan(torch.optim.Optimizer):
    """Adam with decoupled weight decay, as its paper writes it."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["t"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["t"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * p.grad
                state["v"] = 0.999 * state["v"] + 0.001 * p.grad**2
                mean, variance = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * mean / (variance.sqrt() + 1e-8))
        return loss


class PumpModel(TurbineModel):
    """The same network with the optimizer of the paper."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.by_name:
            return Adan(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def pumps(fault: bool) -> None:
    data = TensorDataset(torch.randn(50 * 96, 60), torch.randn(50 * 96, 1))
    trainer().fit(PumpModel(by_name=fault), DataLoader(data, 96, shuffle=True))


# --- species of plants ---


class SpeciesModel(L.LightningModule):
    """A feature vector of a photograph to one of many species."""

    def __init__(self, species: int = 12_000, width: int = 768) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, species)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def species(fault: bool) -> None:
    data = TensorDataset(torch.randn(64 * 64, 1024), torch.randint(12_000, (64 * 64,)))
    run = trainer(accumulate_grad_batches=1 if fault else 16)
    run.fit(SpeciesModel(), DataLoader(data, 64, shuffle=True))


if __name__ == "__main__":
    main(keywords, characters, molecules, credit, faces, clothes, articles, turbines, pumps, species)
