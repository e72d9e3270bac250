"""Language models: a small GPT with positions, samples of text on the way, and a tagger fed with sentences."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import fit, main

VOCAB = 2000


class Corpus(Dataset):
    def __init__(self, sentences: int, length: int) -> None:
        self.tokens = torch.randint(VOCAB, (sentences, length + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.tokens[i]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


def sinusoids(length: int, dim: int) -> torch.Tensor:
    position = torch.arange(length).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    pe = torch.zeros(length, dim)
    pe[:, 0::2] = torch.sin(position * div_term)
    pe[:, 1::2] = torch.cos(position * div_term)
    return pe


class PositionalEncoding(nn.Module):
    def __init__(self, dim: int, max_len: int = 8192) -> None:
        super().__init__()
        self.dim = dim
        self.max_len = max_len

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pe = sinusoids(self.max_len, self.dim).to(x)
        return x + pe[: x.size(1)]


class StoredPositionalEncoding(nn.Module):
    def __init__(self, dim: int, max_len: int = 8192) -> None:
        super().__init__()
        self.pe: torch.Tensor
        self.register_buffer("pe", sinusoids(max_len, dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[: x.size(1)]


class MiniGPT(pl.LightningModule):
    def __init__(self, positions: nn.Module, dim: int = 256, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.positions = positions
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.positions(self.embed(tokens)))))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def letters(fault: bool) -> None:
    kind = PositionalEncoding if fault else StoredPositionalEncoding
    loader = DataLoader(Corpus(512, 32), batch_size=4, shuffle=True)
    fit(MiniGPT(kind(512, 8192), dim=512, depth=1), loader, steps=60)


class Storyteller(MiniGPT):
    """Shows what it would write."""

    def __init__(self, show_every: int) -> None:
        super().__init__(StoredPositionalEncoding(192, 512), dim=192)
        self.show_every = show_every
        self.stories: list[list[int]] = []

    @torch.no_grad()
    def write(self, start: torch.Tensor, words: int) -> torch.Tensor:
        tokens = start
        for _ in range(words):
            probabilities = self(tokens)[:, -1].softmax(dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1)), dim=1)
        return tokens

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % self.show_every == 0:
            self.eval()
            self.stories = self.write(batch[:4, :8], 40).tolist()
            self.train()


def stories(fault: bool) -> None:
    loader = DataLoader(Corpus(1024, 64), batch_size=12, shuffle=True)
    fit(Storyteller(show_every=4 if fault else 60), loader, steps=60)


class Tagger(pl.LightningModule):
    """Names the parts of speech."""

    def __init__(self, dim: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.tags = nn.Linear(dim, 17)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        tags = self.tags(self.blocks(self.embed(batch[:, :-1])))
        return functional.cross_entropy(tags.flatten(0, 1), batch[:, 1:].flatten() % 17)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def parts_of_speech(fault: bool) -> None:
    at_once, parts = (1, 16) if fault else (16, 1)
    loader = DataLoader(Corpus(1024, 24), batch_size=at_once, shuffle=True)
    fit(Tagger(), loader, steps=40 if fault else 60, accumulate_grad_batches=parts)


if __name__ == "__main__":
    main(letters, stories, parts_of_speech)
