"""Differences between kernels and torch's fake tensors: buffers of CUDA's kernels, dtypes of the CPU's results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_memprof.capture.torch_internals import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Buffer", "CpuKernels", "kernel_buffers"]

_IMAGES: Final = 4
# Source: aten/src/ATen/native/cuda/Reduce.cuh.
_WARP: Final = 32
_MOST_THREADS: Final = 512
_VECTOR: Final = 4
_LEAST_PER_THREAD: Final = 16
_MOST_PER_THREAD: Final = 256
_SUMS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "linalg_vector_norm.default", "amax.default",
        "amin.default", "prod.default", "prod.dim_int",
    )
)  # fmt: skip

_NORMS: Final = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_group_norm.default",
    }
)


class Buffer(NamedTuple):
    """A buffer that ends with its operator.

    Attributes:
        size: in bytes.
        label: the kernel or library that uses it.
        is_optional: whether the library may choose a kernel that needs none.

    """

    size: int
    label: str
    is_optional: bool = False


def kernel_buffers(name: str, args: Any, result: Any, resident_threads: int) -> Iterator[Buffer]:
    """Yield the buffers of an operator's kernels.

    Args:
        name: of the operator and its overload.
        args: its arguments.
        result: its result.
        resident_threads: how many threads all multiprocessors of the device run at once.

    """
    if name == "aten.convolution.default":
        yield from _convolution(args[0], result, args[8])
    elif name == "aten.convolution_backward.default":
        yield from _convolution_backward(args[0], args[1], args[9], args[10])
    elif name in _SUMS and isinstance(args[0], Tensor) and isinstance(result, Tensor):
        yield from _reduction(args[0], result, resident_threads)


def _convolution(data: Tensor, result: Tensor, groups: int) -> Iterator[Buffer]:
    """Yield cuDNN's workspace: copies of input and output with channels last, which tensor cores read."""
    if groups == 1 and data.ndim == _IMAGES:
        yield Buffer(data.nbytes + result.nbytes, "cuDNN in aten.convolution.default", is_optional=True)


def _convolution_backward(gradient: Tensor, data: Tensor, groups: int, wanted: Any) -> Iterator[Buffer]:
    """Yield cuDNN's workspaces for the gradients of input and weight: copies of gradient and input."""
    if groups == 1 and data.ndim == _IMAGES:
        for is_wanted in wanted[:2]:
            if is_wanted:
                label = "cuDNN in aten.convolution_backward.default"
                yield Buffer(gradient.nbytes + data.nbytes, label, is_optional=True)


def _reduction(data: Tensor, result: Tensor, resident_threads: int) -> Iterator[Buffer]:
    """Yield the partial results of a reduction that several blocks of threads share, and their semaphores.

    Of dense tensors, in which either the first or the last dimensions are reduced.
    """
    outputs = max(result.numel(), 1)
    inputs = data.numel() // outputs
    if inputs <= _MOST_PER_THREAD or not data.is_contiguous():
        return
    is_whole = outputs == 1
    along = is_whole or data.shape[-1] != result.shape[-1] or _reduces_last(data, result)
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, _vector(outputs))
    if is_whole:
        width //= _VECTOR
    most = _MOST_THREADS // vector
    columns = min(_power(width // vector), most)
    rows = min(_power(height), most)
    block_width = min(columns, _WARP)
    block_height = min(rows, most // block_width)
    block_width = min(columns, most // block_height)
    per_thread = -(-inputs // block_width) if along else inputs
    per_block = 1 if along else block_width
    splits_height = per_thread >= block_height * _LEAST_PER_THREAD or per_thread >= _MOST_PER_THREAD
    if splits_height:
        per_thread = -(-per_thread // block_height)
    else:
        per_block *= block_height
    grid = -(-(outputs // vector) // per_block)
    target = resident_threads // (block_width * block_height)
    if not splits_height or per_thread < _MOST_PER_THREAD or grid > target:
        return
    blocks = max(min(-(-target // grid), -(-per_thread // _LEAST_PER_THREAD)), -(-per_thread // _MOST_PER_THREAD))
    if blocks > 1:
        element = 8 if data.dtype == torch.float64 else 4
        yield Buffer(element * outputs * blocks * (1 if along else block_width * vector), "partial results of a sum")
        yield Buffer(4 * grid, "semaphores of a sum")


def _reduces_last(data: Tensor, result: Tensor) -> bool:
    """Return whether the last dimension is reduced where sizes alone do not say it."""
    return result.ndim < data.ndim and math.prod(data.shape[: result.ndim]) == result.numel()


def _vector(outputs: int) -> int:
    """Return how many outputs a thread computes: their number must be divisible."""
    return next(vector for vector in (4, 2, 1) if outputs % vector == 0)


def _power(number: int) -> int:
    """Return the largest power of 2 that is not larger."""
    return 1 << max(number, 1).bit_length() - 1


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
