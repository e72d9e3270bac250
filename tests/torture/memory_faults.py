"""Faults of the machine's memory: it refuses an allocation, or the kernel ends the process that asked."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import fault
import psutil
import torch

# What the process may still take while it saves what there is.
SPARE_BYTES: Final = 96 << 20
WANTED_BYTES: Final = 1 << 30
CGROUP_BYTES: Final = 48 << 20
PAGE: Final = 4096
# The first is version 1 of control groups, the other version 2.
CGROUPS: Final = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextmanager
def _limited_again(cell: fault.Cell) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run_out(cell: fault.Cell) -> None:
    """Bound the address space to what is there and a little, and ask for more: torch's allocator is refused."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + SPARE_BYTES, hard))
    torch.empty(WANTED_BYTES, dtype=torch.uint8)


def _be_killed(cell: fault.Cell) -> None:
    """Move into a control group with little memory and touch more: the kernel's OOM killer comes."""
    group = _group(cell.directory)
    group.mkdir()
    for name, value in ((_limit_name(), CGROUP_BYTES), ("memory.swappiness", 0), ("memory.swap.max", 0)):
        # Not every version has all of them.
        with suppress(OSError):
            (group / name).write_text(str(value))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = bytearray(WANTED_BYTES // 4)
    for index in range(0, len(taken), PAGE):
        taken[index] = 1


def _remove_group(directory: Path) -> None:
    with suppress(OSError):
        _group(directory).rmdir()


def _root() -> tuple[Path, str] | None:
    return next(((root, name) for root, name in CGROUPS if _can_limit(root, name)), None)


def _can_limit(root: Path, name: str) -> bool:
    probe = root / f"memprof-torture-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return os.access(probe / name, os.W_OK)
    finally:
        probe.rmdir()


def _limit_name() -> str:
    found = _root()
    return found[1] if found is not None else ""


def _group(directory: Path) -> Path:
    found = _root()
    root = found[0] if found is not None else directory
    return root / ("memprof-torture-" + "-".join(directory.parts[-3:]))


def _no_group() -> dict[str, str]:
    reason = "this machine lets no program make a memory control group"
    return {} if _root() else dict.fromkeys(("before", "warmup", "active", "save", "teardown"), reason)


FAULTS: Final = (
    fault.Fault(
        name="host out of memory (refused)",
        says="in a callback: the address space is bounded (`RLIMIT_AS`) to what there is and 96 MiB, then torch is "
        "asked for 1 GiB; the bound stays while everything is saved",
        place="callback",
        strike=_run_out,
        prepare=_limited_again,
        harms=True,
    ),
    fault.Fault(
        name="host out of memory (killed)",
        says="in a callback: the process moves into a control group of 48 MiB and fills more; the kernel's OOM killer "
        "ends it",
        place="callback",
        strike=_be_killed,
        absent=_no_group(),
        tidy=_remove_group,
    ),
)
