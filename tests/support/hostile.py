"""A program whose objects refuse to be compared, hashed, counted and tested, and count what their tensors are asked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn

T = TypeVar("T", bound=type)

COMPARED = ("__eq__", "__ne__", "__bool__", "__len__")


def refusing(*names: str) -> Callable[[T], T]:
    """Return a decorator that makes the named methods of a class raise."""

    def refuse(self: Any, *_: object) -> Any:
        raise TypeError(f"{type(self).__name__} is compared, hashed, counted or tested")

    def decorated(kind: T) -> T:
        hashed = kind.__hash__
        for name in names:
            setattr(kind, name, refuse)
        if "__hash__" not in names:
            kind.__hash__ = hashed  # type: ignore[method-assign]
        return kind

    return decorated


class Asked:
    """Counts the calls of ``__torch_function__`` of a subclass of Tensor."""

    asked: ClassVar[Counter[str]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]


@refusing("__bool__", "__len__")
class Weight(Asked, nn.Parameter):
    asked: ClassVar[Counter[str]] = Counter()


@refusing("__bool__", "__len__")
class Sample(Asked, torch.Tensor):
    asked: ClassVar[Counter[str]] = Counter()


@refusing(*COMPARED)
class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.eye(8) / 2)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight * self.scale


class Fickle(nn.Tanh):
    """Never has the same hash twice, as metrics whose hash is that of their state."""

    hashes: ClassVar[Iterator[int]] = count()

    def __hash__(self) -> int:
        return next(self.hashes)


@refusing(*COMPARED, "__hash__")
class Batch(dict[str, Any]):
    pass


@refusing(*COMPARED, "__hash__")
class Optimizer(torch.optim.SGD):
    """Its state has an entry that is no dictionary."""

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("k", torch.tensor(0)).add_(1)  # type: ignore[call-overload]
        return super().step(closure)


@refusing(*COMPARED, "__hash__")
class Scheduler(torch.optim.lr_scheduler.StepLR):
    pass


@refusing(*COMPARED, "__hash__")
class Loader:
    def __iter__(self) -> Iterator[Batch]:
        for number in range(5):
            rows = torch.linspace(0, 1, 32).reshape(4, 8) + number
            yield Batch(x=rows.as_subclass(Sample), y=[rows])


@refusing(*COMPARED, "__hash__")
class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return Loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@refusing(*COMPARED, "__hash__")
class Hook(pl.Callback):
    def on_before_backward(self, *_: object) -> None:
        pass


@refusing(*COMPARED, "__hash__")
class Log(Logger):
    name, version = "log", 0

    def log_metrics(self, *_: object, **__: object) -> None:
        pass

    def log_hyperparams(self, *_: object, **__: object) -> None:
        pass


def _only_lightning() -> None:
    caller = str(sys._getframe(2).f_globals["__name__"])
    assert not caller.startswith("lightning_memprof"), caller


class Model(pl.LightningModule):
    """Lightning itself compares it and asks whether it is true."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Linear(), Fickle(), Linear())
        self.seen: list[torch.Tensor] = []

    def __eq__(self, other: object) -> bool:
        _only_lightning()
        return self is other

    def __bool__(self) -> bool:
        _only_lightning()
        return True

    def __len__(self) -> int:
        raise TypeError

    __hash__ = object.__hash__

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch["x"]).square().mean()
        self.seen.append(loss.detach().clone())
        self.log("loss", torch.ones(1))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(self.net(batch["x"]).mean())

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = Optimizer(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [Scheduler(optimizer, 1)]


def run_stages(*callbacks: pl.Callback) -> tuple[list[torch.Tensor], dict[str, Counter[str]]]:
    """Run every stage; return losses, outputs and weights, and what each subclass of Tensor was asked."""
    for kind in (Sample, Weight):
        kind.asked.clear()
    torch.manual_seed(0)
    model = Model()
    trainer = pl.Trainer(
        callbacks=[*callbacks, Hook()], logger=[Log()], max_epochs=2, accelerator="cpu", devices=1, log_every_n_steps=1,
        num_sanity_val_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        stage(model, datamodule=Data())
    asked = {kind.__name__: Counter(kind.asked) for kind in (Sample, Weight)}
    return [*model.seen, *model.parameters()], asked
