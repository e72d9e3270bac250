"""A training of Llama 3 under FSDP2, for estimates: ``llama.py SIZE CHECKPOINTING SAMPLES [LAYERS]``.

As torchtitan trained it in 2024: parameters in float32, which FSDP2 gathers in bfloat16 and whose gradients it reduces
in float32; selective checkpointing, which saves attention and every other matrix product; gradient clipping; AdamW
with ``foreach``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

HEAD: Final = 128
SAVED: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths of a Llama: features, blocks, heads of queries, of keys and values, features in a block, and tokens."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    tokens: int = 8192
    vocabulary: int = 128256


SIZES: Final = MappingProxyType(
    {
        "1b": Size(width=2048, layers=16, heads=16, key_heads=8, inner=8192, vocabulary=32000),
        "8b": Size(width=4096, layers=32, heads=32, key_heads=8, inner=14336),
        "70b": Size(width=8192, layers=80, heads=64, key_heads=8, inner=28672),
    }
)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.key_heads = size.heads, size.key_heads
        keys = HEAD * size.key_heads
        self.queries, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(size.width, keys, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def attend(self, data: Tensor, angles: Tensor) -> Tensor:
        queries = rotated(self.queries(data).unflatten(-1, (self.heads, HEAD)), angles)
        keys = rotated(self.keys(data).unflatten(-1, (self.key_heads, HEAD)), angles)
        values = self.values(data).unflatten(-1, (self.key_heads, HEAD))
        several = self.heads // self.key_heads
        keys, values = keys.repeat_interleave(several, 2), values.repeat_interleave(several, 2)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found

    def forward(self, data: Tensor, angles: Tensor) -> Tensor:
        data = data + self.attend(self.first_norm(data), angles)
        normed = self.second_norm(data)
        found: Tensor = data + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return found


def rotated(data: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of features, which are complex numbers, by an angle for each token."""
    pairs = torch.view_as_complex(data.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2).type_as(data)


def selective() -> Any:
    """Save attention and every other matrix product, and compute the rest again."""
    products = 0

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        nonlocal products
        if operator == torch.ops.aten.mm.default:
            products += 1
            if products % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    make: Any = create_selective_checkpoint_contexts
    return make(policy)


class Llama(pl.LightningModule):
    """Trains on random tokens.

    Args:
        size: the widths.
        checkpointing: ``op`` for torchtitan's selective checkpointing by operator, ``full`` for every block, ``none``.

    """

    def __init__(self, size: Size, checkpointing: str = "op") -> None:
        super().__init__()
        self.size, self.checkpointing = size, checkpointing
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.angles: Tensor
        self.register_buffer("angles", torch.zeros(size.tokens, HEAD // 2, dtype=torch.complex64), persistent=False)

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            # Backward would gather the last one at once.
            fully_shard(block, reshard_after_forward=number < last, **options)
        fully_shard(self, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        data = self.tokens(tokens)
        for block in self.blocks:
            if self.checkpointing == "op":
                data = checkpoint(block, data, self.angles, use_reentrant=False, context_fn=selective)
            elif self.checkpointing == "full":
                data = checkpoint(block, data, self.angles, use_reentrant=False)
            else:
                data = block(data, self.angles)
        found: Tensor = self.head(self.norm(data))
        return found

    def training_step(self, batch: Tensor) -> Tensor:
        return functional.cross_entropy(self(batch).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, foreach=True)


def loader(size: Size, samples: int = 1) -> Any:
    batches: Any = [torch.zeros(samples, size.tokens, dtype=torch.long)]
    return DataLoader(batches, batch_size=None)


if __name__ == "__main__":
    name, saving, samples, *layers = sys.argv[1:]
    size = SIZES[name] if not layers else replace(SIZES[name], layers=int(layers[0]))
    pl.Trainer(gradient_clip_val=1.0).fit(Llama(size, saving), loader(size, int(samples)))
