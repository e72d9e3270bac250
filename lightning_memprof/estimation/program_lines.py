"""The source lines of the user's program among the frames of torch, Lightning and this package."""

from __future__ import annotations

import os
import sys
import sysconfig
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
_INSTALLED: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# torch's optimizers and clipping read values that decide no shape.
_HARMLESS: Final = tuple(str(Path(torch.__path__[0], part)) + os.sep for part in ("optim", "nn/utils", "amp"))


def is_program(filename: str) -> bool:
    """Return whether a source file is neither torch's, Lightning's nor ours."""
    return not filename.startswith(("<", *_LIBRARIES))


def is_installed(filename: str) -> bool:
    """Return whether a source file belongs to Python or an installed package."""
    return filename.startswith(_INSTALLED) or "site-packages" in filename


def user_line() -> str:
    """Return file and line of the innermost frame that belongs to the program; empty where it decides no shape."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 inspect.stack() reads source files
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_HARMLESS):
            return ""
        if is_program(path):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
