"""Real text that needs no download: the source files of Python's own standard library, one token a byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memprof.errors import MemprofError
from lightning_memprof.units import MIB

__all__ = ["VOCABULARY", "ByteWindows", "read_library"]

VOCABULARY: Final = 256
"""One token for every value of a byte."""


def read_library(limit: int = 2 * MIB) -> Tensor:
    """Read the modules of the standard library in alphabetical order, until there are ``limit`` bytes.

    Returns:
        ``uint8``, one-dimensional, at most ``limit`` long.

    Raises:
        MemprofError: this Python comes without the sources of its library.

    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for module in sorted(folder.glob("*.py")):
        text += module.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise MemprofError(
            f"no *.py file in {folder}: the demo trains on the standard library's sources, install Python with them"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """The text cut into stretches of ``context`` bytes, each with the same stretch one byte later as its target."""

    def __init__(self, text: Tensor, context: int) -> None:
        """Keep ``text``, a one-dimensional ``uint8`` tensor, without copying it."""
        self.text = text
        self.context = context

    def __len__(self) -> int:
        """Count the whole stretches."""
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target, both ``int64`` of shape ``(context,)``."""
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
