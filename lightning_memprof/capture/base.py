"""The collector protocol, and the context that collectors get."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from lightning_memprof.artifacts.manifest import PauseRow, UnavailableRow
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import DeviceTimer, LoggedTimes, StepClock
from lightning_memprof.capture.room import is_at_limit, with_room
from lightning_memprof.capture.sources.memory import ResidentSize

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_memprof.artifacts.series import PulseRow
    from lightning_memprof.artifacts.sink import Sink
    from lightning_memprof.capture.faults import Faults
    from lightning_memprof.schedule import Mark, Point, Window

_NOTABLE_PAUSE_NS: Final = 50_000_000
OnMark = Callable[["Mark"], None]
# Gets the exception that ended the run; returns whether the run's out-of-memory report describes it.
OnException = Callable[[BaseException], bool]


class SkipWindow(Exception):  # noqa: N818 it is not an error
    """Raised by ``record`` if this window cannot be recorded, without a fault; its text is the reason."""


class ActionFeed(Protocol):
    """The Trainer's actions (hooks, fetches, phases) as they start and stop, under Lightning's names."""

    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call ``start`` and ``stop`` with the name of every action while the context is open."""


class TrainingFeed(Protocol):
    """Batches, losses and optimizers of the training."""

    def listen(
        self, *, batch: Callable[[Any], None] | None = None, loss: Callable[[torch.Tensor], None] | None = None
    ) -> AbstractContextManager[None]:
        """Call ``batch`` with each batch before ``Point.BATCH_START``, and ``loss`` with the root of each backward.

        The loss comes before ``Point.BEFORE_BACKWARD``, once for every backward that goes through Lightning, divided
        and scaled as backward gets it. Every stage has batches, except those of a validation inside fit; only fit has
        losses.
        """

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the Trainer's optimizers; empty before it has any."""

    def is_over(self) -> bool:
        """Return whether the Trainer's run has ended, even if no hook has ended the recording yet."""


class Position(NamedTuple):
    """Place in the run where a step begins.

    ``step`` counts the training batches of the run before this one, ``global_step`` its optimizer steps, ``epoch`` its
    epochs, and ``schedule_step`` is the number that the schedule decides by.
    """

    step: int
    global_step: int
    epoch: int
    schedule_step: int


class StepRecord(NamedTuple):
    """One finished step of the run.

    ``times`` are computed when they are first read. ``moments`` holds ``(index of the phase that begins, device
    timestamp, nanoseconds after it to exclude)`` in order, and a last one that ends the step; None without a device
    clock. ``usual`` is False if it contains a validation, a checkpoint or the end of an epoch.
    """

    step: int
    global_step: int
    epoch: int
    window: int | None
    start_ns: int
    duration_ns: int
    times: LoggedTimes
    moments: list[tuple[int, Any, int]] | None
    usual: bool = True

    @property
    def phases_ns(self) -> Sequence[int]:
        """Self time of each of ``artifacts.series.PHASES``; the sum is ``duration_ns``."""
        return self.times.phases_ns


OnStep = Callable[[StepRecord], None]
OnRows = Callable[[Sequence["PulseRow"]], None]


class TimedPart(NamedTuple):
    """A method of an object of the Trainer that is not a profiler action, and the action name for its calls.

    ``always`` is whether its calls are so rare or so slow that they are timed in every step, not only in windows;
    ``meets`` whether it may wait for other ranks, which does not belong to the phase that it is called in.
    """

    owner: Any
    method: str
    action: str
    always: bool = False
    meets: bool = False


def unix_offset_ns() -> int:
    """Return the difference between Unix time and ``time.perf_counter_ns``, by the machine's clock now.

    A run reads it once: if the machine's clock is set during the training, times that were converted before and after
    would be inconsistent.
    """
    return time.time_ns() - time.perf_counter_ns()


@dataclass(eq=False)
class RunContext:
    """The run, as collectors see it, and its place at this moment, which the session updates.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        function: the LightningModule's method that a step runs, ``training_step`` for instance.
        strategy: class name of the strategy.
        device: device of the model.
        model: the LightningModule.
        actions: the Trainer's actions.
        training: batches, losses and optimizers.
        sink: writes artifacts.
        faults: reports failures of collectors.
        resident: reads the RSS; the session closes it.
        timer: the device's own clock, one for the run; None on a CPU, whose clock is the host's.
        peak_flops: peak floating-point operations per second of the device in this run's precision; None if unknown.
        parts: returns the current methods of the Trainer's objects that are not profiler actions.
        ledger: cost of the traces so far, and its bounds.
        pulse_written: called with the rows of the pulse when they are written, some dozens of steps at a time.
        profiler_conflict: why torch's profiler is not available in this run; None if it is.
        unix_offset_ns: converts a reading of ``time.perf_counter_ns`` to Unix time, the same for the whole run.
        clock: of the run's steps.
        position: where the current step began; None between steps.
        point: the last point that was reached.
        window: index of the open window.
        is_usual: whether the current step has no validation, checkpoint or end of an epoch so far.
        validation_batch: called before each batch of a validation inside fit; None if nobody listens.
        rare_action: called with the name of an action that is not part of every step where it starts, and with None
            where it ends; None if nobody listens.
        holders_asked: whether the request of the next window asks for holders of growing memory.
        apart_ns: nanoseconds of collectors outside windows that do not belong to the pulse, by name.
        charged_ns: their sum.
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
    resident: ResidentSize = field(default_factory=ResidentSize)
    timer: DeviceTimer | None = None
    peak_flops: float | None = None
    parts: Callable[[], Sequence[TimedPart]] = tuple
    ledger: Ledger = field(default_factory=Ledger)
    pulse_written: OnRows = lambda _: None
    profiler_conflict: str | None = None
    unix_offset_ns: int = field(default_factory=unix_offset_ns)
    clock: StepClock = field(default_factory=lambda: StepClock(None))
    position: Position | None = None
    point: Point | None = None
    window: int | None = None
    is_usual: bool = True
    validation_batch: Callable[[], None] | None = None
    rare_action: Callable[[str | None], None] | None = None
    holders_asked: bool = False
    apart_ns: dict[str, int] = field(default_factory=dict)
    charged_ns: int = 0

    def charge(self, collector: str, ns: int) -> None:
        """Count time outside windows as the collector's, not as the pulse's."""
        self.apart_ns[collector] = self.apart_ns.get(collector, 0) + ns
        self.charged_ns += ns

    def guarded(
        self, call: Callable[..., None], *, collector: str, window: Window | None = None
    ) -> Callable[..., None]:
        """Return ``call`` as a hook for the user's code: its first failure is reported, and it is not called again.

        It is skipped if the user's code has reached Python's recursion limit.
        """
        failed = False

        def guarded(*values: Any) -> None:
            nonlocal failed
            if not failed:
                try:
                    with_room(call, *values)
                except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
                    if is_at_limit(error):
                        return
                    failed = True
                    with_room(self.faults.report, collector, "hook", None if window is None else window.index, error)

        return guarded

    def on_fault(self, collector: str, window: Window | None = None) -> Callable[[Exception], None]:
        """Return a function that reports a failure of a hook; the first one only."""

        def fail(error: Exception) -> None:
            raise error

        return self.guarded(fail, collector=collector, window=window)

    def note_unavailable(self, collector: str, reason: str, window: Window | None = None) -> None:
        """Write why a collector has no data, of one window or of the run."""
        index = None if window is None else window.index
        self.sink.manifest.append(UnavailableRow(collector=collector, window=index, reason=reason))

    def note_pause(self, ns: int) -> None:
        """Write that work between two steps took so long, if other ranks would notice that they waited."""
        if ns >= _NOTABLE_PAUSE_NS:
            self.sink.manifest.append(PauseRow(ns=ns))

    def in_background(self, job: Callable[[], None], *, collector: str, window: Window) -> None:
        """Run slow work after the window, without blocking the training; a failure is the collector's."""

        def guarded() -> None:
            with self.faults.caught(collector, "write", window.index):
                job()

        self.sink.in_background(guarded, window=window.index)


def no_training_step(run: RunContext) -> str | None:
    """Return why a collector that needs training steps is not available in this run, or None in a fit."""
    return None if run.stage == "fit" else f"{run.stage} has no training step"


class Collector:
    """Records one kind of data. Its constructor is its configuration; the state of a window is local to ``record``.

    Attributes:
        name: of its series and its rows in the manifest.
        every_rank: whether it is light enough for every rank of a large run; the others record on the chosen ranks
            only, see ``MemProfilerCallback(ranks=...)``.
        times_device: whether it reads ``StepRecord.moments``, for which each phase records device timestamps.
        marks_last: whether it gets each mark after the other collectors, so that it does not record their work.
    """

    name: ClassVar[str]
    every_rank: ClassVar[bool] = False
    times_device: ClassVar[bool] = False
    marks_last: ClassVar[bool] = False

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 for overriding
        """Return why this collector is not available in this run, or None if it is."""
        return None

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002 for overriding
        """Record one window: acquire, yield the function that is called at each mark, save and release.

        Entered before the window's first step, left after its last one.

        Raises:
            SkipWindow: this window cannot be recorded; the reason goes into the manifest and training continues.
        """
        return nullcontext(None)

    def follow(self, run: RunContext) -> AbstractContextManager[OnStep | None]:  # noqa: ARG002 for overriding
        """Follow the steps of the whole run, also outside windows: yield a function that is called after each step.

        Avoid it: its cost is part of every step.
        """
        return nullcontext(None)

    def guard(self, run: RunContext) -> AbstractContextManager[OnException | None]:  # noqa: ARG002 for overriding
        """Guard the run from its setup to its end: yield a function that is called with an exception that ends it.

        The function is called before anything else is closed, while the exception's frames still exist.
        """
        return nullcontext(None)
