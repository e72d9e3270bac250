"""Bytes of saved activations, counted by torch's saved-tensor hooks; only on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_memprof.capture.observe import take_out, without_torch_function
from lightning_memprof.capture.room import is_at_limit, with_room
from lightning_memprof.capture.sources.tensors import local_bytes, local_storage
from lightning_memprof.capture.torch_internals import (
    _current_graph_task_id,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)


class _Saved(NamedTuple):
    """A saved tensor, detached to avoid a reference cycle, and its version at that time."""

    tensor: torch.Tensor
    version: int


def checked_pack(tensor: torch.Tensor) -> Any:
    """Pack for :func:`checked_unpack`."""
    return _Saved(tensor.detach(), _version(tensor))


def checked_unpack(saved: Any) -> Any:
    """Return the tensor that :func:`checked_pack` packed, and anything else unchanged.

    Autograd omits its own check for packed tensors: without this one an in-place operation on a saved tensor would
    silently give wrong gradients.

    Raises:
        RuntimeError: an in-place operation has changed the tensor since it was saved; raised without hooks too.
    """
    if not isinstance(saved, _Saved):
        return saved
    tensor, version = saved
    if _version(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {_version(tensor)}; "
            f"expected version {version} instead. Hint: enable anomaly detection to find the operation that failed to "
            "compute its gradient, with torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


@without_torch_function
def _version(tensor: torch.Tensor) -> int:
    version: int = tensor._version  # noqa: SLF001 torch's documented counter of in-place operations
    return version


class SavedBytes:
    """Counts the bytes that autograd saves between :meth:`start` and :meth:`stop`.

    Each storage counts once and completely, for any number of views; storages of parameters and buffers do not count,
    nor does anything saved during backward, such as a checkpoint's recomputation.

    Args:
        model: its parameters and buffers are excluded.
        functions: the user's pack and unpack; None saves the tensors themselves. A tensor that pack returns unchanged
            is checked for in-place operations if unpack is :func:`checked_unpack`.
        on_fault: called with an exception of the user's pack; that tensor is then saved itself.
    """

    def __init__(
        self,
        model: nn.Module,
        functions: tuple[Callable[..., Any], Callable[..., Any]] | None,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.total = 0
        # Read again at each start; walking the modules each time would take as long as a step's hooks.
        self._tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]  # noqa: SLF001
        self._functions = functions
        self._on_fault = on_fault
        self._own: set[int] = set()
        # A freed storage keeps its identity as long as there is a weak reference to it.
        self._seen: dict[int, int] = {}
        self._hooks: Any = None

    def start(self) -> None:
        """Start counting at 0, in this thread.

        Raises:
            RuntimeError: the program has disabled saved-tensor hooks here.
        """
        self.total = 0
        self._own = {
            storage._cdata  # noqa: SLF001 a storage's identity, which its views share
            for table in self._tables
            for tensor in table.values()
            if tensor is not None and (storage := local_storage(tensor)) is not None
        }
        pack, unpack = self._pack, self._unpack()
        _push((pack, unpack))
        self._hooks = pack

    def stop(self) -> None:
        """Stop counting; :attr:`total` remains."""
        pack, self._hooks = self._hooks, None
        if pack is not None:
            take_out(_pop, _push, lambda hooks: hooks[0] is pack)
        for weak in self._seen.values():
            torch.UntypedStorage._free_weak_ref(weak)  # type: ignore[no-untyped-call] # noqa: SLF001 its only way
        self._seen, self._own = {}, set()

    def _pack(self, tensor: torch.Tensor) -> Any:
        try:
            return with_room(self._packed, tensor)
        except RecursionError as error:
            if not is_at_limit(error):
                raise
            # `checked_pack` without its frames; not counted.
            return tuple.__new__(_Saved, (tensor.detach(), tensor._version))  # noqa: SLF001 as there

    def _packed(self, tensor: torch.Tensor) -> Any:
        if _current_graph_task_id() == -1:  # outside of backward
            self._count(tensor)
        if self._functions is None:
            return checked_pack(tensor)
        pack, unpack = self._functions
        try:
            packed = pack(tensor)
        except Exception as error:  # noqa: BLE001 a user's hook must not stop the training
            self._on_fault(error)
            return checked_pack(tensor)
        return checked_pack(tensor) if packed is tensor and unpack is checked_unpack else packed

    def _unpack(self) -> Callable[[Any], Any]:
        if self._functions is None or self._functions[1] is checked_unpack:
            return checked_unpack
        unpack = self._functions[1]
        return lambda packed: checked_unpack(packed) if isinstance(packed, _Saved) else unpack(packed)

    @without_torch_function
    def _count(self, tensor: torch.Tensor) -> None:
        storage = local_storage(tensor)
        if storage is None:
            self.total += local_bytes(tensor)
            return
        identity = storage._cdata  # noqa: SLF001 a storage's identity, which its views share
        if identity in self._own or identity in self._seen:
            return
        # Parameters of other models, and those that FSDP inserts for a forward.
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):  # noqa: SLF001
            return
        # A fake tensor, of a program that is being exported or compiled, uses no memory.
        if storage.device.type == "meta":
            return
        weak: Any = storage._weak_ref()  # noqa: SLF001 its only way
        self._seen[identity] = weak
        self.total += storage.nbytes()


def _pop() -> tuple[Any, Any] | None:
    top: tuple[Any, Any] | None = _top_saved_tensors_default_hooks(True)  # noqa: FBT003 torch's signature
    if top is not None:
        _pop_saved_tensors_default_hooks()
    return top


def _push(hooks: tuple[Any, Any]) -> None:
    _push_saved_tensors_default_hooks(*hooks)  # torch's context manager removes those on top
