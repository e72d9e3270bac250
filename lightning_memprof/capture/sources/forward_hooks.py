"""What memory does at the outermost forwards of a model, and hooks of the user's own around each forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.sources.module_calls import module_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ForwardWatch", "Forwards", "UserHooks", "memory_info", "user_hooks"]


@dataclass
class _Figure:
    """One quantity: when the first forward began, when the last one ended, and what the forwards added."""

    before: int = 0
    after: int = 0
    added: int = 0
    began: int = 0


class Forwards:
    """The outermost forwards since a moment, at which ``packed_before`` bytes had been saved for backward."""

    def __init__(self, packed_before: int) -> None:
        self.is_inside = False
        self._packed_before = packed_before
        self._count = 0
        self._rss = _Figure()
        self._npp = _Figure()

    def begin(self, rss_bytes: int, packed_bytes: int) -> None:
        """Begin an outermost forward."""
        for figure, now in ((self._rss, rss_bytes), (self._npp, packed_bytes - self._packed_before)):
            figure.began = now
            if self._count == 0:
                figure.before = now
        self._count += 1
        self.is_inside = True

    def end(self, rss_bytes: int, packed_bytes: int) -> None:
        """End it; nothing where none is open."""
        if self.is_inside:
            self.is_inside = False
            for figure, now in ((self._rss, rss_bytes), (self._npp, packed_bytes - self._packed_before)):
                figure.after = now
                figure.added += now - figure.began

    def rss(self) -> dict[str, int]:
        """Resident bytes; 0 where there was no forward."""
        return {
            "rss_pre_forward": self._rss.before, "rss_post_forward": self._rss.after, "rss_diff": self._rss.added
        }  # fmt: skip

    def npp(self) -> dict[str, int]:
        """Bytes saved for backward beyond parameters and buffers; 0 where there was no forward."""
        return {
            "npp_pre_forward": self._npp.before, "npp_post_forward": self._npp.after, "npp_diff": self._npp.added
        }  # fmt: skip


def _nothing(*_: object) -> None:
    return None


def _copied() -> Callable[..., None]:
    return _nothing


class _Hook:
    """A hook of a module; in a copy of the module, or in its pickle, it is one that does nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        self._call()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


class _OneForward:
    """One forward that goes on; ``ended`` is called when it ends, also where it raises.

    The hooks are on that module alone: with torch's global ones every module inside of it would take its slow way.
    """

    def __init__(self, module: nn.Module, waiting: list[Forwards], ended: Callable[[_OneForward], None]) -> None:
        self.waiting = waiting
        self._ended = ended
        self._again = 0
        if isinstance(module, torch.jit.ScriptModule):

            def leave(other: nn.Module, _args: Any, _output: Any) -> None:
                if other is module:
                    self._leave()

            self._handles = [register_module_forward_hook(leave, always_call=True)]
        else:
            enter, out = _Hook(self._enter), _Hook(self._leave)
            self._handles = [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(out, always_call=True),
            ]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()

    def _enter(self) -> None:
        # The module calls itself: that forward's end is not this one's.
        self._again += 1

    def _leave(self) -> None:
        if self._again:
            self._again -= 1
        else:
            self._ended(self)


class ForwardWatch:
    """Reads memory where the outermost forwards of a model's modules begin and end, in the thread that makes it.

    There is a hook only while somebody waits for the next forward, and none inside of one that was waited for: the
    modules inside of it cost nothing.

    Args:
        model: whose modules count.
        rss: reads the resident size in bytes.
        packed: reads the bytes that were saved for backward so far.
        guard: makes a function safe to stand in the user's code.

    """

    def __init__(
        self,
        model: nn.Module,
        rss: Callable[[], int],
        packed: Callable[[], int],
        guard: Callable[[Callable[..., None]], Any],
    ) -> None:
        self._members = {id(module) for module in model.modules()}
        self._rss = rss
        self._packed = packed
        self._thread = get_ident()
        self._open: list[Forwards] = []
        self._inside: list[_OneForward] = []
        self._armed: Any = None
        self._begin_guarded = guard(self._begin)
        self._end_guarded = guard(self._end)

    def open(self) -> Forwards:
        """Watch the forwards that begin from now on."""
        forwards = Forwards(self._packed())
        self._open.append(forwards)
        self._arm()
        return forwards

    def close(self, forwards: Forwards) -> None:
        """Watch them no longer; one that goes on ends here."""
        if forwards not in self._open:
            return
        self._open.remove(forwards)
        forwards.end(self._rss(), self._packed())
        for forward in [
            forward for forward in self._inside if not any(waits in self._open for waits in forward.waiting)
        ]:
            self._drop(forward)
        self._arm()

    def release(self) -> None:
        """Take every hook out."""
        self._open.clear()
        for forward in tuple(self._inside):
            self._drop(forward)
        self._arm()

    def _arm(self) -> None:
        waits = any(not forwards.is_inside for forwards in self._open)
        if waits and self._armed is None:
            self._armed = register_module_forward_pre_hook(self._before)
        elif not waits and self._armed is not None:
            self._armed.remove()
            self._armed = None

    def _before(self, module: nn.Module, _args: Any) -> None:
        # Asked first: a compiler that looks in here knows the answer, and nothing else of ours.
        if not torch.compiler.is_compiling() and id(module) in self._members and get_ident() == self._thread:
            self._begin_guarded(module)

    def _begin(self, module: nn.Module) -> None:
        waiting = [forwards for forwards in self._open if not forwards.is_inside]
        self._inside.append(_OneForward(module, waiting, self._end_guarded))
        rss, packed = self._rss(), self._packed()
        for forwards in waiting:
            forwards.begin(rss, packed)
        self._arm()

    def _end(self, forward: _OneForward) -> None:
        rss, packed = self._rss(), self._packed()
        for forwards in forward.waiting:
            forwards.end(rss, packed)
        self._drop(forward)
        self._arm()

    def _drop(self, forward: _OneForward) -> None:
        forward.remove()
        if forward in self._inside:
            self._inside.remove(forward)


@dataclass(frozen=True, kw_only=True)
class UserHooks:
    """Hooks of the user's own, with finetuning-scheduler's signatures.

    They are called for the modules of the root: the model's attribute ``model`` where that is a module, else the model
    itself. Beside their own attributes these find ``module.mem_info_handle``, which returns psutil's
    ``memory_info()``. What a hook returns is thrown away: it changes neither inputs nor outputs.

    Args:
        pre_forward: called with ``(module, args)`` before each module's forward.
        post_forward: called with ``(module, args, output)`` after it.
        reset_state: called with ``(root, save_attributes)`` at the beginning and behind each function's end.
        saved_tensors_funcs: pack and unpack for ``torch.autograd.graph.saved_tensors_hooks``.
        save_attributes: attributes of the root that are read at each edge; at the end every module gets back what it
            had under these names, or loses them.

    """

    pre_forward: Sequence[Callable[..., Any]] = ()
    post_forward: Sequence[Callable[..., Any]] = ()
    reset_state: Sequence[Callable[..., Any]] = ()
    saved_tensors_funcs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    save_attributes: Sequence[str] = ()


def memory_info() -> Any:
    """Return psutil's ``memory_info()`` of this process; unlike a process' own method it can be copied and pickled."""
    return psutil.Process().memory_info()


_HANDLE = "mem_info_handle"


@contextmanager
def user_hooks(model: nn.Module, hooks: UserHooks, guard: Callable[[Callable[..., None]], Any]) -> Iterator[UserState]:
    """Call the user's hooks around the forwards of the root's modules while the context is open.

    Every attribute of :attr:`UserHooks.save_attributes` is afterwards as it was on every module.
    """
    root = getattr(model, "model", None)
    root = root if isinstance(root, nn.Module) else model
    names = (*hooks.save_attributes, _HANDLE)
    absent = object()
    found = [(module, [(name, vars(module).get(name, absent)) for name in names]) for module in model.modules()]
    befores = [guard(_valueless(hook)) for hook in hooks.pre_forward]
    afters = [guard(_valueless(hook)) for hook in hooks.post_forward]
    resets = [guard(_valueless(hook)) for hook in hooks.reset_state]

    def before(module: nn.Module, args: Any) -> None:
        for hook in befores:
            hook(module, args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for hook in afters:
            hook(module, args, output)

    with ExitStack() as all_of_it:
        all_of_it.callback(_put_back, found, absent)
        if befores or afters:
            for module in root.modules():
                vars(module)[_HANDLE] = memory_info
            all_of_it.enter_context(module_hooks(root, before, after))
        state = UserState(root, tuple(hooks.save_attributes), resets)
        state.reset()
        yield state


class UserState:
    """The attributes that the user's hooks write on the root module."""

    def __init__(self, root: nn.Module, names: tuple[str, ...], resets: Sequence[Callable[..., None]]) -> None:
        self._root = root
        self._names = names
        self._resets = resets

    def reset(self) -> None:
        """Call the user's resets."""
        for reset in self._resets:
            reset(self._root, list(self._names))

    def read(self) -> dict[str, Any]:
        """Read the attributes; None where no hook has written one."""
        return {name: _plain(vars(self._root).get(name)) for name in self._names}


def _valueless(hook: Callable[..., Any]) -> Callable[..., None]:
    def call(*values: Any) -> None:
        hook(*values)

    return call


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: 0)() == 1:
        return item()
    return str(value)


def _put_back(found: Sequence[tuple[nn.Module, Sequence[tuple[str, Any]]]], absent: object) -> None:
    for module, values in found:
        for name, value in values:
            if value is absent:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
