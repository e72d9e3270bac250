"""The frames of a snapshot's stacks: which program allocated, and in which part of a step."""

from __future__ import annotations

import re
from typing import Final, Literal

from lightning_memprof.read.snapshot.reader import DeviceSnapshot
from lightning_memprof.read.stacks import Frame

Stack = tuple[Frame, ...]
Phase = Literal["data_wait", "loading", "forward", "backward", "optimizer"]

OPTIMIZER: Final = "/torch/optim/"
# Backward, or a forward pass that it repeats.
BACKWARD: Final = ("/torch/utils/checkpoint.py", "/torch/autograd/")
_RUNS_BACKWARD: Final = frozenset({"backward", "_engine_run_backward"})
# A new gradient of a parameter is often the output of the cast in front of it.
GRADIENTS: Final = ("AccumulateGrad", "ToCopyBackward0")
CACHE: Final = re.compile(r"kv_?cache|cache_(?:engine|utils)|key_value", re.IGNORECASE)
_LIGHTNING: Final = ("/lightning/pytorch/", "/pytorch_lightning/")
# C++ stacks have torch::autograd:: in every forward, too: it has the bindings of all operators.
_TRAINS: Final = re.compile(r"backward|torch::autograd::(?:Engine|AccumulateGrad)|\Atraining_step\Z", re.IGNORECASE)
# The functions of each phase, and files all of whose functions are. In windows of this package `_call_impl` is not on
# the stack.
_PHASES: Final[tuple[tuple[Phase, frozenset[str], str], ...]] = (
    ("optimizer", frozenset(), OPTIMIZER),
    ("backward", _RUNS_BACKWARD, ""),
    (
        "data_wait",
        frozenset({"batch_to_device", "transfer_batch_to_device", "move_data_to_device"}),
        "/torch/utils/data/",
    ),
    (
        "loading",
        frozenset({"_apply", "load_state_dict", "_load_from_state_dict", "reset_parameters", "from_pretrained"}),
        "/safetensors/",
    ),
    ("forward", frozenset({"_call_impl", "_wrapped_call_impl", "forward"}), ""),
)


def phase_of(stack: Stack) -> Phase | None:
    """Return the phase in which a stack allocates, by its innermost frame that tells; None outside of all.

    Threads of backward have no Python frames, the other threads of a program do. The forward and the backward that an
    optimizer's step calls, as Lightning has it, are not the optimizer's.
    """
    if not any(frame.is_python for frame in stack):
        return "backward"
    for frame in stack:
        path = frame.filename.replace("\\", "/")
        for phase, names, files in _PHASES:
            if frame.name in names or (files and files in path):
                return phase
    return None


def is_lightning(device: DeviceSnapshot) -> bool:
    """Return whether Lightning's Trainer ran the program; False if no stack has Python frames."""
    files = {frame.filename for stack in device.stacks for frame in stack}
    return any(part in file for file in files for part in _LIGHTNING)


def is_training(device: DeviceSnapshot) -> bool:
    """Return whether the program trains: it has a training step, backward or an optimizer; True without any stack."""
    allocating = {event.stack for event in device.events if event.action == "alloc"}
    return (
        not any(device.stacks)
        or any(phase_of(device.stacks[stack]) == "backward" for stack in allocating)
        or any(OPTIMIZER in frame.filename or _TRAINS.search(frame.name) for stack in device.stacks for frame in stack)
    )
