"""What the CPU's kernels allocate where torch's fake tensors say something else."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lightning_memprof.capture.torch_internals import TorchDispatchMode, _disable_current_modes, tree_map

__all__ = ["CpuKernels"]

_NORMS: Final = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_group_norm.default",
    }
)
_RECURRENT: Final = "aten.mkldnn_rnn_layer.default"


class CpuKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives results of operators on fake tensors of the CPU the sizes that its kernels give them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspaces: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if str(func) == _RECURRENT:
            return (*result[:3], torch.empty(self._workspace(func, args), dtype=result[3].dtype))
        if str(func) in _NORMS:
            # Mean and deviation have the dtype of weights or running statistics, not the input's.
            dtype = next((value.dtype for value in args[1:5] if isinstance(value, Tensor)), args[0].dtype)
            return (result[0], *(statistic.to(dtype) for statistic in result[1:]))
        return result

    def _workspace(self, layer: Any, args: Any) -> int:
        """Return the bytes of the workspace that oneDNN's recurrent layer saves; its fake saves none."""
        key = str(tree_map(_shape, args))
        if key not in self._workspaces:
            # Only oneDNN knows: the layer runs once on zeros.
            with _disable_current_modes():
                self._workspaces[key] = layer(*tree_map(_zeros, args))[3].numel()
        return self._workspaces[key]


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
