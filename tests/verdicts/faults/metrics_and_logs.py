"""Metrics that are computed or logged too often, and loggers that write too much."""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import BinaryAUROC, MulticlassAUROC

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, Classifier, Residual, Trained, Vectors, fit, labeled, main, one_epoch, quiet, vector_batches
from small_models import Regressor, Spectra, Tabular, perceptron, spectrograms


class Ranked(Classifier):
    """Computes the area under the ROC curve of everything seen so far: at each step, or each 50."""

    def __init__(self, every: int) -> None:
        super().__init__(classes=40)
        self.every = every
        self.auroc = MulticlassAUROC(num_classes=40, thresholds=None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        logits = self(features)
        self.auroc.update(logits.detach().softmax(-1), labels)
        if batch_idx % self.every == self.every - 1:
            self.log("auroc", self.auroc.compute())
        return functional.cross_entropy(logits, labels)


def metric_each_step(fault: bool) -> None:
    """A metric over all predictions is computed at each step; healthy: each 50 steps."""
    fit(Ranked(every=1 if fault else 50), vector_batches())


class ClickModel(Trained, optimizer=torch.optim.SGD, lr=0.1):
    def __init__(self, score_each_step: bool, width: int = 256) -> None:
        super().__init__()
        self.score_each_step = score_each_step
        self.embed = nn.EmbeddingBag(20_000, 64)
        self.mlp = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 1)
        self.train_auc = BinaryAUROC()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, clicked = batch
        logits = self.out(self.mlp(self.embed(features))).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, clicked.float())
        self.train_auc.update(logits.detach(), clicked)
        self.log("train/loss", loss)
        if self.score_each_step:
            self.log("train/auc", self.train_auc.compute())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/auc_epoch", self.train_auc.compute())
        self.train_auc.reset()


class ClickLog(Dataset):
    """The log in chunks: one item is a whole batch."""

    def __init__(self, batches: int, size: int) -> None:
        self.features = torch.randint(20_000, (batches, size, 12))
        self.clicked = torch.randint(2, (batches, size))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.clicked[index]


def clicks(fault: bool) -> None:
    """A metric over all predictions is computed in each step; healthy: at the end of the epoch."""
    one_epoch().fit(ClickModel(score_each_step=fault), DataLoader(ClickLog(60, 16384), batch_size=None, shuffle=True))


class DefaultModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """The risk that a loan is not paid back."""

    def __init__(self, watch_each_step: bool) -> None:
        super().__init__()
        self.net = perceptron(64, 512, 2, 1)
        self.auroc = BinaryAUROC()
        self.watch_each_step = watch_each_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        applications, defaulted = batch
        risk = self.net(applications).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(risk, defaulted.float())
        self.auroc.update(risk.detach(), defaulted)
        if self.watch_each_step:
            self.log("train_auroc", self.auroc.compute())
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train_auroc_epoch", self.auroc.compute())
        self.auroc.reset()


class Loans(Dataset):
    """Applications for loans; they are read in slices."""

    def __init__(self, count: int) -> None:
        self.applications = torch.randn(count, 64)
        self.defaulted = (torch.rand(count) < 0.1).long()

    def __len__(self) -> int:
        return len(self.defaulted)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.applications[indices], self.defaulted[indices]


def loan_defaults(fault: bool) -> None:
    """A metric over all predictions is computed in each step; healthy: at the end of the epoch."""
    loader = DataLoader(Loans(2048 * 120), batch_size=2048, shuffle=True, collate_fn=lambda batch: batch)
    quiet(120).fit(DefaultModel(watch_each_step=fault), loader)


class PaymentModel(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    """Finds fraudulent payments."""

    def __init__(self, running: bool) -> None:
        super().__init__()
        self.running = running
        self.network = perceptron(48, 256, 2, 1)
        self.auroc = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        payments, fraud = batch
        scores = self.network(payments).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(scores, fraud.float())
        self.auroc.update(scores.detach(), fraud)
        if self.running:
            self.log("train/auroc_so_far", self.auroc.compute())
        self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("train/auroc", self.auroc.compute())
        self.auroc.reset()


class Batches(Dataset):
    """Payments in ready batches."""

    def __init__(self, batches: int, size: int) -> None:
        self.payments = torch.randn(batches, size, 48)
        self.fraud = (torch.rand(batches, size) < 0.02).long()

    def __len__(self) -> int:
        return len(self.payments)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.payments[index], self.fraud[index]


def card_payments(fault: bool) -> None:
    """A metric over all predictions is computed in each step; healthy: at the end of the epoch."""
    quiet(60).fit(PaymentModel(running=fault), DataLoader(Batches(60, 6144), batch_size=None, shuffle=True))


class Verbose(Classifier):
    """Logs the mean of each feature, or of all."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each = each

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = batch[0].mean(0)
        if self.each:
            for index, mean in enumerate(means[:300]):
                self.log(f"feature_{index}", mean)
        else:
            self.log("features", means.mean())
        return super().training_step(batch, batch_idx)


def log_volume(fault: bool) -> None:
    """300 calls of `self.log` per step; healthy: 2."""
    fit(Verbose(each=fault), vector_batches())


class MusicTagger(Trained, optimizer=torch.optim.SGD, lr=0.1):
    """Multi-label tags of a mel spectrogram."""

    def __init__(self, per_tag: bool, tags: int = 180) -> None:
        super().__init__()
        self.per_tag = per_tag
        self.names = [f"tag_{number:03d}" for number in range(tags)]
        self.conv = nn.Sequential(
            nn.Conv1d(96, 256, 5, padding=2), nn.ReLU(), nn.Conv1d(256, 256, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)
        )
        self.head = nn.Linear(256, tags)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mel, tags = batch
        logits = self.head(self.conv(mel).mean(-1))
        losses = functional.binary_cross_entropy_with_logits(logits, tags, reduction="none").mean(0)
        if self.per_tag:
            accuracy = ((logits > 0) == (tags > 0.5)).float().mean(0)
            for number, name in enumerate(self.names):
                self.log(f"train/loss/{name}", losses[number].detach(), on_step=True, on_epoch=True)
                self.log(f"train/accuracy/{name}", accuracy[number], on_step=True, on_epoch=True)
        loss = losses.mean()
        self.log("train/loss", loss)
        return loss


def music_tags(fault: bool) -> None:
    """Each step logs loss and accuracy of each of 180 tags; healthy: the mean loss."""
    data = TensorDataset(torch.randn(40 * 32, 96, 128), torch.randint(2, (40 * 32, 180)).float())
    one_epoch().fit(MusicTagger(per_tag=fault), DataLoader(data, 32, shuffle=True))


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


class TopicTagger(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """Which of many topics a news article has."""

    def __init__(self, report_topics: bool, topics: int = 160, width: int = 512) -> None:
        super().__init__()
        self.report_topics = report_topics
        self.words = nn.EmbeddingBag(8000, width)
        self.body = nn.Sequential(
            nn.Linear(width, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, width), nn.ReLU()
        )
        self.topics = nn.Linear(width, topics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        articles, tags = batch
        scores = self.topics(self.body(self.words(articles)))
        losses = functional.binary_cross_entropy_with_logits(scores, tags, reduction="none").mean(dim=0)
        loss = losses.mean()
        self.log("train/loss", loss)
        if self.report_topics:
            for topic, value in enumerate(losses.detach()):
                self.log(f"train/topic_{topic:03d}", value, on_step=True, on_epoch=True)
        return loss


def news_topics(fault: bool) -> None:
    """Each step logs the loss of each of 160 topics; healthy: the mean."""
    articles = torch.randint(8000, (256 * 50, 40))
    tags = (torch.rand(256 * 50, 160) < 0.03).float()
    loader = DataLoader(torch.utils.data.TensorDataset(articles, tags), batch_size=256, shuffle=True)
    quiet(50).fit(TopicTagger(report_topics=fault), loader)


class GaugeModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """The water level of tomorrow at each gauge of a river basin."""

    def __init__(self, gauges: int, log_each: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 * gauges, 512), Residual(512), Residual(512), nn.Linear(512, gauges))
        self.log_each = log_each

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        week, tomorrow = batch
        error = (self.net(week) - tomorrow).abs()
        if self.log_each:
            for gauge, value in enumerate(error.mean(dim=0)):
                self.log(f"error/gauge_{gauge}", value)
        loss = error.mean()
        self.log("error", loss)
        return loss


def river_gauges(fault: bool) -> None:
    """Each step logs the error of each of 150 gauges; healthy: their mean."""
    gauges = 150
    data = TensorDataset(torch.randn(384 * 20, 3 * gauges), torch.randn(384 * 20, gauges))
    quiet(80).fit(GaugeModel(gauges, log_each=fault), DataLoader(data, batch_size=384, shuffle=True))


class Birds(Spectra):
    def __init__(self, every: int) -> None:
        super().__init__(width=160, depth=14)
        self.every = every

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step % self.every:
            return
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                self.log(f"grad_norm/{name}", parameter.grad.norm(2).item())


def bird_songs(fault: bool) -> None:
    """`on_before_optimizer_step` logs the norm of each gradient; healthy: in each 50th step."""
    fit(Birds(every=1 if fault else 50), DataLoader(spectrograms(1024), batch_size=16, shuffle=True), steps=60)


class Molecules(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Message passing over the atoms of a batch of molecules; predicts an energy for each molecule."""

    def __init__(self, rounds: int = 3, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.energy = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        atoms, bonds, molecules, energies = batch
        source, target = bonds
        hidden = self.embed(atoms)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = functional.silu(message(torch.cat((hidden[source], hidden[target]), dim=1)))
            received = torch.zeros_like(hidden).scatter_add_(0, target[:, None].expand_as(sent), sent)
            hidden = hidden + functional.silu(update(torch.cat((hidden, received), dim=1)))
        members = molecules[:, None].expand_as(hidden)
        pooled = torch.zeros(len(energies), hidden.shape[1]).scatter_add_(0, members, hidden)
        loss = functional.l1_loss(self.energy(pooled)[:, 0], energies)
        self.log("loss", loss)
        return loss


class Structures(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Batches of random molecules as one graph each."""

    def __init__(self, batches: int, molecules: int = 128, atoms: int = 20, bonds: int = 60) -> None:
        offsets = torch.arange(molecules).repeat_interleave(bonds) * atoms
        self.members = torch.arange(molecules).repeat_interleave(atoms)
        self.atoms = torch.randint(20, (batches, molecules * atoms))
        self.bonds = torch.randint(atoms, (batches, 2, molecules * bonds)) + offsets
        self.energies = torch.randn(batches, molecules)

    def __len__(self) -> int:
        return len(self.atoms)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.atoms[index], self.bonds[index], self.members, self.energies[index]


class Histograms(lightning.Callback):
    """Histograms of the matrices and their gradients for a logger. Fault: in each step; healthy: in each 50th."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step % self.every == 0:
            writer = pl_module.logger.experiment
            for name, parameter in pl_module.named_parameters():
                if parameter.ndim < 2:
                    continue
                writer.add_histogram(f"weights/{name}", parameter, trainer.global_step)
                writer.add_histogram(f"gradients/{name}", parameter.grad, trainer.global_step)


def histograms_each_step(fault: bool) -> None:
    """TensorBoard gets histograms of matrices and their gradients in each step; healthy: in each 50th."""
    loader = DataLoader(Structures(80), batch_size=None, shuffle=True)
    fit(Molecules(), loader, steps=80, logger=TensorBoardLogger("."), callbacks=[Histograms(1 if fault else 50)])


class JsonLogger(Logger):
    """Keeps all metrics in one JSON file: rewritten at each call, or one line appended."""

    def __init__(self, rewrite: bool) -> None:
        super().__init__()
        self.rewrite = rewrite
        self.path = Path("metrics.json")
        # A resumed training has a history.
        self.rows = [{"step": step, "loss": 1.0 / (step + 1), "accuracy": step / 2e4} for step in range(8000)]

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step or 0, **metrics})
        if self.rewrite:
            self.path.write_text(json.dumps(self.rows))
        else:
            with self.path.open("a") as lines:
                lines.write(json.dumps(self.rows[-1]) + "\n")


def rewriting_logger(fault: bool) -> None:
    """The logger writes its whole history again at each call; healthy: it appends."""
    fit(Classifier(depth=2), vector_batches(), logger=JsonLogger(rewrite=fault), log_every_n_steps=1)


class JsonHistoryLogger(Logger):
    """Keeps the history of an experiment, that of earlier sessions included, in one JSON file."""

    def __init__(self, path: Path, flush_every: int) -> None:
        super().__init__()
        self.path, self.flush_every = path, flush_every
        self.history: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self.pending = 0

    @property
    def name(self) -> str:
        return "json"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append({"step": step, **metrics})
        self.pending += 1
        if self.pending >= self.flush_every:
            self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.history, indent=1))
        self.pending = 0

    def finalize(self, status: str) -> None:
        self.write()


class DemandForecaster(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(336, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 48),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        past, future = batch
        predicted = self.net(past)
        loss = functional.mse_loss(predicted, future)
        self.log("mse", loss)
        self.log("mae", functional.l1_loss(predicted.detach(), future))
        return loss


def energy_demand(fault: bool) -> None:
    """The logger writes its whole history after each step; healthy: after 500."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.json"
        earlier = [{"step": step, "mse": 1 / (step + 1), "mae": 0.5, "epoch": step // 60} for step in range(26_000)]
        path.write_text(json.dumps(earlier))
        logger = JsonHistoryLogger(path, flush_every=1 if fault else 500)
        data = TensorDataset(torch.randn(60 * 768, 336), torch.randn(60 * 768, 48))
        loader = DataLoader(data, sampler=torch.arange(60 * 768).view(60, 768).tolist(), batch_size=None)
        one_epoch(logger=logger, log_every_n_steps=1).fit(DemandForecaster(), loader)


class JsonHistory(Logger):
    """Keeps the metrics of a run in a file that a dashboard reads."""

    def __init__(self, path: Path, whole: bool) -> None:
        super().__init__()
        self.path = path
        self.whole = whole
        self.history: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        record = {"step": step, "metrics": dict(metrics), "host": [random.random() for _ in range(600)]}
        if self.whole:
            self.history.append(record)
            self.path.write_text(json.dumps(self.history, indent=1))
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def turbine_output(fault: bool) -> None:
    """The logger writes its whole history again at each call; healthy: it appends."""
    data = TensorDataset(torch.randn(60 * 256, 256), torch.randn(60 * 256))
    with tempfile.TemporaryDirectory() as folder:
        logger = JsonHistory(Path(folder) / "history.json", whole=fault)
        loader = DataLoader(data, batch_size=256, shuffle=True)
        quiet(60, logger=logger, log_every_n_steps=1).fit(Regressor(256), loader)


logger = logging.getLogger("tides")


class Tides(Trained, optimizer=torch.optim.SGD, lr=0.05):
    """A recurrent network that describes its states in debug messages, which are off."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.rnn = nn.GRU(16, 96, num_layers=2, batch_first=True)
        self.level = nn.Linear(96, 10)

    def describe(self, what: str, states: Tensor) -> None:
        if self.eager:
            logger.debug(f"{what}: {states.detach()[:, ::8, ::4]}")  # noqa: G004
        else:
            logger.debug("%s: %s", what, states)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series, labels = batch
        states, last = self.rnn(series)
        self.describe("states", states)
        self.describe("last", last)
        return functional.cross_entropy(self.level(last[-1]), labels)


def eager_messages(fault: bool) -> None:
    """Each step formats tensors for debug messages that nobody reads; healthy: arguments are formatted on demand."""
    torch.set_printoptions(profile="full")
    fit(Tides(eager=fault), DataLoader(labeled(32 * 50, 40, 16), batch_size=32), steps=50)


if __name__ == "__main__":
    main(
        metric_each_step,
        clicks,
        loan_defaults,
        card_payments,
        log_volume,
        music_tags,
        chatty_log,
        news_topics,
        river_gauges,
        bird_songs,
        histograms_each_step,
        rewriting_logger,
        energy_demand,
        turbine_output,
        eager_messages,
    )
