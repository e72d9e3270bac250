"""The source lines of the user's program among the frames of torch, Lightning and this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import lightning
import torch

import lightning_memprof

LOOPS: Final = "a loop that waits for a value, which is unknown without data"
"""Part of the message about a loop that never ends without data."""
ON_CUDA: Final = "the program moves tensors to CUDA{place}; leave that to the Trainer, or use self.device"
"""Message about a program that names the device."""

_LIBRARIES: Final = tuple(str(Path(found.__path__[0])) + os.sep for found in (torch, lightning, lightning_memprof))
_STANDARD: Final = sysconfig.get_path("stdlib") + os.sep
_PACKAGES: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
# torch's optimizers and clipping read values that decide no shape.
_HARMLESS: Final = tuple(str(Path(torch.__path__[0], part)) + os.sep for part in ("optim", "nn/utils", "amp"))


def program_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the program's own code, and that of an installed package which it calls there.

    Args:
        frames: source files and lines, the innermost one first.
    """
    package = ""
    for path, number in frames:
        if path.startswith(("<", *_LIBRARIES)):
            continue
        if path.startswith(_PACKAGES) or "site-packages" in path:
            package = package or f"{path}:{number}"
        elif not path.startswith(_STANDARD):
            return f"{path}:{number}{package and f' (in {package})'}"
    return package


def user_line() -> str:
    """Return the line of the program that runs; empty where it decides no shape."""
    frames = []
    frame: Any = sys._getframe(2)  # noqa: SLF001 inspect.stack() reads source files
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HARMLESS):
            break
        frames.append((path, frame.f_lineno))
        frame = frame.f_back
    return program_line(frames)
