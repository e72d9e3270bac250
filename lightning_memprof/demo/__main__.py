"""``python -m lightning_memprof.demo``: the training of the demo as a program of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from lightning_memprof.demo.train import train_demo

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train_demo(Path(folder))
