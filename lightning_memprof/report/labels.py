"""What quantities are called, in every format: one word for one thing, and what each peak counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_memprof.analysis.snapshot.model import DeviceReport
    from lightning_memprof.analysis.trace.model import GpuTimes

__all__ = ["BEFORE_RECORDING", "PEAKS", "Peak", "called", "device_parts", "peak_note", "reserved_parts"]

# What is not here is called as it is named, with blanks.
LABELS: Final[Mapping[str, str]] = {
    "allocator": "allocator calls",
    "before": "before the window",
    # A step waits for its batch, whether the loop or a trace tells it.
    "data_loading": "data wait",
    "idle_loading": "idle, data wait",
    "garbage": "garbage collection",
    "launch": "kernel launch",
    "memory_copy": "memory copies",
    "pending": "pending free",
    "python": "Python",
    "queue": "queued, not started",
}
# Of a block's stack.
BEFORE_RECORDING: Final = "(allocated before recording, or no stack)"


@dataclass(frozen=True)
class Peak:
    """A largest value: what it is called, what is counted, and over which time."""

    label: str
    counts: str
    span: str


RUN: Final = "the most of the run; of a step, the most until then"
HISTORY: Final = "the most in the recorded history"
PEAKS: Final[Mapping[str, Peak]] = {
    "rss": Peak("host rss peak", "the whole process in memory, Python and libraries included", RUN),
    "device": Peak("device peak", "what tensors held of the device's allocator at once, temporary ones too", RUN),
    "tensors": Peak("tensors peak", "tensors whose category is known", "the recorded step with the most"),
    "live": Peak("live peak", "allocated since a window began and not yet freed", "the most in the recorded steps"),
    "requested": Peak("requested peak", "what the program asked for and had not freed", HISTORY),
    "reserved": Peak("reserved peak", "what the allocator had taken from the device", HISTORY),
}


def called(name: str) -> str:
    """Return what a phase, a category or a cause is called on a page."""
    return LABELS.get(name, name.replace("_", " "))


def peak_note(name: str) -> str:
    """Return the line that says what a peak counts, and over which time."""
    peak = PEAKS[name]
    return f"{peak.label}: {peak.counts}; {peak.span}"


def reserved_parts(device: DeviceReport) -> dict[str, int]:
    """Return what the allocator's reserved bytes are made of; they add up to them."""
    lost = device.fragmentation
    return {
        "requested": device.requested_bytes,
        "rounding": lost.rounding_bytes,
        "pending": device.pending_bytes,
        "inactive_split": lost.inactive_split_bytes,
        "free_segments": lost.free_segment_bytes,
    }


def device_parts(times: GpuTimes) -> dict[str, int]:
    """Return what a device's time is made of; they add up to its window: what overlaps counts once, for computation."""
    return {
        "compute": times.compute_ns,
        "communication": times.communication_exposed_ns,
        "memory_copy": max(0, times.busy_ns - times.compute_ns - times.communication_exposed_ns),
        "idle": times.idle_ns,
    }
