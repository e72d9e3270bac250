"""Anomalies that open a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import psutil
import torch

from lightning_memprof.capture.clock import RecentMedian
from lightning_memprof.capture.sources.memory import memory_stats, peak_allocated_bytes, without_statistics
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import format_bytes, format_ns

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext, StepRecord

Watch: TypeAlias = "Callable[[StepRecord], str | None]"

_HISTORY: Final = 51
# Fewer steps give no stable median; the first steps of a run are slow.
_ENOUGH: Final = 20
_MACHINE_NS: Final = 100_000_000


class Anomaly(ABC):
    """An unusual step, which opens a window at the next step, on the same rank.

    Its constructor is its configuration; the state of a run is local to ``watch``.

    Attributes:
        limit: maximum number of windows in a run.
    """

    name: ClassVar[str]
    limit: int = 1

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 for overriding
        """Return why this cannot be watched in this run, or None if it can."""
        return None

    @abstractmethod
    def watch(self, run: RunContext) -> Watch:
        """Return a function that is called after each step outside windows; its cost is part of every step.

        It returns a description of the anomaly, or None.
        """


class SlowStep(Anomaly):
    """A step that takes much longer than the median of the 51 before it.

    Args:
        factor: multiple of the median.
        limit: maximum number of windows in a run.

    Raises:
        ConfigError: a value is invalid.
    """

    name: ClassVar[str] = "slow_step"

    def __init__(self, factor: float = 2.0, limit: int = 1) -> None:
        self.factor = _number("SlowStep", "factor", factor, above=1)
        self.limit = _limit("SlowStep", limit)

    def watch(self, run: RunContext) -> Watch:  # noqa: ARG002 the record has the time
        """Compare durations; about 2 µs per step."""
        durations = RecentMedian(_HISTORY, _ENOUGH)
        epoch: int | None = None

        def watch(record: StepRecord) -> str | None:
            nonlocal epoch
            # The first step of an epoch waits for its loader to start.
            first, epoch = record.epoch != epoch, record.epoch
            if first or not record.usual:
                return None
            median = durations.add(record.duration_ns)
            if median is None or record.duration_ns < self.factor * median:
                return None
            times = record.duration_ns / max(median, 1)
            return f"step {record.step} took {format_ns(record.duration_ns)}, {times:.1f} times the median before it"

        return watch


class AllocatorRetries(Anomaly):
    """The device's allocator found no free block, released its cache to the driver and retried.

    Args:
        limit: maximum number of windows in a run.

    Raises:
        ConfigError: a value is invalid.
    """

    name: ClassVar[str] = "allocator_retries"

    def __init__(self, limit: int = 1) -> None:
        self.limit = _limit("AllocatorRetries", limit)

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason on the CPU and with a CUDAPluggableAllocator, which have no counters."""
        return without_statistics(run.device)

    def watch(self, run: RunContext) -> Watch:
        """Compare ``num_alloc_retries``; reads the allocator's statistics once per step."""
        seen = _retries(run.device)

        def watch(record: StepRecord) -> str | None:
            nonlocal seen
            before, seen = seen, _retries(run.device)
            if seen <= before:
                return None
            return f"the allocator had to free its cache and retry {seen - before} times in step {record.step}"

        return watch


class NearOOM(Anomaly):
    """Memory that is nearly full.

    On an accelerator the peak of allocated bytes, relative to its memory without that of other processes; on the CPU
    the used memory of the machine.

    Args:
        fraction: of the available memory.
        limit: maximum number of windows in a run; each needs a higher peak than the previous one.

    Raises:
        ConfigError: a value is invalid.
    """

    name: ClassVar[str] = "near_oom"

    def __init__(self, fraction: float = 0.95, limit: int = 1) -> None:
        self.fraction = _number("NearOOM", "fraction", fraction, above=0)
        if self.fraction >= 1:
            msg = f"NearOOM(fraction={fraction!r}): must be less than 1; at 1 no memory is left to record with"
            raise ConfigError(msg)
        self.limit = _limit("NearOOM", limit)

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason on accelerators that do not report their memory."""
        if run.device.type not in ("cpu", "cuda"):
            return f"{run.device.type} does not report its free memory"
        return None if run.device.type == "cpu" else without_statistics(run.device)

    def watch(self, run: RunContext) -> Watch:
        """Read the allocator's statistics once per step, or the machine's memory every 100 ms."""
        fill = _host_fill if run.device.type == "cpu" else _device_fill(run.device)
        reported = 0
        last_ns = 0

        def watch(record: StepRecord) -> str | None:
            nonlocal reported, last_ns
            end_ns = record.start_ns + record.duration_ns
            if run.device.type == "cpu" and end_ns - last_ns < _MACHINE_NS:
                return None
            last_ns = end_ns
            used, total = fill()
            if total <= 0 or used < self.fraction * total or used <= reported:
                return None
            reported = used
            share = f"{used / total:.0%} of {format_bytes(total)}"
            return f"{share} in use after step {record.step}"

        return watch


def _device_fill(device: torch.device) -> Callable[[], tuple[int, int]]:
    total = int(torch.cuda.get_device_properties(device).total_memory)

    def fill() -> tuple[int, int]:
        peak = peak_allocated_bytes(device)
        # The driver is slow: it is queried only near the limit.
        if peak < total // 2:
            return peak, total
        free = int(torch.cuda.mem_get_info(device)[0])
        return peak, min(total, free + int(torch.cuda.memory_stats(device)["reserved_bytes.all.current"]))

    return fill


def _host_fill() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available), int(memory.total)


def _retries(device: torch.device) -> int:
    if device.type == "cuda":
        # Nested, without the flattening of a hundred keys: it is read in every step.
        return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
    return int(memory_stats(device).get("num_alloc_retries", 0))


def _number(owner: str, name: str, value: Any, *, above: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > above:
        raise ConfigError(f"{owner}({name}={value!r}): must be a number above {above}")
    return float(value)


def _limit(owner: str, limit: int) -> int:
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"{owner}(limit={limit!r}): must be an integer of at least 1; remove {owner} to open none")
    return limit
