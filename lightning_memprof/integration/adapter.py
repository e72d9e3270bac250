"""The base of the callback and of the profiler: it translates the hooks of a Trainer into the life of a run."""

from __future__ import annotations

import logging
import signal
import sys
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_memprof.artifacts.sink import RunPlace
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.observe import deferred
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.integration.attachment import Attachment, end_abandoned
from lightning_memprof.integration.background import start_report
from lightning_memprof.integration.live_run import LIVE
from lightning_memprof.integration.place import claim_place
from lightning_memprof.integration.settings import Settings, for_this_rank
from lightning_memprof.logs import logger_of
from lightning_memprof.report.printers.terminal import is_terminal
from lightning_memprof.units import printable

log = logger_of(__name__)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """A type of its own: different from the handlers of the program."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; on a terminal, above Lightning's progress bar, which owns the last line."""
        if not (is_terminal(sys.stdout) and is_terminal(self.stream)):
            super().emit(record)
            return
        try:
            # Without tqdm's lock: a thread may hold it for as long as the terminal does not read.
            with Tqdm.external_write_mode(file=self.stream, nolock=True):
                super().emit(record)
        except Exception:  # noqa: BLE001 as logging does it: a terminal that is gone
            self.handleError(record)


class _Line(logging.Formatter):
    """Formats a message as one line, with control characters escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 overriding
        """Return the message, which a traceback may follow."""
        return f"memprof: {printable(record.message)}"


class LogLines:
    """Shows INFO lines of this package on the terminal where the program has set up no logging."""

    def __init__(self) -> None:
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET

    def show(self) -> None:
        """Show them, unless the program or another run of this package already does."""
        logger = logging.getLogger("lightning_memprof")
        if self._handler is not None or logging.getLogger().handlers or logger.handlers:
            return
        self._handler = _Handler()
        self._handler.setFormatter(_Line())
        logger.addHandler(self._handler)
        self._level = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)

    def hide(self) -> None:
        """Remove the handler again."""
        if self._handler is not None:
            logger = logging.getLogger("lightning_memprof")
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)
            self._handler = None


class Adapter(Callback):
    """Translates the hooks of a Trainer into calls of an :class:`Attachment`; decides nothing."""

    def __init__(self) -> None:
        # By the id of the Trainer: a fit may run inside a fit.
        self._attachments: dict[int, Attachment] = {}
        self._place: RunPlace | None = None
        self._log_lines = LogLines()

    @property
    def run_directory(self) -> Path | None:
        """Directory of the current or last run, the same on all ranks; None before the first ``setup``.

        For results at a URL it is the working copy, which is removed after a successful run.
        """
        return None if self._place is None else self._place.directory

    @property
    def run_location(self) -> str | None:
        """The argument for ``lightning-memprof show``: :attr:`run_directory`, or the URL of the run."""
        return None if self._place is None else self._place.location

    @abstractmethod
    def settings(self, trainer: Trainer) -> Settings:
        """Return the settings of a run of this Trainer.

        Raises:
            ConfigError: this Trainer does not support them.
        """

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether it records nothing, and its schedule does not lead: another adapter records, or it is disabled."""
        return False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Claim a directory and prepare the run."""
        if self.steps_aside(trainer):
            return
        end_abandoned(trainer)
        if any(run.is_here and not isinstance(run, Attachment) for run in LIVE):
            log.warning("this run is not recorded: record() records the program around it")
            return
        stage = getattr(stage, "value", stage)
        settings = for_this_rank(
            self.settings(trainer),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            local_rank=trainer.local_rank,
        )
        self._place = claim_place(trainer, stage, settings.output.dirpath)
        if self._place is None:
            return
        if trainer.is_global_zero:
            self._log_lines.show()
        try:
            attachment = Attachment(trainer, stage, settings, self._place, Adapter, self)
            attachment.ended_early = partial(self._finish, trainer, attachment, None)
            self._attachments[id(trainer)] = attachment
            LIVE.add(attachment)
        except MemprofError:
            self._log_lines.hide()
            raise
        except Exception as error:
            self._log_lines.hide()
            if settings.output.on_error == "raise":
                raise
            log.warning("this rank is not recorded (%s); training continues", describe(error), exc_info=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start recording: loaders and optimizers are known."""
        self._guarded(trainer, Attachment.start, ConfigError)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Pass the batch to the collectors that listen."""
        self._pass(trainer, "batch", batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Pass the loss to the collectors that listen."""
        self._pass(trainer, "loss", loss)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pass the batch to the collectors that listen, unless validation is part of fit."""
        if trainer.state.fn != "fit":
            self._pass(trainer, "batch", batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start recording, unless validation is part of fit."""
        if trainer.state.fn != "fit":
            self._guarded(trainer, Attachment.start, ConfigError)

    on_test_start = on_predict_start = on_validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step."""
        self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the last step, unless validation is part of fit."""
        if trainer.state.fn != "fit":
            self._stop(trainer)

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the recorded data; Lightning calls neither ``on_train_end`` nor ``teardown`` after an exception."""
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish every file."""
        self._end(trainer, None)

    def ended(self, trainer: Trainer, attachment: Attachment, reason: str | None) -> None:
        """Called after every file is written; for overriding.

        Args:
            trainer: of the run.
            attachment: the run.
            reason: why the run did not finish, usually its exception; None if it finished.
        """

    @property
    def attachment(self) -> Attachment | None:
        """The run that started last and has not ended."""
        return next(reversed(self._attachments.values()), None)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the state of a running process."""
        return {**vars(self), "_attachments": {}, "_log_lines": LogLines()}

    def _pass(self, trainer: Trainer, kind: Literal["batch", "loss"], value: Any) -> None:
        attachment = self._attachments.get(id(trainer))
        # None outside windows: a training step does not pay for more.
        if attachment is not None and (listeners := attachment.tensors.listeners[kind]):
            for listener in tuple(listeners):
                self._guarded(trainer, lambda _, listener=listener: listener(value))  # type: ignore[misc]

    def _guarded(self, trainer: Trainer, call: Callable[[Attachment], None], *passed: type[Exception]) -> None:
        attachment = self._attachments.get(id(trainer))
        if attachment is not None:
            try:
                call(attachment)
            except passed:
                raise
            except Exception as error:  # noqa: BLE001 a failure here must not stop the training
                attachment.break_off(error)

    def _stop(self, trainer: Trainer) -> None:
        with deferred(signal.SIGCHLD):
            self._guarded(trainer, Attachment.stop)

    def _end(self, trainer: Trainer, exception: BaseException | None) -> None:
        attachment = self._attachments.get(id(trainer))
        if attachment is not None:
            self._finish(trainer, attachment, exception)

    def _finish(
        self, trainer: Trainer, attachment: Attachment, exception: BaseException | None, reason: str | None = None
    ) -> None:
        LIVE.discard(attachment)
        if self._attachments.get(id(trainer)) is attachment:
            del self._attachments[id(trainer)]
        output = attachment.settings.output
        with deferred(signal.SIGCHLD) as arrived:
            try:
                self.ended(trainer, attachment, attachment.end(exception, reason))
                if output.report and attachment.run.stage == "fit" and trainer.is_global_zero:
                    start_report(attachment.place)
            except Exception as error:
                if output.on_error == "raise":
                    raise
                log.warning("the last files of the run cannot be written (%s)", describe(error), exc_info=True)
            finally:
                attachment.release()
                if not self._attachments:
                    self._log_lines.hide()
            if exception is not None:
                # The training ends anyway, and an exception here would end it without Lightning's teardown.
                arrived.clear()
