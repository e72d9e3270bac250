"""Listens to the actions of a Trainer's profiler."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from lightning_memprof.capture.observe import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lightning_memprof.capture.observe import Link

__all__ = ["ActionTap"]


class ActionTap:
    """Wraps ``start`` and ``stop`` of a profiler instance during a run.

    An action without a handler costs about 0.1 µs; an idle profiler's own ``start`` and ``stop`` are not called. The
    profiler's own timing never includes ours. Actions of other threads than the one that installs the tap are passed to
    the profiler only: ranges must be opened and closed in the same thread.

    Args:
        profiler: a Lightning profiler.
        starts: handlers of the start of an action, by its name.
        stops: handlers of its stop.
        on_fault: called with an exception of a handler; the training continues.

    """

    def __init__(
        self,
        profiler: Any,
        starts: Mapping[str, Callable[[], None]],
        stops: Mapping[str, Callable[[], None]],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._profiler = profiler
        self._starts = starts
        self._stops = stops
        self._on_fault = on_fault
        self._start_listeners: list[Callable[[str], None]] = []
        self._stop_listeners: list[Callable[[str], None]] = []
        self._installed = ExitStack()

    def install(self) -> None:
        """Install the tap."""
        self._installed.enter_context(wrapped(self._profiler, "start", self._starter))
        self._installed.enter_context(wrapped(self._profiler, "stop", self._stopper))

    def remove(self) -> None:
        """Remove the tap and restore the profiler."""
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

    def _starter(self, link: Link) -> Callable[[str], None]:
        passes_on = not _is_idle(self._profiler, "start")
        handler_of = self._starts.get
        listeners = self._start_listeners
        on_fault = self._on_fault
        thread = get_ident()

        def start(action_name: str) -> None:
            handler = handler_of(action_name)
            if (handler is not None or listeners) and get_ident() == thread:
                try:
                    if handler is not None:
                        handler()
                    for listener in tuple(listeners):
                        listener(action_name)
                except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
                    on_fault(error)
            if passes_on:
                link.call(action_name)

        return start

    def _stopper(self, link: Link) -> Callable[[str], None]:
        passes_on = not _is_idle(self._profiler, "stop")
        handler_of = self._stops.get
        listeners = self._stop_listeners
        on_fault = self._on_fault
        thread = get_ident()

        def stop(action_name: str) -> None:
            if passes_on:
                link.call(action_name)
            handler = handler_of(action_name)
            if (handler is not None or listeners) and get_ident() == thread:
                try:
                    for listener in tuple(listeners):
                        listener(action_name)
                    if handler is not None:
                        handler()
                except Exception as error:  # noqa: BLE001 nothing of ours may stop the training
                    on_fault(error)

        return stop


def _is_idle(profiler: Any, name: str) -> bool:
    """Return whether the profiler's own method is declared to do nothing; asked before it is wrapped."""
    declared = name not in vars(profiler) and getattr(type(profiler), "idle_actions", False)
    return declared or (
        type(profiler).__name__ == "PassThroughProfiler" and type(profiler).__module__.endswith(".base")
    )
