"""The part of an event by its category and name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from lightning_memprof.account.parts import PARTS, Part
from lightning_memprof.account.trace.classify import event_parts
from lightning_memprof.read.trace.columns import read_columns
from trace_events import event

NCCL = {"Collective name": "allreduce"}


def part_of(directory: Path, category: str, name: str, **args: Any) -> Part | None:
    columns = read_columns(write_trace(directory / "made.json", [event(category, name, 0, 1, **args)]))
    (number,) = event_parts(columns).tolist()
    return PARTS[number] if number >= 0 else None


@pytest.mark.parametrize(
    ("category", "name", "part"),
    [
        ("cuda_runtime", "cudaGraphLaunch", Part.IDLE_GRAPH),
        ("cuda_runtime", "hipGraphLaunch", Part.IDLE_GRAPH),
        ("cuda_driver", "cuModuleLoadDataEx", Part.IDLE_LOADING),
        ("cuda_driver", "cuLibraryLoadData", Part.IDLE_LOADING),
        ("cuda_driver", "cuLibraryGetKernel", Part.IDLE_LOADING),
        ("cuda_runtime", "hipModuleLoadData", Part.IDLE_LOADING),
        ("overhead", "Lazy Function Loading", Part.IDLE_LOADING),
        ("overhead", "Buffer Flush", None),
        ("cuda_runtime", "cudaMalloc", Part.IDLE_ALLOCATOR),
        ("cuda_runtime", "cudaHostAlloc", Part.IDLE_ALLOCATOR),
        ("cuda_runtime", "cudaEventCreateWithFlags", Part.IDLE_LAUNCH),
        ("cuda_runtime", "cudaStreamSynchronize", Part.IDLE_SYNCHRONIZATION),
        ("cuda_runtime", "hipMemcpyWithStream", Part.IDLE_SYNCHRONIZATION),
        ("cuda_runtime", "cudaMemcpyAsync", Part.IDLE_LAUNCH),
        ("cuda_runtime", "cudaLaunchKernelExC", Part.IDLE_LAUNCH),
        ("cpu_op", "aten::item", Part.IDLE_SYNCHRONIZATION),
        ("cpu_op", "aten::mm", Part.IDLE_OPERATORS),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Part.IDLE_DATA),
        ("user_annotation", "forward", Part.IDLE_PYTHON),
        ("python_function", "train.py(12): training_step", Part.IDLE_PYTHON),
        ("python_function", "<built-in function collect>", Part.IDLE_GC_PAUSES),
        ("kernel", "gemm", Part.COMPUTE),
        ("kernel", "triton_per_fused_all_reduce_0", Part.COMPUTE),
        ("kernel", "void (anonymous namespace)::softmax_warp_forward<float, 8>(float*)", Part.COMPUTE),
        ("kernel", "void cub::DeviceReduceKernel<blockAllReduce>(int)", Part.COMPUTE),
        ("kernel", "void warpAllReduceKernel<float>(float*)", Part.COMPUTE),
        ("kernel", "void at::native::index_elementwise_kernel<128, 4>(long)", Part.COMPUTE),
        ("kernel", "void vllm::cross_device_reduce_1stage<float, 2>", Part.COLLECTIVE),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", Part.COLLECTIVE),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", Part.COPY),
        ("gpu_memset", "Memset (Device)", Part.COPY),
    ],
)
def test_an_event_has_the_part_of_its_category_and_name(
    category: str, name: str, part: Part | None, tmp_path: Path
) -> None:
    assert part_of(tmp_path, category, name) is part


def test_a_kernel_with_the_arguments_of_a_collective_is_one_and_a_copy_with_them_is_none(tmp_path: Path) -> None:
    assert part_of(tmp_path, "kernel", "my_reduction", **NCCL) is Part.COLLECTIVE
    assert part_of(tmp_path, "gpu_memcpy", "Memcpy DtoD (Device -> Device)", **NCCL) is Part.COPY
