"""Parts of a step's time, on the host and on a device, with the words that people read for each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal

Group = Literal["input", "model", "optimizer", "loop", "ranks", "device idle", "outside"]


class Part(str, Enum):
    """What a step's time goes to; its value is the name in JSON.

    The parts of the host are what the training thread does. A module hook is a method of the LightningModule; forward
    and backward hooks are those that the program registered on modules and parameters. ``rank_wait`` is for the late
    rank, in collectives; in ``core_wait`` that thread is ready to run, but another one has the core. A device is at
    work, or idle by what the host does meanwhile; unknown where the trace has no host.

    Attributes:
        number: place among the parts, for columns of numbers.
        label: what people read.
        group: what the part belongs to.
        phase: the phase of the pulse that has all of its time, None where several have it, or none.
    """

    number: int
    label: str
    group: Group
    phase: str | None

    def __new__(cls, value: str, label: str, group: Group, phase: str | None = None) -> Part:  # noqa: PYI034
        """Return the member of a value."""
        part = str.__new__(cls, value)
        part._value_ = value
        part.number, part.label, part.group, part.phase = len(cls.__members__), label, group, phase
        return part

    def __str__(self) -> str:
        """Return the value."""
        return str(self.value)

    @property
    def takes(self) -> str:
        """The label with its verb: ``GC pauses take``."""
        is_plural = self.label.partition(" for ")[0].endswith("s")
        return f"{self.label} {'take' if is_plural else 'takes'}"

    DATA_WAIT = "data_wait", "data wait", "input", "data_wait"
    TRANSFER = "transfer", "transfer", "input"
    FORWARD = "forward", "forward", "model", "forward"
    BACKWARD = "backward", "backward", "model", "backward"
    OPTIMIZER = "optimizer", "optimizer", "optimizer", "optimizer"
    CALLBACK = "callback", "callbacks", "loop", "callbacks"
    MODULE_HOOK = "module_hook", "module hooks", "loop"
    FORWARD_HOOK = "forward_hook", "forward hooks", "model", "forward"
    BACKWARD_HOOK = "backward_hook", "backward hooks", "model", "backward"
    LOGGING = "logging", "logging", "loop"
    SELF_LOG = "self_log", "self.log", "loop", "forward"
    METRIC = "metric", "metrics", "loop"
    VALIDATION = "validation", "validation", "loop"
    CHECKPOINT = "checkpoint", "checkpoints", "loop"
    GC_PAUSES = "gc_pauses", "GC pauses", "loop"
    COMPILE = "compile", "torch.compile, compiling", "model"
    PROFILER = "profiler", "profiler overhead", "outside"
    STALL = "stall", "stall", "outside"
    RANK_WAIT = "rank_wait", "waiting for other ranks", "ranks"
    CORE_WAIT = "core_wait", "waiting for a core", "outside"
    UNTRACKED = "untracked", "untracked time", "loop", "other"
    COMPUTE = "compute", "compute", "model"
    COLLECTIVE = "collective", "collectives", "ranks"
    COPY = "copy", "memory copies", "model"
    IDLE_DATA = "idle_data", "data wait", "device idle"
    IDLE_SYNCHRONIZATION = "idle_synchronization", "synchronization", "device idle"
    IDLE_ALLOCATOR = "idle_allocator", "allocator calls", "device idle"
    IDLE_GC_PAUSES = "idle_gc_pauses", "GC pauses", "device idle"
    IDLE_PYTHON = "idle_python", "Python outside operators", "device idle"
    IDLE_OPERATORS = "idle_operators", "operators", "device idle"
    IDLE_LAUNCH = "idle_launch", "kernel launch", "device idle"
    IDLE_GRAPH = "idle_graph", "graph launch", "device idle"
    IDLE_LOADING = "idle_loading", "kernel load", "device idle"
    IDLE_QUEUE = "idle_queue", "queued, not started", "device idle"
    IDLE_UNKNOWN = "idle_unknown", "unknown", "device idle"
    COLD_START = "cold_start", "cold start", "device idle"


PARTS: Final = tuple(Part)
BUSY: Final = (Part.COMPUTE, Part.COLLECTIVE, Part.COPY)
"""The parts of a device at work."""
PHASE_PARTS: Final[Mapping[str, Part]] = {
    part.phase: part
    for part in (Part.DATA_WAIT, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.CALLBACK, Part.UNTRACKED)
    if part.phase
}
"""The part that has a phase of the pulse where no other part has its time."""


def phase_label(phase: str | None) -> str:
    """Return the label of a phase of the pulse; other places of a process, such as ``between_steps``, have none."""
    part = PHASE_PARTS.get(phase or "")
    return part.label if part else (phase or "?").replace("_", " ")
