"""Bytes by category of a model under ``fully_shard`` (FSDP2): torch's FSDPMemTracker, adapted to Lightning's loop.

torch's own removes FSDP's hooks and adds others, in a different order for groups of modules and without
``always_call``. Here each hook is replaced in its place, and the same object is restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.torch_internals import (
    FSDPMemTracker,
    _current_graph_task_id,
    _FSDPModState,
    _FSDPRefType,
    _FSDPState,
)
from lightning_memprof.capture.tracker.report import ModuleFigures, TrackerReport
from lightning_memprof.capture.tracker.tracker import CategoryTracker, Kinds


class ShardedTracker(CategoryTracker, FSDPMemTracker):  # type: ignore[no-untyped-call]
    """Tracks this rank's part of the step.

    Args:
        root: a module that ``fully_shard`` was called on; its sub-modules are tracked.
        path: its path in the model.
    """

    kinds = Kinds(
        parameter=_FSDPRefType.SHARDED_PARAM,
        buffer=_FSDPRefType.BUFFER,
        gradient=_FSDPRefType.SHARDED_GRAD,
        activation=_FSDPRefType.ACT,
        temporary=_FSDPRefType.TEMP,
        optimizer_state=_FSDPRefType.OPT,
        input=_FSDPRefType.INP,
    )
    peaks = (_FSDPModState.PEAK_FW, _FSDPModState.PEAK_BW)

    def __init__(self, root: nn.Module, path: str = "") -> None:
        super().__init__(root)
        self._root, self._path = root, path
        self._mod_tracker: Any = _Active(root)

    def report(self) -> TrackerReport:
        """Return peak, current state, and the moments of each sharded module."""
        name = self._mod_tracker.get_known_fqn(self._root)
        modules = []
        for stats in self.memory_tracking.values():  # type: ignore[no-untyped-call]
            below = stats.mod_fqn.removeprefix(name).removeprefix(".")
            path = ".".join(part for part in (self._path, below) if part)
            for state, snapshots in stats.snapshots.items():
                modules += [
                    ModuleFigures(
                        name=stats.mod_fqn, path=path, state=state.value, call=call, figures=self._figures(snapshot)
                    )
                    for call, snapshot in enumerate(snapshots, start=1)
                ]
        return replace(super().report(), modules=tuple(modules))

    def _watch_gradients(self, model: nn.Module, undo: ExitStack) -> None:  # noqa: ARG002 overriding
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()  # noqa: SLF001 torch's own tracker asks for it
                group = state._fsdp_param_group  # noqa: SLF001 torch's own tracker asks for it
                if group is not None:
                    self._replace_hooks(module, state, undo)
                    # Modules of one group share it.
                    if "pre_backward" not in vars(group):
                        begin, end = self._fsdp_param_group_pre_backward, self._fsdp_param_group_post_backward
                        self._wrap(group, "pre_backward", self._beginning(begin, module), undo)
                        self._wrap(group, "post_backward", self._ending(end, module), undo)

    def _replace_hooks(self, module: Any, state: Any, undo: ExitStack) -> None:
        begin, end = self._fsdp_state_pre_forward, self._fsdp_state_post_forward
        for handle, hooks, wrap in (
            (state._pre_forward_hook_handle, module._forward_pre_hooks, self._beginning(begin, module)),  # noqa: SLF001
            (state._post_forward_hook_handle, module._forward_hooks, self._ending(end, module)),  # noqa: SLF001
        ):
            # One handle has the hooks of all modules of a group.
            for single in getattr(handle, "handles", (handle,)):
                if single.id in hooks:
                    original = hooks[single.id]
                    hooks[single.id] = self.guard.between(wrap, original)
                    undo.callback(hooks.__setitem__, single.id, original)

    def _beginning(self, wrap: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        active = self._mod_tracker

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            active.parents.add(active.get_known_fqn(module))
            found: Callable[..., Any] = wrap(module, original)
            return found

        return wrapper

    def _ending(self, wrap: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        active, is_backward = self._mod_tracker, wrap == self._fsdp_param_group_post_backward

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = wrap(module, original)(*args, **kwargs)
                # Where a checkpoint computes again, its backward follows.
                if is_backward or not active.is_bw:
                    active.parents.discard(active.get_known_fqn(module))
                return result

            return call

        return wrapper

    def _wrap(self, group: Any, name: str, wrap: Callable[..., Any], undo: ExitStack) -> None:
        def between(link: Link) -> Callable[..., Any]:
            def original(*args: Any, **kwargs: Any) -> Any:
                return link.call(*args, **kwargs)

            return self.guard.between(wrap, original)

        undo.enter_context(wrapped(group, name, between))

    def _see(self, func: Any, args: Any, result: Any) -> None:
        c10d = torch.ops.c10d
        if func is c10d._allgather_base_.default and self._fsdp_state in {_FSDPState.PRE_FW, _FSDPState.PRE_BW}:
            self._update_and_maybe_create_winfos(args[0], _FSDPRefType.ALL_GATHER)
        elif func is c10d._reduce_scatter_base_.default and self._fsdp_state is _FSDPState.POST_BW:
            self._update_and_maybe_create_winfos(args[1], _FSDPRefType.REDUCE_SCATTER)
        super()._see(func, args, result)


class _Active:
    """The sharded modules in forward or backward, in place of torch's ModTracker, which hooks all modules.

    Args:
        root: modules are named by its class and their path, ``Net.layers.0``.
    """

    def __init__(self, root: nn.Module) -> None:
        self.parents = {"Global"}
        # By identity: torch's calls ``__hash__`` and ``__eq__`` of each module.
        self._names = {
            id(module): ".".join(filter(None, (type(root).__name__, path))) for path, module in root.named_modules()
        }

    @property
    def is_bw(self) -> bool:
        """Whether autograd runs."""
        return bool(_current_graph_task_id() != -1)

    def get_known_fqn(self, module: nn.Module) -> str:
        """Return the name of a module."""
        return self._names[id(module)]


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ``fully_shard`` was called on, by path; the model itself has the path ``""``."""
    return {path: module for path, module in model.named_modules() if issubclass(type(module), FSDPModule)}
