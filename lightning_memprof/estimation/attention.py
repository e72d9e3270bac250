"""The kernels that CUDA chooses for scaled dot-product attention."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["CudaAttention"]

_ALIGNMENT: Final = 8
_MAX_FLASH_HEAD: Final = 256


class CudaAttention(TorchFunctionMode):
    """Calls flash attention for 16-bit operands without a mask, memory-efficient attention otherwise.

    Both keep one number per row for backward instead of the attention matrix, which the CPU's kernel keeps. Source:
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _attention(  # noqa: PLR0917, PLR0913 torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 torch's signature
) -> Tensor:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_half, head = query.dtype in {torch.float16, torch.bfloat16}, query.size(-1)
    if is_half and attn_mask is None and head <= _MAX_FLASH_HEAD:
        scale = head**-0.5 if scale is None else scale
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
        if enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 the operator's name
        found: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # noqa: FBT003
        return found[..., :head]
    if enable_gqa:
        key, value = _repeated(key, query), _repeated(value, query)
    mask = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001 the operator's name
    needs_sums = any(tensor.requires_grad for tensor in (query, key, value))
    result: Tensor = efficient(query, key, value, mask, needs_sums, dropout_p, is_causal, scale=scale)[0]
    return result


def _padded(tensor: Tensor) -> Tensor:
    """Return the tensor with its last dimension padded to what the kernel reads at once."""
    rest = -tensor.size(-1) % _ALIGNMENT
    return functional.pad(tensor, (0, rest)) if rest else tensor


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3)
