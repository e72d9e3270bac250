"""The source lines of the user's program among the frames of torch, Lightning and this package; its failures."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import lightning
import torch

import lightning_memprof
from lightning_memprof.capture.torch_internals import DynamicOutputShapeException

LOOPS: Final = "a loop that waits for a value, which is unknown without data"
"""Part of the message about a loop that never ends without data."""
ON_CUDA: Final = "the program moves tensors to CUDA{place}; leave that to the Trainer, or use self.device"
"""Message about a program that names the device."""

_ADVICE: Final = "--debug shows the traceback"
# torch's messages, and their meaning in an estimate.
_MEANINGS: Final = (
    (
        r"not compiled with CUDA|no NVIDIA driver|not linked with support for cuda|re-initialize CUDA|and cuda:\d",
        ON_CUDA,
    ),
    (
        r"autograd's threading",
        "this process has already trained on a GPU and cannot be forked; estimate in a new process",
    ),
    (
        r"^Stage \d+: .*metadata required|_StageForwardMeta",
        "a stage of a pipeline asks another rank for its shapes{place}; give PipelineStage input_args and output_args",
    ),
    (r"\.numpy\(\)", "a tensor on the device becomes an array of NumPy{place}; .cpu() comes first"),
)
# torch's message about an operator defined in Python, and its exception for any other.
_NO_FAKE: Final = r"no fake impl registered for <CustomOpDef\(([^)]*)\)>|^UnsupportedOperatorException: ([\w.:]+)"

_METRICS: Final = "torchmetrics"
_LIBRARIES: Final = tuple(str(Path(found.__path__[0])) + os.sep for found in (torch, lightning, lightning_memprof))
_STANDARD: Final = sysconfig.get_path("stdlib") + os.sep
_PACKAGES: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
# torch's optimizers and clipping read values that decide no shape.
_HARMLESS: Final = tuple(str(Path(torch.__path__[0], part)) + os.sep for part in ("optim", "nn/utils", "amp"))
# Below it are the frames of the command.
_START: Final = str(Path(lightning_memprof.__path__[0], "estimation", "program.py"))


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
    for frame, line in traceback.walk_stack(sys._getframe(2)):  # noqa: SLF001 inspect.stack() reads source files
        path = frame.f_code.co_filename
        if path.startswith(_HARMLESS) or path == _START:
            break
        frames.append((path, line))
    return program_line(frames)


def is_in_metric() -> bool:
    """Return whether code of a metric runs: torchmetrics, or code that it calls, such as the program's ``update``."""
    frames = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 inspect.stack() reads source files
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] == _METRICS for frame, _ in frames)


def failure_line(error: BaseException, failed: str = "the simulated training failed") -> str:
    """Return the message about a failure of the program, with its line; ``failed`` begins that of an unknown one."""
    frames = traceback.extract_tb(error.__traceback__)
    line = program_line((frame.filename, frame.lineno or 0) for frame in reversed(frames))
    place = line and f" at {line}"
    words = " ".join(str(error).split())[:300]
    if isinstance(error, StopIteration) and not line:
        return "estimate: the loader has no batch; --batch-shape does not replace it"
    if isinstance(error, DynamicOutputShapeException):
        words = f"a shape depends on values{place} ({words}), which are unknown without data"
        return f"estimate: {words}; for an upper bound keep all rows, as torch.where does"
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, words):
            return f"estimate: {meaning.format(place=place)} ({_ADVICE})"
    if custom := re.search(_NO_FAKE, f"{type(error).__name__}: {words}"):
        words = f"the operator {custom[1] or custom[2]}{place} has no fake implementation"
        return f"estimate: {words}; torch.library.register_fake gives it one"
    return f"estimate: {failed}{place}: {type(error).__name__}: {words} ({_ADVICE})"
