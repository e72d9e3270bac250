"""The part of each event of a trace, by its kind and name: events are classified nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.parts import Part
from lightning_memprof.read.trace.columns import Kind, TraceColumns
from lightning_memprof.read.trace.kernel_names import plain_kernel

# Libraries whose kernels contain their name (NCCL, RCCL, oneCCL and XCCL, HCCL, MSCCL++, NVSHMEM, DeepEP), and kernels
# of torch's symmetric memory, vLLM, TensorRT-LLM and others that are named after the collective. A kernel fused by a
# compiler is named after its operators, and a warp or block reduces within itself: no collectives.
_COMMUNICATES: Final = re.compile(
    r"[nrxh]ccl|oneccl|\bccl_|\bhcom_|mscclpp|nvshmem|deep_ep::|cross_device_reduce|symm_mem|multimem_"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
_FUSED: Final = "triton_"
# Calls that return when the device is done, and calls that get or return memory.
_WAITS: Final = re.compile(r"(?:cuda|hip|cu)\w*Synchronize\w*\Z|(?:cuda|hip)Memcpy(?:WithStream|2D|3D)?\Z")
_ALLOCATES: Final = re.compile(
    r"(?:cuda|hip|cu)(?:Ext)?(?:Host|Mem)?"
    r"(?:Malloc|Free|Alloc|Create|Release|Map|Unmap|AddressReserve|AddressFree)(?!\w*Event)\w*\Z"
)
_GRAPHS: Final = re.compile(r"(?:cuda|hip|cu)GraphLaunch\w*\Z")
_LOADS: Final = re.compile(r"(?:cu|hip)(?:Module|Library)(?:Load|Unload|Get(?!LoadingMode)|Enumerate)\w*\Z")
# Events of the category ``overhead`` in which the driver loads code for the program.
_LOADING: Final = frozenset({"Lazy Function Loading", "Runtime Triggered Module Loading", "Driver Compiler"})
# Operators that read a number back to the host: the wait may be inside a copy without a runtime call.
_READS_BACK: Final = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"})
# torch's own range around a loader's `__next__`, and Lightning's around fetching a batch.
_FETCHES: Final = re.compile(r"enumerate\(DataLoader\)|\[pl\]\[profile\].*dataloader_next\Z")
COLLECTS: Final = re.compile(r"Python GC|<built-in (?:function|method) collect>|gc\.collect", re.IGNORECASE)


def event_parts(columns: TraceColumns) -> NDArray[np.int8]:
    """Return ``(n,)`` the number of the part of each event, -1 for events of no part.

    An event of a device has the part of its work; an event of the host or the driver the cause of idle time during it.
    """
    found = np.full(len(columns.kinds), -1, np.int8)
    for kind, part_of in _PARTS.items():
        mine = columns.kinds == kind
        names = columns.names[mine]
        by_name = np.full(len(columns.name_of), -1, np.int8)
        for name in np.flatnonzero(np.bincount(names)).tolist():
            if (part := part_of(columns.name_of[name])) is not None:
                by_name[name] = part.number
        found[mine] = by_name[names]
    named = np.array([row for row, event in columns.collectives.items() if event.args.collective], np.int64)
    found[named[columns.kinds[named] == Kind.KERNEL]] = Part.COLLECTIVE.number
    return found


def _kernel_part(name: str) -> Part:
    if name.startswith(_FUSED):
        return Part.COMPUTE
    function, _, arguments = plain_kernel(name).partition("<")
    # The arguments of a general kernel name what it computes; only a library's name tells there.
    communicates = _COMMUNICATES.search(function) is not None or "nccl" in arguments
    return Part.COLLECTIVE if communicates else Part.COMPUTE


def _call_part(call: str) -> Part:
    if _WAITS.match(call):
        return Part.IDLE_SYNCHRONIZATION
    if _ALLOCATES.match(call):
        return Part.IDLE_ALLOCATOR
    if _GRAPHS.match(call):
        return Part.IDLE_GRAPH
    return Part.IDLE_LOADING if _LOADS.match(call) else Part.IDLE_LAUNCH


def _operator_part(name: str) -> Part:
    return Part.IDLE_SYNCHRONIZATION if name in _READS_BACK else _python_part(name, Part.IDLE_OPERATORS)


def _range_part(name: str) -> Part:
    return Part.IDLE_DATA if _FETCHES.match(name) else _python_part(name)


def _python_part(name: str, otherwise: Part = Part.IDLE_PYTHON) -> Part:
    return Part.IDLE_GC_PAUSES if COLLECTS.search(name) else otherwise


_PARTS: Final[Mapping[int, Callable[[str], Part | None]]] = {
    Kind.KERNEL: _kernel_part,
    Kind.MEMORY_COPY: lambda _: Part.COPY,
    Kind.MEMORY_SET: lambda _: Part.COPY,
    Kind.RUNTIME: _call_part,
    Kind.OPERATOR: _operator_part,
    Kind.ANNOTATION: _range_part,
    Kind.PYTHON: _python_part,
    Kind.OVERHEAD: lambda name: Part.IDLE_LOADING if name in _LOADING else None,
}
