"""The frames of a snapshot's stacks: which program allocated, and in which part of a step."""

from __future__ import annotations

import re
from typing import Final, Literal

from lightning_memprof.read.snapshot.reader import DeviceSnapshot
from lightning_memprof.read.stacks import Frame

Stack = tuple[Frame, ...]
Part = Literal["forward", "backward", "other"]

OPTIMIZER: Final = "/torch/optim/"
MODULES: Final = "/torch/nn/modules/module.py"
# Backward, or a forward pass that it repeats.
BACKWARD: Final = ("/torch/utils/checkpoint.py", "/torch/autograd/")
_RUNS_BACKWARD: Final = frozenset({"backward", "_engine_run_backward"})
CACHE: Final = re.compile(r"kv_?cache|cache_(?:engine|utils)|key_value", re.IGNORECASE)
_LIGHTNING: Final = ("/lightning/pytorch/", "/pytorch_lightning/")
# C++ stacks have torch::autograd:: in every forward, too: it has the bindings of all operators.
_TRAINS: Final = re.compile(r"backward|torch::autograd::(?:Engine|AccumulateGrad)|\Atraining_step\Z", re.IGNORECASE)
# In windows of this package, `_call_impl` is not on the stack.
_CALLS: Final = frozenset({"_call_impl", "_wrapped_call_impl"})


def part_of(stack: Stack) -> Part:
    """Return in which part of a step a stack allocates; "other" is outside of forward and backward.

    Threads of backward have no Python frames, the other threads of a program do.
    """
    python = [frame for frame in stack if frame.is_python]
    if not python or any(frame.name in _RUNS_BACKWARD for frame in python):
        return "backward"
    is_forward = any(frame.name in _CALLS and MODULES in frame.filename for frame in python)
    return "forward" if is_forward else "other"


def is_lightning(device: DeviceSnapshot) -> bool:
    """Return whether Lightning's Trainer ran the program; True if no stack has Python frames."""
    files = {frame.filename for stack in device.stacks for frame in stack if frame.is_python}
    return not files or any(part in file for file in files for part in _LIGHTNING)


def is_training(device: DeviceSnapshot) -> bool:
    """Return whether the program trains: it has a training step, backward or an optimizer; True without any stack."""
    allocating = {event.stack for event in device.events if event.action == "alloc"}
    return (
        not any(device.stacks)
        or any(part_of(device.stacks[stack]) == "backward" for stack in allocating)
        or any(OPTIMIZER in frame.filename or _TRAINS.search(frame.name) for stack in device.stacks for frame in stack)
    )
