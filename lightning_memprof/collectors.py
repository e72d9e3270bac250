"""The collectors, their options, and the type of a window for collectors of your own.

``lightning_memprof.Collector`` is the base class; ``MemProfilerCallback(collectors=["default", MyCollector()])`` adds a
collector to the default set.
"""

from __future__ import annotations

from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory as AllocatorHistory
from lightning_memprof.capture.collectors.allocator_stats import AllocatorStats as AllocatorStats
from lightning_memprof.capture.collectors.functions import CallRange as CallRange
from lightning_memprof.capture.collectors.functions import FunctionMemory as FunctionMemory
from lightning_memprof.capture.collectors.garbage import GarbageCollection as GarbageCollection
from lightning_memprof.capture.collectors.hangs import Hangs as Hangs
from lightning_memprof.capture.collectors.holders import Holders as Holders
from lightning_memprof.capture.collectors.hook_timings import HookTimings as HookTimings
from lightning_memprof.capture.collectors.host import HostMemory as HostMemory
from lightning_memprof.capture.collectors.oom import OOMAutopsy as OOMAutopsy
from lightning_memprof.capture.collectors.operator_trace import OperatorTrace as OperatorTrace
from lightning_memprof.capture.collectors.pulse import Pulse as Pulse
from lightning_memprof.capture.collectors.saved_tensors import SavedTensors as SavedTensors
from lightning_memprof.capture.collectors.system import SystemStats as SystemStats
from lightning_memprof.capture.collectors.throughput import Throughput as Throughput
from lightning_memprof.capture.sources.call_memory import UserHooks as UserHooks
from lightning_memprof.capture.tracker.collectors import FSDPMemory as FSDPMemory
from lightning_memprof.capture.tracker.collectors import ModuleMemory as ModuleMemory
from lightning_memprof.schedule import Window as Window
