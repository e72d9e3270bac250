"""The run of a training loop of the program's own: its calls become steps, phases and points of a session.

The phases come from the calls that a loop makes anyway: the fetch of its loader, the call of the model,
``torch.autograd.backward`` and the steps of optimizers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memprof.artifacts.manifest import NoteRow
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.capture.base import Position, RunContext, TimedPart
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import device_timer
from lightning_memprof.capture.faults import Faults, describe
from lightning_memprof.capture.observe import Link, place_of, wrapped
from lightning_memprof.capture.sources.compiled import WRAPPED
from lightning_memprof.integration.facts import Launch, model_facts, peak_flops
from lightning_memprof.integration.feeds import TensorFeed
from lightning_memprof.integration.live_run import LiveRun
from lightning_memprof.integration.settings import Settings
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Point, Schedule
from lightning_memprof.units import format_count

log = logger_of(__name__)

_VALIDATION: Final = "run_validation"
_SHORT: Final = {torch.bfloat16: "bf16", torch.float16: "16", torch.float64: "64"}


class LoopRun(LiveRun):
    """The run of a loop: turns its calls into steps, phases and points of a session.

    Args:
        model: the model, perhaps in a wrapper.
        optimizers: those that are known.
        settings: the settings of this rank.
        place: where the files of the run go.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], settings: Settings, place: RunPlace
    ) -> None:
        self._called = list(model.children()) if type(model) in {nn.ModuleDict, nn.ModuleList} else [model]
        self._optimizers = list(optimizers)
        self._loaders: list[Any] = []
        self._tensors = TensorFeed(self.is_over, lambda: tuple(self._optimizers))
        self._thread = get_ident()
        self._taps = ExitStack()
        self._is_over = False
        self._precision: str | None = None
        self._has_facts = False
        # Of the whole loop, of its optimizers, and of this epoch.
        self._step = self._global_step = self._in_epoch = 0
        self._epoch = -1
        # Whether the current step has no batch yet.
        self._is_fresh = False
        self._in_backward = False
        rank, world_size, local_rank = ranks_of_process()
        inner, strategy = _unwrapped(model)
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        sink = Sink(place, rank)
        run = RunContext(
            rank=rank,
            world_size=world_size,
            stage="fit",
            function="training_step",
            strategy=strategy,
            device=device,
            model=inner,
            actions=_NoActions(),
            training=self._tensors,
            sink=sink,
            faults=Faults(sink.manifest, settings.output.on_error),
            timer=device_timer(device),
            peak_flops=peak_flops(device, _precision_of(inner, device)),
            ledger=Ledger(settings.budget, None),
            parts=self._parts,
        )
        launch = Launch(local_rank=local_rank, node_rank=int(os.environ.get("GROUP_RANK", "0")))
        super().__init__(run, settings, launch)
        clock = self.session.clock
        self._slots = {
            name: clock.slot(name, PHASES.index(name)) for name in ("data_wait", "forward", "backward", "optimizer")
        }

    def start(self) -> None:
        """Start recording."""
        self.session.open()
        self.triggers.start()
        with ExitStack() as taps:
            for model in self._called:
                taps.enter_context(wrapped(place_of(model, "__call__"), "__call__", self._around_call(model)))
            taps.enter_context(wrapped(torch.autograd, "backward", self._around_backward))
            for register, handler in (
                (register_optimizer_step_pre_hook, self._before_optimizer),
                (register_optimizer_step_post_hook, self._after_optimizer),
            ):
                taps.callback(register(self._of_optimizer(handler)).remove)
            self._taps = taps.pop_all()

    def is_over(self) -> bool:
        """Return whether the loop has ended."""
        return self._is_over

    def abandon(self, reason: str | None = None) -> None:
        """End the run: the process exits inside the loop."""
        if self.is_here:
            self.end(reason=reason)
            self.release()

    def stop(self, reason: str | None = None) -> None:
        """Stop recording: the loop has ended."""
        if self._is_over:
            return
        self._is_over = True
        self._taps.close()
        self.triggers.stop()
        if self._is_fresh:
            self.session.drop_step()
        self._write_facts()
        self.session.close(reason=reason)
        schedule, steps = self.settings.schedule, self.session.facts().steps or 0
        if isinstance(schedule, Schedule) and steps and steps <= schedule.first_active:
            message = (
                f"no window was recorded: the loop had {format_count(steps, 'step')}, and the first recorded step is "
                f"{schedule.first_active}"
            )
            self.run.sink.manifest.append(NoteRow(collector="schedule", message=message))

    def guarded(self, call: Callable[..., None], *values: Any) -> None:
        """Call a method of this run; after a failure the recording stops and the loop continues."""
        if self._is_over or not self._is_own():
            return
        try:
            call(*values)
        except Exception as error:
            if self.settings.output.on_error == "raise":
                raise
            log.warning("recording failed and is disabled; the loop continues", exc_info=error)
            self.run.faults.report("session", "mark", None, error)
            with self.run.faults.caught("session", "exit"):
                self.stop(f"recording failed: {describe(error)}")

    def epoch(self, loader: Any) -> None:
        """Note that an epoch over a loader begins."""
        if not any(known is loader for known in self._loaders):
            self._loaders.append(loader)
        self._epoch += 1
        self._in_epoch = 0

    def fetch(self) -> None:
        """Begin a step with the fetch of its batch; the end of an epoch is part of the next one's first step."""
        self._begin()
        self.session.clock.enter(self._slots["data_wait"])

    def exhausted(self) -> None:
        """Note that the loader has no more batches."""
        self.session.clock.leave()
        self.session.unusual()

    def batch_start(self, batch: Any) -> None:
        """Pass a batch to the collectors that listen."""
        self.session.clock.leave()
        for listener in tuple(self._tensors.listeners["batch"]):
            listener(batch)
        self.session.mark(Point.BATCH_START)
        self._is_fresh = False

    def batch_end(self, is_whole: bool) -> None:
        """Mark the end of an iteration; one that has left the loop ends the step."""
        self.session.mark(Point.BATCH_END)
        if not is_whole:
            self.session.end_step()

    def enter_validation(self) -> None:
        """Note that a validation begins in this step."""
        self.session.unusual()
        self.session.rare_action(_VALIDATION)
        self.session.clock.enter_within(_VALIDATION)

    def leave_validation(self) -> None:
        """Note that it ends."""
        self.session.clock.leave()
        self.session.rare_action(None)

    def next_step(self) -> None:
        """End an iteration, and begin the next."""
        self.session.mark(Point.BATCH_END)
        self._is_fresh = False
        self._begin()

    def _begin(self) -> None:
        by_epoch = getattr(self.settings.schedule, "anchor", "fit") == "epoch"
        number = self._step - self._is_fresh
        position = Position(number, self._global_step, max(self._epoch, 0), self._in_epoch if by_epoch else number)
        if self._is_fresh and by_epoch:
            self.session.drop_step()
        elif self._is_fresh:
            self.run.position = position
            return
        self._is_fresh = True
        self.session.begin_step(position)
        self._step = number + 1
        self._in_epoch += 1

    def _around_call(self, model: nn.Module) -> Callable[[Link], Callable[..., Any]]:
        def wrap(link: Link) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                __tracebackhide__ = True
                if module is not model or torch.compiler.is_compiling():
                    return link.call(module, *args, **kwargs)
                is_validation = not (torch.is_grad_enabled() or module.training)
                self.guarded(self._before_forward, is_validation)
                try:
                    return link.call(module, *args, **kwargs)
                finally:
                    self.guarded(self._after_forward, is_validation)

            return call

        return wrap

    def _before_forward(self, is_validation: bool) -> None:
        if is_validation:
            self.session.unusual()
            self.session.validation_batch()
            self.session.clock.enter_within(_VALIDATION)
            return
        if self._precision is None:
            self._precision = _precision_of(self.run.model, self.run.device)
        self.session.clock.enter(self._slots["forward"])

    def _after_forward(self, is_validation: bool) -> None:
        self.session.clock.leave()
        if not is_validation:
            self.session.mark(Point.AFTER_FORWARD)

    def _around_backward(self, link: Link) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # Checkpoints call it inside a backward.
            if not self._is_own() or self._in_backward:
                return link.call(tensors, *args, **kwargs)
            self._in_backward = True
            self.guarded(self._before_backward, tensors)
            try:
                return link.call(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                self.guarded(self._after_backward)

        return backward

    def _before_backward(self, tensors: Any) -> None:
        if listeners := self._tensors.listeners["loss"]:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            for listener in tuple(listeners):
                listener(roots[0])
        self.session.mark(Point.BEFORE_BACKWARD)
        self.session.clock.enter(self._slots["backward"])

    def _after_backward(self) -> None:
        self.session.clock.leave()
        self.session.mark(Point.AFTER_BACKWARD)

    def _of_optimizer(self, handler: Callable[[torch.optim.Optimizer], None]) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.guarded(handler, optimizer)

        return hook

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self.session.mark(Point.BEFORE_OPTIMIZER_STEP)
        self.session.clock.enter(self._slots["optimizer"])

    def _after_optimizer(self, _: torch.optim.Optimizer) -> None:
        self.session.clock.leave()
        self._global_step += 1
        self._write_facts()

    def _write_facts(self) -> None:
        """Write the facts of the training once, when its loader and its optimizers are known."""
        if self._has_facts:
            return
        self._has_facts = True
        missing: dict[str, str] = {}
        facts = model_facts(self.run.model, lambda: self._optimizers, lambda: self._loaders, missing)
        self.run.sink.manifest.append("training", precision=self._precision, **facts)
        for name, error in missing.items():
            self.run.note_unavailable("training", f"{name} cannot be read ({error})")

    def _parts(self) -> list[TimedPart]:
        return [
            TimedPart(optimizer, method, f"[Optimizer]{type(optimizer).__name__}.{method}")
            for optimizer in self._optimizers
            for method in ("step", "zero_grad")
        ]

    def _is_own(self) -> bool:
        return get_ident() == self._thread and os.getpid() == self._process


class _NoActions:
    """A loop has no named actions."""

    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call nothing."""
        return nullcontext()


def ranks_of_process() -> tuple[int, int, int]:
    """Return the global rank, the number of ranks and the rank on this node: those of the process group, if any."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        return rank, torch.distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", rank))
    return 0, 1, 0


def _unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the program's own model, and the class of its wrapper."""
    strategy, model = "PlainLoop", _uncompiled(model)
    if isinstance(model, DistributedDataParallel):
        strategy, model = type(model).__name__, model.module
    return _uncompiled(model), strategy


def _uncompiled(model: nn.Module) -> nn.Module:
    inner = vars(model)["_modules"].get(WRAPPED)
    return model if inner is None else inner


def _precision_of(model: nn.Module, device: torch.device) -> str:
    """Return the precision of a forward that is called now, as Lightning names it."""
    if torch.is_autocast_enabled(device.type):
        return f"{_SHORT.get(torch.get_autocast_dtype(device.type), '32')}-mixed"
    first = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    return f"{_SHORT.get(first, '32')}-true"
