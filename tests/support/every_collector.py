"""Every collector that a CPU has, with what of its options sees most."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import lightning_memprof.collectors as exported
from lightning_memprof import Collector

if TYPE_CHECKING:
    from collections.abc import Mapping

# These need CUDA, or a sharded model.
ELSEWHERE: Final = frozenset({"AllocatorHistory", "AllocatorStats", "FSDPMemory"})
OPTIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "FunctionMemory": {
            "functions": ["training_step", "backward", "optimizer_step"],
            "saved_tensors_hooks": True,
            "dump_pickle": True,
        },
        "OperatorTrace": {"record_shapes": True, "profile_memory": True, "with_stack": True},
        "SystemStats": {"always": True},
        "Throughput": {"flops": True},
    }
)


def every_collector() -> list[Any]:
    kinds = [kind for kind in vars(exported).values() if isinstance(kind, type) and issubclass(kind, Collector)]
    return [kind(**OPTIONS.get(kind.__name__, {})) for kind in kinds if kind.__name__ not in ELSEWHERE]
