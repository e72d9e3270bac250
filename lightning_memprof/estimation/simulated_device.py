"""A device without memory: tensors on it have shape, dtype and device, and operators on them compute no values.

torch lets one backend be written in Python, under the key PrivateUse1. On that device autograd, autocast and the
optimizers choose what they choose on CUDA, which they do not on ``cpu`` or ``meta``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Final, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    FakeTensorMode,
    _ExcludeDispatchKeyGuard,
    _foreach_supported_types,
    _get_privateuse1_backend_name,
    _setup_privateuseone_for_python_backend,
    tree_leaves,
    tree_map,
)
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.allocator import GRANULE
from lightning_memprof.estimation.kernels import CpuKernels

NAME: Final = "simgpu"
_ALIGNMENT: Final = 8
_MAX_FLASH_HEAD: Final = 256
_MATRIX: Final = 2
# Source: the AT_FORALL macros of aten/src/ATen/autocast_mode.h.
_LOWER: Final = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT: Final = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm", "nuclear_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm", "rms_norm",
)  # fmt: skip
# They compute in float32 unless a dtype is given, and need no copy of their input for it.
_FLOAT_RESULT: Final = ("prod", "cumprod", "cumsum", "sum", "linalg_vector_norm", "linalg_matrix_norm")
_WIDEST: Final = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
_HALVES: Final = (torch.float16, torch.bfloat16)


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    # A constant is made on the CPU and copied: the device cannot make one.
    avoid_device_init: ClassVar[property] = property(lambda _: True)


def _nothing(*_: Any) -> None:
    """Operators take no time."""


class _Event:
    """Marks nothing."""

    record = wait = synchronize = _nothing

    def __init__(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """A queue of which only the number counts: CUDA's allocator gives each stream blocks of its own."""

    wait_stream = wait_event = synchronize = _nothing

    def __init__(self, number: int) -> None:
        self.number = number

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Streams:
    """The streams of the device; ``current`` is the one that operators run on."""

    def __init__(self) -> None:
        self._made = [_Stream(0)]
        self.current = self._made[0]

    def new(self, *_: Any, **__: Any) -> _Stream:
        self._made.append(_Stream(len(self._made)))
        return self._made[-1]

    @contextmanager
    def use(self, stream: _Stream | None) -> Iterator[None]:
        earlier, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = earlier


def _register() -> None:
    """Register the device in this process; torch has no way to take that back.

    Raises:
        MemprofError: another backend is registered, which happens on machines with such an accelerator.
    """
    current = _get_privateuse1_backend_name()
    if current == NAME:
        return
    if current != "privateuseone":
        raise MemprofError(f"estimate: this process uses the backend {current!r}; torch has room for one: use another")
    streams = _Streams()
    module = types.SimpleNamespace(
        Stream=streams.new,
        Event=_Event,
        stream=streams.use,
        current_stream=lambda *_: streams.current,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        device=lambda _: ExitStack(),
        manual_seed_all=_nothing,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of device to imitate.

    Attributes:
        is_gpu: with CUDA's kernels and rounding, otherwise the CPU's.
        workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices.
        resident_threads: how many threads all multiprocessors run at once.
    """

    is_gpu: bool = True
    workspace_bytes: int = 0
    resident_threads: int = 0

    @property
    def kind(self) -> str:
        """Type of the device on which the operators run without data."""
        return NAME if self.is_gpu else "cpu"

    @property
    def granule(self) -> int:
        """Bytes to which storages are rounded up."""
        return GRANULE if self.is_gpu else 1

    def register(self) -> None:
        """Make the device known to torch.

        Raises:
            MemprofError: this process uses another backend of its own.
        """
        if self.is_gpu:
            _register()

    @contextmanager
    def simulated(self) -> Iterator[torch.device]:
        """Run the operators inside without data, those on the returned device as the target would choose them.

        Raises:
            MemprofError: this process uses another backend of its own.
        """
        with ExitStack() as undo:
            self.register()
            if self.is_gpu:
                undo.enter_context(_cuda_autocast(NAME))
                undo.enter_context(_cuda_attention())
                _foreach_supported_types.append(FakeTensor)
                undo.callback(_foreach_supported_types.remove, FakeTensor)
            undo.enter_context(_Mode(allow_non_fake_inputs=True))
            if not self.is_gpu:
                undo.enter_context(CpuKernels())  # type: ignore[no-untyped-call]
            yield torch.device(NAME, 0) if self.is_gpu else torch.device("cpu")


@contextmanager
def _cuda_autocast(kind: str) -> Iterator[None]:
    """Apply CUDA's rules under ``torch.autocast`` of the device ``kind``, which is torch's PrivateUse1 backend."""
    casts = _Casts(kind)
    key = "AutocastPrivateUse1"
    rest = _library("_", key)
    rules = _library("aten", key)
    rest.fallback(torch.library.fallthrough_kernel)
    chosen = (
        (_LOWER, casts.lower), (_FLOAT, casts.full), (_WIDEST, casts.widest), (_FLOAT_RESULT, casts.full_result),
    )  # fmt: skip
    for names, casting in chosen:
        for operator in _cast_on_cuda(names):
            rules.impl(operator, _with_cast(operator, casting))
    for name in ("softmax", "log_softmax"):
        rules.impl(f"{name}.int", _with_cast(getattr(torch.ops.aten, name).int, casts.full_result))

    def forgetting(link: Link) -> Callable[[], None]:
        def clear() -> None:
            casts.weights.clear()
            link.call()

        return clear

    try:
        with wrapped(torch, "clear_autocast_cache", forgetting):
            yield
    finally:
        casts.weights.clear()
        rules._destroy()  # noqa: SLF001 no public one
        rest._destroy()  # noqa: SLF001 no public one


def _library(namespace: str, key: str) -> Any:
    """Return torch's registry of an operator namespace's implementations for a dispatch key, which is not typed."""
    make: Any = torch.library.Library
    return make(namespace, "IMPL", key)


class _Casts:
    """The casts of the arguments of an operator.

    Attributes:
        weights: the 16-bit copies of parameters, by the parameter's id, that autocast keeps until it ends.
    """

    def __init__(self, kind: str) -> None:
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}
        self._kind = kind

    def lower(self, values: Any) -> Any:
        # Compiled by GCC, torch casts the last argument first.
        args, kwargs = values
        kwargs = tree_map(self._lower, kwargs)
        return tuple(reversed([tree_map(self._lower, value) for value in reversed(args)])), kwargs

    def full(self, values: Any) -> Any:
        return tree_map(self._full, values)

    def widest(self, values: Any) -> Any:
        has_full = any(self._is_float(leaf) and leaf.dtype == torch.float32 for leaf in tree_leaves(values))
        return self.full(values) if has_full else values

    def full_result(self, values: Any) -> Any:
        args, kwargs = values
        has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if has_dtype or not self._is_half(args[0]):
            return values
        return args, {**kwargs, "dtype": torch.float32}

    def _lower(self, value: Any) -> Any:
        dtype = torch.get_autocast_dtype(self._kind)
        if not self._is_float(value) or value.dtype in {dtype, torch.float64}:
            return value
        is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
        if not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self.weights:
            self.weights[id(value)] = (value.to(dtype), value)
        return self.weights[id(value)][0]

    def _is_half(self, value: Any) -> bool:
        return self._is_float(value) and value.dtype in _HALVES

    def _full(self, value: Any) -> Any:
        return value.float() if self._is_half(value) else value

    def _is_float(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._kind and value.is_floating_point()


def _with_cast(operator: Any, casting: Callable[[Any], Any]) -> Callable[..., Any]:
    excluded = DispatchKeySet(DispatchKey.AutocastPrivateUse1)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(excluded):
            args, kwargs = casting((args, kwargs))
            return operator(*args, **kwargs)

    return call


def _converting_softmax(name: str) -> Callable[..., Any]:
    """Return a softmax whose kernel converts float16 to float32 itself, as CUDA's does, and not bfloat16."""
    composed = getattr(torch.ops.aten, name).int
    fused = getattr(torch.ops.aten, f"_{name}")

    def call(value: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if dtype == torch.float32 and value.dtype == torch.float16:
            return fused(value, dim, True)  # noqa: FBT003 torch's argument half_to_float
        return composed.decompose(value, dim, dtype)

    return call


def _cast_on_cuda(names: Iterable[str]) -> Iterator[Any]:
    """Yield the operators of these names that the installed torch casts on CUDA: ``rms_norm`` since torch 2.12."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operator, is_cast = getattr(packet, overload), False
            with suppress(RuntimeError):  # the dispatcher does not have TorchScript's own overloads
                is_cast = operator.has_kernel_for_dispatch_key(DispatchKey.AutocastCUDA)
            if is_cast:
                yield operator


@contextmanager
def _cuda_attention() -> Iterator[None]:
    """Call flash attention for 16-bit operands without a mask, memory-efficient attention otherwise, if they can.

    Both keep one number per row for backward instead of the attention matrix, which the CPU's kernel keeps. Source:
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``. Registered with the dispatcher: a mode would be off while
    backward recomputes checkpointed modules.
    """
    rules = _library("aten", "AutogradPrivateUse1")
    rules.impl("scaled_dot_product_attention", _attention)
    if hasattr(torch.ops.aten, "_fused_rms_norm"):  # since torch 2.9
        rules.impl("rms_norm", _rms_norm)
    rules.impl("linear", _linear)
    for name in ("softmax", "log_softmax"):
        rules.impl(f"{name}.int", _converting_softmax(name))
    for name in ("silu_backward", "mish_backward"):
        rules.impl(name, _in_one_kernel(name))
    try:
        yield
    finally:
        rules._destroy()  # noqa: SLF001 no public one


class _Options(msgspec.Struct, frozen=True):
    """The rest of the operator's arguments, in its order."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    options = _Options(*rest, **named)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if options.enable_gqa:
        key, value = _repeated(key, query), _repeated(value, query)
    is_half, head = query.dtype in _HALVES, query.size(-1)
    scale = head**-0.5 if options.scale is None else options.scale
    can_flash = is_half and options.attn_mask is None and head <= _MAX_FLASH_HEAD
    is_aligned = can_flash or head % (_ALIGNMENT if is_half else _ALIGNMENT // 2) == 0
    if not is_aligned or any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        composed = torch.ops.aten._scaled_dot_product_attention_math  # noqa: SLF001 the operator's name
        mask, dropped, is_causal = options.attn_mask, options.dropout_p, options.is_causal
        return cast("Tensor", composed(query, key, value, mask, dropped, is_causal, scale=scale)[0])
    if can_flash:
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 the operator's name
        found: Tensor = flash(query, key, value, options.dropout_p, options.is_causal, False, scale=scale)[0]  # noqa: FBT003
        return found[..., :head]
    mask = None if options.attn_mask is None else _bias(options.attn_mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001 the operator's name
    needs_sums = any(tensor.requires_grad for tensor in (query, key, value))
    result = efficient(query, key, value, mask, needs_sums, options.dropout_p, options.is_causal, scale=scale)
    return cast("Tensor", result[0])


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's kernel saves its input and a number for each row; elsewhere torch has single operators."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        rows = value.shape[: value.ndim - dimensions]
        read = value.contiguous()
        found = torch.empty_like(read)
        ctx.save_for_backward(value, weight, read.new_empty(rows, dtype=torch.float32))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value, weight, _rows = ctx.saved_tensors
        read = [tensor.contiguous() for tensor in (value, *gradients)]
        wanted = zip((read[0], weight), ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(tensor) if is_wanted else None for tensor, is_wanted in wanted), None


def _rms_norm(value: Tensor, shape: Sequence[int], weight: Tensor | None = None, _eps: float | None = None) -> Tensor:
    if weight is None or weight.dtype == value.dtype:
        fused: Any = _FusedRmsNorm.apply
        found: Tensor = fused(value, weight, len(shape))
        return found
    wide = value.float()
    scale = wide.pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True).add_(1.0).rsqrt()
    return (wide * scale).mul(weight).type_as(value)


def _linear(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias in place where it is not a part of the matrix product, as for tensors with data."""
    if bias is None or value.ndim <= _MATRIX or value.is_contiguous() or isinstance(weight, DTensor):
        found: Tensor = torch.ops.aten.linear.default.decompose(value, weight, bias)
        return found
    return torch.matmul(value, weight.t()).add_(bias)


def _in_one_kernel(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a backward that makes one tensor, and that torch composes of operators where it has no kernel."""
    composed = getattr(torch.ops.aten, name).default

    def call(gradient: Tensor, value: Tensor) -> Tensor:
        found: Tensor = composed.decompose(gradient, value) if torch.is_grad_enabled() else torch.empty_like(value)
        return found

    return call


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return what is added to the scores."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _padded(tensor: Tensor) -> Tensor:
    """Return the tensor with its last dimension padded to what the kernel reads at once."""
    rest = -tensor.size(-1) % _ALIGNMENT
    return functional.pad(tensor, (0, rest)) if rest else tensor


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3)
