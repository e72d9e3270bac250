"""What collectors can listen to: the actions of a Trainer's profiler, its other methods, its batches and losses."""

from __future__ import annotations

from contextlib import ContextDecorator, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.capture.base import TimedPart
from lightning_memprof.capture.observe import original_of, place_of, wrapped
from lightning_memprof.capture.sources.methods import unsupported_method
from lightning_memprof.packages import overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.profilers import Profiler

    from lightning_memprof.capture.observe import Link

    Handler = Callable[[], None] | int
    Handlers = Mapping[str, Handler]

_MOST_NAMES: Final = 4096
_PRECISION: Final = ("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients")
# Methods that wait for other ranks. Not `reduce`: `self.log` compares the bound methods of two calls, and raises where
# they differ, as they would between a step in a window and a step before it.
_COLLECTIVES: Final = ("barrier", "broadcast", "all_gather")
# Metrics are computed here, and passed to every logger.
_LOGGING: Final = (
    "update_train_step_metrics", "update_train_epoch_metrics", "update_eval_step_metrics", "log_eval_end_metrics",
)  # fmt: skip


class ActionTap:
    """Listens to the actions of a profiler instance during a run.

    A profiler's ``profile`` is a generator: 1 µs for each of the 20 actions of a step. Where the profiler is idle, the
    tap replaces it by a lookup of one context per action name, and the profiler's own ``start`` and ``stop`` are not
    called. Any other profiler keeps ``profile``; the tap wraps its ``start`` and ``stop``, so that its own timing never
    includes ours. The wrappers are in the profiler's class, so pickles and copies of the profiler, such as those for
    spawned DataLoader workers, do not contain them.

    Actions of other threads than the one that installs the tap are passed to the profiler only: ranges must be opened
    and closed in the same thread.

    Args:
        profiler: a Lightning profiler.
        on_fault: called with an exception of a handler; the training continues.
    """

    def __init__(self, profiler: Any, on_fault: Callable[[Exception], None]) -> None:
        self._profiler = profiler
        self._on_fault = on_fault
        self._start_listeners: list[Callable[[str], None]] = []
        self._stop_listeners: list[Callable[[str], None]] = []
        self._installed = ExitStack()
        self.is_installed = False

    def install(
        self,
        starts: Handlers,
        stops: Handlers,
        interrupts: list[BaseException],
        log: Callable[[tuple[int, int]], None] = lambda _: None,
    ) -> None:
        """Install the tap.

        A handler is a function, or a number for ``log``: that is cheaper.

        Args:
            starts: handlers of the start of an action, by its name; called before the listeners.
            stops: handlers of its stop; called after the listeners.
            interrupts: see :func:`lightning_memprof.capture.observe.kept_interrupts`; raised by an action.
            log: called with the number and ``time.perf_counter_ns``; must not fail.
        """
        shared = _Shared(
            thread=get_ident(),
            on_fault=self._on_fault,
            start_listeners=self._start_listeners,
            stop_listeners=self._stop_listeners,
            interrupts=interrupts,
            log=log,
        )
        actions = _Actions(shared, starts, stops)
        # An action may be open while the tap is removed.
        self._installed.callback(actions.ignore)
        profiler = self._profiler
        is_idle = {name: _is_idle(profiler, name) for name in ("start", "stop", "profile")}
        for name in ("start", "stop"):
            is_own = name in vars(profiler)
            tapped = partial(_tapped, actions, profiler, is_start=name == "start", is_own=is_own, is_idle=is_idle[name])
            self._installed.enter_context(wrapped(place_of(profiler, name), name, tapped))
        if all(is_idle.values()):
            self._installed.enter_context(wrapped(type(profiler), "profile", partial(_lookup, actions, profiler)))
        self.is_installed = True

    def remove(self) -> None:
        """Remove the tap and restore the profiler."""
        self.is_installed = False
        self._installed.close()

    @contextmanager
    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> Iterator[None]:
        """Call ``start`` and ``stop`` with the name of every action while the context is open."""
        self._start_listeners.append(start)
        self._stop_listeners.insert(0, stop)
        try:
            yield
        finally:
            self._start_listeners.remove(start)
            self._stop_listeners.remove(stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """State that all actions of a tap share; see :class:`ActionTap`."""

    thread: int
    on_fault: Callable[[Exception], None]
    start_listeners: list[Callable[[str], None]]
    stop_listeners: list[Callable[[str], None]]
    interrupts: list[BaseException]
    log: Callable[[tuple[int, int]], None]


class _Action(ContextDecorator):
    """The context of the actions of one name, for any number of calls; without a handler or listener about 0.2 µs.

    After a training step the caches are cold: its cost is the number of objects that it reads.
    """

    __slots__ = ("_shared", "name", "on_start", "on_stop")

    def __init__(
        self, name: str, shared: _Shared, on_start: Handler | None = None, on_stop: Handler | None = None
    ) -> None:
        self.name = name
        self.on_start = on_start
        self.on_stop = on_stop
        self._shared = shared

    def __enter__(self) -> str:
        """Call the handler, then the listeners."""
        handler, shared = self.on_start, self._shared
        if (handler is not None or shared.start_listeners) and get_ident() == shared.thread:
            try:
                if handler is not None:
                    if type(handler) is int:
                        shared.log((handler, perf_counter_ns()))
                    else:
                        handler()  # type: ignore[operator]
                if shared.start_listeners:
                    for listener in tuple(shared.start_listeners):
                        listener(self.name)
            except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
                shared.on_fault(error)
            except BaseException:
                self.__exit__()
                raise
        return self.name

    def __exit__(self, *_: object) -> None:
        """Call the listeners, then the handler; raise an interrupt that was kept."""
        handler, shared = self.on_stop, self._shared
        if (handler is not None or shared.stop_listeners) and get_ident() == shared.thread:
            try:
                if shared.stop_listeners:
                    for listener in tuple(shared.stop_listeners):
                        listener(self.name)
                if handler is not None:
                    if type(handler) is int:
                        shared.log((handler, perf_counter_ns()))
                    else:
                        handler()  # type: ignore[operator]
            except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
                shared.on_fault(error)
        if shared.interrupts and get_ident() == shared.thread:
            raise shared.interrupts.pop(0)


class _Actions(dict[str, _Action]):
    """The actions of a tap by name; an action without a handler is created at its first use."""

    def __init__(self, shared: _Shared, starts: Handlers, stops: Handlers) -> None:
        super().__init__((name, _Action(name, shared, starts.get(name), stops.get(name))) for name in {*starts, *stops})
        self._shared = shared

    def __missing__(self, name: str) -> _Action:
        action = _Action(name, self._shared)
        # A program may put numbers into the names of its own actions.
        return self.setdefault(name, action) if len(self) < _MOST_NAMES else action

    def ignore(self) -> None:
        """Call no handler from now on."""
        for action in self.values():
            action.on_start = action.on_stop = None


def _tapped(
    actions: _Actions, profiler: Profiler, link: Link, *, is_start: bool, is_own: bool, is_idle: bool
) -> Callable[..., None]:
    """Return ``start`` or ``stop`` for one profiler; calls of other instances of its class pass through."""

    def call(self: Profiler, action_name: str) -> None:
        __tracebackhide__ = True
        if is_start and self is profiler:
            actions[action_name].__enter__()
        if not (is_idle and self is profiler):
            link.call(*(() if is_own else (self,)), action_name)
        if not is_start and self is profiler:
            actions[action_name].__exit__()

    return partial(call, profiler) if is_own else call


def _lookup(actions: _Actions, profiler: Profiler, link: Link) -> Callable[..., AbstractContextManager[Any]]:
    """Return ``profile`` for one profiler, while its ``start`` and ``stop`` are those of the tap."""
    kind, own = type(profiler), vars(profiler)
    start, stop = kind.start, kind.stop

    def profile(self: Profiler, action_name: str) -> AbstractContextManager[Any]:
        is_ours = kind.start is start and kind.stop is stop and "start" not in own and "stop" not in own
        if self is profiler and is_ours:
            return actions[action_name]
        return link.call(self, action_name)  # type: ignore[no-any-return]

    return profile


class TensorFeed:
    """Who listens to the batches and losses of a run.

    Args:
        is_over: returns whether the Trainer or the loop has ended, with or without its hooks.
        optimizers: returns the optimizers.

    Attributes:
        listeners: functions that get each batch, and those that get each loss; empty outside windows.
    """

    def __init__(self, is_over: Callable[[], bool], optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> None:
        self.is_over = is_over
        self.optimizers = optimizers
        self.listeners: dict[Literal["batch", "loss"], list[Callable[[Any], None]]] = {"batch": [], "loss": []}

    @contextmanager
    def listen(
        self, *, batch: Callable[[Any], None] | None = None, loss: Callable[[torch.Tensor], None] | None = None
    ) -> Iterator[None]:
        """Call ``batch`` with each batch, and ``loss`` with the root of each backward, while the context is open."""
        with ExitStack() as undo:
            for listeners, listener in ((self.listeners["batch"], batch), (self.listeners["loss"], loss)):
                if listener is not None:
                    listeners.append(listener)
                    undo.callback(listeners.remove, listener)
            yield


def unprofiled_parts(trainer: Trainer, stage: str) -> list[TimedPart]:
    """Return the methods of a Trainer whose time is not an action of its profiler.

    They are named as Lightning names its actions: ``[Precision]MixedPrecision.optimizer_step``,
    ``[Optimizer]AdamW.step``, ``[Logger]CSVLogger.log_metrics``, ``[CheckpointIO]TorchCheckpointIO.save_checkpoint``,
    ``[LightningModule]Net.log``,
    and ``logging`` and ``run_validation`` for actions that contain others, as ``run_training_batch`` does.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    can_log = hasattr(module, "log") and not unsupported_method(module, "log")
    several = trainer.world_size > 1
    shared = _COLLECTIVES if several else ()
    parts = [
        *_of("Precision", strategy.precision_plugin, _PRECISION),
        *_of("Strategy", strategy, ("save_checkpoint",)),
        *_of("Strategy", strategy, shared, always=True, meets=True),
        *_of("CheckpointIO", strategy.checkpoint_io, ("save_checkpoint", "remove_checkpoint")),
        *(part for logger in trainer.loggers for part in _of("Logger", logger, ("log_metrics", "save"), always=True)),
        *(part for metric in _metrics(trainer) for part in _of("Metric", metric, ("update",), always=True)),
        *(
            part
            for metric in _metrics(trainer)
            for part in _of("Metric", metric, ("compute",), always=True, meets=several)
        ),
        *(TimedPart(trainer._logger_connector, method, "logging") for method in _LOGGING),
        *(_of("LightningModule", module, ("log",), always=several, meets=several) if can_log else ()),
    ]
    if stage == "fit":
        loop = trainer.fit_loop.epoch_loop
        parts += [
            *(part for optimizer in trainer.optimizers for part in _of("Optimizer", optimizer, ("step", "zero_grad"))),
            TimedPart(loop.val_loop, "run", "run_validation", always=True),
        ]
        if shared:
            action = f"[Strategy]{type(strategy).__name__}.broadcast_sigterm"
            parts.append(TimedPart(loop, "_broadcast_sigterm_tensor", action, always=True))
    return [part for part in parts if callable(getattr(part.owner, part.method, None))]


def _metrics(trainer: Trainer) -> list[torch.nn.Module]:
    """Return the module's metrics by torchmetrics, which this package does not import."""
    modules: Iterable[torch.nn.Module] = getattr(trainer.lightning_module, "modules", tuple)()
    kind = ("torchmetrics.metric", "Metric")
    return [module for module in modules if any((b.__module__, b.__name__) == kind for b in type(module).__mro__)]


def _of(
    kind: str, owner: object, methods: Iterable[str], *, always: bool = False, meets: bool = False
) -> Iterator[TimedPart]:
    for method in methods:
        yield TimedPart(owner, method, f"[{kind}]{type(owner).__name__}.{method}", always, meets)


def _is_idle(profiler: Any, name: str) -> bool:
    """Return whether the profiler's own method is declared to do nothing; call it before wrapping."""
    method = getattr(type(profiler), name)
    if name in vars(profiler) or original_of(method) is not method:
        # The program's attribute, or the tap of another run.
        return False
    if name == "profile":
        return not overrides(profiler, "Profiler", "profile")
    return getattr(type(profiler), "idle_actions", False) or not overrides(profiler, "PassThroughProfiler", name)
