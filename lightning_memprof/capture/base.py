"""What a collector is, and what it is given."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from lightning_memprof.capture.budget import Ledger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_memprof.artifacts.sink import Sink
    from lightning_memprof.capture.faults import Faults
    from lightning_memprof.schedule import Mark, Window

__all__ = [
    "ActionFeed",
    "Collector",
    "DeviceTimer",
    "NotNowError",
    "OnMark",
    "OnRows",
    "OnStep",
    "RunContext",
    "StepRecord",
    "TimedPart",
    "TrainingFeed",
    "no_training_step",
    "unix_offset_ns",
]

OnMark = Callable[["Mark"], None]


class NotNowError(Exception):
    """Raised by ``record`` where this window cannot be recorded for a reason that is nobody's fault."""


class ActionFeed(Protocol):
    """The Trainer's actions (hooks, fetches, phases) as they start and stop, by Lightning's names."""

    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call ``start`` and ``stop`` with the name of every action while the context is open."""


class TrainingFeed(Protocol):
    """What a training step works on, as it comes by."""

    def listen(
        self, *, batch: Callable[[Any], None] | None = None, loss: Callable[[torch.Tensor], None] | None = None
    ) -> AbstractContextManager[None]:
        """Call ``batch`` with each batch before ``Point.BATCH_START``, and ``loss`` with what backward starts from.

        The loss comes before ``Point.BEFORE_BACKWARD``, once for every backward that goes through Lightning, divided
        and scaled as backward gets it. Every stage has batches, those of a validation inside fit left out; only fit
        has losses.
        """

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the Trainer's optimizers; empty where there are none yet."""


class DeviceTimer(Protocol):
    """Moments on the device's own clock, read when the device has reached them."""

    def record(self) -> Any:
        """Put a moment into the device's queue."""

    def reached(self, moment: Any) -> bool:
        """Whether the device has passed ``moment``; does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Nanoseconds between two moments that were reached."""

    def release(self, moment: Any) -> None:
        """Give a moment back for reuse."""


class StepRecord(NamedTuple):
    """One finished step of the run.

    ``phases_ns`` holds the exclusive host time of each of ``artifacts.series.PHASES`` and sums to ``duration_ns``.
    ``moments`` holds ``(index of the phase that begins, device moment, nanoseconds after it to exclude)`` in order, and
    a last one that ends the step; None without a device clock. ``usual`` is False where a validation, a checkpoint or
    the end of an epoch is in it.
    """

    step: int
    global_step: int
    epoch: int
    window: int | None
    start_ns: int
    duration_ns: int
    phases_ns: tuple[int, ...]
    moments: list[tuple[int, Any, int]] | None
    usual: bool = True


OnStep = Callable[[StepRecord], None]
# Rows of the pulse, in the order of ``artifacts.series.PULSE_COLUMNS``.
OnRows = Callable[[Sequence[tuple[int | None, ...]]], None]


class TimedPart(NamedTuple):
    """A method of one object of a training that is no action of the Trainer's profiler, and the name of its calls."""

    owner: Any
    method: str
    action: str


def unix_offset_ns() -> int:
    """Return what a reading of ``time.perf_counter_ns`` lacks to be Unix time, by the machine's clock of this moment.

    A run takes it once. A machine may set its clock while it trains: times of one run that were turned into Unix time
    before and afterwards would lie apart by as much, or in another order.
    """
    return time.time_ns() - time.perf_counter_ns()


@dataclass(frozen=True)
class RunContext:
    """What a collector may know of the run.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        function: the LightningModule's method that a step runs, ``training_step`` for instance.
        strategy: class name of the strategy.
        device: where the model runs.
        model: the LightningModule.
        actions: the Trainer's actions while they happen.
        training: the batches, losses and optimizers of the training.
        sink: where artifacts go.
        faults: what happens when a collector fails.
        timer: the device's own clock, one for the run; None on a CPU, whose clock is the host's.
        peak_flops: floating-point operations per second that the device could do at best in this run's precision; None
            where nobody knows.
        parts: gives the methods that the Trainer's profiler does not tell of, as they are now.
        ledger: what traces have cost so far, and may cost.
        pulse_written: is given rows of the pulse when they are written, some dozens of steps at a time.
        unix_offset_ns: makes a reading of ``time.perf_counter_ns`` Unix time, the same for all of the run.

    """

    rank: int
    world_size: int
    stage: str
    function: str
    strategy: str
    device: torch.device
    model: nn.Module
    actions: ActionFeed
    training: TrainingFeed
    sink: Sink
    faults: Faults
    timer: DeviceTimer | None = None
    peak_flops: float | None = None
    parts: Callable[[], Sequence[TimedPart]] = tuple
    ledger: Ledger = field(default_factory=Ledger)
    pulse_written: OnRows = lambda _: None
    unix_offset_ns: int = field(default_factory=unix_offset_ns)

    def guarded(
        self, call: Callable[..., None], *, collector: str, window: Window | None = None
    ) -> Callable[..., None]:
        """Return ``call`` as a hook that may stand in the user's code: its first failure is reported and its last."""
        failed = False

        def guarded(*values: Any) -> None:
            nonlocal failed
            if not failed:
                try:
                    call(*values)
                except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
                    failed = True
                    self.faults.report(collector, "hook", None if window is None else window.index, error)

        return guarded

    def in_background(self, job: Callable[[], None], *, collector: str, window: Window) -> None:
        """Do slow work after the window without the training waiting; a failure is the collector's."""

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 nobody hears what a background thread raises
                self.faults.report(collector, "write", window.index, error)

        self.sink.in_background(guarded, window=window.index)


def no_training_step(run: RunContext) -> str | None:
    """Return why what needs a training step cannot work in this run, or None in a fit."""
    return None if run.stage == "fit" else f"{run.stage} has no training step"


class Collector(ABC):
    """Records one kind of fact. Its constructor is its configuration; state of a window is local to ``record``.

    One that is light enough for every rank of a large run says so in ``every_rank``; the others record on the ranks
    that are chosen, see ``MemProfilerCallback(ranks=...)``.
    """

    name: ClassVar[str]
    every_rank: ClassVar[bool] = False

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 for overriding
        """Return why this collector cannot work in this run, or None where it can."""
        return None

    @abstractmethod
    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:
        """Record one window: acquire, yield the function that is called at each mark, save and release.

        Entered before the window's first step, left after its last one.

        Raises:
            NotNowError: this window cannot be recorded; the reason is written down and training goes on.

        """

    def follow(self, run: RunContext) -> AbstractContextManager[OnStep | None]:  # noqa: ARG002 for overriding
        """Watch the whole run, also outside windows: yield a function that is called after each step.

        Almost no collector should: what it does is paid for in every step.
        """
        return nullcontext(None)
