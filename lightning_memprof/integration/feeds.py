"""What collectors hear of a Trainer: its actions, and what a training step works on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch
    from lightning.pytorch import Trainer

    from lightning_memprof.integration.tap import ActionTap

__all__ = ["LateFeed", "TensorFeed"]


class LateFeed:
    """The tap of a run that has not begun when collectors are asked what they need."""

    def __init__(self, tap: Callable[[], ActionTap | None]) -> None:
        self._tap = tap

    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call ``start`` and ``stop`` with the name of every action while the context is open."""
        tap = self._tap()
        if tap is None:
            msg = "actions can be observed only while the stage runs"
            raise RuntimeError(msg)
        return tap.listen(start, stop)


class TensorFeed:
    """Hands on what an adapter's hooks are given; a :class:`~lightning_memprof.capture.base.TrainingFeed`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._batch: list[Callable[[Any], None]] = []
        self._loss: list[Callable[[torch.Tensor], None]] = []

    @contextmanager
    def listen(
        self, *, batch: Callable[[Any], None] | None = None, loss: Callable[[torch.Tensor], None] | None = None
    ) -> Iterator[None]:
        """Call ``batch`` with each batch, and ``loss`` with what backward starts from, while the context is open."""
        if batch is not None:
            self._batch.append(batch)
        if loss is not None:
            self._loss.append(loss)
        try:
            yield
        finally:
            if batch is not None:
                self._batch.remove(batch)
            if loss is not None:
                self._loss.remove(loss)

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the Trainer's optimizers."""
        return tuple(self._trainer.optimizers)

    def batch_comes(self, batch: Any) -> None:
        """Tell the listeners of a batch."""
        for listener in tuple(self._batch):
            listener(batch)

    def loss_comes(self, loss: torch.Tensor) -> None:
        """Tell the listeners of a loss."""
        for listener in tuple(self._loss):
            listener(loss)
