"""Programs for trials that start their training in unusual ways, or limit it: ``python tried_programs.py KIND``."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

KIND = sys.argv[1] if len(sys.argv) > 1 else ""


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) * random.random() + torch.rand(8)


class Anywhere(Sampler[int]):
    """Draws each index when it is asked for it, without a generator."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(24) for _ in range(24))


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    share = torch.rand(1)
    return share * batch + (1 - share) * batch[torch.randperm(len(batch))]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.lr = 1e-2

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if KIND == "rank" and self.global_rank == 1 and self.global_step == 3:
            raise RuntimeError("only here\nand more")
        if KIND == "loggers":
            self.logger.log_image("sample", [1])  # type: ignore[union-attr]  # of WandbLogger
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val", 1.0)

    def configure_callbacks(self) -> list[Callback]:
        return [ModelCheckpoint("of-the-module", every_n_train_steps=1)] if KIND == "loggers" else []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        if KIND != "limits":
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, enable_progress_bar=False, **{"max_epochs": 1, **options})


def loader(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Samples(), batch_size=4, **options)


def spawned() -> None:
    pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1).fit(Module(), loader())


def ranks() -> None:
    pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1).fit(Module(), loader(shuffle=True))


def child() -> None:
    subprocess.run([sys.executable, __file__, "ranked"], check=True)


def limits() -> None:
    stopping = EarlyStopping("val", patience=0)
    trainer(callbacks=[stopping], max_time={"seconds": 1}).fit(Module(), loader(), loader())


def loggers() -> None:
    loggers = [WandbLogger(project="mine", save_dir="wandb-here"), MLFlowLogger(tracking_uri="file:mlruns-here")]
    loggers[0].watch(nn.Linear(1, 1))  # type: ignore[attr-defined]  # of WandbLogger
    made = trainer(logger=loggers)
    Path(str(made.log_dir), "mine.txt").write_text("before the fit")
    made.fit(Module(), loader())


def checked_first() -> None:
    trainer(fast_dev_run=True).fit(Module(), loader())
    made, module = trainer(max_epochs=9), Module()
    Tuner(made).lr_find(module, loader(), num_training=30, early_stop_threshold=None)
    assert module.lr != 1e-2
    made.fit(module, loader())


def random_everywhere() -> None:
    multiprocessing.set_start_method("spawn")
    trainer().fit(Module(), loader(sampler=Anywhere(), collate_fn=mixed))


def short_epochs() -> None:
    trainer().fit(Module(), loader(num_workers=1))


def main() -> None:
    kinds = {
        "spawned": spawned, "ranked": ranks, "rank": ranks, "child": child, "limits": limits, "loggers": loggers,
        "checked": checked_first, "random": random_everywhere, "short": short_epochs,
    }  # fmt: skip
    kinds[KIND]()
    Path("after.txt").touch()


if __name__ == "__main__":
    main()
