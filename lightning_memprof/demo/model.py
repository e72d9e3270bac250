"""A compact GPT: token and position embeddings, pre-norm blocks, one output layer tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The size of a model; as it stands, 2.75 million parameters."""

    vocabulary: int = 256
    context: int = 192
    width: int = 192
    heads: int = 6
    layers: int = 6


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the projections."""
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        """Build both halves."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        transformed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return transformed


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the layers and draw their weights."""
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(_draw_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``(batch, time)`` to logits ``(batch, time, vocabulary)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
