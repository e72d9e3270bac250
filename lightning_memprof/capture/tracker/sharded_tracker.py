"""Bytes by category of a model under ``fully_shard`` (FSDP2): torch's FSDPMemTracker, adapted to Lightning's loop.

torch's own removes FSDP's hooks and adds others, in a different order for groups of modules and without
``always_call``. Here each hook is replaced in its place, and the same object is restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.torch_internals import FSDPMemTracker, _FSDPModState, _FSDPRefType, _FSDPState
from lightning_memprof.capture.tracker.tracker import CategoryTracker, Kinds


class ShardedTracker(CategoryTracker, FSDPMemTracker):  # type: ignore[no-untyped-call]
    """Tracks this rank's part of the step.

    Args:
        root: a module that ``fully_shard`` was called on; its sub-modules are tracked.
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

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root, root)

    def _hook(self, model: nn.Module, undo: ExitStack) -> None:
        super()._hook(model, undo)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()  # noqa: SLF001 torch's own tracker asks for it
                group = state._fsdp_param_group  # noqa: SLF001 torch's own tracker asks for it
                if group is not None:
                    self._replace_hooks(module, state, undo)
                    # Modules of one group share it.
                    if "pre_backward" not in vars(group):
                        self._wrap(group, "pre_backward", partial(self._fsdp_param_group_pre_backward, module), undo)
                        self._wrap(group, "post_backward", partial(self._fsdp_param_group_post_backward, module), undo)
        modules = self._mod_tracker
        modules.register_user_hooks(
            pre_fw_hook=lambda *_: self._module_begins(), pre_bw_hook=lambda *_: self._last_totals.clear()
        )
        undo.callback(modules.clear_user_hooks)

    def _replace_hooks(self, module: Any, state: Any, undo: ExitStack) -> None:
        for handle, hooks, wrap in (
            (state._pre_forward_hook_handle, module._forward_pre_hooks, self._fsdp_state_pre_forward),  # noqa: SLF001
            (state._post_forward_hook_handle, module._forward_hooks, self._fsdp_state_post_forward),  # noqa: SLF001
        ):
            # One handle has the hooks of all modules of a group.
            for single in getattr(handle, "handles", (handle,)):
                if single.id in hooks:
                    original = hooks[single.id]
                    hooks[single.id] = self.guard.between(partial(wrap, module), original)
                    undo.callback(hooks.__setitem__, single.id, original)

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


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ``fully_shard`` was called on, by path; the model itself has the path ``""``."""
    return {path: module for path, module in model.named_modules() if issubclass(type(module), FSDPModule)}
