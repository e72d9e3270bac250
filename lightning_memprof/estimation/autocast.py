"""CUDA's rules of autocast for another device: torch registers its lists of operators for each device by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memprof.capture.observe import Link, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["cuda_autocast"]

# Source: the AT_FORALL macros of aten/src/ATen/autocast_mode.h.
_LOWER: Final = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention scaled_dot_product_attention"
).split()
_FLOAT: Final = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss "
    "nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d prod softmax log_softmax cumprod cumsum sum norm"
).split()
_WIDEST: Final = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add"
).split()
_HALVES: Final = (torch.float16, torch.bfloat16)


@contextmanager
def cuda_autocast(kind: str) -> Iterator[None]:
    """Apply CUDA's rules under ``torch.autocast`` of the device ``kind``, which is torch's PrivateUse1 backend."""
    key = "AutocastPrivateUse1"
    rest = torch.library.Library("_", "IMPL", key)
    rules = torch.library.Library("aten", "IMPL", key)
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # noqa: SLF001 no public one
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def lower(value: Any) -> Any:
        dtype = torch.get_autocast_dtype(kind)
        if not _is_float(value, kind) or value.dtype in {dtype, torch.float64}:
            return value
        is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
        if not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in cache:
            cache[id(value)] = (value.to(dtype), value)
        return cache[id(value)][0]

    def full(value: Any) -> Any:
        return value.float() if _is_float(value, kind) and value.dtype in _HALVES else value

    def widest(values: Any) -> Any:
        has_full = any(_is_float(leaf, kind) and leaf.dtype == torch.float32 for leaf in tree_leaves(values))
        return tree_map(full, values) if has_full else values

    def with_cast(operator: Any, cast: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(excluded):  # noqa: SLF001 no public one
                args, kwargs = cast((args, kwargs))
                return operator(*args, **kwargs)

        return call

    def forgetting(link: Link) -> Callable[[], None]:
        def clear() -> None:
            cache.clear()
            link.call()

        return clear

    rest.fallback(torch.library.fallthrough_kernel)
    for names, cast in (
        (_LOWER, lambda values: tree_map(lower, values)),
        (_FLOAT, lambda values: tree_map(full, values)),
        (_WIDEST, widest),
    ):
        for name in names:
            for overload in _overloads(name):
                found = getattr(getattr(torch.ops.aten, name), overload)
                rules.impl(name if overload == "default" else f"{name}.{overload}", with_cast(found, cast))
    try:
        with wrapped(torch, "clear_autocast_cache", forgetting):
            yield
    finally:
        cache.clear()
        rules._destroy()  # noqa: SLF001 no public one
        rest._destroy()  # noqa: SLF001 no public one


def _is_float(value: Any, kind: str) -> bool:
    return isinstance(value, Tensor) and value.device.type == kind and value.is_floating_point()


def _overloads(name: str) -> Iterator[str]:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        if "out" not in overload and "name" not in overload.lower():
            yield overload
