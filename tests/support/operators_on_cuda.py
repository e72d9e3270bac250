"""A program that runs operators without data and on the GPU, and prints the peaks of both, in bytes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lightning_memprof.estimation.simulated_device import Target
from lightning_memprof.estimation.simulation import _no_gpu
from lightning_memprof.estimation.storages import StorageTracer

SAMPLES, ROWS, WIDTH = 8, 200, 544
Layout = Callable[[Tensor], Tensor]
LAYOUTS: Final[MappingProxyType[str, Layout]] = MappingProxyType(
    {
        "dense": lambda values: values * 2,
        "transposed": lambda values: (values * 2).transpose(1, 2),
        "sliced": lambda values: (values * 2)[..., : WIDTH // 2],
        "expanded": lambda values: (values * 2)[:, :1].expand(-1, ROWS, -1),
    }
)
DTYPES: Final[MappingProxyType[str, tuple[torch.dtype, torch.dtype | None]]] = MappingProxyType(
    {
        "float32": (torch.float32, None),
        "bfloat16": (torch.bfloat16, None),
        "float16": (torch.float16, None),
        "bf16-mixed": (torch.float32, torch.bfloat16),
        "16-mixed": (torch.float32, torch.float16),
    }
)


def _scaled(values: Tensor) -> Tensor:
    weight = torch.empty(values.shape[-1], device=values.device, dtype=values.dtype, requires_grad=True)
    return functional.rms_norm(values, values.shape[-1:], weight)


OPERATORS: Final[MappingProxyType[str, Layout]] = MappingProxyType(
    {
        "layer_norm": lambda values: functional.layer_norm(values, values.shape[-1:]),
        "group_norm": lambda values: functional.group_norm(values, 4),
        "group_norm_of_channels": lambda values: functional.group_norm(values.transpose(1, 2), 2),
        "rms_norm": lambda values: functional.rms_norm(values, values.shape[-1:]),
        "rms_norm_with_weight": _scaled,
        "softmax": lambda values: values.softmax(-1),
        "softmax_of_rows": lambda values: values.softmax(1),
        "softmax_in_float32": lambda values: values.softmax(-1, dtype=torch.float32),
        "log_softmax": lambda values: values.log_softmax(-1),
        "log_softmax_in_float32": lambda values: functional.log_softmax(values, -1, dtype=torch.float32),
        "logsigmoid": functional.logsigmoid,
        "cumsum": lambda values: values.cumsum(-1),
        "roll": lambda values: values.roll(1, 1),
        "amax": lambda values: values.amax(-1),
        "avg_pool": lambda values: functional.avg_pool2d(values, 2),
        "max_pool": lambda values: functional.max_pool2d(values, 2),
        "gelu": functional.gelu,
        "silu": functional.silu,
        "dropout": lambda values: functional.dropout(values, 0.1),
        "normalize": lambda values: functional.normalize(values, dim=-1),
        "logsumexp": lambda values: values.logsumexp(-1),
        "std": lambda values: values.std(-1),
    }
)
Case = tuple[str, str, str]


def cases() -> list[Case]:
    return list(product(OPERATORS, LAYOUTS, DTYPES))


def run(case: Case, device: torch.device) -> None:
    """Run forward and backward of an operator, whose input is what another one makes."""
    operator, layout, name = case
    dtype, autocast = DTYPES[name]
    leaf = torch.empty(SAMPLES, ROWS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        values = LAYOUTS[layout](leaf)
        loss = OPERATORS[operator](values if autocast is None else values.to(autocast)).float().sum()
    del values
    torch.autograd.backward(loss)


def expected(threads: int) -> dict[Case, int]:
    target = Target(resident_threads=threads)
    found = {}
    with _no_gpu(), torch.autograd.set_multithreading_enabled(False), target.simulated() as device:
        for case in cases():
            with StorageTracer(device, target) as tracer:
                tracer.mark(0, "forward")
                run(case, device)
            found[case] = tracer.log.peak().live_bytes
    return found


def measured(case: Case) -> int:
    # Allocated bytes include what is left of a cached block that is not split.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    run(case, torch.device("cuda"))
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - int(before)


def _main() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    context = multiprocessing.get_context("spawn")
    # A process with a context of CUDA cannot be forked, and the simulation is for a whole process.
    with context.Pool(1) as pool:
        found = pool.apply(expected, (threads,))
    for case in cases():
        print(json.dumps(["/".join(case), found[case], measured(case)]))


if __name__ == "__main__":
    _main()
