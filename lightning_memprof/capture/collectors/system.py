"""Use of the machine while the model trains: processors, memory, disks, networks and the GPU."""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import psutil
import torch

from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.artifacts.series import encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnMark, OnStep, RunContext
from lightning_memprof.capture.loader_workers import worker_pids
from lightning_memprof.capture.sources.memory import cgroup_memory
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from lightning_memprof.schedule import Mark, Window

Row = dict[str, Any]

_LEAST_S: Final = 0.1
_MOST_S: Final = 60.0
# Processor time is counted in ticks of 10 ms: over a few of them a rate is noise.
_LAST_SAMPLE_S: Final = 0.02
# A driver that hangs must not hang the training.
_PATIENCE_S: Final = 15.0
_IDLE: Final = frozenset({"idle", "iowait"})
# Linux includes these in user and nice as well.
_COUNTED_TWICE: Final = frozenset({"guest", "guest_nice"})


def _counts() -> dict[str, float | None]:
    """Return all counters that only grow, at this moment; None is not available on this machine."""
    process = resource.getrusage(resource.RUSAGE_SELF)
    machine = psutil.cpu_times()._asdict()
    machine_s = sum(seconds for name, seconds in machine.items() if name not in _COUNTED_TWICE)
    # psutil handles counters that wrap under a lock, which a fork of the training may copy while it is held.
    # Both are None on a machine without a disk or a network.
    disk, network = psutil.disk_io_counters(nowrap=False), psutil.net_io_counters(nowrap=False)
    return {
        "process_s": process.ru_utime + process.ru_stime,
        "workers_s": _workers_s(),
        "busy_s": machine_s - sum(machine.get(name, 0.0) for name in _IDLE),
        "machine_s": machine_s,
        "disk_read_bytes": getattr(disk, "read_bytes", None),
        "disk_write_bytes": getattr(disk, "write_bytes", None),
        "network_sent_bytes": getattr(network, "bytes_sent", None),
        "network_received_bytes": getattr(network, "bytes_recv", None),
        "page_faults": process.ru_minflt + process.ru_majflt,
        "context_switches": process.ru_nvcsw + process.ru_nivcsw,
    }


def _workers_s() -> float | None:
    """Return the processor time of the DataLoader workers; None without any."""
    found = []
    for pid in worker_pids():
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found.append(times.user + times.system)
    return sum(found) if found else None


class _Reader:
    """Converts counters into rates since the previous reading."""

    def __init__(self, offset_ns: int) -> None:
        self._limit_bytes, _ = cgroup_memory()
        self._offset_ns = offset_ns
        self._before = _counts()
        self._read_ns = time.perf_counter_ns()

    @property
    def age_s(self) -> float:
        return (time.perf_counter_ns() - self._read_ns) / 1e9

    def read(self) -> Row:
        """Return one sample; its rates cover the time since the previous one."""
        counts, now_ns = _counts(), time.perf_counter_ns()
        before, self._before = self._before, counts
        elapsed_s = max(now_ns - self._read_ns, 1) / 1e9
        self._read_ns = now_ns
        grown = {name: _grown(before[name], count) for name, count in counts.items()}
        workers_s = grown.pop("workers_s")
        process_s, busy_s, machine_s = (grown.pop(name) or 0.0 for name in ("process_s", "busy_s", "machine_s"))
        memory = psutil.virtual_memory()
        # The kernel may count time late, and in a short sample then more than there is.
        most_s = elapsed_s * (os.cpu_count() or 1)
        return {
            "time_ns": now_ns + self._offset_ns,
            "process_cpu_percent": round(100 * min(process_s, most_s) / elapsed_s, 1),
            "workers_cpu_percent": None if workers_s is None else round(100 * min(workers_s, most_s) / elapsed_s, 1),
            "machine_cpu_percent": round(min(100.0, 100 * busy_s / machine_s), 1) if machine_s else None,
            "load_1m": round(os.getloadavg()[0], 2),
            "memory_used_bytes": memory.used,
            "memory_available_bytes": memory.available,
            "swap_used_bytes": psutil.swap_memory().used,
            "memory_limit_bytes": self._limit_bytes,
            **{f"{name}_per_s": None if by is None else round(by / elapsed_s, 1) for name, by in grown.items()},
        }


def _grown(before: float | None, now: float | None) -> float | None:
    """Return the growth of a counter; 0 if it fell because a disk or a network was removed."""
    return None if before is None or now is None else max(0.0, now - before)


@contextmanager
def _sampled(
    interval_s: float, gpu: tuple[int, str | None] | None, offset_ns: int, put: Callable[[Row], None]
) -> Iterator[None]:
    """Sample in a thread while the context is open, and once more when it ends.

    Args:
        interval_s: from sample to sample.
        gpu: torch's index and the UUID of the GPU; None omits it.
        offset_ns: of the run's times.
        put: called with each sample, in the thread.

    Raises:
        RuntimeError: at the end: the thread does not end because the driver hangs.
        Exception: at the end: a sample raised it.
    """
    stop, errors = threading.Event(), list[Exception]()

    def sample() -> None:
        try:
            with ExitStack() as opened:
                reader = _Reader(offset_ns)
                read_gpu: Callable[[], Row] = dict
                if gpu is not None:
                    # The manifest has the reason from the start of the run.
                    with suppress(Exception):
                        read_gpu = opened.enter_context(open_gpu(*gpu))
                samples = 0
                while not stop.wait(max(0.0, interval_s - reader.age_s)):
                    put(reader.read() | read_gpu())
                    samples += 1
                if not samples or reader.age_s >= _LAST_SAMPLE_S:
                    put(reader.read() | read_gpu())
        except Exception as error:  # noqa: BLE001 raised at the end of the context
            errors.append(error)

    thread = threading.Thread(target=sample, name="memprof-system", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE_S)
        if thread.is_alive():
            raise RuntimeError(f"the sampling thread did not end within {_PATIENCE_S:.0f} s: a reading hangs")
        for error in errors:
            raise error


class SystemStats(Collector):
    """Processors, memory, disks, networks and this rank's GPU, sampled by a thread while a window is open.

    One sample takes the thread about 1 ms. The last one is taken when the window ends, so a window shorter than the
    interval has one too. Rates cover the time since the previous sample, for the whole machine; processor time, page
    faults and context switches are those of this process, and of its DataLoader workers there is the processor time.
    GPU figures need ``nvidia-ml-py``.

    Args:
        interval: seconds between samples, 0.1 to 60.
        always: also sample the whole run, into a separate file.

    Raises:
        ConfigError: the interval is outside that range.
    """

    name: ClassVar[str] = "system"

    def __init__(self, interval: float = 0.5, always: bool = False) -> None:  # noqa: FBT001, FBT002 read from YAML
        number: Any = interval
        if type(number) not in {int, float} or not _LEAST_S <= number <= _MOST_S:
            msg = f"SystemStats(interval={interval!r}): must be a number of seconds from {_LEAST_S} to {_MOST_S:.0f}"
            raise ConfigError(msg)
        if not isinstance(always, bool):
            raise ConfigError(f"SystemStats(always={always!r}): must be true or false")
        self._interval_s = float(interval)
        self._always = always

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Sample while the window is open."""
        rows: list[Row] = []
        place: Row = {"step": None, "global_step": None, "recorded": False}

        def on_mark(mark: Mark) -> None:
            nonlocal place
            place = {"step": mark.step, "global_step": mark.global_step, "recorded": mark.recorded}

        def put(sample: Row) -> None:
            rows.append({**place, **sample})

        try:
            with _sampled(self._interval_s, gpu_of(run.device), run.unix_offset_ns, put):
                yield on_mark
        finally:
            run.sink.write_rows(window, self.name, list(rows))

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Report once why the GPU has no figures; with ``always``, sample the whole run, one line per sample."""
        gpu = gpu_of(run.device)
        if gpu is not None and (reason := gpu_fault(gpu)) is not None:
            run.note_unavailable(self.name, reason)
        if not self._always:
            yield None
            return
        path = run.sink.place.directory / system_name(run.rank)
        with path.open("x", encoding="utf-8", buffering=1) as file:

            def put(sample: Row) -> None:
                # One call, so that a reader sees whole lines.
                file.write(encode_rows([{"step": None, "global_step": None, "recorded": True, **sample}]))

            with _sampled(self._interval_s, gpu, run.unix_offset_ns, put):
                yield None
        run.sink.list_artifact(ArtifactSpec(path=path, type="series", collector=self.name))


def gpu_of(device: torch.device) -> tuple[int, str | None] | None:
    """Return torch's index and the UUID of the GPU that ``device`` is, or None if it is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # None without an index, which torch's types do not say.
    number: Any = device.index
    index = torch.cuda.current_device() if number is None else int(number)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return index, None if uuid is None else str(uuid)


@contextmanager
def open_gpu(index: int, uuid: str | None) -> Iterator[Callable[[], Row]]:
    """Open the driver's library, about 10 ms, and yield a function that reads the GPU.

    Its figures are utilization in percent, bytes used by all processes, watts and degrees Celsius; one that the GPU's
    model does not have is None. Source: NVML's ``nvmlDeviceGetUtilizationRates``, ``GetMemoryInfo``, ``GetPowerUsage``,
    ``GetTemperature``. The UUID finds the GPU independently of ``CUDA_VISIBLE_DEVICES``; without one torch's index is
    used as the driver's.

    Raises:
        Exception: an ``NVMLError`` if the driver does not know it.
    """
    nvml = importlib.import_module("pynvml")

    def value(read: Callable[[], Any]) -> int | None:
        try:
            return int(read())
        except nvml.NVMLError:
            return None

    def read() -> Row:
        milliwatts = value(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            f"gpu{index}_utilization_percent": value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            f"gpu{index}_memory_used_bytes": value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            f"gpu{index}_power_w": None if milliwatts is None else milliwatts / 1000,
            f"gpu{index}_temperature_c": value(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        }

    nvml.nvmlInit()
    try:
        if uuid is None:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        yield read
    finally:
        nvml.nvmlShutdown()


def gpu_fault(gpu: tuple[int, str | None]) -> str | None:
    """Return why the driver has no figures of the GPU from :func:`gpu_of`, or None if it has."""
    try:
        with open_gpu(*gpu):
            return None
    except ImportError:
        return "no GPU figures: nvidia-ml-py is not installed; pip install nvidia-ml-py"
    except Exception as error:  # noqa: BLE001 an NVMLError, whose class is the library's
        return f"no GPU figures: the driver does not answer ({error})"
