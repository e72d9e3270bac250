"""What the callback and the profiler have in common: the life of a run, told by a Trainer's hooks."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memprof.integration.attachment import Attachment, claim_place

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.artifacts.sink import RunPlace
    from lightning_memprof.integration.settings import Settings

__all__ = ["Adapter"]


class Adapter(Callback):
    """Translates a Trainer's hooks into the life of an :class:`Attachment`; decides nothing."""

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._place: RunPlace | None = None
        self._handler: logging.Handler | None = None

    @property
    def run_directory(self) -> Path | None:
        """Directory of the present or last run, the same on all ranks; None before the first ``setup``."""
        return None if self._place is None else self._place.directory

    @abstractmethod
    def settings(self, trainer: Trainer) -> Settings:
        """Say what is wanted of a run of this Trainer.

        Raises:
            ConfigError: it cannot be done with this Trainer.

        """

    def leads(self, trainer: Trainer) -> bool:
        """Whether this adapter's schedule holds for the Trainer, and a profiler lends it its collectors."""
        return True

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether another adapter of this Trainer records instead of this one."""
        return False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Claim a directory and prepare the run."""
        if self.steps_aside(trainer):
            return
        stage = getattr(stage, "value", stage)
        settings = self.settings(trainer)
        self._place = claim_place(trainer, stage, settings.dirpath)
        chosen = settings.ranks is None or trainer.global_rank in settings.ranks
        if self._place is None or not chosen:
            return
        self._show_log_lines(trainer.is_global_zero)
        try:
            self._attachment = Attachment(trainer, stage, settings, self._place, Adapter)
        except OSError as error:
            logging.getLogger(__name__).warning("%s: this rank is not recorded; training goes on", error)
        except BaseException:
            self._hide_log_lines()
            raise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen: loaders and optimizers are known."""
        self._start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen, where validation is the stage and not a part of fit."""
        if trainer.state.fn == "validate":
            self._start()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self._start()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self._start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step."""
        self._stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step, where validation is the stage and not a part of fit."""
        if trainer.state.fn == "validate":
            self._stop()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step."""
        self._stop()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what there is; Lightning calls neither ``on_train_end`` nor ``teardown`` after an exception."""
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish every file."""
        self._end(trainer, None)

    def ended(self, trainer: Trainer, attachment: Attachment, exception: BaseException | None) -> None:
        """Do what is left to do when every file is written; for overriding."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave what belongs to a running process behind."""
        return {**vars(self), "_attachment": None, "_handler": None}

    def _start(self) -> None:
        if self._attachment is not None:
            self._attachment.start()

    def _stop(self) -> None:
        if self._attachment is not None:
            self._attachment.stop()

    def _end(self, trainer: Trainer, exception: BaseException | None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        try:
            attachment.end(exception)
            self.ended(trainer, attachment, exception)
        finally:
            self._hide_log_lines()

    def _show_log_lines(self, is_global_zero: bool) -> None:
        # As Lightning does for its own lines: shown where the program has not set up logging itself.
        if is_global_zero and not logging.getLogger().handlers:
            self._handler = logging.StreamHandler()
            self._handler.setFormatter(logging.Formatter("memprof: %(message)s"))
            logger = logging.getLogger("lightning_memprof")
            logger.addHandler(self._handler)
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.INFO)

    def _hide_log_lines(self) -> None:
        if self._handler is not None:
            logger = logging.getLogger("lightning_memprof")
            logger.removeHandler(self._handler)
            self._handler = None
            logger.setLevel(logging.NOTSET)
