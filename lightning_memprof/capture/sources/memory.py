"""Readings of memory: of the process and the device's allocator; the limits of the container, on memory and cores."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from time import thread_time_ns
from typing import Any, Final

import psutil
import torch

from lightning_memprof.capture.sources.proc import OpenFile, read_file
from lightning_memprof.units import KIB, MIB

NO_ACCELERATOR: Final = "no accelerator"
NO_CUDA: Final = "CUDA is not available"
# torch's name of its own caching allocator.
NATIVE: Final = "native"

_SLOW_NS: Final = 500_000
_BLOCK_BYTES: Final = 16 * MIB
_SHARED: Final = ("/dev/", "/memfd:", "/SYSV")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest number of pages that fits into 63 bits.
_UNLIMITED: Final = 1 << 60
# Limit and use: of version 1, of version 2.
_MEMORY_FILES: Final = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.max", "memory.current"),
)


class ResidentSize(OpenFile):
    """Reads the resident memory (RSS) of this process; about 4 µs on Linux, from one open file."""

    def __init__(self) -> None:
        super().__init__("/proc/self/statm")
        self._process = psutil.Process()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._step, self._after_step = -1, 0

    def read(self) -> int:
        """Return the RSS in bytes."""
        pages = self.content()
        return int(pages.split(b" ", 2)[1]) * self._page_bytes if pages else int(self._process.memory_info().rss)

    def after_step(self, step: int) -> int:
        """Return the RSS after a step: one reading for all collectors that follow the run."""
        if step != self._step:
            self._step, self._after_step = step, self.read()
        return self._after_step


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    # Bytes of mapped blocks and of blocks of arenas are the ones that count.
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "fast", "maps", "mapped", "_", "fast_bytes", "used", "free_bytes", "keepcost")
    )


class HeapSize:
    """Reads the bytes that the C allocator has handed out and not got back: from 1 µs with glibc, by its free blocks.

    Args:
        most_ns: a heap whose blocks take longer to walk is not read again.
    """

    def __init__(self, most_ns: int = _SLOW_NS) -> None:
        self._most_ns = most_ns
        self._info: Any = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
        if self._info is not None:
            self._info.restype = _MallInfo

    def read(self) -> int | None:
        """Return the bytes, None where they are not available."""
        if self._info is None:
            return None
        # Of this thread: that another process runs meanwhile does not make the heap large.
        began = thread_time_ns()
        info = self._info()
        if thread_time_ns() - began > self._most_ns:
            self._info = None
        return int(info.used) + int(info.mapped)

    def free(self) -> int:
        """Return the bytes that the C allocator has got back and keeps, 0 where they are not available."""
        return int(self._info().free_bytes) if self._info is not None else 0


def peak_rss_bytes(at_least: int) -> int:
    """Return the peak RSS of this process in bytes.

    On Linux it is ``VmHWM`` of ``/proc/self/status``: ``ru_maxrss`` of ``getrusage`` starts with the peak of the parent
    process.

    Args:
        at_least: the RSS that was just read; the kernel updates the peak later than the RSS.
    """
    if sys.platform == "linux" and (high_water := read_file("/proc/self/status").partition(b"VmHWM:")[2]):
        return max(at_least, int(high_water.split(b"kB", 1)[0]) * KIB)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(at_least, peak if sys.platform == "darwin" else peak * KIB)


def allocator_backend(device: torch.device) -> str:
    """Return the name of the device's allocator: ``native``, or with CUDA ``cudaMallocAsync`` or ``pluggable``.

    Only the native one of CUDA keeps a history, takes snapshots and reports that memory runs out.
    """
    return torch.cuda.get_allocator_backend() if device.type == "cuda" else NATIVE


def without_statistics(device: torch.device) -> str | None:
    """Return why there are no statistics of an allocator, None if there are."""
    if device.type == "cpu":
        return NO_ACCELERATOR
    if device.type == "cuda" and not torch.cuda.is_available():
        return NO_CUDA  # where a build without CUDA raises, one without a device answers with zeros
    return "a CUDAPluggableAllocator has no statistics" if allocator_backend(device) == "pluggable" else None


def mapped_files() -> list[range]:
    """Return the addresses at which files are mapped, in their order; empty without ``maps`` of proc(5)."""
    lines = read_file("/proc/self/maps").splitlines()
    return [range(first, last) for first, last, path in map(_mapping, lines) if _is_file(path)]


def _mapping(line: bytes) -> tuple[int, int, str]:
    fields = line.split(None, 5)
    first, last = (int(part, 16) for part in fields[0].split(b"-"))
    return first, last, fields[5].decode("utf-8", "replace") if len(fields) > 5 else ""


def _is_file(path: str) -> bool:
    # Shared memory is memory; a deleted file's is too.
    return path.startswith("/") and not path.startswith(_SHARED) and not path.endswith("(deleted)")


def mapped_sizes() -> dict[str, int]:
    """Return the resident bytes of each mapped file by its path, and of each large block of memory by address and size.

    A block is a mapping of 16 MiB or more without a file. Source: ``smaps`` of proc(5), which walks the page tables: 40
    to 70 ms per GiB; empty without it.
    """
    sizes: dict[str, int] = {}
    key: str | None = None
    for line in read_file("/proc/self/smaps").splitlines():
        fields = line.split(None, 5)
        if not fields[0].endswith(b":"):
            first, last, path = _mapping(line)
            block = f"{first:x}+{last - first:x}" if not path and last - first >= _BLOCK_BYTES else None
            key = path if _is_file(path) else block
        elif key is not None and fields[0] == b"Rss:":
            sizes[key] = sizes.get(key, 0) + int(fields[1]) * KIB
    return sizes


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Return all statistics of the device's caching allocator under torch's names, bytes and counts; none without one.

    Source: ``torch.cuda.memory_stats``; on other accelerators ``torch.accelerator.memory_stats``.
    """
    if without_statistics(device) is not None:
        return {}
    if device.type == "cuda":
        return dict(torch.cuda.memory_stats(device))
    return dict(torch.accelerator.memory_stats(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the peak of allocated bytes since the process started or the user reset it."""
    if device.type == "cuda":
        return _peak("allocated_bytes", device)
    return int(torch.accelerator.max_memory_allocated(device))


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak of bytes that the allocator reserved since the process started or the user reset it."""
    if device.type == "cuda":
        return _peak("reserved_bytes", device)
    return int(torch.accelerator.max_memory_reserved(device))


def _peak(name: str, device: torch.device) -> int:
    # The nested form omits the flattening of a hundred keys: it is read in every step.
    nested = torch.cuda.memory_stats_as_nested_dict(device)
    return int(nested[name]["all"]["peak"]) if nested else 0


def cgroup_memory(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> tuple[int | None, int | None]:
    """Return the smallest memory limit among this process's control groups and their parents, and its use, in bytes.

    Both are None without a limit. Reads versions 1 and 2, also both at once. In a container the kernel may give the
    host's path, which is not visible there: the mount itself is then the container's group.

    Args:
        membership: the file that lists the groups of this process; source: cgroups(7).
        mount: where the groups are mounted.
    """
    limits = [
        (limit, used)
        for folder, is_second in _groups("memory", membership, mount)
        for limit_name, used_name in (_MEMORY_FILES[is_second],)
        if (limit := _number(folder / limit_name)) is not None and limit < _UNLIMITED
        for used in (folder / used_name,)
    ]
    if not limits:
        return None, None
    limit, used = min(limits, key=lambda entry: entry[0])
    return limit, _number(used)


def cgroup_cores(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float | None:
    """Return how many cores this process's control groups let it use at once, None without a limit.

    ``docker run --cpus 2``, a pod's limit, and some job schedulers set it; the number of cores that a process sees
    stays that of the machine. Source: cpu.max of version 2, CFS bandwidth control of version 1.
    """
    quotas = []
    for folder, is_second in _groups("cpu", membership, mount):
        try:
            if is_second:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period")
                )
            quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # "max" is not a number, and the root has no file.
    return min((quota for quota in quotas if quota > 0), default=None)


def usable_cpus() -> int | None:
    """Return the number of cores that this process may use, by its affinity and its control groups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_cores()
    return cores if cores is None or quota is None else min(cores, math.ceil(quota))


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group of this process with a controller, innermost first, and whether of version 2."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", "..", "."}]
        for count in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:count]), not controllers


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
