"""The modules of one model that are in forward or backward: torch's ModTracker, adapted to Lightning's loop."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn

from lightning_memprof.capture.observe import Guard
from lightning_memprof.capture.sources.compiled import WRAPPED, is_compiled, module_paths
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.torch_internals import ModTracker, tree_leaves

# The attributes of the wrappers of FSDP1 and torch.compile that have the wrapped module.
_WRAPPERS: Final = ("_fsdp_wrapped_module", WRAPPED)


class PathTracker(ModTracker):
    """The modules of one model that are in forward or backward, by name; its hooks never raise.

    Args:
        root: the model; its modules are named by its class and their path, ``Net.layers.0``. Others are ignored. A
            module and the wrapper of FSDP1 or ``torch.compile`` around it have one name, and are one module.
        guard: runs the hooks.
    """

    def __init__(self, root: nn.Module, guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard
        self._handles: list[Any] = []
        self._inner: Counter[str] = Counter()
        self._calls = ExitStack()
        self._root = root
        name = type(root).__name__
        # By identity: torch's tracker calls `__hash__` and `__eq__` of each module. The modules are kept alive.
        self._names: dict[int, tuple[str, nn.Module]] = {}
        for path, module in root.named_modules():
            parts = [part for part in path.split(".") if part and part not in _WRAPPERS]
            self._names[id(module)] = ".".join([name, *parts]), module

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the name of a module; None for one of another model."""
        return self._names.get(id(mod), (None,))[0]

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:  # noqa: A002 torch's name
        if not torch.compiler.is_compiling() and id(mod) in self._names:
            self._guard.run(self._forward_begins, mod, input)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:  # noqa: A002 torch's name
        if not torch.compiler.is_compiling() and id(mod) in self._names:
            self._guard.run(self._forward_ends, mod, input, output)

    def __enter__(self) -> PathTracker:  # noqa: PYI034 typing has no Self in Python 3.10
        if not is_compiled(self._root):
            super().__enter__()  # type: ignore[no-untyped-call]
            self._calls.callback(super().__exit__)
            return self
        # torch.compile would compile the hooks, and call those of its wrapper's class.
        modules = module_paths(self._root)

        def before(path: str, args: Any) -> None:
            self._guard.run(self._forward_begins, modules[path], args)

        def after(path: str, output: Any) -> None:
            self._guard.run(self._forward_ends, modules[path], (), output)

        self._calls.enter_context(module_calls(self._root, before, after))
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._post_bw_callbacks_to_enqueue.clear()

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        name, _ = self._names[id(module)]
        if name in self.parents and not self.is_bw:
            self._inner[name] += 1
            return
        self._push(name)
        if self._user_pre_fw_hook is not None:
            self._user_pre_fw_hook(module, args)
        if self.is_bw:
            return
        # The backward of a module ends when the gradients of all its inputs have arrived.
        leave = self._leaver(weakref.ref(module), name)
        nodes = _nodes(args)
        awaited = len(nodes)

        def arrived() -> None:
            nonlocal awaited
            awaited -= 1
            if awaited == 0:
                leave()

        for node in nodes:
            self._before(node, arrived)
        if not nodes:
            self._post_bw_callbacks_to_enqueue.append(lambda: self._guard.run(leave))

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        reference, (name, _) = weakref.ref(module), self._names[id(module)]
        if self._inner[name] and not self.is_bw:
            self._inner[name] -= 1
            return
        if self._user_post_fw_hook is not None:
            self._user_post_fw_hook(module, args, output)
        self._pop(name)
        if self.is_bw:
            return
        begun = False

        def begins() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._maybe_set_engine_callback()  # type: ignore[no-untyped-call]
                self._push(name)
                if self._user_pre_bw_hook is not None and (owner := reference()) is not None:
                    self._user_pre_bw_hook(owner, ())

        for node in _nodes(output):
            self._before(node, begins)

    def _leaver(self, reference: weakref.ref[nn.Module], name: str) -> Callable[[], None]:
        def leave() -> None:
            if name in self.parents:
                if self._user_post_bw_hook is not None and (owner := reference()) is not None:
                    self._user_post_bw_hook(owner, ())
                self._pop(name)

        return leave

    def _before(self, node: Any, call: Callable[[], None]) -> None:
        self._handles.append(node.register_prehook(lambda _grads: self._guard.run(call)))

    def _push(self, name: str) -> None:
        self._active_module_cnt[name] = self._active_module_cnt.get(name, 0) + 1 if name in self.parents else 1
        self.parents.add(name)

    def _pop(self, name: str) -> None:
        if name in self.parents:
            self._active_module_cnt[name] -= 1
            if self._active_module_cnt[name] == 0:
                self.parents.remove(name)


def _nodes(value: Any) -> list[Any]:
    """Return the graph nodes of tensors; a leaf has none."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
