"""Training scripts around language: a masked language model, a character model, a topic tagger."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet

VOCABULARY = 800
MASK, PAD, FIRST = 1, 0, 3
STEPS = 50


class Sentences(Dataset):
    """Token numbers of sentences, all of one length."""

    def __init__(self, count: int, length: int) -> None:
        self.rows = [[random.randrange(FIRST, VOCABULARY) for _ in range(length)] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


class MaskingCollator:
    """BERT's masking: 15% of the tokens are targets; of them 80% become [MASK], 10% another token."""

    def __init__(self, probability: float = 0.15) -> None:
        self.probability = probability

    def __call__(self, rows: list[list[int]]) -> dict[str, Tensor]:
        inputs, labels, weights = [], [], []
        for row in rows:
            tokens, targets, kept = [], [], []
            for position, token in enumerate(row):
                token_id = torch.tensor(token)
                target, weight = torch.tensor(-100), torch.tensor(1.0)
                if random.random() < self.probability:
                    target = token_id.clone()
                    draw = random.random()
                    if draw < 0.8:
                        token_id = torch.tensor(MASK)
                    elif draw < 0.9:
                        token_id = torch.tensor(random.randrange(FIRST, VOCABULARY))
                    weight = torch.tensor(1.0 / (1 + position))
                tokens.append(token_id)
                targets.append(target)
                kept.append(weight)
            inputs.append(torch.stack(tokens))
            labels.append(torch.stack(targets))
            weights.append(torch.stack(kept))
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels), "weights": torch.stack(weights)}


class BatchedMaskingCollator(MaskingCollator):
    """The same on whole tensors."""

    def __call__(self, rows: list[list[int]]) -> dict[str, Tensor]:
        inputs = torch.tensor(rows)
        chosen = torch.rand(inputs.shape) < self.probability
        labels = inputs.masked_fill(~chosen, -100)
        draws = torch.rand(inputs.shape)
        others = torch.randint(FIRST, VOCABULARY, inputs.shape)
        inputs = torch.where(chosen & (draws < 0.8), MASK, inputs)
        inputs = torch.where(chosen & (draws >= 0.8) & (draws < 0.9), others, inputs)
        weights = torch.where(chosen, 1.0 / (1 + torch.arange(inputs.shape[1])), 1.0)
        return {"inputs": inputs, "labels": labels, "weights": weights}


class MaskedLanguageModel(lightning.LightningModule):
    def __init__(self, width: int = 112, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.encoder(self.embedding(batch["inputs"])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.log("mlm", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def masked_sentences(fault: bool) -> None:
    collator = MaskingCollator() if fault else BatchedMaskingCollator()
    loader = DataLoader(Sentences(1600, 64), batch_size=32, shuffle=True, collate_fn=collator)
    quiet(STEPS).fit(MaskedLanguageModel(), loader)


class NewGELU(nn.Module):
    """The activation of GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class LayerNorm(nn.Module):
    """Normalizes over the last dimension."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(variance + self.eps) + self.shift


class CharacterBlock(nn.Module):
    """Mixes the characters with a causal convolution, then each by itself."""

    def __init__(self, width: int, own: bool) -> None:
        super().__init__()
        self.norm_mix = LayerNorm(width) if own else nn.LayerNorm(width)
        self.norm_feed = LayerNorm(width) if own else nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.act = NewGELU() if own else nn.GELU(approximate="tanh")
        self.reduce = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_mix(x)
        before = functional.pad(normed, (0, 0, 1, 0))[:, :-1]
        x = x + self.mix(torch.cat([before, normed], dim=-1))
        return x + self.reduce(self.act(self.expand(self.norm_feed(x))))


class CharacterModel(lightning.LightningModule):
    def __init__(self, own: bool, width: int = 80, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.Sequential(*(CharacterBlock(width, own) for _ in range(layers)))
        self.head = nn.Linear(width, 96)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.embedding(batch[:, :-1])))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def novel_characters(fault: bool) -> None:
    text = torch.randint(96, (32 * STEPS, 97))
    quiet(STEPS).fit(CharacterModel(own=fault), DataLoader(text, batch_size=32, shuffle=True))  # type: ignore[arg-type]  # rows of a tensor


class TopicTagger(lightning.LightningModule):
    """Which of many topics a news article has."""

    def __init__(self, report_topics: bool, topics: int = 160, width: int = 512) -> None:
        super().__init__()
        self.report_topics = report_topics
        self.words = nn.EmbeddingBag(8000, width)
        self.body = nn.Sequential(
            nn.Linear(width, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, width), nn.ReLU()
        )
        self.topics = nn.Linear(width, topics)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        articles, tags = batch
        scores = self.topics(self.body(self.words(articles)))
        losses = functional.binary_cross_entropy_with_logits(scores, tags, reduction="none").mean(dim=0)
        loss = losses.mean()
        self.log("train/loss", loss)
        if self.report_topics:
            for topic, value in enumerate(losses.detach()):
                self.log(f"train/topic_{topic:03d}", value, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def news_topics(fault: bool) -> None:
    articles = torch.randint(8000, (256 * STEPS, 40))
    tags = (torch.rand(256 * STEPS, 160) < 0.03).float()
    loader = DataLoader(torch.utils.data.TensorDataset(articles, tags), batch_size=256, shuffle=True)
    quiet(STEPS).fit(TopicTagger(report_topics=fault), loader)


if __name__ == "__main__":
    main(masked_sentences, novel_characters, news_topics)
