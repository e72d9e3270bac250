"""NVIDIA's management library without a GPU."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from lightning_memprof.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class _NVMLError(Exception):
    """The library's own exception."""


@dataclass
class FakeNvml:
    """Stands in for ``pynvml``, with one GPU.

    Attributes:
        uuid: of the GPU; another one is not found.
        figures: what the GPU answers by figure: ``utilization`` (percent), ``memory`` (bytes), ``power`` (milliwatts)
            and ``temperature`` (degrees Celsius); None is not supported by it.
        broken: what the driver says instead of answering at all; None is a sound one.
        opened: how often the library is open and not closed.

    """

    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    figures: dict[str, int | None] = field(
        default_factory=lambda: {"utilization": 87, "memory": 12 * GIB, "power": 310_500, "temperature": 61}
    )
    broken: str | None = None
    opened: int = 0

    @contextmanager
    def installed(self) -> Iterator[FakeNvml]:
        """Be what ``import pynvml`` gives while the context is open."""
        module: Any = ModuleType("pynvml")
        module.NVMLError = _NVMLError
        module.NVML_TEMPERATURE_GPU = 0
        module.nvmlInit = self._init
        module.nvmlShutdown = self._shutdown
        module.nvmlDeviceGetHandleByIndex = lambda index: self._found(index == 0)
        module.nvmlDeviceGetHandleByUUID = lambda uuid: self._found(uuid == self.uuid)
        module.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=self._figure("utilization"))
        module.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=self._figure("memory"))
        module.nvmlDeviceGetPowerUsage = lambda _: self._figure("power")
        module.nvmlDeviceGetTemperature = lambda _, __: self._figure("temperature")
        with mock.patch.dict(sys.modules, {"pynvml": module}):
            yield self

    def _init(self) -> None:
        if self.broken is not None:
            raise _NVMLError(self.broken)
        self.opened += 1

    def _shutdown(self) -> None:
        self.opened -= 1

    def _found(self, known: bool) -> object:
        if not known:
            msg = "Not Found"
            raise _NVMLError(msg)
        return object()

    def _figure(self, name: str) -> int:
        value = self.figures[name]
        if value is None:
            msg = "Not Supported"
            raise _NVMLError(msg)
        return value
