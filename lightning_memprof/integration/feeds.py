"""What collectors can listen to: the actions of a Trainer's profiler, and the batches and losses of its hooks."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

from lightning_memprof.capture.observe import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from lightning.pytorch import Trainer

    from lightning_memprof.capture.observe import Link

    Handlers = Mapping[str, Callable[[], None]]

__all__ = ["ActionTap", "TensorFeed"]


class ActionTap:
    """Wraps ``start`` and ``stop`` of a profiler instance during a run.

    An action without a handler costs about 0.1 µs; an idle profiler's own ``start`` and ``stop`` are not called. The
    profiler's own timing never includes ours. Actions of other threads than the one that installs the tap are passed to
    the profiler only: ranges must be opened and closed in the same thread.

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

    def install(self, starts: Handlers, stops: Handlers, interrupts: list[BaseException]) -> None:
        """Install the tap.

        Args:
            starts: handlers of the start of an action, by its name; called before the listeners.
            stops: handlers of its stop; called after the listeners.
            interrupts: see :func:`lightning_memprof.capture.observe.kept_interrupts`; raised by an action.

        """
        for name, handlers, listeners in (
            ("start", starts, self._start_listeners),
            ("stop", stops, self._stop_listeners),
        ):
            wrap = self._wrapper(
                handlers, listeners, interrupts, is_idle=_is_idle(self._profiler, name), is_start=name == "start"
            )
            self._installed.enter_context(wrapped(self._profiler, name, wrap))
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

    def _wrapper(
        self,
        handlers: Handlers,
        listeners: list[Callable[[str], None]],
        interrupts: list[BaseException],
        *,
        is_idle: bool,
        is_start: bool,
    ) -> Callable[[Link], Callable[[str], None]]:
        on_fault = self._on_fault
        handler_of = handlers.get
        is_before, is_after = not is_idle and not is_start, not is_idle and is_start
        thread = get_ident()

        def wrap(link: Link) -> Callable[[str], None]:
            # One function, since every action of a step pays for a further call.
            def action(action_name: str) -> None:
                if is_before:
                    link.call(action_name)
                handler = handler_of(action_name)
                if (handler is not None or listeners) and get_ident() == thread:
                    try:
                        if handler is not None and is_start:
                            handler()
                        if listeners:
                            for listener in tuple(listeners):
                                listener(action_name)
                        if handler is not None and not is_start:
                            handler()
                    except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
                        on_fault(error)
                if is_after:
                    link.call(action_name)
                if interrupts and get_ident() == thread:
                    raise interrupts.pop(0)

            return action

        return wrap


class TensorFeed:
    """Who listens to the batches and losses of an adapter's hooks.

    Attributes:
        listeners: functions that get each batch, and those that get each loss; empty outside windows.

    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
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

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the Trainer's optimizers."""
        return tuple(self._trainer.optimizers)


def _is_idle(profiler: Any, name: str) -> bool:
    """Return whether the profiler's own method is declared to do nothing; call it before wrapping."""
    declared = name not in vars(profiler) and getattr(type(profiler), "idle_actions", False)
    return declared or (
        type(profiler).__name__ == "PassThroughProfiler" and type(profiler).__module__.endswith(".base")
    )
