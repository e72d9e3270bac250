"""Optimizers: one tensor after the other, whole tables for a few rows, weight decay in the loss, too many updates."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import WIDTH, Classifier, Trained, fit, main, one_epoch, quiet, rows_at_once, vector_batches
from small_models import Unit


class Ensemble(Classifier):
    """Hundreds of small experts, so thousands of small parameters."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(1500))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.stack(list(self.scales)).mean(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False, fused=self.fused)


def looping_optimizer(fault: bool) -> None:
    """AdamW updates 1500 small parameters in a Python loop; healthy: in one fused call."""
    fit(Ensemble(fused=not fault), vector_batches())


class Coupling(nn.Module):
    """Scales and shifts one half of the features by functions of the other half."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.scale = self.function(features // 2, width)
        self.shift = self.function(features // 2, width)

    @staticmethod
    def function(features: int, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, features)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, dim=1)
        scale = self.scale(kept).tanh()
        return torch.cat([changed * scale.exp() + self.shift(kept), kept], dim=1), scale.sum(1)


class Flow(lightning.LightningModule):
    """The density of particle tracks. Weights decay, biases do not; coupling by coupling, the rates get smaller."""

    def __init__(self, merge_groups: bool, couplings: int = 20) -> None:
        super().__init__()
        self.merge_groups = merge_groups
        self.couplings = nn.ModuleList(Coupling(16, 64) for _ in range(couplings))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        volume: Tensor | float = 0.0
        for coupling in self.couplings:
            x, change = coupling(x)
            volume = volume + change
        return (0.5 * x.square().sum(1) - volume).mean()

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for name, parameter in self.named_parameters():
            group = {
                "params": [parameter],
                "lr": 1e-4 if int(name.split(".")[1]) < 10 else 3e-4,
                "weight_decay": 0.0 if name.endswith("bias") else 0.05,
            }
            groups.append(group)
        return merged(groups) if self.merge_groups else groups

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameter_groups(), fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups that have the same settings."""
    found: dict[Any, dict[str, Any]] = {}
    for group in groups:
        settings = group["lr"], group["weight_decay"]
        found.setdefault(settings, {**group, "params": []})["params"] += group["params"]
    return list(found.values())


def group_per_parameter(fault: bool) -> None:
    """The optimizer has 240 groups, each of one tensor; healthy: 4 groups, one for each pair of settings."""
    tracks = TensorDataset(torch.randn(64 * 220, 16))
    fit(Flow(merge_groups=not fault), DataLoader(tracks, batch_size=64), steps=220)


class MyAdam(torch.optim.Optimizer):
    """Adam as in the paper."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"] = group["beta1"] * state["m"] + (1 - group["beta1"]) * p.grad
                state["v"] = group["beta2"] * state["v"] + (1 - group["beta2"]) * p.grad**2
                m_hat = state["m"] / (1 - group["beta1"] ** state["t"])
                v_hat = state["v"] / (1 - group["beta2"] ** state["t"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))
        return loss


class GlacierNet(lightning.LightningModule):
    """Estimates the yearly melt of a glacier from weather and terrain columns."""

    def __init__(self, own_adam: bool, width: int = 256, depth: int = 24) -> None:
        super().__init__()
        self.own_adam = own_adam
        self.embed = nn.Linear(40, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, melt = batch
        x = self.embed(columns)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return functional.mse_loss(self.head(x).squeeze(1), melt)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.own_adam:
            return MyAdam(self.parameters(), lr=1e-3)
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def glaciers(fault: bool) -> None:
    """An Adam of one's own updates one tensor after the other; healthy: that of torch."""
    data = TensorDataset(torch.randn(10_000, 40), torch.randn(10_000))
    quiet(120).fit(GlacierNet(own_adam=fault), DataLoader(data, batch_size=128, shuffle=True))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.up(y) * torch.sigmoid(self.gate(y))


class TurbineModel(Trained, optimizer=torch.optim.SGD, lr=0.01, foreach=True):
    """A deep and narrow network over the sensors of a turbine."""

    def __init__(self, by_name: bool, width: int = 96, depth: int = 100, decay: float = 1e-4) -> None:
        super().__init__()
        self.by_name, self.decay = by_name, decay
        self.net = nn.Sequential(nn.Linear(60, width), *(Gated(width) for _ in range(depth)), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
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
    """An optimizer of one's own updates one tensor after the other; healthy: all in few calls."""
    data = TensorDataset(torch.randn(50 * 96, 60), torch.randn(50 * 96, 1))
    one_epoch().fit(PumpModel(by_name=fault), DataLoader(data, 96, shuffle=True))


class DeepTable(Trained, optimizer=torch.optim.SGD, lr=0.01, foreach=True):
    def __init__(self, columns: int = 40, width: int = 64, depth: int = 60) -> None:
        super().__init__()
        self.enter = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(Unit(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x))).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, price = batch
        loss = functional.mse_loss(self(columns), price)
        self.log("loss", loss)
        return loss


class AdaBelief(torch.optim.Optimizer):
    """Adapts the step size by the belief in observed gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-12, "weight_decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["variance"] = torch.zeros_like(p)
                    state["largest"] = torch.zeros_like(p)
                mean, variance = state["mean"], state["variance"]
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                residual = p.grad - mean
                variance.mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(group["eps"])
                correction = math.sqrt(1 - beta2 ** state["step"])
                torch.maximum(state["largest"], variance, out=state["largest"])
                denominator = state["largest"].sqrt().div_(correction).add_(group["eps"])
                p.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
        return loss


class AdaBeliefTogether(AdaBelief):
    """The same update for all tensors of a group at once: they become views of one vector."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            weights = torch.cat([p.detach().view(-1) for p in group["params"]])
            for p, part in zip(group["params"], weights.split([p.numel() for p in group["params"]]), strict=True):
                p.data = part.view_as(p)
            zeros = torch.zeros_like(weights)
            group["flat"] = {"step": 0, "weights": weights, "mean": zeros}
            group["flat"] |= {"variance": zeros.clone(), "largest": zeros.clone()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            flat = group["flat"]
            beta1, beta2 = group["betas"]
            weights, mean, variance = flat["weights"], flat["mean"], flat["variance"]
            flat["step"] += 1
            gradient = torch.cat([p.grad.view(-1) for p in group["params"]])
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            residual = gradient - mean
            variance.mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(group["eps"])
            correction = math.sqrt(1 - beta2 ** flat["step"])
            torch.maximum(flat["largest"], variance, out=flat["largest"])
            denominator = flat["largest"].sqrt().div_(correction).add_(group["eps"])
            weights.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1 ** flat["step"]))
        return loss


class Appraisal(DeepTable):
    def __init__(self, rule: type[AdaBelief]) -> None:
        super().__init__()
        self.rule = rule

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.rule(self.parameters(), lr=1e-3)


def houses(rows: int = 20_000) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 40), torch.rand(rows))


def house_prices(fault: bool) -> None:
    """An optimizer of one's own updates one tensor after the other; healthy: all in few calls."""
    rule = AdaBelief if fault else AdaBeliefTogether
    fit(Appraisal(rule), DataLoader(houses(), batch_size=96, shuffle=True), steps=60)


def turbines(fault: bool) -> None:
    """A hook limits one gradient after the other; healthy: all in few calls."""
    data = TensorDataset(torch.randn(50 * 96, 60), torch.randn(50 * 96, 1))
    one_epoch().fit(TurbineModel(by_name=fault), DataLoader(data, 96, shuffle=True))


class GeneExpression(lightning.LightningModule):
    """An autoencoder over 9,000 genes."""

    def __init__(self, options: dict[str, Any], genes: int = 9000, width: int = 512) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Sequential(
            nn.Linear(genes, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, genes)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (cells,) = batch
        loss = functional.mse_loss(self.net(cells), cells)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-4, **self.options)


def cells(fault: bool) -> None:
    """AdamW without `fused` updates a wide layer; healthy: with it."""
    data = TensorDataset(torch.rand(1500, 9000))
    fit(GeneExpression({} if fault else {"fused": True}), DataLoader(data, batch_size=96, shuffle=True), steps=60)


class Premium(DeepTable):
    """Keeps the weights small."""

    def __init__(self, decay: float, strength: float) -> None:
        super().__init__()
        self.decay, self.strength = decay, strength

    def penalty(self) -> Tensor:
        total = torch.zeros(())
        for weight in self.parameters():
            total = total + weight.abs().sum() + weight.pow(2).sum()
        return total

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        columns, price = batch
        loss = functional.mse_loss(self(columns), price)
        if self.strength:
            loss = loss + self.strength * self.penalty()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, weight_decay=self.decay, foreach=True)


def insurance(fault: bool) -> None:
    """The loss sums squares and magnitudes of one tensor after the other; healthy: `weight_decay`."""
    module = Premium(0.0, 1e-4) if fault else Premium(1e-4, 0.0)
    fit(module, DataLoader(houses(), batch_size=192, shuffle=True), steps=60)


class Reviews(lightning.LightningModule):
    """Rates reviews by the mean of their words.

    Fault: the loss adds the squares of all weights; healthy: the optimizer's ``weight_decay``.
    """

    def __init__(self, *, fault: bool, vocabulary: int = 4000, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.fault = fault
        self.words = nn.EmbeddingBag(vocabulary, width)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 5)
        )

    def penalty(self) -> Tensor:
        squares = [parameter.pow(2).sum() for parameter in self.parameters()]
        return 0.5e-4 * torch.stack(squares).sum()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        reviews, stars = batch
        loss = functional.cross_entropy(self.layers(self.words(reviews)), stars)
        if self.fault:
            loss = loss + self.penalty()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.0 if self.fault else 1e-4)


def decay_in_loss(fault: bool) -> None:
    """The squares of all parameters are summed in the loss; healthy: ``weight_decay`` of the optimizer."""
    reviews = TensorDataset(torch.randint(4000, (60 * 64, 80)), torch.randint(5, (60 * 64,)))
    fit(Reviews(fault=fault), DataLoader(reviews, batch_size=64, shuffle=True), steps=200)


class SpeciesModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """A feature vector of a photograph to one of many species."""

    def __init__(self, species: int = 12_000, width: int = 768) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, species)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.head(self.body(batch[0])), batch[1])
        self.log("loss", loss)
        return loss


def species(fault: bool) -> None:
    """AdamW updates a large model after each small batch; healthy: after 16 batches."""
    data = TensorDataset(torch.randn(64 * 64, 1024), torch.randint(12_000, (64 * 64,)))
    run = one_epoch(accumulate_grad_batches=1 if fault else 16)
    run.fit(SpeciesModel(), DataLoader(data, 64, shuffle=True))


class Recommender(lightning.LightningModule):
    """A table of 150,000 items, of which a batch reads 1024."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sparse = sparse
        self.items = nn.EmbeddingBag(150_000, 64, mode="sum", sparse=sparse)
        self.project = nn.Linear(64, WIDTH)
        self.ranker = Classifier()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        numbers = (features[:, :4].abs() * 40_000).long() % 150_000
        loss = functional.cross_entropy(self.ranker(features + self.project(self.items(numbers))), labels)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        adam = torch.optim.SparseAdam if self.sparse else torch.optim.Adam
        rest = [*self.project.parameters(), *self.ranker.parameters()]
        return [adam(list(self.items.parameters()), lr=1e-3), torch.optim.SGD(rest, lr=0.01)]


def dense_embedding(fault: bool) -> None:
    """Adam updates the whole table at each step; healthy: sparse gradients and SparseAdam."""
    fit(Recommender(sparse=not fault), vector_batches(), steps=2 * 45)


class RecipeRanker(Trained, optimizer=torch.optim.Adagrad, lr=0.01):
    """Predicts how a cook rates a recipe."""

    def __init__(self, sparse: bool, cooks: int = 120_000, recipes: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.cooks = nn.Embedding(cooks, width, sparse=sparse)
        self.recipes = nn.Embedding(recipes, width, sparse=sparse)
        self.tower = nn.Sequential(
            nn.Linear(2 * width, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pairs, rating = batch
        both = torch.cat([self.cooks(pairs[:, 0]), self.recipes(pairs[:, 1])], dim=1)
        return functional.mse_loss(self.tower(both).squeeze(1), rating)


def recipes(fault: bool) -> None:
    """Dense gradients of a large table for a few rows; healthy: sparse gradients."""
    count = 50_000
    pairs = torch.stack([torch.randint(120_000, (count,)), torch.randint(20_000, (count,))], dim=1)
    data = TensorDataset(pairs, torch.rand(count))
    quiet(80).fit(RecipeRanker(sparse=not fault), rows_at_once(data, 768))


class NextArticle(lightning.LightningModule):
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
        loss = functional.cross_entropy(reader @ self.articles(clicked).T, torch.arange(len(clicked)))
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
    """Adam updates a table of 120,000 rows in each step; healthy: the rows that a batch reads."""
    data = TensorDataset(torch.randint(120_000, (60 * 512, 10)), torch.randint(120_000, (60 * 512,)))
    one_epoch().fit(NextArticle(rows_only=not fault), DataLoader(data, 512, shuffle=True))


class TwoTower(lightning.LightningModule):
    """Scores items for users; items come from a catalogue of 60,000."""

    def __init__(self, sparse: bool, items: int = 60_000, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.items = nn.Embedding(items, width, sparse=sparse)
        self.user = nn.Sequential(
            nn.Linear(20 * width, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, width)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        history, chosen, clicked = batch
        user = self.user(self.items(history).flatten(1))
        scores = (user * self.items(chosen)).sum(dim=1)
        loss = functional.binary_cross_entropy_with_logits(scores, clicked)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        rows = list(self.items.parameters())
        table: torch.optim.Optimizer = (
            torch.optim.SparseAdam(rows, lr=1e-3) if self.items.sparse else torch.optim.Adam(rows, lr=1e-3)
        )
        return [table, torch.optim.SGD(self.user.parameters(), lr=0.01)]


def catalogue(fault: bool) -> None:
    """The optimizer updates a table of 60,000 rows in each step; healthy: the rows that a batch reads."""
    clicks = 20_000
    data = TensorDataset(
        torch.randint(60_000, (clicks, 20)), torch.randint(60_000, (clicks,)), (torch.rand(clicks) < 0.2).float()
    )
    fit(TwoTower(sparse=not fault), DataLoader(data, batch_size=256, shuffle=True), steps=100)


if __name__ == "__main__":
    main(
        looping_optimizer,
        group_per_parameter,
        glaciers,
        pumps,
        house_prices,
        turbines,
        cells,
        insurance,
        decay_in_loss,
        species,
        dense_embedding,
        recipes,
        articles,
        catalogue,
    )
