from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from fake_devices import FakeCuda
from lightning_memprof.capture.sources import memory
from lightning_memprof.capture.sources.memory import (
    ResidentSize,
    cgroup_cores,
    cgroup_memory,
    memory_stats,
    peak_allocated_bytes,
)
from lightning_memprof.units import MIB

PEAK = "from lightning_memprof.capture.collectors.host import peak_rss_bytes; print(peak_rss_bytes(0))"


def test_the_resident_size_is_psutils() -> None:
    resident = ResidentSize()
    try:
        # Other threads of this process may allocate between the two readings.
        assert any(
            abs(resident.read() - psutil.Process().memory_info().rss) <= 2 * os.sysconf("SC_PAGE_SIZE")
            for _ in range(20)
        )
    finally:
        resident.close()


def test_without_proc_the_resident_size_is_asked_of_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("lightning_memprof.capture.sources.memory.os.open", refuse)
    resident = ResidentSize()
    assert resident.read() > MIB
    resident.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list open files")
def test_closing_releases_the_file_and_twice_is_harmless() -> None:
    def opened() -> list[Path]:
        return [path for path in Path("/proc/self/fd").iterdir() if os.path.realpath(path).endswith("/statm")]

    before = len(opened())
    resident = ResidentSize()
    assert len(opened()) == before + 1
    resident.close()
    resident.close()
    assert len(opened()) == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    with mmap.mmap(-1, 512 * MIB) as held:
        held.write(b"x" * (512 * MIB))
        told = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    assert 0 < int(told) < 512 * MIB


def test_the_peak_is_the_one_of_the_statistics() -> None:
    device = torch.device("cuda", 0)
    with FakeCuda().installed() as cuda:
        cuda.allocate(100)
        cuda.allocate(-60)
        assert peak_allocated_bytes(device) == memory_stats(device)["allocated_bytes.all.peak"] == 100


def test_before_cuda_is_used_the_peak_is_zero() -> None:
    assert not torch.cuda.is_initialized()
    assert peak_allocated_bytes(torch.device("cuda", 0)) == 0


def groups(directory: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    (directory / "cgroup").write_text(lines)
    mount = directory / "mount"
    for name, content in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(content)
    return directory / "cgroup", mount


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/a/b\n", {"cgroup.controllers": "", "a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"cgroup.controllers": "", "a/b/memory.max": "1024\n", "a/memory.max": "4096\n"}, 1024),
        ("0::/\n", {"cgroup.controllers": "", "memory.max": "2048\n"}, 2048),
        ("0::/on/the/host\n", {"cgroup.controllers": "", "memory.max": "512\n"}, 512),
        ("4:cpu,memory:/c\n0::/\n", {"memory/c/memory.limit_in_bytes": "99\n"}, 99),
        ("4:memory:/c\n", {"memory/c/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("4:memory:/on/the/host\n", {"memory/memory.limit_in_bytes": "77\n"}, 77),
        ("0::/x\n", {"unified/x/memory.max": "55\n"}, 55),
        ("0::/../../x\n", {"cgroup.controllers": "", "memory.max": "nonsense\n"}, None),
        ("nonsense\n\n", {}, None),
    ],
)
def test_the_smallest_limit_of_the_groups_around_is_the_limit(
    lines: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    assert cgroup_memory(*groups(tmp_path, lines, files))[0] == limit


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        ("0::/a/b\n", {"cgroup.controllers": "", "a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/on/the/host\n", {"cgroup.controllers": "", "cpu.max": "50000 100000\n"}, 0.5),
        ("3:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "400000\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, 4.0),
        ("3:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, None),
        ("3:cpuset:/c\n", {"cpuset/c/cpu.cfs_quota_us": "1\n", "cpuset/c/cpu.cfs_period_us": "1\n"}, None),
        ("0::/x\n", {"cgroup.controllers": "", "x/cpu.max": "1 0\n"}, None),
    ],
)
def test_the_smallest_quota_of_the_groups_around_is_the_number_of_cores(
    lines: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    assert cgroup_cores(*groups(tmp_path, lines, files)) == cores


@pytest.mark.parametrize(("quota", "affinity", "cores"), [(None, 4, 4), (1.5, 4, 2), (8.0, 4, 4), (0.2, 4, 1)])
def test_the_usable_cores_are_those_of_the_affinity_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, affinity: int, cores: int
) -> None:
    monkeypatch.setattr(memory, "cgroup_cores", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    assert memory.usable_cpus() == cores


def test_a_machine_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path / "none", tmp_path) == (None, None)
    assert cgroup_cores(tmp_path / "none", tmp_path) is None


def test_the_use_of_the_group_with_the_limit_is_given(tmp_path: Path) -> None:
    files = {"cgroup.controllers": "", "a/b/memory.max": "max\n", "a/memory.max": "4096\n", "a/memory.current": "7\n"}
    assert cgroup_memory(*groups(tmp_path, "0::/a/b\n", files)) == (4096, 7)
