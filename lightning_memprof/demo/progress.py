"""Lightning's own progress bar on one line of 80 columns."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

__all__ = ["ProgressBar"]


class ProgressBar(RichProgressBar):
    """Shows the loss and leaves out the version number, which the end of the run names anyway."""

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the logged metrics without Lightning's ``v_num``."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
