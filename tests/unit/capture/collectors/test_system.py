from __future__ import annotations

import json
import os
import resource
import threading
import time
from itertools import chain, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from fake_devices import FakeCuda
from fake_nvidia import FakeNvml
from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.system import _Reader
from lightning_memprof.collectors import SystemStats
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Schedule
from lightning_memprof.units import GIB, MIB
from recorded_rows import read_series
from sessions import context, drive, session
from training import manifest

WINDOW = Schedule(wait=1, warmup=1, active=2, repeat=1)
# The system counts a process's time at its ticks.
TICK_S = 0.01


def sampling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memprof-system"]


def record(run: RunContext, system: SystemStats, step_s: float = 0.0, steps: int = 6) -> list[int]:
    """Drive a window and give the number of sampling threads in each step."""
    seen = []

    def step(_: int) -> None:
        seen.append(len(sampling()))
        time.sleep(step_s)

    with session(run, WINDOW, [system]) as made:
        drive(made, range(steps), step)
    return seen


def rows(directory: Path) -> list[dict[str, Any]]:
    return read_series(directory / "memprofiler/window000/rank00000.system.jsonl")


def reasons(run: RunContext) -> list[str]:
    return [row["reason"] for row in manifest(run.sink.place.directory) if row["kind"] == "unavailable"]


@pytest.mark.parametrize("interval", [0, 0.05, 61, float("nan"), float("inf"), "1", None, True])
def test_an_option_that_means_nothing_is_refused(interval: Any) -> None:
    SystemStats(interval=60)
    with pytest.raises(ConfigError, match=r"SystemStats\(interval=.*from 0.1 to 60"):
        SystemStats(interval=interval)
    with pytest.raises(ConfigError, match=r"SystemStats\(always='no'\)"):
        SystemStats(always="no")  # type: ignore[arg-type]


def test_the_thread_lives_as_long_as_the_window(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert record(run, SystemStats()) == [0, 1, 1, 1, 0, 0]
    assert not sampling()


def test_a_window_shorter_than_the_interval_has_one_sample_in_base_units(tmp_path: Path) -> None:
    before = time.time_ns()
    with context(tmp_path) as run:
        # Machines count processor time in ticks of 10 ms: over less than one it is not known.
        record(run, SystemStats(interval=60), step_s=0.02)
    (row,) = rows(tmp_path)
    assert row["step"] == 3
    assert row["recorded"] is True
    assert before < row["time_ns"] < time.time_ns()
    assert row["memory_used_bytes"] + row["memory_available_bytes"] <= psutil.virtual_memory().total * 1.2
    assert row["memory_available_bytes"] > MIB
    assert 0 <= row["machine_cpu_percent"] <= 100
    assert row["context_switches_per_s"] >= 0
    assert {"load_1m", "swap_used_bytes", "memory_limit_bytes", "disk_read_bytes_per_s"} <= row.keys()
    assert not any(name.startswith("gpu") for name in row)


def test_samples_come_at_the_interval_in_order_of_time(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        began = time.monotonic()
        record(run, SystemStats(interval=0.1), step_s=0.12)
        most = (time.monotonic() - began) / 0.1 + 2
    times = [row["time_ns"] for row in rows(tmp_path)]
    assert 2 <= len(times) <= most
    assert all(later - earlier > 0 for earlier, later in pairwise(times))


def test_the_processor_time_of_this_process_is_its_share_of_one() -> None:
    def moment() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    outer_began = moment()
    reader = _Reader(0)
    inner_began = moment()
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass
    time.sleep(0.1)
    inner_ended = moment()
    percent = reader.read()["process_cpu_percent"]
    outer_ended = moment()
    # However busy the machine is, what was read lies between these.
    (inner_s, inner_cpu_s), (outer_s, outer_cpu_s) = (
        (ended[0] - began[0], ended[1] - began[1])
        for began, ended in ((inner_began, inner_ended), (outer_began, outer_ended))
    )
    assert 100 * (inner_cpu_s - TICK_S) / outer_s <= percent <= 100 * (outer_cpu_s + TICK_S) / inner_s


def test_time_that_the_kernel_counts_late_is_at_most_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _Reader(0)
    late = resource.struct_rusage((3600.0, 0.0, *([0] * 14)))
    monkeypatch.setattr(resource, "getrusage", lambda _: late)
    assert reader.read()["process_cpu_percent"] == 100.0 * (os.cpu_count() or 1)


def test_a_counter_that_falls_is_no_negative_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SimpleNamespace(read_bytes=10_000, write_bytes=500)
    readings = chain([first], repeat(SimpleNamespace(read_bytes=100, write_bytes=5_000_000)))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: next(readings))
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: None)
    with context(tmp_path) as run:
        record(run, SystemStats(interval=60))
    (row,) = rows(tmp_path)
    assert row["disk_read_bytes_per_s"] == 0
    assert row["disk_write_bytes_per_s"] > 0
    assert row["network_sent_bytes_per_s"] is None


def test_a_sample_that_fails_is_the_collectors_error_and_the_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no /proc/vmstat")

    monkeypatch.setattr(psutil, "swap_memory", fail)
    with context(tmp_path) as run:
        record(run, SystemStats(interval=60))
        assert "system" in run.faults.disabled
    assert not sampling()


def test_an_exception_in_the_training_ends_the_thread_and_keeps_the_samples(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        context(tmp_path) as run,
        session(run, WINDOW, [SystemStats(interval=60)]) as made,
    ):
        drive(made, range(6), lambda step: 1 // (3 - step))
    assert not sampling()
    assert len(rows(tmp_path)) == 1


def test_always_samples_outside_of_windows_into_its_own_file_while_the_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "memprofiler" / system_name(0)
    with context(tmp_path) as run, session(run, lambda _: WINDOW(0), [SystemStats(interval=0.1, always=True)]) as made:
        drive(made, range(2))
        deadline = time.monotonic() + 60
        while file.read_text().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert json.loads(file.read_text().splitlines()[0])["load_1m"] >= 0
    assert not sampling()
    whole = read_series(file)
    assert len(whole) >= 2
    assert all(row["step"] is None and row["memory_used_bytes"] > MIB for row in whole)
    listed = manifest(tmp_path / "memprofiler")
    assert [row["path"] for row in listed if row["kind"] == "artifact" and row["window"] is None] == [
        "memprofiler/system.rank00000.jsonl"
    ]


@pytest.mark.parametrize("uuid", ["11111111-2222", "GPU-11111111-2222"])
def test_the_ranks_gpu_is_found_by_its_uuid(uuid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(uuid="GPU-11111111-2222")
    with FakeCuda().installed(), nvml.installed(), context(tmp_path, "cuda:3") as run:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
        record(run, SystemStats(interval=60))
        assert not reasons(run)
    (row,) = rows(tmp_path)
    assert {name: value for name, value in row.items() if name.startswith("gpu")} == {
        "gpu3_utilization_percent": 87,
        "gpu3_memory_used_bytes": 12 * GIB,
        "gpu3_power_w": 310.5,
        "gpu3_temperature_c": 61,
    }
    assert nvml.opened == 0


def test_a_figure_that_a_gpu_does_not_have_is_none(tmp_path: Path) -> None:
    nvml = FakeNvml(figures={"utilization": None, "memory": GIB, "power": None, "temperature": 40})
    with FakeCuda().installed(), nvml.installed(), context(tmp_path, "cuda:0") as run:
        record(run, SystemStats(interval=60))
    (row,) = rows(tmp_path)
    assert row["gpu0_utilization_percent"] is row["gpu0_power_w"] is None
    assert row["gpu0_memory_used_bytes"] == GIB


def test_a_driver_that_does_not_answer_is_said_once_and_the_machine_is_sampled(tmp_path: Path) -> None:
    nvml = FakeNvml(broken="Driver/library version mismatch")
    with FakeCuda().installed(), nvml.installed(), context(tmp_path, "cuda:0") as run:
        with session(run, Schedule(wait=0, warmup=0, active=1, repeat=2), [SystemStats()]) as made:
            drive(made, range(2))
        assert reasons(run) == ["no GPU figures: the driver does not answer (Driver/library version mismatch)"]
    assert rows(tmp_path)[0]["memory_used_bytes"] > MIB


def test_without_the_library_the_reason_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with FakeCuda().installed(), context(tmp_path, "cuda:0") as run:
        record(run, SystemStats())
        assert reasons(run) == ["no GPU figures: nvidia-ml-py is not installed; pip install nvidia-ml-py"]
