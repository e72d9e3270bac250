"""What is measured between the start and the end of a function: at its forwards, and of what autograd saves."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.capture.collectors.host import ResidentSize
from lightning_memprof.capture.sources.forward_hooks import Forwards, ForwardWatch, user_hooks
from lightning_memprof.capture.sources.methods import compiled_methods
from lightning_memprof.capture.sources.module_calls import COMPILED, is_compiled
from lightning_memprof.capture.sources.saved_hooks import SavedBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.sources.forward_hooks import UserHooks, UserState
    from lightning_memprof.capture.sources.methods import MethodCall

__all__ = ["CallMemory", "HookOptions", "MeasuredCall"]

_RSS: Final = ("rss_pre_forward", "rss_post_forward", "rss_diff")
_NPP: Final = ("npp_pre_forward", "npp_post_forward", "npp_diff")


@dataclass(frozen=True)
class HookOptions:
    """What is asked for.

    Attributes:
        memory: resident size at forwards.
        saved_tensors: bytes that autograd saves, by saved-tensor hooks.
        user: hooks of the user's.

    """

    memory: bool
    saved_tensors: bool
    user: UserHooks | None


@dataclass(eq=False)
class MeasuredCall:
    """One call while it goes on, in the thread that the hooks belong to."""

    forwards: Forwards
    saves: bool


class CallMemory:
    """The hooks, while they are open, and what they say of a call.

    Args:
        run: of the collector.
        options: what is asked for.
        guard: makes a function safe to stand in the user's code.
        on_fault: called with what a hook of the user's raised.

    """

    def __init__(
        self,
        run: RunContext,
        options: HookOptions,
        guard: Callable[[Callable[..., None]], Any],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._run = run
        self._options = options
        self._guard = guard
        self._on_fault = on_fault
        self._thread = get_ident()
        self._resources = ExitStack()
        self._watch: ForwardWatch | None = None
        self._saved: SavedBytes | None = None
        self._user: UserState | None = None
        self._saver: MeasuredCall | None = None
        self.is_open = False

    def open(self) -> str | None:
        """Put the hooks in, for the present thread; return why the forwards are not heard, or None where they are."""
        options, model = self._options, self._run.model
        # Hooks are not called inside a compiled method, and nobody says so.
        told = not is_compiled(model) and not compiled_methods(model)
        asked = options.memory or options.saved_tensors or options.user is not None
        self._thread, self.is_open = get_ident(), True
        with ExitStack() as resources:
            if options.saved_tensors:
                functions = options.user.saved_tensors_funcs if options.user is not None else None
                self._saved = SavedBytes(model, functions, self._on_fault)
            if told and (options.memory or options.saved_tensors):
                resident = ResidentSize()
                resources.callback(resident.close)
                self._watch = ForwardWatch(model, resident.read, self._packed_bytes, self._guard)
                resources.callback(self._watch.release)
            if options.user is not None:
                self._user = resources.enter_context(user_hooks(model, options.user, self._guard))
            self._resources = resources.pop_all()
        return f"memory at forwards: {COMPILED}" if asked and not told else None

    def close(self) -> None:
        """Take the hooks out."""
        self.is_open = False
        if self._saver is not None and get_ident() == self._thread:
            self._stop_saving()
        self._watch = self._user = None
        self._resources.close()

    def start(self, call: MethodCall) -> MeasuredCall | None:
        """Begin to measure a call; None where nothing is measured of it.

        Nothing is of calls in other threads, and of generators and coroutines, which other code runs inside of.
        """
        if self._watch is None or call.suspends or get_ident() != self._thread:
            return None
        saves = self._saved is not None and self._saver is None
        if saves and self._saved is not None:
            self._saved.start()
        measured = MeasuredCall(self._watch.open(), saves)
        if saves:
            self._saver = measured
        return measured

    def end(self, measured: MeasuredCall | None) -> None:
        """End it; its values stay."""
        if measured is None:
            return
        if self._watch is not None:
            self._watch.close(measured.forwards)
        if self._saver is measured:
            self._stop_saving()

    def values(self, measured: MeasuredCall | None) -> dict[str, Any]:
        """Give the values of a call by name, None where they are not known."""
        values: dict[str, Any] = {}
        if self._options.memory:
            values |= dict.fromkeys(_RSS) if measured is None else measured.forwards.rss()
        if self._options.saved_tensors:
            values |= dict.fromkeys(_NPP) if measured is None else measured.forwards.npp()
        if self._user is not None:
            values |= self._user.read()
        return values

    def reset(self) -> None:
        """Call the user's resets, behind a function's end."""
        if self._user is not None:
            self._user.reset()

    def _packed_bytes(self) -> int:
        return 0 if self._saved is None else self._saved.total

    def _stop_saving(self) -> None:
        self._saver = None
        if self._saved is not None:
            self._saved.stop()
