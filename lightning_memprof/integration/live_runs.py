"""The live runs of this process; ends those that Lightning's hooks do not end.

Lightning calls neither ``on_exception`` nor ``teardown`` of a callback that the program has removed, nor where another
callback raises in ``on_exception``. Some of these ends show in the Trainer's actions; the other runs are ended by the
next event: a Trainer is made or set up, the Trainer is garbage, or the process exits.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Callback, Trainer

EXITED: Final = "the process exited during the run"


class LiveRun(Protocol):
    """A run that has begun; its equality and hash are those of the object."""

    @property
    def trainer(self) -> Trainer:
        """Its Trainer."""

    def abandon(self, reason: str | None = None) -> None:
        """End it because no hook does; ``reason`` is why it did not finish."""


# One per process, as is the state that a live run changes: torch's profiler, wrapped methods, signal handlers.
_LIVE: Final[WeakSet[Any]] = WeakSet()


def add(run: LiveRun) -> None:
    """Add a run that has begun."""
    _LIVE.add(run)


def discard(run: LiveRun) -> None:
    """Remove a run that has ended."""
    _LIVE.discard(run)


def end_abandoned(trainer: Trainer | None = None) -> None:
    """End the runs whose Trainer is over, and those of ``trainer``, which begins another."""
    for run in tuple(_LIVE):
        if run.trainer is trainer or is_over(run.trainer):
            run.abandon()


def is_over(trainer: Trainer) -> bool:
    """Return whether the last run of a Trainer has ended, with or without its hooks."""
    return trainer.state.stopped


@atexit.register
def _end_all() -> None:
    for run in tuple(_LIVE):
        run.abandon(None if is_over(run.trainer) else EXITED)


class Endings:
    """Handlers for the actions that show an end of the run that Lightning does not report to the callback.

    Args:
        trainer: of the run.
        callback: the callback; while the Trainer does not have it, another one may pass its hooks on.
        raised: called with an exception that leaves the training loop.
        end: ends the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        callback: Callback,
        raised: Callable[[BaseException], None],
        end: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._callback = callback
        # For each epoch that runs: a search of a Tuner has one inside another, with callbacks of its own.
        self._had_callback: list[bool] = []
        self._raised = raised
        self._end = end
        self._handled: BaseException | None = None
        self._hooks = [f"[Callback]{callback.state_key}.on_exception" for callback in trainer.callbacks]  # type: ignore[attr-defined]

    def handlers(self) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
        """Return the handlers of the start and of the stop of an action, by its name."""
        return (
            {"run_training_epoch": self._epoch_start, **dict.fromkeys(self._hooks, self._note)},
            {"run_training_epoch": self._epoch_end, **dict.fromkeys(self._hooks, self._hook_end)},
        )

    def _note(self) -> None:
        # The program may call fit while it handles an exception of its own.
        self._handled = sys.exc_info()[1]

    def _exception(self) -> BaseException | None:
        error = sys.exc_info()[1]
        return None if error is self._handled else error

    def _epoch_start(self) -> None:
        self._note()
        self._had_callback.append(self._has_callback())

    def _epoch_end(self) -> None:
        error = self._exception()
        if error is not None and not isinstance(error, StopIteration):
            self._raised(error)
        if self._had_callback.pop() and not self._has_callback():
            self._end()

    def _hook_end(self) -> None:
        if self._exception() is not None:
            self._end()

    def _has_callback(self) -> bool:
        return any(each is self._callback for each in self._trainer.callbacks)  # type: ignore[attr-defined]
