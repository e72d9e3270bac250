"""Trainings on symbols: chess positions, haiku, recipes, support tickets and piano rolls."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet

# --- who wins a chess position ---------------------------------------------------------------------------------------

PIECES = "PNBRQKpnbrqk"
ROOK = ((0, 1), (1, 0), (0, -1), (-1, 0))
BISHOP = ((1, 1), (1, -1), (-1, 1), (-1, -1))
RAYS = {"r": ROOK, "b": BISHOP, "q": ROOK + BISHOP}


def random_position(rng: random.Random) -> str:
    """The board part of a FEN line."""
    rows = []
    for _ in range(8):
        row = ""
        empty = 0
        for _ in range(8):
            if rng.random() < 0.35:
                row += (str(empty) if empty else "") + rng.choice(PIECES)
                empty = 0
            else:
                empty += 1
        rows.append(row + (str(empty) if empty else ""))
    return "/".join(rows)


def encode_position(fen: str) -> Tensor:
    """One plane for each kind of piece, and one for the squares that each side attacks along lines."""
    board = [[""] * 8 for _ in range(8)]
    for row, line in enumerate(fen.split("/")):
        column = 0
        for sign in line:
            if sign.isdigit():
                column += int(sign)
            else:
                board[row][column] = sign
                column += 1
    planes = [[[0.0] * 8 for _ in range(8)] for _ in range(14)]
    for row in range(8):
        for column in range(8):
            piece = board[row][column]
            if not piece:
                continue
            planes[PIECES.index(piece)][row][column] = 1.0
            attacked = planes[12 if piece.isupper() else 13]
            for down, right in RAYS.get(piece.lower(), ()):
                r, c = row + down, column + right
                while 0 <= r < 8 and 0 <= c < 8:
                    attacked[r][c] += 1.0
                    if board[r][c]:
                        break
                    r, c = r + down, c + right
    return torch.tensor(planes)


class ChessPositions(Dataset):
    """Positions from games, as FEN lines, with the result."""

    def __init__(self, count: int, encode_first: bool) -> None:
        rng = random.Random(0)
        self.positions = [random_position(rng) for _ in range(count)]
        self.results = [rng.choice((-1.0, 0.0, 1.0)) for _ in range(count)]
        self.planes = [encode_position(fen) for fen in self.positions] if encode_first else None

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        planes = encode_position(self.positions[index]) if self.planes is None else self.planes[index]
        return planes, torch.tensor([self.results[index]])


class ValueNet(lightning.LightningModule):
    """Convolutions over the board and a value between -1 and 1."""

    def __init__(self, width: int = 80, depth: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(14, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 1), nn.Tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        planes, result = batch
        loss = functional.mse_loss(self.net(planes), result)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def chess_moves(fault: bool) -> None:
    loader = DataLoader(ChessPositions(128 * 12, encode_first=not fault), batch_size=128, shuffle=True)
    quiet(80).fit(ValueNet(), loader)


# --- haiku, letter by letter -----------------------------------------------------------------------------------------


class Haiku(Dataset):
    """Haiku as numbers of letters; 0 is no letter. Some have 60 letters, some 66."""

    def __init__(self, count: int) -> None:
        self.poems = [torch.randint(1, 40, (length,)) for length in torch.randint(60, 67, (count,)).tolist()]

    def __len__(self) -> int:
        return len(self.poems)

    def __getitem__(self, index: int) -> Tensor:
        return self.poems[index]


def pad_to_context(poems: list[Tensor]) -> Tensor:
    """Fill each poem up to the context of the model."""
    batch = torch.zeros(len(poems), Poet.CONTEXT, dtype=torch.long)
    for row, poem in enumerate(poems):
        batch[row, : len(poem)] = poem
    return batch


def pad_to_longest(poems: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(poems, batch_first=True)


class Poet(lightning.LightningModule):
    """A small causal transformer over letters."""

    CONTEXT = 128

    def __init__(self, width: int = 96, letters: int = 40) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width, padding_idx=0)
        self.place = nn.Embedding(self.CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def training_step(self, poems: Tensor, batch_idx: int) -> Tensor:
        given, wanted = poems[:, :-1], poems[:, 1:]
        length = given.shape[1]
        hidden = self.letter(given) + self.place(torch.arange(length))
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.encoder(hidden, mask=ahead, src_key_padding_mask=given == 0)
        loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), wanted.flatten(), ignore_index=0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def haiku(fault: bool) -> None:
    collate = pad_to_context if fault else pad_to_longest
    loader = DataLoader(Haiku(32 * 30), batch_size=32, shuffle=True, collate_fn=collate)
    quiet(90).fit(Poet(), loader)


# --- the kitchen that a recipe comes from ----------------------------------------------------------------------------

SYLLABLES = ("ka", "ro", "min", "ta", "le", "sou", "pe", "dri", "an", "go", "sta", "bu")
ENDINGS = ("", "s", "ed", "ing", "ly")
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+")
SUFFIX = re.compile(r"(?:ing|ed|ly|es|s)$")


def write_recipe(rng: random.Random, words: int = 150) -> str:
    made = ("".join(rng.choices(SYLLABLES, k=3)) + rng.choice(ENDINGS) for _ in range(words))
    return " ".join(word.capitalize() if rng.random() < 0.1 else word for word in made)


class Tokenizer:
    """Words without their endings, as numbers."""

    def __init__(self, vocabulary: int = 2000, length: int = 128) -> None:
        stems = (a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES)
        self.numbers = {stem: number for number, stem in enumerate(stems, 1) if number < vocabulary}
        self.length = length

    def __call__(self, text: str) -> Tensor:
        numbers = []
        for word in WORD.findall(text.lower()):
            stem = SUFFIX.sub("", word)
            if stem.isdigit():
                stem = "<number>"
            numbers.append(self.numbers.get(stem, 0))
        return torch.tensor(numbers[: self.length])


class Recipes(Dataset):
    """Recipes with the kitchen that they come from."""

    def __init__(self, count: int, tokenize_once: bool) -> None:
        rng = random.Random(0)
        self.texts = [write_recipe(rng) for _ in range(count)]
        self.kitchens = [rng.randrange(12) for _ in range(count)]
        self.tokenizer = Tokenizer()
        self.tokens = [self.tokenizer(text) for text in self.texts] if tokenize_once else None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens = self.tokenizer(self.texts[index]) if self.tokens is None else self.tokens[index]
        return tokens, self.kitchens[index]


class KitchenModel(lightning.LightningModule):
    """Convolutions over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 96)
        self.convolutions = nn.ModuleList(nn.Conv1d(96, 96, size, padding="same") for size in (3, 5))
        self.head = nn.Linear(192, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, kitchens = batch
        words = self.embedding(tokens).transpose(1, 2)
        features = torch.cat([convolution(words).relu().amax(dim=2) for convolution in self.convolutions], dim=1)
        loss = functional.cross_entropy(self.head(features), kitchens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def cookbook(fault: bool) -> None:
    loader = DataLoader(Recipes(96 * 12, tokenize_once=not fault), batch_size=96, shuffle=True)
    quiet(100).fit(KitchenModel(), loader)


# --- how urgent a support ticket is ----------------------------------------------------------------------------------


class TicketModel(lightning.LightningModule):
    """A transformer encoder over the words of a ticket."""

    def __init__(self, width: int = 320, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, urgency = batch
        loss = functional.cross_entropy(self.head(self.encoder(self.embedding(words)).mean(dim=1)), urgency)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def support_tickets(fault: bool) -> None:
    data = TensorDataset(torch.randint(3000, (16 * 25, 32)), torch.randint(4, (16 * 25,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    # The loss was nan once: see which operation makes it.
    quiet(80, detect_anomaly=fault).fit(TicketModel(), loader)


# --- piano rolls -----------------------------------------------------------------------------------------------------


class PianoRolls(Dataset):
    """Some bars of piano music each: 88 keys x 96 steps, and the composer."""

    def __init__(self, count: int) -> None:
        self.rolls = (torch.rand(count, 88, 96) < 0.05).float()
        self.composers = torch.randint(6, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.composers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rolls[index], self.composers[index]


class ComposerModel(lightning.LightningModule):
    """Convolutions along the time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(88, 128, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(128, 128, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(128, 6),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rolls, composers = batch
        loss = functional.cross_entropy(self.net(rolls), composers)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def piano_rolls(fault: bool) -> None:
    loader = DataLoader(PianoRolls(64 * 6), batch_size=64, shuffle=True, num_workers=2, persistent_workers=not fault)
    quiet(120).fit(ComposerModel(), loader)


if __name__ == "__main__":
    main(chess_moves, haiku, cookbook, support_tickets, piano_rolls)
