"""What the CPU's kernels allocate where torch's fake tensors say something else."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from lightning_memprof.capture.torch_internals import TorchDispatchMode

__all__ = ["CpuKernels"]

_NORMS: Final = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_group_norm.default",
    }
)


class CpuKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives results of operators on fake tensors of the CPU the dtypes that its kernels give them.

    The workspace that oneDNN's LSTM saves is missing: only oneDNN knows its size, and a forked process that
    asks it waits forever for threads of the parent.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if str(func) in _NORMS:
            # Mean and deviation have the dtype of weights or running statistics, not the input's.
            dtype = next((value.dtype for value in args[1:5] if isinstance(value, Tensor)), args[0].dtype)
            return (result[0], *(statistic.to(dtype) for statistic in result[1:]))
        return result
