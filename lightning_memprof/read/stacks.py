"""Python stacks of traces and allocator snapshots, and the frames in them that are the user's code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from lightning_memprof.packages import PACKAGES

_LIBRARIES: Final = PACKAGES | {
    "functorch", "lightning_memprof", "lightning_utilities", "numpy", "torch", "torchmetrics", "torchvision", "triton",
}  # fmt: skip
_STANDARD: Final = frozenset(sys.stdlib_module_names)
_LIBRARY_PATH: Final = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/"
    r"|/lib(?:64)?/python3(?:\.\d+)?/"
    r"|/(?:torch/(?:_\w+|amp|autograd|cuda|distributed|fx|functional|nn|optim|overrides|profiler|utils)(?:/|\.py$)"
    r"|lightning/(?:pytorch|fabric)/|pytorch_lightning/|lightning_fabric/|lightning_memprof/)"
)
_NATIVE: Final = re.compile(r"^(?:<|\?\?|$)|\.(?:c|cc|cpp|cu|cuh|h|hpp|o|so)(?:\.\d+)*$")
# The caller of the allocator in C++: the autograd node, else the operator, else the first other function.
_NATIVE_SITES: Final = (
    re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply"),
    re.compile(r"at::_ops::(?!empty)(\w+)::"),
    re.compile(r"(?!torch::unwind|torch::CapturedTraceback|torch::cuda::|c10::|at::(?:detail|empty))([\w:~<>, ]+)"),
)
_FRAME: Final = re.compile(r"(?P<filename>.+)\((?P<line>\d+)\): (?P<name>.*)", re.DOTALL)


class Frame(NamedTuple):
    """One frame; its text is that of Kineto: ``file.py(12): function``."""

    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        """Return Kineto's text of the frame."""
        return f"{self.filename}({self.line}): {self.name}"

    @property
    def is_python(self) -> bool:
        """False for a frame of C++ code and for code that has no file."""
        return _NATIVE.search(self.filename) is None


def parse_frame(text: str) -> Frame | None:
    """Return the frame in Kineto's name of a Python call, or None for a builtin or a module."""
    match = _FRAME.fullmatch(text)
    return Frame(match["filename"], int(match["line"]), match["name"]) if match else None


def is_library(filename: str) -> bool:
    """Return whether a file is part of Python, torch, Lightning or an installed package, and not the user's code.

    Kineto removes the entries of ``sys.path``; of installed packages, only the best known are then recognised by name.
    """
    path = filename.replace("\\", "/")
    if _NATIVE.search(path) or _LIBRARY_PATH.search(path):
        return True
    first = path.partition("/")[0].removesuffix(".py")
    return first in _LIBRARIES or first in _STANDARD


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, or None where there is none.

    Args:
        stack: frames, innermost first.
    """
    return next((frame for frame in stack if not is_library(frame.filename)), None)


def native_site(stack: Sequence[Frame]) -> str | None:
    """Return the autograd node, else the operator or the function, that a stack of C++ frames allocated for."""
    for wanted in _NATIVE_SITES:
        for frame in stack:
            match = None if frame.is_python else wanted.match(frame.name)
            if match:
                return match[1]
    return None
