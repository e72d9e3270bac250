"""Stand-ins for tests: of what reads a run, of collectors, and of hardware that a machine has not."""

from __future__ import annotations

from lightning_memprof.testing.collectors import FakeCollector
from lightning_memprof.testing.devices import FakeCuda, FakeTimer
from lightning_memprof.testing.memory import FakeMemory
from lightning_memprof.testing.nvidia import FakeNvml
from lightning_memprof.testing.runs import HEALTHY, FakeRun, make_run

__all__ = ["HEALTHY", "FakeCollector", "FakeCuda", "FakeMemory", "FakeNvml", "FakeRun", "FakeTimer", "make_run"]
