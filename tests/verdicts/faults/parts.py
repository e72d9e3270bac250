"""Faults of memory, and of two processes: summed losses, all stages, a copied argument, a broadcast bank."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main


class Segmenter(lightning.LightningModule):
    """Segments scans; a batch goes through the network in parts to save memory.

    Fault: the parts' losses are summed and go backward at the end; healthy: each part goes backward at once.
    """

    def __init__(self, *, fault: bool, parts: int = 12, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fault = fault
        self.parts = parts
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        total = torch.zeros(())
        for scans, masks in zip(*(part.chunk(self.parts) for part in batch), strict=True):
            loss = functional.cross_entropy(self.layers(scans), masks) / self.parts
            if self.fault:
                total = total + loss
            else:
                self.manual_backward(loss)
                total = total + loss.detach()
        if self.fault:
            self.manual_backward(total)
        optimizer.step()
        self.log("loss", total.detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def summed_parts(fault: bool) -> None:
    """Fault: the graphs of all parts of a batch live until one backward; healthy: a backward after each part."""
    scans = TensorDataset(torch.randn(48, 1, 128, 128), torch.randint(4, (48, 128, 128)))
    fit(Segmenter(fault=fault), DataLoader(scans, batch_size=24, shuffle=True), steps=40)


class Beats(Dataset[tuple[Tensor, Tensor]]):
    """Recordings of hearts, in memory."""

    def __init__(self, samples: int, length: int = 1000) -> None:
        self.signals = torch.randn(samples, 1, length)
        self.kinds = torch.randint(5, (samples,))

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.signals[index], self.kinds[index]


class Hearts(lightning.LightningDataModule):
    """Recordings of hearts. Fault: ``setup`` loads the data of every stage; healthy: that of the stage it is given."""

    def __init__(self, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault

    def setup(self, stage: str) -> None:
        if self.fault or stage == "fit":
            self.training = Beats(15_000)
            self.validation = Beats(2_000)
        if self.fault or stage == "test":
            self.testing = Beats(30_000)
        if self.fault or stage == "predict":
            self.unlabeled = Beats(40_000)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=128, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=128)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.testing, batch_size=128)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.unlabeled, batch_size=128)


class Rhythm(lightning.LightningModule):
    """A convolutional network over recordings of hearts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(2 * width, 4 * width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 5),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signals, kinds = batch
        loss = functional.cross_entropy(self.layers(signals), kinds)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        signals, kinds = batch
        self.log("val_loss", functional.cross_entropy(self.layers(signals), kinds))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kinds: Tensor = self.layers(batch[0]).argmax(dim=1)
        return kinds

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def every_stage(fault: bool) -> None:
    """Fault: ``setup`` holds the test and prediction data during the fit; healthy: it loads what the fit needs."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=80,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Rhythm(), datamodule=Hearts(fault=fault))


class Ranker(lightning.LightningModule):
    """Ranks articles for readers by pretrained vectors of words.

    Fault: ``save_hyperparameters`` copies the vectors; healthy: it ignores them.
    """

    def __init__(self, vectors: Tensor, width: int = 512, *, fault: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=None if fault else ["vectors"])
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.article = nn.Sequential(nn.Linear(vectors.shape[1], width), nn.GELU(), nn.Linear(width, width))
        self.reader = nn.GRUCell(width, width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        read, offered, clicked = batch
        articles = self.article(self.words(read).mean(dim=2))
        reader = articles[:, 0]
        for place in range(1, articles.shape[1]):
            reader = self.reader(articles[:, place], reader)
        candidates = self.article(self.words(offered).mean(dim=2))
        loss = functional.cross_entropy((candidates @ reader[:, :, None])[:, :, 0], clicked)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=1e-3)


def copied_argument(fault: bool) -> None:
    """Fault: ``save_hyperparameters()`` deep-copies the word vectors; healthy: ``ignore=["vectors"]``."""
    vectors = torch.randn(200_000, 200)
    clicks = TensorDataset(
        torch.randint(200_000, (40 * 64, 6, 12)),
        torch.randint(200_000, (40 * 64, 5, 12)),
        torch.randint(5, (40 * 64,)),
    )
    loader = DataLoader(clicks, batch_size=64, shuffle=True)
    fit(Ranker(vectors, fault=fault), loader, steps=120, logger=False)


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy views of each of the samples."""

    def __init__(self, samples: int, width: int = 256) -> None:
        self.samples = torch.randn(samples, width)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        return sample + 0.1 * torch.randn_like(sample), sample + 0.1 * torch.randn_like(sample)


class Contrast(lightning.LightningModule):
    """Contrastive training against a bank of earlier keys, that each process fills with its own keys."""

    bank: Tensor

    def __init__(self, inputs: int = 256, width: int = 768, code: int = 128, size: int = 65_536) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.code = nn.Linear(width, code)
        self.register_buffer("bank", functional.normalize(torch.randn(size, code), dim=1))
        self.place = 0

    def encode(self, views: Tensor) -> Tensor:
        return functional.normalize(self.code(self.query(views)), dim=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch
        queries = self.encode(first)
        with torch.no_grad():
            keys = self.encode(second)
        same = (queries * keys).sum(dim=1, keepdim=True)
        others = queries @ self.bank[torch.randint(len(self.bank), (2048,))].T
        logits = torch.cat((same, others), dim=1) / 0.1
        loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        self.bank[self.place : self.place + len(keys)] = keys
        self.place = (self.place + len(keys)) % len(self.bank)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def broadcast_bank(fault: bool) -> None:
    """Fault: two processes broadcast the bank of keys in each forward; healthy: ``broadcast_buffers=False``."""
    strategy = DDPStrategy(process_group_backend="gloo", broadcast_buffers=fault)
    loader = DataLoader(Views(120 * 256), batch_size=256, shuffle=True)
    fit(Contrast(), loader, steps=60, devices=2, strategy=strategy, logger=False)


if __name__ == "__main__":
    main(summed_parts, every_stage, copied_argument, broadcast_bank)
