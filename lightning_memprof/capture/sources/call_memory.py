"""Memory inside a call of a function: at its forwards, of saved activations, and by the user's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import psutil
from torch import nn

from lightning_memprof.capture.sources.compiled import COMPILED, is_compiled, module_paths
from lightning_memprof.capture.sources.methods import MethodCall, compiled_methods
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.sources.saved_hooks import SavedBytes

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext

_RSS: Final = ("rss_pre_forward", "rss_post_forward", "rss_diff")
_NPP: Final = ("npp_pre_forward", "npp_post_forward", "npp_diff")
_HANDLE: Final = "mem_info_handle"


class Forwards:
    """The outermost forwards of a call.

    Attributes:
        rss: at the start of the first, at the end of the last, and the growth over all; 0 without a forward.
        npp: the same of the bytes that autograd has saved since the call began.
        depth: the forwards that run around the call.
    """

    def __init__(self, depth: int, packed_bytes: int) -> None:
        self.rss = [0, 0, 0]
        self.npp = [0, 0, 0]
        self.depth = depth
        self._packed_before = packed_bytes
        self._began: tuple[int, int] | None = None
        self._is_first = True

    def begin(self, rss_bytes: int, packed_bytes: int) -> None:
        """Start an outermost forward."""
        self._began = rss_bytes, packed_bytes - self._packed_before
        if self._is_first:
            self.rss[0], self.npp[0] = self._began
            self._is_first = False

    def end(self, rss_bytes: int, packed_bytes: int) -> None:
        """End it; does nothing if none is open."""
        if self._began is not None:
            now = rss_bytes, packed_bytes - self._packed_before
            for figure, before, after in zip((self.rss, self.npp), self._began, now, strict=True):
                figure[1:] = after, figure[2] + after - before
            self._began = None


class ForwardWatch:
    """Reads memory at the start and the end of the outermost forwards of calls.

    Args:
        read: returns the RSS and the bytes saved for backward so far.
    """

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self._calls: list[Forwards] = []
        self._depth = 0

    def open(self) -> Forwards:
        """Watch the forwards that start from now on."""
        self._calls.append(Forwards(self._depth, self._read()[1]))
        return self._calls[-1]

    def close(self, call: Forwards) -> None:
        """Stop watching; a running forward ends here."""
        if call in self._calls:
            self._calls.remove(call)
            call.end(*self._read())

    def begin(self, *_: object) -> None:
        """Handle the start of a module's forward."""
        depth, self._depth = self._depth, self._depth + 1
        if waiting := [call for call in self._calls if call.depth == depth]:
            now = self._read()
            for call in waiting:
                call.begin(*now)

    def end(self, *_: object) -> None:
        """Handle its end."""
        self._depth -= 1
        if waiting := [call for call in self._calls if call.depth == self._depth]:
            now = self._read()
            for call in waiting:
                call.end(*now)


class CallMemory:
    """The hooks while they are open, and their values of a call.

    Args:
        run: of the collector.
        guard: wraps a function so that it cannot raise into the user's code.
        memory: read RSS at forwards.
        saved_tensors: count the bytes of saved activations, by saved-tensor hooks.
        user: the user's hooks.
    """

    def __init__(
        self,
        run: RunContext,
        guard: Callable[[Callable[..., None]], Any],
        *,
        memory: bool,
        saved_tensors: bool,
        user: UserHooks | None,
    ) -> None:
        self._run = run
        self._guard = guard
        self._memory = memory
        self._saved_tensors = saved_tensors
        self._user_hooks = user
        self._thread = get_ident()
        self._resources = ExitStack()
        self._watch: ForwardWatch | None = None
        self._saved: SavedBytes | None = None
        self._user: UserState | None = None
        self._saver: Forwards | None = None
        self.is_open = False

    def open(self) -> str | None:
        """Add the hooks for this thread; return why forwards are not measured, or None if they are."""
        model, user = self._run.model, self._user_hooks
        # Hooks are silently not called inside a compiled method.
        supported = not is_compiled(model) and not compiled_methods(model)
        wanted = self._memory or self._saved_tensors or user is not None
        self._thread, self.is_open = get_ident(), True
        with ExitStack() as resources:
            if self._saved_tensors:
                functions = user.saved_tensors_funcs if user is not None else None
                self._saved = SavedBytes(model, functions, self._guard(_raise))
            if supported and (self._memory or self._saved_tensors):
                self._watch = watch = ForwardWatch(self._sizes)
                resources.enter_context(module_calls(model, self._guard(watch.begin), self._guard(watch.end)))
            if user is not None:
                self._user = resources.enter_context(user_hooks(model, user, self._guard))
            self._resources = resources.pop_all()
        return f"memory at forwards: {COMPILED}" if wanted and not supported else None

    def close(self) -> None:
        """Remove the hooks."""
        self.is_open = False
        if self._saver is not None and get_ident() == self._thread:
            self._stop_saving()
        self._watch = self._user = None
        self._resources.close()

    def start(self, call: MethodCall) -> Forwards | None:
        """Start measuring a call; return None if it is not measured.

        Not measured are calls in other threads, and generators and coroutines, whose body other code interrupts.
        """
        if self._watch is None or call.suspends or get_ident() != self._thread:
            return None
        if self._saved is None or self._saver is not None:
            return self._watch.open()
        self._saved.start()
        self._saver = self._watch.open()
        return self._saver

    def end(self, measured: Forwards | None) -> None:
        """End it; its values remain."""
        if measured is None:
            return
        if self._watch is not None:
            self._watch.close(measured)
        if self._saver is measured:
            self._stop_saving()

    def values(self, measured: Forwards | None) -> dict[str, Any]:
        """Return the values of a call by name, None if they are unknown."""
        values: dict[str, Any] = {}
        if self._memory:
            values |= dict.fromkeys(_RSS) if measured is None else dict(zip(_RSS, measured.rss, strict=True))
        if self._saved_tensors:
            values |= dict.fromkeys(_NPP) if measured is None else dict(zip(_NPP, measured.npp, strict=True))
        if self._user is not None:
            values |= self._user.read()
        return values

    def reset(self) -> None:
        """Call the user's resets, after a function's end."""
        if self._user is not None:
            self._user.reset()

    def _sizes(self) -> tuple[int, int]:
        return self._run.resident.read(), 0 if self._saved is None else self._saved.total

    def _stop_saving(self) -> None:
        self._saver = None
        if self._saved is not None:
            self._saved.stop()


@dataclass(frozen=True, kw_only=True)
class UserHooks:
    """The user's own hooks, with finetuning-scheduler's signatures.

    They are called in the training's thread for the modules of the root: the model's attribute ``model`` if that is a
    module, else the model.
    Each module has the attribute ``mem_info_handle``, which returns psutil's ``memory_info()``. The results of hooks
    are ignored: they change neither inputs nor outputs.

    Args:
        pre_forward: called with ``(module, args)`` before each module's forward.
        post_forward: called with ``(module, args, output)`` after it.
        reset_state: called with ``(root, save_attributes)`` at the start and after each function's end.
        saved_tensors_funcs: pack and unpack for ``torch.autograd.graph.saved_tensors_hooks``.
        save_attributes: attributes of the root that are read at each start and end; afterwards these attributes of
            every module are restored or removed.
    """

    pre_forward: Sequence[Callable[..., Any]] = ()
    post_forward: Sequence[Callable[..., Any]] = ()
    reset_state: Sequence[Callable[..., Any]] = ()
    saved_tensors_funcs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    save_attributes: Sequence[str] = ()


def memory_info() -> Any:
    """Return psutil's ``memory_info()`` of this process; unlike the bound method it can be copied and pickled."""
    return psutil.Process().memory_info()


@contextmanager
def user_hooks(model: nn.Module, hooks: UserHooks, guard: Callable[[Callable[..., None]], Any]) -> Iterator[UserState]:
    """Call the user's hooks around the forwards of the root's modules while the context is open.

    Afterwards every attribute of :attr:`UserHooks.save_attributes` is restored on every module.
    """
    root = getattr(model, "model", None)
    root = root if isinstance(root, nn.Module) else model
    names = (*hooks.save_attributes, _HANDLE)
    absent = object()
    found = [(module, [(name, vars(module).get(name, absent)) for name in names]) for module in model.modules()]
    befores, afters, resets = (
        [guard(hook) for hook in several] for several in (hooks.pre_forward, hooks.post_forward, hooks.reset_state)
    )

    modules, running = module_paths(root), list[Any]()

    def before(path: str, args: Any) -> None:
        running.append(args)
        for hook in befores:
            hook(modules[path], args)

    def after(path: str, output: Any) -> None:
        args = running.pop()
        # A forward that raises has no output.
        for hook in afters if output is not None else ():
            hook(modules[path], args, output)

    with ExitStack() as stack:
        stack.callback(_restore, found, absent)
        if befores or afters:
            for module in root.modules():
                vars(module)[_HANDLE] = memory_info
            if not is_compiled(root):
                stack.enter_context(module_calls(root, before, after))
        state = UserState(root, tuple(hooks.save_attributes), resets)
        state.reset()
        yield state


class UserState:
    """Attributes that the user's hooks write on the root module."""

    def __init__(self, root: nn.Module, names: tuple[str, ...], resets: Sequence[Callable[..., None]]) -> None:
        self._root = root
        self._names = names
        self._resets = resets

    def reset(self) -> None:
        """Call the user's resets."""
        for reset in self._resets:
            reset(self._root, list(self._names))

    def read(self) -> dict[str, Any]:
        """Return the attributes; None if no hook has written one."""
        return {name: _plain(vars(self._root).get(name)) for name in self._names}


def _raise(error: Exception) -> None:
    raise error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: 0)() == 1:
        return item()
    return str(value)


def _restore(found: Sequence[tuple[nn.Module, Sequence[tuple[str, Any]]]], absent: object) -> None:
    for module, values in found:
        for name, value in values:
            if value is absent:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
