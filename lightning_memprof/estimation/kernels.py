"""Differences between kernels and torch's fake tensors: buffers, operators in place, dtypes of results."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightning_memprof.capture.torch_internals import (
    TorchDispatchMode,
    _current_autograd_node,
    _current_graph_task_id,
    _storage_Use_Count,
    tree_leaves,
)
from lightning_memprof.estimation.allocator import round_up

_IMAGES: Final = 4
# Sizes of attention's blocks, in rows and columns; 16 bytes of each tile are its lock.
_FLASH_ROWS: Final = 128
_FLASH_WIDTH: Final = 32
_TILE: Final = 64
_TILE_HEAD: Final = 16
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


# Results in the order in which the kernel allocates them, where it is another one.
_ORDER: Final = MappingProxyType(
    {
        "aten.native_dropout.default": (1, 0),
        "aten._scaled_dot_product_efficient_attention.default": (2, 3, 0, 1),
    }
)


# How many buffers of the first argument's size a kernel has.
_COPIES: Final = MappingProxyType(
    {
        "aten.mse_loss.default": 1,
        "aten.smooth_l1_loss.default": 1,
        "aten.huber_loss.default": 1,
        "aten.logsumexp.default": 1,
        "aten._softmax_backward_data.default": 1,
        "aten.binary_cross_entropy_with_logits.default": 2,
    }
)


# Losses whose kernels compute the elementwise loss into the storage of the reduced one, which keeps its size. Source:
# torch's `Loss.cpp`. Of 511 operators whose storages were compared with those of fake tensors, no others keep more.
_ELEMENTWISE: Final = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)


# Arguments of which a kernel makes a contiguous copy, unless they are contiguous, or have channels last where it reads
# these too. `tests/gpu/test_operators.py` compares them with torch's allocator.
_CONTIGUOUS: Final = MappingProxyType(
    {
        "aten.native_layer_norm.default": (0,),
        "aten.native_layer_norm_backward.default": (0, 1),
        "aten.native_group_norm.default": (0,),
        "aten.native_group_norm_backward.default": (0, 1),
        "aten._softmax.default": (0,),
        "aten._log_softmax.default": (0,),
        "aten._softmax_backward_data.default": (1,),
        "aten._log_softmax_backward_data.default": (0, 1),
        "aten.cumsum.default": (0,),
        "aten.cumprod.default": (0,),
        "aten.roll.default": (0,),
    }
)
_POOLED: Final = MappingProxyType(
    {
        "aten.avg_pool2d.default": (0,),
        "aten.avg_pool2d_backward.default": (0, 1),
        "aten.max_pool2d_with_indices.default": (0,),
        "aten.max_pool2d_with_indices_backward.default": (0, 1),
    }
)
# They convert their input to the result's dtype first; of sums those of integers do.
_CONVERTING: Final = frozenset({"aten.cumsum.default", "aten.cumprod.default"})
_CHANNELS_LAST: Final = MappingProxyType({4: torch.channels_last, 5: torch.channels_last_3d})


class Buffer(NamedTuple):
    """A buffer that ends with its operator.

    Attributes:
        size: in bytes.
        label: the kernel or library that uses it.
        is_optional: whether the library may choose a kernel that needs none.
        is_brief: whether it ends before the operator's next buffer.
    """

    size: int
    label: str
    is_optional: bool = False
    is_brief: bool = False


def in_order(name: str, result: Any) -> Any:
    """Return the results of an operator in the order in which CUDA's kernel allocates them."""
    order = _ORDER.get(name)
    return result if order is None else [result[index] for index in order]


def laid_out(name: str, args: Any, result: Any) -> Any:
    """Return the results of an operator in the memory format of CUDA's kernels, where fake tensors have another one."""
    if name == "aten.log_sigmoid_forward.default":
        # Only the CPU's kernel fills the buffer.
        return result[0], result[1].new_empty(0)
    if name == "aten.convolution.default":
        return result.contiguous(memory_format=_format(args[0], args[1]))
    if name == "aten.convolution_backward.default":
        layout = _format(args[1], args[2])
        gradients = (None if made is None else made.contiguous(memory_format=layout) for made in result[:2])
        return (*gradients, result[2])
    return result


def _format(data: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of a convolution. Source: ``cudnn_conv_suggest_memory_format`` of ``ConvUtils.h``."""
    last = _CHANNELS_LAST.get(data.ndim)
    if last is None or data.dtype == torch.float64:
        return torch.contiguous_format
    is_last = any(not each.is_contiguous() and each.is_contiguous(memory_format=last) for each in (data, weight))
    return last if is_last else torch.contiguous_format


def _copies(name: str, args: Any, result: Any) -> Iterator[Buffer]:
    """Yield the copies of arguments in the dtype and memory format that the kernel reads."""
    label = f"copy of an argument of {name}"
    is_sum = name in _SUMS and not args[0].is_floating_point()
    if (is_sum or name in _CONVERTING) and args[0].dtype != result.dtype:
        yield Buffer(args[0].numel() * result.element_size(), label)
    for index in _POOLED.get(name, ()):
        if not (args[index].is_contiguous() or args[index].is_contiguous(memory_format=_CHANNELS_LAST[4])):
            yield Buffer(args[index].nbytes, label)
    needed = [(args[index], torch.contiguous_format) for index in _CONTIGUOUS.get(name, ())]
    if name == "aten.convolution.default":
        needed = [(tensor, _format(args[0], args[1])) for tensor in args[:2]]
    elif name == "aten.convolution_backward.default":
        needed = [(tensor, _format(args[1], args[2])) for tensor in args[:3]]
    for tensor, layout in needed:
        if not tensor.is_contiguous(memory_format=layout):
            element = result.element_size() if name in _CONVERTING else tensor.element_size()
            yield Buffer(tensor.numel() * element, label)


def storage_bytes(name: str, args: Any, result: Tensor) -> int:
    """Return the bytes of a result's storage, on any device; that of a fake tensor may be smaller."""
    known = result.untyped_storage().nbytes()
    if name not in _ELEMENTWISE:
        return known
    elementwise: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return max(known, elementwise.numel() * result.element_size())


def kernel_buffers(name: str, args: Any, result: Any, resident_threads: int) -> Iterator[Buffer]:
    """Yield the buffers of an operator's kernels.

    Args:
        name: of the operator and its overload.
        args: its arguments.
        result: its result.
        resident_threads: how many threads all multiprocessors of the device run at once.
    """
    yield from _copies(name, args, result)
    if name == "aten.convolution.default":
        yield from _convolution(name, (args[0], result), args[8], 1)
    elif name == "aten.convolution_backward.default":
        yield from _convolution(name, args[:2], args[9], sum(args[10][:2]))
    elif name == "aten._scaled_dot_product_flash_attention_backward.default":
        yield from _flash_backward(args[1], (args[0], args[4]))
    elif name == "aten.native_group_norm_backward.default":
        yield from _group_norm_backward(args)
    elif name == "aten._scaled_dot_product_efficient_attention_backward.default":
        yield from _efficient_backward(args[1], args[5])
    elif name in _COPIES:
        # Losses before their reduction, and products of gradient and result.
        for _ in range(_COPIES[name]):
            yield Buffer(args[0].nbytes, f"workspace of {name}")
    elif name in _SUMS and isinstance(args[0], Tensor) and isinstance(result, Tensor):
        yield from _reduction(args[0], result, resident_threads, f"workspace of {name}")


def _convolution(name: str, operands: Sequence[Tensor], groups: int, results: int) -> Iterator[Buffer]:
    """Yield cuDNN's workspace for each result: copies of its operands with channels last, which tensor cores read."""
    if groups == 1 and operands[0].ndim == _IMAGES:
        for _ in range(results):
            yield Buffer(sum(tensor.nbytes for tensor in operands), f"cuDNN in {name}", is_optional=True)


def _group_norm_backward(args: Any) -> Iterator[Buffer]:
    """Yield sums of each channel and each group. Source: ``group_norm_kernel.cu``."""
    data, samples, channels, groups = args[1], args[5], args[6], args[8]
    for count in (channels, channels, groups, groups):
        yield Buffer(samples * count * max(data.element_size(), 4), "sums of group norm's backward")


def _flash_backward(query: Tensor, others: tuple[Tensor, Tensor]) -> Iterator[Buffer]:
    """Yield copies, the sums over rows, and the query's gradient in float32. Source: ``flash_api.cpp``.

    Args:
        query: samples x heads x rows x width.
        others: the result's gradient and the result, which the kernel reads as samples x rows x heads x width.
    """
    for tensor in others:
        if not tensor.transpose(1, 2).is_contiguous():
            yield Buffer(tensor.nbytes, "copy of an argument of flash attention")
    samples, heads, rows, width = query.shape
    rows = round_up(rows, _FLASH_ROWS)
    width = round_up(width, _FLASH_WIDTH if width <= _FLASH_ROWS else 2 * _FLASH_WIDTH)
    yield Buffer(4 * samples * heads * rows, "flash attention's sums")
    yield Buffer(4 * samples * heads * rows * width, "flash attention's gradient of the query")


def _efficient_backward(query: Tensor, result: Tensor) -> Iterator[Buffer]:
    """Yield the sums over rows, and tiles of the query's gradient. Source: ``mem_eff_attention/kernel_backward.h``."""
    samples, heads, rows, width = query.shape
    if query.dtype == torch.float32:
        yield Buffer(result.nbytes, "attention's products of gradients", is_brief=True)
        yield Buffer(4 * samples * heads * rows, "attention's sums", is_brief=True)
    yield Buffer(4 * samples * heads * rows, "attention's sums")
    tiles = -(-rows // _TILE) * -(-width // _TILE)
    yield Buffer(samples * heads * tiles * (4 * _TILE**2 + _TILE_HEAD), "attention's gradient of the query")


def _reduction(data: Tensor, result: Tensor, resident_threads: int, label: str) -> Iterator[Buffer]:
    """Yield the partial results of a reduction that several blocks of threads share, and their semaphores.

    Of dense tensors, in which either the first or the last dimensions are reduced.
    """
    outputs = max(result.numel(), 1)
    inputs = data.numel() // outputs
    if inputs <= _MOST_PER_THREAD or not data.is_contiguous():
        return
    is_whole = outputs == 1
    along = is_whole or data.shape[-1] != result.shape[-1] or _reduces_last(data, result)
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, math.gcd(outputs, _VECTOR))
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
        yield Buffer(element * outputs * blocks * (1 if along else block_width * vector), label)
        yield Buffer(4 * grid, label)


def _reduces_last(data: Tensor, result: Tensor) -> bool:
    """Return whether the last dimension is reduced where sizes alone do not say it."""
    return result.ndim < data.ndim and math.prod(data.shape[: result.ndim]) == result.numel()


def _power(number: int) -> int:
    """Return the largest power of 2 that is not larger."""
    return 1 << max(number, 1).bit_length() - 1


_MASKABLE: Final = frozenset({"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"})
_SUM: Final = "aten.add.Tensor"
_aten: Final[Any] = torch.ops.aten
# torch/csrc/autograd/FunctionsManual.cpp writes these results into a tensor of zeros,
_WRITES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "aten.scatter.src": _aten.scatter_.src,
        "aten.scatter_add.default": _aten.scatter_add_.default,
        "aten.index_add.default": _aten.index_add_.default,
        "aten.index_put.default": _aten.index_put_.default,
        "aten._unsafe_index_put.default": _aten.index_put_.default,
    }
)
# and these into the result before.
_TERMS: Final[Mapping[str, Any]] = MappingProxyType(
    {"aten.sub.Tensor": _aten.sub_.Tensor, "aten.mul.Tensor": _aten.mul_.Tensor}
)
_WITH_TERMS: Final = frozenset({"BinaryCrossEntropyWithLogitsBackward0"})
_AUTOGRAD: Final = str(Path(torch.autograd.__file__).parent)
# Frames between an operator and the dispatch mode that sees it.
_BETWEEN: Final = (
    str(Path(__file__).parent),
    *(str(Path(torch.__path__[0], name)) for name in ("_compile", "_dynamo", "_ops")),
)


class InPlace:
    """Finds the operators of backward that torch runs in place, and out of place on tensor subclasses such as fakes.

    Autograd adds two gradients in place where nothing else refers to the first one. Source: ``accumulate`` in
    ``torch/csrc/autograd/input_buffer.cpp``. The references to a fake are more, by a number that a sum of two
    gradients shows.

    Args:
        device: on which tensors have no data.
    """

    def __init__(self, device: torch.device) -> None:
        with _Sums() as sums, torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            values = torch.empty(2, device=device, requires_grad=True)
            torch.autograd.backward((values * 2 + values * 3).sum())
        self._unshared = sums.found[0] if sums.found else None

    def operator(self, name: str, args: Any) -> Any:
        """Return the operator to run instead of one; None for that one."""
        if _current_graph_task_id() == -1 or torch.is_grad_enabled():
            return None
        if name in _WRITES:
            return _WRITES[name] if _is_autograds() else None
        if name == _SUM:
            return _aten.add_.Tensor if self._is_sum_in_place(args) else None
        found = _TERMS.get(name)
        is_term = found is not None and isinstance(args[1], Tensor) and args[0].numel() >= args[1].numel()
        return found if is_term and _node() in _WITH_TERMS and _is_autograds() else None

    def _is_sum_in_place(self, args: Any) -> bool:
        # A variable for the tensor would be one more reference.
        return (
            isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and _is_dense(args[0])
            and _is_autograds()
            and _references(args) == self._unshared
        )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether each number of a tensor has its own place, and the places follow each other."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def likely_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator in a size that a metric expects; None for other operators.

    Masks keep all rows, classes have the declared number of bins, and all values are the same: metrics reject more
    distinct values than they have classes.
    """
    name = str(func)
    if name in _MASKABLE:
        indices = [index for mask in args[1] for index in _kept(mask)]
        return func(args[0], indices, *args[2:], **kwargs)
    given = {argument.name: argument.default_value for argument in func._schema.arguments}  # noqa: SLF001 no public one
    given |= dict(zip(given, args, strict=False))
    given |= kwargs
    tensor = given["self"]
    if name == "aten.nonzero.default":
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.long)
    if name == "aten.masked_select.default":
        both, _ = torch.broadcast_tensors(tensor, given["mask"])  # type: ignore[no-untyped-call]
        return tensor.new_empty(both.numel())
    if name == "aten.bincount.default":
        weights = given["weights"]
        kind = torch.long if weights is None else torch.float if weights.dtype == torch.float else torch.double
        return tensor.new_empty(max(given["minlength"], 1), dtype=kind)
    if name in {"aten._unique2.default", "aten.unique_consecutive.default"} and given.get("dim") is None:
        inverse = tensor.shape if given["return_inverse"] else (0,)
        counts = (1 if given["return_counts"] else 0,)
        numbers = (tensor.new_empty(shape, dtype=torch.long) for shape in (inverse, counts))
        return (tensor.new_empty(min(tensor.numel(), 1)), *numbers)
    return None


def _kept(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices of all rows for a mask, one for each of its dimensions; another index as it is."""
    if index is None or index.dtype not in {torch.bool, torch.uint8}:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.long) for _ in range(index.ndim)]


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the references to the first tensor of each sum in backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == _SUM and _current_graph_task_id() != -1:
            self.found.append(_references(args))
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                # As a tracer does: from then on there is a Python object.
                leaf.untyped_storage()
        return result


def _references(args: Any) -> tuple[int, ...]:
    """Return how often the first argument, its Python object and its storage are referred to."""
    tensor = args[0]
    storage = tensor.untyped_storage()
    return tensor._use_count(), sys.getrefcount(tensor), _storage_Use_Count(storage._cdata)  # noqa: SLF001 no public ones


def _is_autograds() -> bool:
    """Return whether autograd's C++ code runs an operator, and no Python code that it calls."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 inspect.stack() reads source files
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_AUTOGRAD)


def _node() -> str:
    node = _current_autograd_node()
    return "" if node is None else str(node.name())


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
