"""The storages that operators make on a device, from their first tensor to their end."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memprof.capture.sources.tensors import dense_parts
from lightning_memprof.estimation.storage_log import StorageLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

__all__ = ["StorageTracer"]

_ITEM: Final = "aten._local_scalar_dense.default"
_GEMM: Final = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
# torch's optimizers and clipping read values that decide no shape.
_LIBRARIES: Final = ("/torch/", "/lightning/", "/lightning_memprof/")
_HARMLESS: Final = ("/torch/optim/", "/torch/nn/utils/", "/torch/amp/")


class StorageTracer(TorchDispatchMode):
    """Notes each storage that operators make on a device, and its end.

    Attributes:
        log: the storages.
        assumed: how often a value was read from a tensor, which has none, by operator and source line.

    Args:
        device: the device whose storages count.
        granule: see :class:`StorageLog`.
        workspace_bytes: cuBLAS keeps this much for each thread that multiplies matrices: forward's and backward's.

    """

    def __init__(self, device: torch.device, granule: int, workspace_bytes: int = 0) -> None:
        super().__init__()
        self.log = StorageLog(granule=granule)
        self.assumed: Counter[tuple[str, str]] = Counter()
        self._kind = device.type
        self._workspace_bytes = workspace_bytes
        self._with_workspace: set[str] = set()
        self._part = "setup"
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._paths: dict[nn.Module, str] = {}
        self._modules: list[str] = []
        self._hooks = ExitStack()

    def name_modules(self, model: nn.Module) -> None:
        """Give each storage that follows the path of the module in whose forward it is made."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def mark(self, step: int, part: str) -> None:
        """Note that a part of a step begins: ``forward``, ``backward`` or ``optimizer``."""
        self._part = part
        self.log.begin(step, part)

    def label(self, tensors: Iterable[tuple[str | None, Any]], category: str) -> None:
        """Set the category of tensors' storages, and their module's path where it is not None."""
        for path, tensor in tensors:
            for part in dense_parts(tensor):
                known = self._live.get(part.untyped_storage()._cdata)  # noqa: SLF001 no public one
                if known is not None:
                    self.log.set_category(known[1], category)
                    if path is not None:
                        self.log.set_module(known[1], path)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._hooks.close()
        self._paths.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # The DTensor splits itself; the operators on its parts come here.
        if DTensor in types:
            return NotImplemented
        name = str(func)
        if name in _GEMM:
            self._first_gemm()
        try:
            result = func(*args, **kwargs or {})
        except DataDependentOutputException:
            result = self._assume(name, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._kind:
                self._add(leaf, name)
        return result

    def _enter(self, module: nn.Module, _: Any) -> None:
        if (path := self._paths.get(module)) is not None:
            self._modules.append(path)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self._paths and self._modules:
            self._modules.pop()

    def _add(self, tensor: torch.Tensor, operator: str) -> None:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata  # noqa: SLF001 no public one
            known = self._live.get(key)
            if (known is not None and known[0]() is storage) or storage.nbytes() == 0:
                continue
            number = self._new(storage.nbytes(), self._category(), str(part.dtype), operator)
            self._live[key] = (weakref.ref(storage, self._ender(key, number)), number)

    def _ender(self, key: int, number: int) -> Any:
        def ended(_: object) -> None:
            self.log.requests.free(number)
            known = self._live.get(key)
            if known is not None and known[1] == number:
                del self._live[key]

        return ended

    def _category(self) -> str:
        # Checkpointed modules run forward again in backward: what they make there is saved too.
        if self._part == "forward" or (self._part == "backward" and self._modules):
            return "activation"
        return "temporary"

    def _new(self, size: int, category: str, dtype: str, operator: str) -> int:
        module = self._modules[-1] if self._modules else ""
        return self.log.add(size, category=category, dtype=dtype, module=module, operator=operator)

    def _first_gemm(self) -> None:
        thread = "backward" if self._part == "backward" else "forward"
        if self._workspace_bytes and thread not in self._with_workspace:
            self._with_workspace.add(thread)
            self._new(self._workspace_bytes, "workspace", "torch.uint8", f"cuBLAS in {thread}")

    def _assume(self, name: str, args: Any) -> Any:
        if place := _user_line():
            self.assumed[name, place] += 1
        if name != _ITEM:
            return False
        return False if args[0].dtype == torch.bool else 1


def _user_line() -> str:
    """Return file and line of the innermost frame that belongs to the program; empty where it decides no shape."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 inspect.stack() reads source files
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if any(part in path for part in _HARMLESS):
            return ""
        if not path.startswith("<") and not any(part in path for part in _LIBRARIES):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
