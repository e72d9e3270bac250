"""Utilisation, memory, power and temperature of an NVIDIA GPU, as its driver tells them."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Gpu", "gpu_of", "open_gpu", "why_not"]


class Gpu:
    """One GPU. A figure that this model does not have is None.

    Args:
        nvml: the ``pynvml`` module.
        handle: its handle of the GPU.
        index: torch's index of it, which names the figures.

    """

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._prefix = f"gpu{index}_"

    def read(self) -> dict[str, float | int | None]:
        """Return percent of the time in which a kernel ran, bytes used by all processes, watts, degrees Celsius.

        Source: NVML's ``nvmlDeviceGetUtilizationRates``, ``GetMemoryInfo``, ``GetPowerUsage``, ``GetTemperature``.
        """
        nvml, handle = self._nvml, self._handle
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return {
            f"{self._prefix}utilization_percent": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            f"{self._prefix}memory_used_bytes": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            f"{self._prefix}power_w": None if milliwatts is None else milliwatts / 1000,
            f"{self._prefix}temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        }

    def _ask(self, question: Callable[[], Any]) -> int | None:
        try:
            return int(question())
        except self._nvml.NVMLError:
            return None


def gpu_of(device: torch.device) -> tuple[int, str | None] | None:
    """Return torch's index and the UUID of the GPU that ``device`` is, or None where it is none of NVIDIA's."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # None without a number, which torch's types do not know.
    number: Any = device.index
    index = torch.cuda.current_device() if number is None else int(number)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return index, None if uuid is None else str(uuid)


@contextmanager
def open_gpu(index: int, uuid: str | None) -> Iterator[Gpu]:
    """Open the driver's library and give the GPU; some 10 ms.

    The UUID finds it whatever ``CUDA_VISIBLE_DEVICES`` says; without one torch's index is taken for the driver's.

    Raises:
        Exception: an ``NVMLError`` where the driver does not know it.

    """
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        if uuid is None:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        yield Gpu(nvml, handle, index)
    finally:
        nvml.nvmlShutdown()


def why_not(gpu: tuple[int, str | None]) -> str | None:
    """Return why the driver has no figures of the GPU that :func:`gpu_of` gave, or None where it has."""
    try:
        with open_gpu(*gpu):
            return None
    except ImportError:
        return "no figures of the GPU: nvidia-ml-py is not installed; pip install nvidia-ml-py"
    except Exception as error:  # noqa: BLE001 an NVMLError, whose class is the library's
        return f"no figures of the GPU: its driver does not answer ({error})"
