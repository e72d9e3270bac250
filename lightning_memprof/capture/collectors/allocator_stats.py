"""What the device's allocator counts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightning_memprof.capture.base import Collector, OnMark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["NO_ACCELERATOR", "AllocatorStats", "memory_stats", "peak_allocated_bytes", "peak_reserved_bytes"]

NO_ACCELERATOR = "no accelerator"


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Return all statistics of the device's caching allocator under torch's names, bytes and counts.

    Source: ``torch.cuda.memory_stats``; on other accelerators ``torch.accelerator.memory_stats``.
    """
    if device.type == "cuda":
        return dict(torch.cuda.memory_stats(device))
    return dict(torch.accelerator.memory_stats(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the highest number of bytes in live tensors since the process started or the user reset it.

    On CUDA read from the nested form, which leaves out the flattening of a hundred keys: it is asked in every step.
    """
    if device.type == "cuda":
        nested = torch.cuda.memory_stats_as_nested_dict(device)
        return int(nested["allocated_bytes"]["all"]["peak"]) if nested else 0
    return int(torch.accelerator.max_memory_allocated(device))


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the most bytes that the allocator held of the device since the process started or the user reset it."""
    if device.type == "cuda":
        nested = torch.cuda.memory_stats_as_nested_dict(device)
        return int(nested["reserved_bytes"]["all"]["peak"]) if nested else 0
    return int(torch.accelerator.max_memory_reserved(device))


class AllocatorStats(Collector):
    """Every statistic of the device's caching allocator at each mark. Peaks are read, never reset."""

    name: ClassVar[str] = "allocator"
    every_rank: ClassVar[bool] = True

    def unavailable(self, run: RunContext) -> str | None:
        """Say so where the model runs on the CPU, whose allocator counts nothing."""
        if run.device.type == "cpu":
            return NO_ACCELERATOR
        return None

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Sample at every mark."""
        with run.sink.series(window, self.name) as write:

            def sample(mark: Mark) -> None:
                write(mark, device=str(run.device), **memory_stats(run.device))

            yield sample
